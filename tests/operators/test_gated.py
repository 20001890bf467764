"""Gates on the kept pairs against the oracle: outputs, gradients of vectors and of gates, on both paths."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from bifocals import focus_attention, gated, reference, soft_focus_attention
from bifocals.gated import gated_focus_attention
from tests.operators.cases import (
    cases,
    drawn,
    expected,
    gradients,
    make,
    oracle_gradients,
    small_tiles,
    terms,
    written_out,
)
from tests.operators.test_soft_focus import PRECISE, Gated, over_heads, run
from tests.operators.tolerance import Expected

# Where all pairs are written out, keys may be in any number of groups; the sparse path is for keys in one.
OFFERED = {"dense": {}, "sdpa": {"holds": "one", "softcap": None}}
every_path = pytest.mark.parametrize("path", OFFERED)


def gated_inputs(case, dtype) -> Gated:
    """Gates that are closed at the groups that the case does not read."""
    inputs = make(replace(case, holds=case.holds or "one"), dtype)
    options = dict(inputs.options)
    generator = torch.Generator().manual_seed(case.seed)
    gates, key_gates = (
        torch.where(member, torch.rand(member.shape, generator=generator) + 0.05, 0.0).to(dtype)
        for member in (options.pop("membership"), options.pop("key_membership"))
    )
    return Gated(inputs.query, inputs.key, inputs.value, inputs.temperature, options, gates, key_gates)


def fast(inputs: Gated, path: str) -> Tensor:
    chosen = replace(inputs, options={**inputs.options, "backend": path})
    with small_tiles():
        return run(chosen, gated_focus_attention, inputs.temperature)


def dense(inputs: Gated) -> Tensor:
    return run(inputs, reference.gated_focus_attention, written_out(inputs.temperature))


@every_path
def test_gates_on_kept_pairs_equal_the_oracle(path):
    @drawn(120)
    @given(cases(**OFFERED[path]), PRECISE)
    def check(case, dtype):
        inputs = gated_inputs(case, dtype)
        expected(inputs, dtype, dense).assert_met_by([fast(inputs, path)])

    check()


@every_path
def test_gates_on_kept_pairs_have_the_gradients_of_the_oracle(path):
    @drawn(60)
    @given(cases(**OFFERED[path]), PRECISE)
    def check(case, dtype):
        inputs = gated_inputs(case, dtype).fresh(dtype)
        with small_tiles():
            found = gradients(fast(inputs, path), inputs)
        _, of_vectors, of_logits = terms(inputs, dense)
        gates, key_gates = (
            reference.per_head(side.detach().double(), case.heads) for side in inputs.differentiable[-2:]
        )
        agreement = gates @ key_gates.mT
        of_agreement = torch.where(agreement > 0, of_logits / agreement, 0.0)  # the logarithm has the slope 1 / a
        of_gates = [of_agreement @ key_gates, of_agreement.mT @ gates]
        sides = inputs.gates, inputs.key_gates
        summed = [over_heads(side, like) * (like > 0) for side, like in zip(of_gates, sides)]
        Expected(oracle_gradients(inputs, dense), dtype, [*of_vectors, *summed]).assert_met_by(found)

    check()


def grouped(sharpness: float = 1.0, length: int = 700):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, length, 8, dtype=torch.float64) for _ in range(3))
    scores = torch.randn(1, 2, length, 4, dtype=torch.float64)
    reads = scores >= scores.topk(2, dim=-1).values[..., 1:]
    holds = scores >= scores.amax(dim=-1, keepdim=True)
    return (query, key, value), (sharpness * scores).softmax(dim=-1), reads, holds


def test_open_gates_of_one_are_the_hard_pattern():
    vectors, _, reads, holds = grouped()
    hard = focus_attention(*vectors, membership=reads, key_membership=holds, window=9, sinks=2)
    found = gated_focus_attention(*vectors, gates=reads.double(), key_gates=holds.double(), window=9, sinks=2)
    torch.testing.assert_close(found, hard)


def test_with_every_gate_open_it_is_the_soft_pattern():
    vectors, gates, _, _ = grouped(length=60)
    soft = soft_focus_attention(*vectors, gates=gates, key_gates=gates, window=9, sinks=2)
    torch.testing.assert_close(gated_focus_attention(*vectors, gates=gates, key_gates=gates, window=9, sinks=2), soft)


def test_closed_gates_get_no_gradient_and_read_nothing():
    vectors, gates, reads, holds = grouped()
    sides = [torch.where(member, gates, 0.0).requires_grad_() for member in (reads, holds)]
    gated_focus_attention(*vectors, gates=sides[0], key_gates=sides[1], window=9).sum().backward()
    for side, member in zip(sides, (reads, holds)):
        assert not side.grad[~member].any()
        assert side.grad[member].any()


@pytest.mark.parametrize(("change", "message"), [({"gates": 1}, "gates"), ({"window": -1}, "window")])
def test_wrong_input_is_told_what_was_expected(change, message, as_in_production):
    vectors, gates, _, _ = grouped(length=20)
    options = {"gates": gates, "key_gates": gates, "window": 3, **change}
    if change.get("gates"):
        options["gates"] = gates[:, :, :10]
    with pytest.raises(ValueError, match=message):
        gated_focus_attention(*vectors, **options)


@pytest.mark.parametrize(("change", "message"), [
    ({"backend": "nonsense"}, r"backend: expected 'auto', 'dense' or 'sdpa', got 'nonsense'"),
    ({"backend": "sdpa", "softcap": 2.0}, r"cannot run a softcap with gates: expected none, got 2\.0.*'dense'"),
    ({"backend": "sdpa", "several": True}, r"expected at most one open gate for each key, got 3.*'dense'"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("length", [20, 0])
def test_a_backend_that_cannot_run_is_refused_before_any_work(change, message, length, as_in_production, monkeypatch):
    vectors, gates, _, holds = grouped(length=20)
    options = {"gates": gates[:, :, 20 - length :], "key_gates": torch.where(holds, gates, 0.0), "window": 3, **change}
    if options.pop("several", False):
        options["key_gates"] = options["key_gates"].clone()
        options["key_gates"][:, :, 7] = torch.tensor([0.5, 0.0, 0.2, 0.3])
    for work in ("blank_padding", "focus_pairs", "dense_attention", "gated_attention"):
        monkeypatch.setattr(gated, work, None)
    with pytest.raises(ValueError, match=message):
        gated_focus_attention(vectors[0][:, :, 20 - length :], *vectors[1:], **options)


@pytest.mark.parametrize("change", [{}, {"softcap": 2.0}, {"several": True}], ids=str)
def test_the_backend_that_is_chosen_is_exact(change):
    vectors, gates, reads, holds = grouped()
    sides = {"gates": torch.where(reads, gates, 0.0), "key_gates": torch.where(holds, gates, 0.0)}
    if change.get("several"):
        sides["key_gates"][:, :, 7] = torch.tensor([0.5, 0.0, 0.2, 0.3])
    options = {**sides, "window": 9, "softcap": change.get("softcap")}
    expected = reference.gated_focus_attention(*vectors, **options)
    torch.testing.assert_close(gated_focus_attention(*vectors, **options), expected)
