"""The soft gates against the oracle, with gradients of the gates."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bifocals import focus_attention, reference, soft_focus_attention
from tests.operators.cases import (
    Inputs,
    cases,
    drawn,
    expected,
    gradients,
    make,
    oracle_gradients,
    terms,
    written_out,
)
from tests.operators.tolerance import Expected

LARGEST_LOGIT = 10.0
PRECISE = st.sampled_from([torch.float32, torch.float64])


@dataclass
class Gated(Inputs):
    gates: Tensor
    key_gates: Tensor

    @property
    def differentiable(self) -> list[Tensor]:
        return [*super().differentiable, self.gates, self.key_gates]

    def fresh(self, dtype: torch.dtype) -> "Gated":
        gates, key_gates = (gate.detach().to(dtype).requires_grad_() for gate in (self.gates, self.key_gates))
        same = super().fresh(dtype)
        return Gated(same.query, same.key, same.value, same.temperature, same.options, gates, key_gates)


def soft_inputs(case, dtype, gate) -> Gated:
    inputs = make(case, dtype)
    options = {**inputs.options, "gate": gate, "slope": 3.0}
    queries = options.pop("membership")[:, :, case.keys - case.queries :].shape[:2]
    keys = options.pop("key_membership", torch.empty(case.batch, 1)).shape[:2]
    generator = torch.Generator().manual_seed(case.seed)
    gates, key_gates = (
        torch.randn(*routers, length, case.groups, generator=generator).to(dtype).softmax(dim=-1)
        for routers, length in ((queries, case.queries), (keys, case.keys))
    )
    return Gated(inputs.query, inputs.key, inputs.value, inputs.temperature, options, gates, key_gates)


def over_heads(of_heads: Tensor, like: Tensor) -> Tensor:
    """Over the heads that share a router."""
    return of_heads.unflatten(1, (like.shape[1], -1)).sum(dim=2)


def run(inputs: Gated, attend, temperature) -> Tensor:
    gates = {"gates": inputs.gates, "key_gates": inputs.key_gates}
    return attend(inputs.query, inputs.key, inputs.value, temperature=temperature, **gates, **inputs.options)


def fast(inputs: Gated) -> Tensor:
    return run(inputs, soft_focus_attention, inputs.temperature)


def dense(inputs: Gated) -> Tensor:
    return run(inputs, reference.soft_focus_attention, written_out(inputs.temperature))


@pytest.mark.parametrize("gate", ["log", "sigmoid"])
def test_a_soft_gate_equals_the_oracle(gate):
    @drawn(120)
    @given(cases(), PRECISE)
    def check(case, dtype):
        inputs = soft_inputs(case, dtype, gate)
        expected(inputs, dtype, dense).assert_met_by([fast(inputs)])

    check()


@pytest.mark.parametrize("gate", ["log", "sigmoid"])
def test_a_soft_gate_has_the_gradients_of_the_oracle_and_so_have_the_gates(gate):
    @drawn(40)
    @given(cases(), PRECISE)
    def check(case, dtype):
        inputs = soft_inputs(case, dtype, gate).fresh(dtype)
        found = gradients(fast(inputs), inputs)
        _, of_vectors, of_logits = terms(inputs, dense)
        # The logarithm of a has the slope 1 / a; the sigmoid's factor has a slope below 1 and multiplies a logit.
        gates, key_gates = (
            reference.per_head(side.detach().double(), case.heads) for side in inputs.differentiable[-2:]
        )
        of_agreement = of_logits / (gates @ key_gates.mT) if gate == "log" else of_logits * LARGEST_LOGIT
        of_gates = [of_agreement @ key_gates, of_agreement.mT @ gates]
        summed = [over_heads(side, like) for side, like in zip(of_gates, (inputs.gates, inputs.key_gates))]
        Expected(oracle_gradients(inputs, dense), dtype, [*of_vectors, *summed]).assert_met_by(found)

    check()


def hard_and_soft(gate: str, sharpness: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 60, 8, dtype=torch.float64) for _ in range(3))
    scores = torch.randn(1, 2, 60, 4, dtype=torch.float64)
    membership = torch.nn.functional.one_hot(scores.argmax(dim=-1), 4).bool()
    gates = (sharpness * scores).softmax(dim=-1)
    hard = focus_attention(query, key, value, membership=membership, window=2)
    return hard, soft_focus_attention(query, key, value, gates=gates, key_gates=gates, window=2, gate=gate)


def test_the_log_gate_approaches_the_hard_pattern_as_the_gates_harden():
    distances = []
    for sharpness in (1, 10, 100, 1e5):
        hard, soft = hard_and_soft("log", sharpness)
        distances.append((hard - soft).abs().max().item())
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-12


def test_the_sigmoid_gate_never_closes():
    hard, soft = hard_and_soft("sigmoid", 1e5)
    assert (hard - soft).abs().max() > 0.1
