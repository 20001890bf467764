"""The paper's objective: the language-model loss through the frozen model, far pairs gated.

    loss = - mean_i log p(token i | tokens before),     far logits + log(g_i.g_j)   (or the paper's sigmoid factor)

The gates' balance comes from potentials of earlier steps: Sinkhorn inside this loss would teach routers to read ahead.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bifocals.lens import Lens


def lm_loss(model: nn.Module, lens: Lens, tokens: Tensor) -> Tensor:
    """``model`` is the lens's own, or what wraps it to run on several processes."""
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens[:, 1:].flatten())
