"""Focus attention against the dense oracle in float64, on drawn cases: shapes, groups, windows, padding, packing."""

import random

import pytest
import torch
from torch.nn.functional import one_hot

from bifocals import focus_attention, reference
from bifocals.backends import pattern, tiles

CASES = 260
# Rounding of float64, over at most a few hundred summands of size one.
TOLERANCE = 1e-11


def draw(seed):
    """Tensors and options of one case; padding holds NaN and infinity."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv_heads, repeat = pick.choice([1, 2]), pick.choice([1, 2]), pick.choice([1, 3])
    heads, keys = kv_heads * repeat, pick.choice([1, 2, 17, 63, 130, 300])
    queries, groups = pick.choice([keys, keys, max(1, keys // 3), 1]), pick.choice([1, 2, 5, 8])
    dim = pick.choice([4, 8])
    membership = torch.rand(batch, pick.choice([1, kv_heads, heads]), queries, groups) < pick.choice([0.1, 0.3, 0.7])
    routers = pick.choice([1, kv_heads, heads])
    key_membership = one_hot(torch.randint(groups, (batch, routers, keys)), groups).bool()
    if pick.random() < 0.4:
        key_membership = torch.rand(batch, routers, keys, groups) < pick.choice([0.1, 0.3])
    vectors = [torch.randn(batch, heads, queries, dim, dtype=torch.float64)]
    vectors += [
        torch.randn(batch, kv_heads, keys, size, dtype=torch.float64) for size in (dim, pick.choice([dim, 3, 12]))
    ]
    segments = None
    if pick.random() < 0.5:
        segments = torch.randint(-1, pick.choice([1, 2, 5]), (batch, keys)).sort(dim=1).values
        segments = segments.flip(1).contiguous() if pick.random() < 0.3 else segments
        is_padding = (segments < 0)[:, None, :, None]
        for index, (vector, garbage) in enumerate(zip(vectors, (torch.nan, torch.nan, torch.inf))):
            vectors[index] = vector.masked_fill(is_padding[:, :, keys - vector.shape[2] :], garbage)
    options = {
        "membership": membership,
        "key_membership": key_membership,
        "window": pick.choice([0, 1, 7, 30, 200]),
        "sinks": pick.choice([0, 1, 4, 40]),
        "segments": segments,
        "is_causal": pick.random() < 0.7,
        "reach": pick.choice([None, None, 5, 60]),
        "softcap": pick.choice([None, None, 2.0]),
        "scale": pick.choice([None, 0.3]),
    }
    temperature = pick.choice([1.0, 0.4, torch.rand(heads, dtype=torch.float64) + 0.2])
    if options["softcap"] is not None and isinstance(temperature, torch.Tensor):
        temperature = 0.7
    return [vector.requires_grad_() for vector in vectors], temperature, options


def errors(seed, backend, *, with_gradients):
    vectors, temperature, options = draw(seed)
    per_head = temperature[None, :, None, None] if isinstance(temperature, torch.Tensor) else temperature
    exact = reference.focus_attention(*vectors, temperature=per_head, **options)
    got = focus_attention(*vectors, temperature=temperature, backend=backend, **options)
    pairs = [(got, exact)]
    if with_gradients:
        gradient = torch.randn_like(exact)
        pairs += zip(torch.autograd.grad(got, vectors, gradient), torch.autograd.grad(exact, vectors, gradient))
    return [(left - right).abs().max().item() if left.numel() else 0.0 for left, right in pairs]


@pytest.fixture
def tiny_tiles(monkeypatch):
    """Tiles so small that short sequences have every kind of them."""
    for name, size in (("TILE", 16), ("WIDE", 8), ("NEAR", 4), ("BLOCK", 2), ("TOGETHER", 2000), ("SLACK", 4)):
        monkeypatch.setattr(tiles, name, size)
    monkeypatch.setattr(pattern, "SEVERAL", 400)


@pytest.mark.parametrize("part", range(4))
def test_the_sparse_path_equals_the_oracle_with_every_kind_of_tile(tiny_tiles, part):
    for seed in range(part * CASES, (part + 1) * CASES):
        assert max(errors(seed, "sdpa", with_gradients=False)) < TOLERANCE, f"seed {seed}"


@pytest.mark.parametrize("part", range(2))
def test_gradients_of_the_sparse_path_equal_those_of_the_oracle(tiny_tiles, part):
    for seed in range(10_000 + part * 120, 10_000 + (part + 1) * 120):
        assert max(errors(seed, "sdpa", with_gradients=True)) < TOLERANCE, f"seed {seed}"


@pytest.mark.parametrize("backend", ["sdpa", "auto", "dense"])
def test_every_backend_equals_the_oracle(backend):
    for seed in range(20_000, 20_000 + CASES):
        assert max(errors(seed, backend, with_gradients=False)) < TOLERANCE, f"seed {seed}"


def test_a_dropped_pair_is_found():
    query, key, value = (torch.randn(1, 1, 300, 8, dtype=torch.float64) for _ in range(3))
    groups = one_hot(torch.randint(4, (1, 1, 300)), 4).bool()
    exact = reference.focus_attention(query, key, value, membership=groups, window=4)
    fewer = groups.clone()
    fewer[:, :, 10] = False
    got = focus_attention(query, key, value, membership=groups, key_membership=fewer, window=4, backend="sdpa")
    assert (got - exact).abs().max() > 1e6 * TOLERANCE


def test_long_sequences_use_wide_tiles_and_stay_exact():
    query, key, value = (torch.randn(1, 1, 5000, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    groups = one_hot(torch.randint(2, (1, 1, 5000)), 2).bool()
    exact = reference.focus_attention(query, key, value, membership=groups, window=20, sinks=4)
    got = focus_attention(query, key, value, membership=groups, window=20, sinks=4, backend="sdpa")
    assert (got - exact).abs().max() < TOLERANCE
    gradients = [torch.autograd.grad(output.square().sum(), (query, key, value)) for output in (got, exact)]
    assert max((left - right).abs().max().item() for left, right in zip(*gradients)) < 100 * TOLERANCE


def test_rounding_in_float32_is_that_of_the_oracle():
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, 2, 1500, 32) for _ in range(3))
    groups = one_hot(torch.randint(8, (1, 2, 1500)), 8).bool()
    exact = reference.focus_attention(query.double(), key.double(), value.double(), membership=groups, window=64)
    own = (reference.focus_attention(query, key, value, membership=groups, window=64) - exact).abs().max()
    got = focus_attention(query, key, value, membership=groups, window=64, backend="sdpa")
    assert (got - exact).abs().max() <= 2 * (own + torch.finfo(torch.float32).eps * exact.abs().max())


def test_lengths_zero_and_one_are_exact():
    for length in (0, 1):
        vectors = [torch.randn(1, 2, length, 4) for _ in range(3)]
        groups = torch.ones(1, 1, length, 3, dtype=torch.bool)
        for backend in ("auto", "sdpa", "dense"):
            got = focus_attention(*vectors, membership=groups, window=2, backend=backend)
            torch.testing.assert_close(got, vectors[2])


def test_it_compiles_as_one_graph_with_its_gradient():
    query, key, value = (torch.randn(1, 2, 1200, 8, requires_grad=True) for _ in range(3))
    groups = one_hot(torch.randint(4, (1, 1, 1200)), 4).bool()

    def attend(query):
        return focus_attention(query, key, value, membership=groups, window=8, backend="sdpa")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query), attend(query))
    gradients = [torch.autograd.grad(run(query).square().sum(), query)[0] for run in (compiled, attend)]
    torch.testing.assert_close(*gradients)
