"""Focal attention and the learned temperatures against their oracles."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bifocals import LearnedTemperature, focal_attention, reference
from tests.operators.cases import Inputs, cases, drawn, expected, expected_gradients, gradients, make, written_out
from tests.operators.tolerance import Expected

PRECISE = st.sampled_from([torch.float32, torch.float64])
ACCEPTED = ("scale", "segments", "reach", "is_causal")


def focal_inputs(case, dtype) -> Inputs:
    inputs = make(case, dtype)
    return replace(inputs, options={name: inputs.options[name] for name in ACCEPTED})


def fast(inputs: Inputs) -> torch.Tensor:
    return focal_attention(inputs.query, inputs.key, inputs.value, temperature=inputs.temperature, **inputs.options)


def dense(inputs: Inputs) -> torch.Tensor:
    temperature = written_out(inputs.temperature)
    return reference.focal_attention(inputs.query, inputs.key, inputs.value, temperature=temperature, **inputs.options)


@drawn(250)
@given(cases(), PRECISE)
def test_focal_attention_equals_the_oracle(case, dtype):
    inputs = focal_inputs(case, dtype)
    expected(inputs, dtype, dense).assert_met_by([fast(inputs)])


@drawn(60)
@given(cases(), PRECISE)
def test_focal_attention_has_the_gradients_of_the_oracle_and_so_have_temperatures(case, dtype):
    inputs = focal_inputs(case, dtype).fresh(dtype)
    expected_gradients(inputs, dtype, dense).assert_met_by(gradients(fast(inputs), inputs))


@pytest.mark.parametrize("form", ["token", "length", "prefix", "sequence"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_learned_temperature_equals_its_oracle_on_each_row_without_its_padding(form, outputs):
    module = LearnedTemperature(
        8, start=0.5, minimum=0.1, maximum=2.0, outputs=outputs, form=form, is_causal=form != "sequence"
    )
    for parameter in (module.weight, *([] if module.exponent is None else [module.exponent])):
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(2, 13, 8)
    is_real = torch.ones(2, 13, dtype=torch.bool)
    is_real[0, :5], is_real[1, 9:] = False, False  # padding on the left, and on the right
    temperature = module(hidden.masked_fill(~is_real[..., None], torch.nan), is_real)
    for row, real in enumerate(is_real):

        def alone(dtype, row=row, real=real):
            weight, bias, tokens = (tensor.detach().to(dtype) for tensor in (module.weight, module.bias, hidden))
            how = {"form": form, "minimum": 0.1, "maximum": 2.0}
            if module.exponent is not None:
                how["exponent"] = module.exponent.detach().to(dtype)
            return [reference.learned_temperature(tokens[row : row + 1, real], weight, bias, **how)]

        # x w + b is a sum of eight terms, of which the temperature does not tell the size.
        terms = (hidden[row].abs() @ module.weight.abs().T).detach()
        Expected(alone, torch.float32, [terms]).assert_met_by([temperature[row : row + 1, :, real].detach()])
