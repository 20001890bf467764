"""Objectives: their gradients against finite differences, and what fitting by them leaves alone."""

import pytest
import torch

from bifocals import FocusConfig, attach
from bifocals.testing import tiny_model, tiny_tokens
from bifocals.training.distill import distill_loss
from bifocals.training.lm import lm_loss

FOCUS = FocusConfig(groups=3, window=3, sinks=1, dim=4)
ROUTERS = {
    "log gate": FOCUS,
    "sigmoid gate": FocusConfig(groups=3, window=3, sinks=1, dim=4, gate="sigmoid"),
    "one router, same sides": FocusConfig(groups=3, window=3, sinks=1, dim=4, routers="layer", sides="same"),
    "networks": FocusConfig.network(groups=3, window=3, sinks=1, dim=4),
}


CASES = [(name, mode) for name in ROUTERS for mode in ("soft", "sparse") if (name, mode) != ("sigmoid gate", "sparse")]


@pytest.mark.parametrize("objective", [lm_loss, distill_loss])
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_gradients_agree_with_finite_differences(objective, name, mode):
    # gpt2 normalises in float64; llama would in float32, which is too coarse for differences.
    model, tokens = tiny_model("gpt2"), tiny_tokens(2, 16)
    lens = attach(model, ROUTERS[name])
    lens.mode = mode
    objective(model, lens, tokens).backward()
    step = 1e-6
    for parameter_name, parameter in lens.named_parameters():
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            losses = []
            for sign in (1, -1):
                parameter += sign * step * direction
                losses.append(objective(model, lens, tokens).item())
                parameter -= sign * step * direction
        wanted = (losses[0] - losses[1]) / (2 * step)
        found = (parameter.grad * direction).sum().item()
        assert found == pytest.approx(wanted, rel=1e-5, abs=1e-8), parameter_name


def test_distillation_is_zero_at_the_base_and_positive_elsewhere():
    model, tokens = tiny_model("llama"), tiny_tokens(2, 24)
    lens = attach(model, FocusConfig(groups=1, window=3))
    lens.mode = "soft"
    assert abs(distill_loss(model, lens, tokens).item()) < 1e-6
    lens.detach()
    lens = attach(model, FOCUS)
    lens.mode = "soft"
    assert distill_loss(model, lens, tokens).item() > 1e-3
    assert lens.mode == "soft"


def test_only_the_lens_gets_gradients_from_a_frozen_base():
    model, tokens = tiny_model("llama"), tiny_tokens(2, 24)
    model.requires_grad_(False)
    lens = attach(model, FOCUS)
    lens.mode = "soft"
    distill_loss(model, lens, tokens).backward()
    own = {id(parameter) for parameter in lens.parameters()}
    assert all((parameter.grad is not None) == (id(parameter) in own) for parameter in model.parameters())
