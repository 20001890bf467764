"""Promise 1, fast equals dense: every way of running the Focus pattern against the pairs written out in float64."""

import dataclasses
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bifocals
from bifocals import reference
from bifocals.backends import call, native, pattern, sparse, tiles, workers
from tests.operators.cases import (
    Case,
    cases,
    dense_focus,
    drawn,
    expected,
    expected_gradients,
    gradients,
    make,
    run,
    small_tiles,
    written_out,
)

PRECISE = st.sampled_from([torch.float32, torch.float64])
HALF = st.sampled_from([torch.bfloat16, torch.float16])
BACKENDS = ("sdpa", "dense", "auto")
EDGES = (191, 192, 193, 383, 385, 641, 959, 961)  # around the sizes of tiles, blocks and SHORT
# The sparse path refuses a softcap with a temperature tensor, so a softcap has a kind of its own.
KINDS = {
    "causal": {"is_causal": True, "segments": "none", "softcap": None},
    "not causal": {"is_causal": False, "softcap": None},
    "left padding": {"segments": "left", "has_garbage": True, "softcap": None},
    "packing": {"segments": "gaps", "has_garbage": True, "softcap": None},
    "keys in one group": {"holds": "one", "softcap": None},
    "keys in several groups": {"holds": "many", "softcap": None},
    "softcap": {"softcap": 2.0, "temperature": "number"},
    "own group": {"reads": "one", "holds": None, "is_causal": True, "segments": "none", "softcap": None, "reach": None},
    "sinks and segments": {"sinks": 4, "segments": "packed", "softcap": None},
}


def with_native(case: Case, dtype: torch.dtype, backends: tuple[str, ...]) -> tuple[str, ...]:
    """Where the sparse path is asked for, its other form too, if it offers the case."""
    offers = "sdpa" in backends and dtype == torch.float32 and case.softcap is None and native.missing() is None
    return (*backends, "native") if offers else backends


def assert_forward_agrees(case: Case, dtype: torch.dtype, *backends: str) -> None:
    inputs = make(case, dtype)
    right = expected(inputs, dtype)
    for backend in with_native(case, dtype, backends):
        right.assert_met_by([run(inputs, backend)], backend)


def assert_backward_agrees(case: Case, dtype: torch.dtype, *backends: str) -> None:
    inputs = make(case, dtype)
    right = expected_gradients(inputs, dtype)
    for backend in with_native(case, dtype, backends):
        same = inputs.fresh(dtype)
        right.assert_met_by(gradients(run(same, backend), same), backend)


# Thousands of tiny tiles: checking the signature of every call would take longer than all the calls.
@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_equals_the_oracle_in_tiles_of_every_kind(kind):
    @drawn(260)
    @given(cases(**KINDS[kind]), PRECISE)
    def check(case, dtype):
        with small_tiles():
            assert_forward_agrees(case, dtype, *BACKENDS)

    check()


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_has_the_gradients_of_the_oracle(kind):
    @drawn(35)
    @given(cases(**KINDS[kind]), PRECISE)
    def check(case, dtype):
        with small_tiles():
            assert_backward_agrees(case, dtype, *BACKENDS)

    check()


@drawn(40)
@given(cases(softcap=2.0), PRECISE)
def test_a_softcap_with_any_temperature_equals_the_oracle(case, dtype):
    assert_forward_agrees(case, dtype, "dense", "auto")
    assert_backward_agrees(case, dtype, "dense", "auto")


@drawn(150)
@given(cases(softcap=None), PRECISE)
def test_every_backend_equals_the_oracle_in_tiles_of_its_own_size(case, dtype):
    assert_forward_agrees(case, dtype, *BACKENDS)


@drawn(30)
@given(cases(lengths=EDGES, batch=1, repeat=1, groups=4, softcap=None), PRECISE)
def test_the_sparse_path_equals_the_oracle_around_the_edges_of_tiles(case, dtype):
    assert_forward_agrees(case, dtype, "sdpa", "auto")


@pytest.mark.parametrize("queries", [2300, 700])
@pytest.mark.parametrize("is_causal", [True, False])
def test_groups_of_more_than_a_thousand_tokens_agree_forward_and_backward(queries, is_causal):
    case = Case(seed=1, keys=2300, queries=queries, groups=2, window=100, sinks=4, is_causal=is_causal)
    assert_forward_agrees(case, torch.float32, "sdpa")
    assert_backward_agrees(case, torch.float32, "sdpa")


