"""Focal attention: a constant is one fused call, a learned temperature is alive and reads no later token."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from bifocals import ConstantTemperature, LearnedTemperature, focal_attention

LIMITS = {"minimum": 0.1, "maximum": 2.0}


class Record(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.calls.append(operator.name())
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_number_is_one_fused_call_and_nothing_more(is_causal, kv_heads):
    query, key, value = (torch.randn(2, heads, 50, 16) for heads in (4, kv_heads, kv_heads))
    with Record() as ours:
        attended = focal_attention(query, key, value, temperature=0.4, is_causal=is_causal)
    with Record() as plain:
        expected = scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=16**-0.5 / 0.4, enable_gqa=kv_heads != 4
        )
    assert ours.calls == plain.calls
    assert ours.calls == ["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert torch.equal(attended, expected)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("temperature", [0.4, torch.rand(2, 4, 50) + 0.3])
def test_it_compiles_into_one_graph(temperature):
    query, key, value = (torch.randn(2, heads, 50, 16) for heads in (4, 2, 2))

    def attend(query):
        return focal_attention(query, key, value, temperature=temperature)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query), attend(query))


def test_a_temperature_of_one_is_standard_attention_bit_for_bit():
    query = torch.randn(1, 2, 30, 16)
    assert torch.equal(
        focal_attention(query, query, query, temperature=1.0),
        scaled_dot_product_attention(query, query, query, is_causal=True),
    )


def test_a_smaller_temperature_sharpens():
    query, key = torch.randn(2, 1, 1, 40, 8)
    every_key = torch.eye(40)[None, None]
    largest = [focal_attention(query, key, every_key, temperature=t).amax(dim=-1).mean() for t in (1.0, 0.5, 0.25)]
    assert largest[0] < largest[1] < largest[2]


def test_a_constant_has_nothing_to_learn():
    constant = ConstantTemperature(0.4)
    assert constant(torch.zeros(1, 3, 8)) == 0.4
    assert not list(constant.parameters())
    with pytest.raises(ValueError, match="temperature: expected > 0, got 0"):
        ConstantTemperature(0)


@pytest.mark.parametrize("form", ["token", "length", "prefix", "sequence"])
@pytest.mark.parametrize("start", [0.11, 0.4, 1.05, 1.99])
def test_a_learned_temperature_starts_where_it_is_told_for_every_token(form, start):
    module = LearnedTemperature(8, start=start, **LIMITS, outputs=3, form=form, is_causal=form != "sequence")
    temperature = module(torch.randn(2, 7, 8))
    assert temperature.shape == (2, 3, 7, 1)
    torch.testing.assert_close(temperature, torch.full_like(temperature, start), rtol=1e-6, atol=0)


@pytest.mark.parametrize("raw", [-1e15, -1e8, -1e4, 0.0, 1e4, 1e8, 1e15])
@pytest.mark.parametrize("form", ["token", "length", "prefix", "sequence"])
def test_the_gradient_is_alive_at_both_ends(raw, form):
    module = LearnedTemperature(4, start=0.4, **LIMITS, form=form, is_causal=form != "sequence")
    torch.nn.init.constant_(module.bias, raw)
    temperature = module(torch.ones(1, 3, 4))
    assert ((temperature >= 0.1) & (temperature <= 2.0)).all()
    temperature.sum().backward()
    assert (module.bias.grad > 0).all()
    assert (module.weight.grad > 0).all()


@pytest.mark.parametrize("form", ["token", "length", "prefix"])
def test_a_later_token_changes_no_earlier_temperature(form):
    module = LearnedTemperature(8, start=0.4, **LIMITS, form=form)
    torch.nn.init.normal_(module.weight)
    hidden = torch.randn(1, 12, 8)
    changed = hidden.clone()
    changed[:, 6:] = torch.randn(1, 6, 8)
    before, after = module(hidden), module(changed)
    assert torch.equal(before[:, :, :6], after[:, :, :6])
    assert not torch.equal(before[:, :, 6], after[:, :, 6])


def test_the_length_form_sharpens_as_tokens_come_and_learns_by_how_much():
    module = LearnedTemperature(8, start=0.4, **LIMITS, form="length")
    hidden = torch.randn(1, 50, 8)
    module(hidden).sum().backward()
    assert module.exponent.grad < 0
    torch.nn.init.constant_(module.exponent, 1.0)
    temperature = module(hidden).detach()[0, 0, :, 0]
    assert (temperature.diff() < 0).all()
    assert temperature[0].item() == pytest.approx(0.4)


def test_the_sequence_mean_reads_later_tokens_and_is_refused_for_decoders_with_the_reason():
    with pytest.raises(ValueError, match=r"reads tokens after the query.*expected form 'token' or 'prefix'.*encoders"):
        LearnedTemperature(8, start=0.4, **LIMITS, form="sequence")
    module = LearnedTemperature(8, start=0.4, **LIMITS, form="sequence", is_causal=False)
    torch.nn.init.normal_(module.weight)
    hidden = torch.randn(1, 12, 8)
    changed = hidden.clone()
    changed[:, -1] += 1
    assert not torch.equal(module(hidden)[:, :, 0], module(changed)[:, :, 0])


@pytest.mark.parametrize("start", [0.1, 2.0, -1.0])
def test_a_start_outside_the_range_is_refused(start):
    with pytest.raises(ValueError, match="starts inside its range"):
        LearnedTemperature(8, start=start, **LIMITS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_learned_temperature_is_computed_in_float32_at_least(dtype):
    module = LearnedTemperature(8, start=0.4, **LIMITS).to(dtype)
    assert module(torch.randn(1, 3, 8, dtype=dtype)).dtype == torch.promote_types(dtype, torch.float32)


def test_a_row_that_is_all_padding_has_a_finite_temperature():
    module = LearnedTemperature(8, start=0.4, **LIMITS, form="prefix")
    hidden = torch.full((1, 4, 8), torch.nan)
    assert module(hidden, torch.zeros(1, 4, dtype=torch.bool)).isfinite().all()


def test_garbage_in_padding_does_not_reach_the_gradient_of_a_temperature():
    query = torch.randn(1, 1, 6, 4)
    query[:, :, :2] = torch.nan
    temperature = torch.ones(1, requires_grad=True)
    segments = torch.tensor([[-1, -1, 0, 0, 0, 0]])
    focal_attention(query, query, query, temperature=temperature, segments=segments).sum().backward()
    assert temperature.grad.isfinite().all()
