"""What one forward of the base costs when the mass objective watches it: seconds with capture over seconds without.

The number says how much a fit pays for each sequence beyond running the base. It does not include fitting routers.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from bifocals.benchmarks.measuring import interleave, median, surroundings
from bifocals.config import FocusConfig
from bifocals.lens import attach, evaluating
from bifocals.training.capture import capture_layers
from bifocals.training.mass import MassOptions


@torch.no_grad()
def run(model: PreTrainedModel, length: int, repeats: int) -> dict[str, Any]:
    """Medians of both, taken in turns on random tokens; the lens is taken off again."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.get_text_config().vocab_size, (1, length), generator=generator)
    rows = torch.arange(length)[-2 * MassOptions().rows :][None]
    lens = attach(model, FocusConfig.network())
    try:
        with evaluating(model):
            seconds = interleave(
                {
                    "plain": lambda: _plain(model, tokens, lens),
                    "captured": lambda: capture_layers(lens, tokens, rows),
                },
                repeats,
            )
    finally:
        lens.detach()
    plain, captured = (median(seconds[name]) for name in ("plain", "captured"))
    row = {"length": length, "plain_seconds": plain, "captured_seconds": captured, "ratio": captured / plain}
    return {"rows": [row], "seconds": seconds, "repeats": repeats, "surroundings": surroundings()}


def _plain(model: PreTrainedModel, tokens: torch.Tensor, lens: Any) -> None:
    with lens.disabled():
        model.base_model(input_ids=tokens, use_cache=False)
