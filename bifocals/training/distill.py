"""Distillation: with the lens on, say what the base model says.

    loss = mean_i KL(base(. | tokens up to i) || lens(. | tokens up to i))

0 is the base model. No token is a target, so the lens is not drawn towards the text it is fitted on: the natural second
phase after the mass objective.
"""

import torch
from torch import Tensor, nn

from bifocals.lens import Lens


def distill_loss(model: nn.Module, lens: Lens, tokens: Tensor) -> Tensor:
    """``model`` is the lens's own, or what wraps it to run on several processes."""
    with torch.no_grad(), lens.disabled() as base:
        wanted = log_probabilities(base, tokens)
    return divergence(wanted, log_probabilities(model, tokens))


def divergence(wanted: Tensor, own: Tensor) -> Tensor:
    """KL(wanted || own), mean over tokens; of logarithms."""
    return (wanted.exp() * (wanted - own)).sum(dim=-1).mean()


def log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
