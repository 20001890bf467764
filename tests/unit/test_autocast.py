"""Under autocast the operators do what torch's own attention does, whichever way they run."""

import pytest
import torch
from torch.nn.functional import one_hot, scaled_dot_product_attention

from bifocals import LearnedTemperature, focal_attention, focus_attention, soft_focus_attention

GROUPS = one_hot(torch.arange(700) % 3, 3).bool()[None, None]
OPERATORS = {
    "focal": lambda *vectors: focal_attention(*vectors, temperature=1.0),
    "dense": lambda *vectors: focus_attention(*vectors, membership=GROUPS, window=2, backend="dense"),
    "sdpa": lambda *vectors: focus_attention(*vectors, membership=GROUPS, window=2, backend="sdpa"),
    "soft": lambda *vectors: soft_focus_attention(*vectors, gates=GROUPS.float(), key_gates=GROUPS.float(), window=2),
}


@pytest.fixture
def vectors():
    torch.manual_seed(0)
    return torch.randn(3, 1, 2, 700, 16).unbind()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("rotated", [torch.float32, torch.bfloat16])
def test_vectors_of_two_dtypes_are_taken_in_that_of_autocast(vectors, name, rotated):
    query, key, value = vectors
    in_half = OPERATORS[name](*(tensor.bfloat16() for tensor in vectors))
    with torch.autocast("cpu", torch.bfloat16):
        attended = OPERATORS[name](query, key.to(rotated), value.bfloat16())
        assert scaled_dot_product_attention(query, key.to(rotated), value.bfloat16()).dtype == torch.bfloat16
    assert attended.dtype == torch.bfloat16
    torch.testing.assert_close(attended, in_half)


def test_autocast_leaves_double_precision_alone(vectors):
    doubles = [tensor.double() for tensor in vectors]
    with torch.autocast("cpu", torch.bfloat16):
        attended = focal_attention(*doubles, temperature=0.4)
    assert torch.equal(attended, focal_attention(*doubles, temperature=0.4))


@pytest.mark.parametrize("form", ["token", "length", "prefix"])
def test_a_learned_temperature_is_computed_in_float32_under_autocast(form):
    module = LearnedTemperature(16, start=0.4, minimum=0.1, maximum=2.0, form=form)
    torch.nn.init.normal_(module.weight)
    hidden = torch.randn(1, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(hidden), module.float()(hidden))
        assert module(hidden).dtype == torch.float32
