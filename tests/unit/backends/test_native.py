"""The program that is compiled on the user's machine: made once, exact on every thread, and not needed."""

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from bifocals import focus_attention, reference
from bifocals.backends import native
from tests.operators.cases import Case, drawn, expected, make, run
from tests.operators.tolerance import Expected

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def fresh_start(monkeypatch, tmp_path):
    """As if nothing had been compiled; caches are in a folder of the test's own."""
    monkeypatch.setattr(native, "__file__", str(tmp_path / "package" / "native.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    native._library.cache_clear()
    yield tmp_path
    native._library.cache_clear()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_compiler
def test_it_is_compiled_once_and_leaves_nothing_else_behind(fresh_start):
    assert native.missing() is None
    (program,) = (path for path in fresh_start.rglob("*") if path.is_file())
    made = program.stat().st_mtime_ns
    native._library.cache_clear()
    assert native.missing() is None
    assert program.stat().st_mtime_ns == made


@needs_compiler
def test_where_the_package_cannot_be_written_to_it_goes_to_the_cache_of_the_user(fresh_start):
    (fresh_start / "package").touch()  # no folder, so nothing can be made in it
    assert native.missing() is None
    assert list((fresh_start / "caches" / "bifocals").glob("native-*.so"))


def vectors(length, dtype=torch.float32):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, length, 8, dtype=dtype) for _ in range(3))
    return query, key, value, {"membership": one_hot(torch.randint(4, (1, 1, length)), 4).bool(), "window": 3}


@pytest.mark.parametrize("compiler", ["none", "false", "/nonexistent/cc"])
def test_without_a_compiler_torch_computes_the_same(fresh_start, monkeypatch, compiler):
    if compiler == "none":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        monkeypatch.setenv("CC", compiler)
    query, key, value, pattern = vectors(50)
    with pytest.raises(ValueError, match=r"'native' cannot run: .*compile.*Use backend='sdpa' or 'auto'"):
        focus_attention(query, key, value, **pattern, backend="native")
    with_torch = focus_attention(query, key, value, **pattern)
    torch.testing.assert_close(with_torch, reference.focus_attention(query, key, value, **pattern))
    assert not [path for path in fresh_start.rglob("*") if path.is_file()]


def test_what_is_not_float32_or_has_too_many_groups_is_refused_by_name():
    query, key, value, pattern = vectors(20, torch.float64)
    with pytest.raises(ValueError, match="'native' cannot run: expected float32, got float64"):
        focus_attention(query, key, value, **pattern, backend="native")
    query, key, value, pattern = vectors(20)
    pattern["membership"] = pattern["membership"].repeat(1, 1, 1, 20)
    with pytest.raises(ValueError, match="expected at most 64 groups, got 80"):
        focus_attention(query, key, value, **pattern, backend="native")
    focus_attention(query, key, value, **pattern)


@needs_compiler
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("holds", ["one", "many", None])
@pytest.mark.parametrize("reads", ["one", "two", "few"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_several_threads_equal_the_oracle(reads, holds, is_causal):
    case = Case(seed=2, keys=1100, queries=1000, kv_heads=2, repeat=2, dim=33, reads=reads, holds=holds, window=40)
    case = Case(**{**vars(case), "sinks": 3, "is_causal": is_causal, "batch": 2, "segments": "packed"})
    inputs = make(case, torch.float32)
    right = expected(inputs, torch.float32)
    right.assert_met_by([run(inputs, "native")])


@needs_compiler
def test_logits_of_every_size_are_masked():
    query, key, value, pattern = vectors(300)
    exact = reference.focus_attention(1e17 * query.double(), 1e17 * key.double(), value.double(), **pattern)
    out = focus_attention(1e17 * query, 1e17 * key, value, **pattern, backend="native")
    torch.testing.assert_close(out.double(), exact, atol=1e-3, rtol=1e-3)


@needs_compiler
def test_what_is_not_a_number_stays_so():
    query, key, value, pattern = vectors(100)
    query[0, 0, 60, 3] = torch.nan
    out = focus_attention(query, key, value, **pattern, backend="native")
    assert out[0, 0, 60].isnan().all()
    assert not out[0, 1].isnan().any()
    assert not out[0, 0, :60].isnan().any()
    assert not out[0, 0, 61:].isnan().any()


STEPS = {
    "seed": st.integers(0, 2**31),
    "keys": st.sampled_from([1, 2, 17, 63, 200, 1500]),
    "batch": st.integers(1, 3),
    "kv_heads": st.sampled_from([1, 2]),
    "repeat": st.sampled_from([1, 3]),
    "dim": st.sampled_from([1, 8, 33, 64, 80]),
    "window": st.sampled_from([0, 3, 40, 5000]),
    "sinks": st.sampled_from([0, 4]),
    "per_head": st.booleans(),
    "routers": st.sampled_from(["one", "kv_head"]),
    "is_padded": st.booleans(),
}


def assert_step_agrees(seed, keys, batch, kv_heads, repeat, dim, window, sinks, per_head, routers, is_padded):
    torch.manual_seed(seed)
    heads, groups = kv_heads * repeat, 5
    query = torch.randn(batch, heads, 1, dim)
    key, value = (torch.randn(batch, kv_heads, keys + 9, dim)[:, :, :keys] for _ in range(2))  # room to grow
    numbers = torch.randint(0, groups + 1, (batch, kv_heads if routers == "kv_head" else 1, keys))
    reads = torch.rand(batch, heads if per_head else kv_heads, groups) < 0.4
    starts = torch.randint(0, keys, (batch,)) if is_padded else torch.zeros(batch, dtype=torch.long)
    holds = one_hot(numbers, groups + 1)[..., 1:].bool()
    segments = torch.where(torch.arange(keys) < starts[:, None], -1, 0)
    pattern = {"membership": reads[:, :, None], "key_membership": holds, "window": window, "sinks": sinks}

    def oracle(dtype, values=value):
        sides = (side.to(dtype) for side in (query, key, values))
        return [reference.focus_attention(*sides, **pattern, segments=segments)]

    known = numbers.to(torch.int16).numpy()[:, :, : max(0, keys - 1 - window)]
    how = np.ascontiguousarray(known), tuple(starts.tolist()), window, sinks, dim**-0.5
    out = native.step(query, key, value, reads, *how)
    Expected(oracle, torch.float32, oracle(torch.float64, value.abs())).assert_met_by([out])


@needs_compiler
@drawn(150)
@given(**STEPS)
def test_a_step_equals_the_oracle(**case):
    assert_step_agrees(**case)


@needs_compiler
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("per_head", [True, False])
def test_a_step_of_several_threads_equals_the_oracle(per_head):
    sizes = {"keys": 5000, "batch": 2, "kv_heads": 2, "repeat": 3, "dim": 64, "window": 40, "sinks": 4}
    assert_step_agrees(0, **sizes, per_head=per_head, routers="kv_head", is_padded=True)
