"""How a backend is picked."""

import logging

import pytest
import torch
from torch.nn.functional import one_hot, scaled_dot_product_attention

import bifocals
from bifocals import focus, reference
from bifocals.backends import native


@pytest.fixture(autouse=True)
def nothing_logged_before():
    focus._log_choice.cache_clear()


def vectors(length, kv_heads=2, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, heads, length, 16, dtype=dtype) for heads in (4, kv_heads, kv_heads)]


def groups(length, count=4):
    return one_hot(torch.arange(length) * 7 % count, count).bool().expand(2, 1, -1, -1)


@pytest.mark.parametrize("length", [50, 1000])
@pytest.mark.parametrize("full", ["one group", "a common group", "a long window"])
def test_auto_is_plain_attention_bit_for_bit_where_every_pair_is_read(length, full):
    query, key, value = vectors(length)
    membership, window = groups(length, 1 if full == "one group" else 4), 3
    if full == "a common group":
        membership = membership | torch.tensor([False, True, False, False])
    if full == "a long window":
        window = length - 1
    got = bifocals.focus_attention(query, key, value, membership=membership, window=window)
    assert torch.equal(got, scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))


def test_auto_logs_its_choice_once_for_each_reason(caplog):
    caplog.set_level(logging.INFO, logger="bifocals.focus")
    for _ in range(3):
        for length, how in (
            (30, {"window": 40}),
            (30, {"window": 2}),
            (30, {"window": 2, "membership": groups(30) | groups(30).roll(1, -1)}),
            (30, {"window": 2, "reach": 9}),
            (900, {"window": 2}),
        ):
            inputs = vectors(length, dtype=torch.float64)
            bifocals.focus_attention(*inputs, **{"membership": groups(length), **how})
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "focus_attention runs 'full': every pair is read.",
        "focus_attention runs 'strips': at most 896 x 896 pairs.",
        "focus_attention runs 'strips': at most 2048 x 2048 pairs.",
        "focus_attention runs 'dense': at most 640 x 640 pairs.",
        "focus_attention runs 'sdpa': more than 896 x 896 pairs, and not 'native': expected float32, got float64.",
    ]


@pytest.mark.skipif(native.missing() is not None, reason="needs a C compiler")
def test_auto_runs_a_program_of_its_own_where_it_can(caplog):
    caplog.set_level(logging.INFO, logger="bifocals.focus")
    bifocals.focus_attention(*vectors(30), membership=groups(30), window=2)
    assert [record.getMessage() for record in caplog.records] == ["focus_attention runs 'native': float32 on a CPU."]


@pytest.mark.parametrize("backend", ["dense", "sdpa", "native"])
def test_a_named_backend_is_run_without_a_word(caplog, backend):
    caplog.set_level(logging.INFO, logger="bifocals.focus")
    bifocals.focus_attention(*vectors(30), membership=groups(30), window=2, backend=backend)
    assert not caplog.records


def test_the_drawing_in_the_docstring_is_the_pattern():
    names = [0, 1, 0, 0, 1, 0, 1, 1]
    membership = one_hot(torch.tensor(names), 2).bool()[None, None]
    rows = reference.focus_pairs(membership, membership, window=1, sinks=1, heads=1)[0, 0]
    drawn = [" ".join("x" if read else "." for read in row[: index + 1]) for index, row in enumerate(rows)]
    for module in (focus, bifocals.reference):
        for row in drawn:
            assert any(line.endswith(row) for line in module.__doc__.splitlines()), row
    every_key = torch.eye(8)[None, None]
    weights = bifocals.focus_attention(every_key, every_key, every_key, membership=membership, window=1, sinks=1)
    assert torch.equal(weights[0, 0] > 0, rows)


def test_a_later_token_changes_no_earlier_output():
    query, key, value = vectors(100)
    membership = groups(100)
    changed = [tensor.clone() for tensor in (query, key, value)]
    other = membership.clone()
    for tensor in changed:
        tensor[:, :, 60:] = torch.randn_like(tensor[:, :, 60:])
    other[:, :, 60:] = ~other[:, :, 60:]
    for backend in ("auto", "dense", "sdpa", "native"):
        before, after = (
            bifocals.focus_attention(*inputs, membership=sides, window=3, sinks=2, backend=backend)[:, :, :60]
            for inputs, sides in (((query, key, value), membership), (changed, other))
        )
        torch.testing.assert_close(before, after)


@pytest.mark.parametrize("backend", ["auto", "dense", "sdpa", "native"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (1, 2, 0, 4)])
def test_nothing_has_a_gradient_of_zeros_all_the_same(backend, shape):
    query, key, value = (torch.zeros(shape, requires_grad=True) for _ in range(3))
    membership = torch.ones(shape[0], 1, shape[2], 3, dtype=torch.bool)
    bifocals.focus_attention(query, key, value, membership=membership, window=1, backend=backend).sum().backward()
    for tensor in (query, key, value):
        assert torch.equal(tensor.grad, torch.zeros(shape))
