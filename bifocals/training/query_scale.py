"""Re-learn the scale of the queries while a temperature is put on: the schedule ``scale`` of `bifocals adapt`.

    softmax((e^s q) k^T / (t sqrt(dim)))      one s for each layer, learned; it starts at log t

so training starts at the base model itself, and whatever temperature each layer wants in truth is its to find. Once
trained, e^s goes into the weights that make the query and a constant t is left. It follows that what this schedule
reaches is a model that t was made part of, not one that t has changed: without a norm on the queries every model can be
written so.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bifocals.families import family_of
from bifocals.focal import ConstantTemperature
from bifocals.folding import query_rows
from bifocals.lens import Lens

PACE = 100.0  # times the rate: weights move by far less of their size in a step than a scale has to


class ScaledTemperature(ConstantTemperature):
    """A constant over the scale that the query has learned."""

    def __init__(self, temperature: float) -> None:
        super().__init__(temperature)
        self.paced_log_scale = nn.Parameter(torch.tensor([math.log(temperature) / PACE], dtype=torch.float64))

    def scale(self) -> Tensor:
        return (PACE * self.paced_log_scale).exp()

    def forward(self, hidden: Float[Tensor, "batch length hidden"]) -> Tensor:  # type: ignore[override]
        return self.temperature / self.scale()


def expect_scalable(lens: Lens) -> None:
    """Nothing but a scale of its queries may be what a temperature is."""
    if family_of(lens.model).softcap and getattr(lens.model.config, family_of(lens.model).softcap) is not None:
        raise ValueError(
            f"schedule 'scale': {type(lens.model).__name__} caps its logits, so that a temperature is more than a "
            "scale of its queries. Expected a model without a softcap; use schedule 'anneal'."
        )
    for module in lens.modules():
        query_rows(module, family_of(lens.model))  # refuses weights that no scale can be put into


def relearn_scales(lens: Lens) -> None:
    """Put learned scales on a lens with a constant temperature."""
    for module, layer in zip(lens.modules(), lens.layers.values()):
        assert isinstance(layer.temperature, ConstantTemperature)
        weight = next(module.parameters())
        precision = torch.promote_types(weight.dtype, torch.float32)
        layer.temperature = ScaledTemperature(layer.temperature.temperature).to(weight.device, precision)


@torch.no_grad()
def put_scales_into_weights(lens: Lens) -> None:
    """The same model with the constant alone."""
    for module, layer in zip(lens.modules(), lens.layers.values()):
        if isinstance(layer.temperature, ScaledTemperature):
            scale = layer.temperature.scale()
            for row in query_rows(module, family_of(lens.model)):
                row.mul_(scale.to(row.dtype))
            layer.temperature = ConstantTemperature(layer.temperature.temperature)
