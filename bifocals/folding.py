"""Fold a constant temperature into the weights: a stock model that computes the same and knows nothing of us.

    softmax(q k^T scale / t)   =   softmax((q / t) k^T scale)

So the rows that make the query are divided by t, wherever the family puts them: the projection and its bias, or the
norm after it, which would undo a change before it. With a softcap c, softmax(c tanh(q k^T scale / c) / t) needs both
the query and c divided by t; c is one number for the whole model, so every layer must have the same temperature.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bifocals.families import Family, attention_sites, family_of
from bifocals.focal import ConstantTemperature
from bifocals.lens import Lens, lens_of


@torch.no_grad()
def fold(model: PreTrainedModel) -> PreTrainedModel:
    """Put the lens's constant temperature into the weights, in place, and take the lens off."""
    lens = lens_of(model)
    if lens is None:
        raise ValueError(
            "Nothing to fold: this model has no lens. Attach a FocalConfig with a constant temperature first."
        )
    family = family_of(model)
    temperature = _foldable(lens, family)
    rows = [row for module in lens.modules() for row in query_rows(module, family)]
    lens.detach()
    for row in rows:
        row.div_(temperature)
    if family.softcap:
        _divide_softcap(model, family.softcap, temperature)
    return model


def _foldable(lens: Lens, family: Family) -> float:
    """The temperature, if folding it is exact."""
    if lens.focus is not None:
        raise ValueError(
            "Only Focal folds into the weights; this lens has Focus, which changes what is read. Save it as an "
            "adapter, or attach Focal alone."
        )
    assert lens.focal is not None
    if lens.focal.is_learned:
        raise ValueError(
            f"A learned temperature (form {lens.focal.form!r}) depends on the tokens and cannot be folded into "
            "weights: expected form 'constant'."
        )
    covered, all_sites = len(lens.layers), len(attention_sites(lens.model))
    if family.softcap and covered < all_sites and getattr(lens.model.config, family.softcap) is not None:
        raise ValueError(
            f"The softcap of {type(lens.model).__name__} is one number for all layers, so a temperature folds into it "
            f"only if every layer has it: expected {all_sites} layers, got {covered}. Attach without layers=."
        )
    forms = [layer.temperature for layer in lens.layers.values()]
    assert all(isinstance(form, ConstantTemperature) for form in forms)
    return lens.focal.temperature


def query_rows(module: nn.Module, family: Family) -> list[Tensor]:
    """The parameters, or parts of them, that the query is linear in."""
    rows = []
    for query in family.queries:
        place = getattr(module, query.submodule, None)
        if place is None:
            continue  # a variant of the family without it, as deepseek_v3 with or without a latent query
        for name in ("weight", "bias"):
            tensor = getattr(place, name, None)
            if tensor is not None:
                rows.append(query.of(module, tensor))
    if not rows or not all(row.is_floating_point() for row in rows):
        raise ValueError(
            f"The query of {type(module).__name__} does not lie in floating-point weights here (quantised?), so the "
            "temperature cannot be folded into it exactly. Load the model in float32 or bfloat16."
        )
    return rows


def _divide_softcap(model: PreTrainedModel, name: str, temperature: float) -> None:
    """In the config, for the next load, and in the modules that read it when they were made."""
    if getattr(model.config, name) is None:
        return
    divided = getattr(model.config, name) / temperature
    for holder in (model.config, *(site.module for site in attention_sites(model))):
        setattr(holder, name, divided)
