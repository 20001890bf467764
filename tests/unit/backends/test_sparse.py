"""The cost of the sparse path: nothing of size length x length, memory linear in length, any length."""

import tracemalloc

import pytest
import torch
from torch.nn.functional import one_hot

from bifocals import focus_attention
from bifocals.backends import operator, sparse
from tests.sizes import Sizes


def largest_allocations(length, reads):
    """Bytes of the largest tensor, and of numpy's arrays at their peak, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = torch.randn(4, 1, 1, length, 8, generator=generator)
    holds = one_hot(torch.randint(8, (1, 1, length), generator=generator), 8).bool()
    membership = torch.rand(1, 1, length, 8, generator=generator).argsort(dim=-1) < reads
    pattern = operator.as_pattern(membership, holds, None, 16, 4, length + 1, True)
    tracemalloc.start()
    with Sizes() as sizes:
        out, lse = sparse.forward(query, key, value, pattern, 0.5, None)
        sparse.backward(grad, query, key, value, out, lse, pattern, 0.5, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return sizes.largest, peak


@pytest.mark.parametrize("reads", [1, 2])
def test_nothing_of_size_length_by_length_is_built_and_memory_is_linear(reads):
    length = 4096
    tensors, arrays = largest_allocations(length, reads)
    assert tensors < 4 * length * length / 4  # a quarter of the pairs, in float32
    assert arrays < length * length / 4  # not even in bytes
    twice = largest_allocations(2 * length, reads)
    assert twice[0] <= 2.1 * tensors
    assert twice[1] <= 2.1 * arrays


def test_the_meter_sees_a_dense_mask():
    with Sizes() as sizes:
        torch.ones(4096, 4096)
    assert sizes.largest == 4 * 4096 * 4096


def test_a_quarter_of_a_million_tokens_run():
    length = 262_144
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, length, 8, generator=generator)
    group = torch.randint(64, (length,), generator=generator)
    membership = one_hot(group, 64).bool()[None, None]
    # The value says in which group a key is: far keys are of the query's own.
    value = (1.0 + group)[None, None, :, None].expand(-1, -1, -1, 8).contiguous()
    out = focus_attention(query, key, value, membership=membership, window=0)
    assert out.shape == query.shape
    torch.testing.assert_close(out, value, rtol=1e-5, atol=0)
