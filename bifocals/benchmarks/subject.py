"""The model of a benchmark: a base, and on it a Focus lens with untrained routers whose groups are equally full."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bifocals.config import FocusConfig
from bifocals.lens import Lens, attach
from bifocals.models import load_model

BALANCED_ON = 1024  # tokens


@dataclass(frozen=True, slots=True)
class Subject:
    """Runs as the base or with its lens."""

    model: PreTrainedModel
    lens: Lens

    def tokens(self, length: int) -> Tensor:
        """Random ones: what they say does not matter here, and the groups are balanced on their like."""
        return torch.randint(0, self.model.config.get_text_config().vocab_size, (1, length))


@torch.no_grad()
def load_subject(name: str, *, groups: int, top_k: int, window: int, sinks: int) -> Subject:
    """The named model with a lens in hard mode. Without momentum, one step balances the groups."""
    model = load_model(name).model.eval()
    lens = attach(model, FocusConfig(groups=groups, top_k=top_k, window=window, sinks=sinks, momentum=0.0))
    subject = Subject(model, lens)
    lens.train()
    model(subject.tokens(BALANCED_ON), use_cache=False, logits_to_keep=1)
    lens.step_balance()
    lens.train(False)
    return subject