@drawn(60)
@given(cases(softcap=None), HALF)
def test_every_backend_equals_the_oracle_in_half_precision(case, dtype):
    assert_forward_agrees(case, dtype, *BACKENDS)


@pytest.mark.parametrize("reads", [1, 2])
def test_no_logit_of_float16_is_too_large_to_be_masked(reads):
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 300, 16, generator=drawn) for _ in range(3))
    query, key, value = (200 * query).half(), (200 * key).half(), value.half()  # logits of up to a million
    holds, scores = torch.randint(8, (1, 2, 300), generator=drawn), torch.rand(1, 2, 300, 8, generator=drawn)
    key_membership = torch.nn.functional.one_hot(holds, 8).bool()
    membership = scores >= scores.topk(reads).values[..., -1:] if reads > 1 else key_membership
    how = {"membership": membership, "key_membership": key_membership, "window": 16, "scale": 1.0}
    exact = reference.focus_attention(query.double(), key.double(), value.double(), **how)
    out = bifocals.focus_attention(query, key, value, **how, backend="sdpa")
    torch.testing.assert_close(out.double(), exact, atol=1e-3, rtol=1e-3)


def test_a_key_in_some_of_fifty_groups_is_read_once():
    for reads, holds in (("few", "few"), ("three", "many"), ("one", None)):
        case = Case(seed=3, keys=90, queries=90, groups=50, reads=reads, holds=holds, sinks=2)
        assert_forward_agrees(case, torch.float64, *BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("empty", ["batch", "keys", "queries"])
def test_nothing_in_gives_nothing_out(backend, empty):
    sizes = {"batch": 2, "keys": 9, "queries": 9, empty: 0}
    if empty == "keys":
        sizes["queries"] = 0
    inputs = make(Case(seed=0, kv_heads=2, **sizes), torch.float32)
    assert run(inputs, backend).shape == (sizes["batch"], 2, sizes["queries"], 8)


BASE = Case(seed=5, keys=130, queries=130, batch=2, kv_heads=2, groups=4, reads="two", sinks=2, segments="packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("change", ["one pair left out", "one pair counted twice", "one pair too many"])
def test_the_tolerance_sees_a_single_wrong_pair(dtype, change):
    inputs = make(BASE, dtype)
    options = {name: inputs.options[name] for name in ("window", "sinks", "segments", "is_causal", "reach")}
    pairs = reference.focus_pairs(
        inputs.options["membership"], inputs.options["key_membership"], heads=BASE.heads, **options
    )
    twice = torch.zeros(pairs.shape, dtype=dtype)
    visible = reference.visible_pairs(2, 130, 130, inputs.options["segments"], True)
    is_far = visible & (reference.distance(130, 130) > BASE.window)
    candidates = (is_far & ~pairs) if change == "one pair too many" else (is_far & pairs)
    found = candidates.nonzero()
    place = tuple(found[len(found) // 2])

    def attend(wrong: bool) -> torch.Tensor:
        used, gate = pairs.clone(), twice.clone()
        if wrong and change == "one pair counted twice":
            gate[place] = torch.tensor(2.0).log()
        elif wrong:
            used[place] = ~used[place]
        return reference.attention(
            inputs.query, inputs.key, inputs.value, used, temperature=written_out(inputs.temperature), gate=gate
        )

    right = expected(inputs, dtype)
    assert right.is_met_by([attend(wrong=False)])
    assert not right.is_met_by([attend(wrong=True)])


def break_staircase(change):
    """The plan of the sparse path, wrong by one pair."""
    right = sparse.staircases

    def wrong(pattern, order):
        for staircase in right(pattern, order):
            if change == "one pair left out":
                row = int((staircase.high - staircase.low).argmax())
                high = staircase.high.copy()
                high[row] -= 1
                yield dataclasses.replace(staircase, high=high)
            else:
                yield staircase
                yield dataclasses.replace(staircase, is_first=False)

    return wrong


@pytest.mark.parametrize("change", ["one pair left out", "every far pair counted twice"])
def test_the_tolerance_sees_a_broken_sparse_path(monkeypatch, change):
    inputs = make(dataclasses.replace(BASE, segments="none"), torch.float32).fresh(torch.float32)
    right, right_gradients = expected(inputs, torch.float32), expected_gradients(inputs, torch.float32)
    output = run(inputs, "sdpa")
    assert right.is_met_by([output])
    assert right_gradients.is_met_by(gradients(output, inputs))
    output = run(inputs, "sdpa")
    monkeypatch.setattr(sparse, "staircases", break_staircase(change))
    assert not right_gradients.is_met_by(gradients(output, inputs))
    assert not right.is_met_by([run(inputs, "sdpa")])


def test_the_tolerance_sees_garbage():
    inputs = make(dataclasses.replace(BASE, segments="left"), torch.float32)
    output = dense_focus(inputs)
    right = expected(inputs, torch.float32)
    assert right.is_met_by([output])
    output[0, 0, -1, 0] = torch.nan
    assert not right.is_met_by([output])


def test_small_tiles_reach_every_kind_of_tile(monkeypatch):
    """So that the drawn cases above mean something."""
    seen = set()
    right = tiles.far_tiles

    def watch(staircase, device, dtype):
        for tile in right(staircase, device, dtype):
            if tile.is_causal:
                seen.add("own group")
            elif tile.mask is None:
                seen.add("shared by a block" if tile.row.stop - tile.row.start > tiles.TILE else "without a mask")
            else:
                seen.add("several together" if len(tile.row) > 1 else "alone")
                seen.add("padded" if not tile.is_row.all() or not tile.is_key.all() else "whole")
                seen.add("later staircase" if not staircase.is_first else "first staircase")
            yield tile

    monkeypatch.setattr(sparse, "far_tiles", watch)
    with small_tiles():
        for reads in ("one", "two", "same"):
            run(make(dataclasses.replace(BASE, reads=reads, holds="one"), torch.float32), "sdpa")
            run(make(dataclasses.replace(BASE, reads=reads, holds=None, reach=40), torch.float32), "sdpa")
        run(make(dataclasses.replace(BASE, reads="one", holds=None, segments="none"), torch.float32), "sdpa")
    kinds = {"shared by a block", "without a mask", "several together", "alone", "padded", "whole"}
    assert seen == kinds | {"later staircase", "first staircase", "own group"}


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [900, 1000])
def test_long_own_groups_shared_by_several_heads_equal_the_oracle(softcap, batch, length):
    query, key, value = torch.randn(3, batch, 4, length, 8, dtype=torch.float64)
    membership = torch.nn.functional.one_hot(torch.randint(2, (batch, 1, length)), 2).bool()
    options = {"membership": membership, "window": 16, "softcap": softcap}
    output = bifocals.focus_attention(query, key, value, **options, backend="sdpa")
    assert (output - reference.focus_attention(query, key, value, **options)).abs().max() < 1e-12


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_causal_call_in_blocks_is_the_same_call(softcap, monkeypatch):
    query = torch.randn(2, 4, 64, 8, dtype=torch.float64)
    whole = call.attend(query, query, query, None, 0.3, softcap, is_causal=True)
    monkeypatch.setattr(call, "LEAF", 8)
    for blocks, one in zip(call.attend(query, query, query, None, 0.3, softcap, is_causal=True), whole):
        assert (blocks - one).abs().max() < 1e-12


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("reads", ["one", "two"])
@pytest.mark.parametrize("holds", ["one", None])
def test_parts_that_run_side_by_side_equal_the_oracle_forward_and_backward(monkeypatch, reads, holds):
    ran = []
    plainly = workers._plainly
    monkeypatch.setattr(workers, "_plainly", lambda work: ran.append(threading.current_thread().name) or plainly(work))
    for module in (sparse, workers):
        monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(pattern, "PART", 64)
    case = dataclasses.replace(BASE, reads=reads, holds=holds)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with small_tiles():
            assert_forward_agrees(case, torch.float64, "sdpa")
            assert_backward_agrees(case, torch.float64, "sdpa")
    finally:
        torch.set_num_threads(threads)
    assert {"bifocals_0", "bifocals_1"} == set(ran)


def test_worker_threads_leave_the_number_of_threads_alone():
    seen = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pieces = [workers.Piece(1 << 30, lambda: seen.append(torch.get_num_threads())) for _ in range(8)]
        workers.run(pieces, torch.device("cpu"))
        fresh = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        fresh.start()
        fresh.join()
        assert seen == [1] * 8 + [2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
