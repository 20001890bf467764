"""The sparse path as an operator of torch: autograd, compile, and torch's own checks of operators."""

import pytest
import torch
from torch.nn.functional import one_hot

from bifocals import focus_attention
from bifocals.backends.operator import focus_backward, focus_forward
from tests.operators.cases import small_tiles


def inputs(length, dtype, **options):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, length, 4, dtype=dtype, requires_grad=True) for heads in (2, 1, 1))
    membership = one_hot(torch.randint(3, (1, 1, length)), 3).bool()
    return query, key, value, membership, options


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_gradient_is_that_of_finite_differences(is_causal):
    query, key, value, membership, _ = inputs(11, torch.float64)
    temperature = torch.tensor([0.7, 0.9], dtype=torch.float64, requires_grad=True)
    segments = torch.tensor([[-1, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2]])

    def attend(query, key, value, temperature):
        return focus_attention(
            query,
            key,
            value,
            membership=membership,
            window=1,
            sinks=1,
            segments=segments,
            temperature=temperature,
            is_causal=is_causal,
            backend="sdpa",
        )

    with small_tiles():
        assert torch.autograd.gradcheck(attend, (query, key, value, temperature), fast_mode=True)


@pytest.mark.parametrize("segments", [None, torch.tensor([[-1] * 5 + [0] * 20 + [1] * 15])])
def test_the_operators_pass_the_checks_of_torch(segments):
    query, key, value, membership, _ = inputs(40, torch.float32)
    pattern = (membership, membership, segments, 3, 2, 41, True, 0.5, None)
    for is_native in (False, True):
        torch.library.opcheck(focus_forward, (query, key, value, *pattern, is_native))
    detached = [tensor.detach() for tensor in (query, key, value)]
    out, lse = focus_forward(*detached, *pattern, False)
    torch.library.opcheck(focus_backward, (torch.randn_like(out), *detached, out, lse, *pattern))


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("backend", ["sdpa", "native", "auto"])
def test_it_compiles_into_one_graph_with_its_gradients(backend):
    query, key, value, membership, _ = inputs(700, torch.float32)
    segments = torch.zeros(1, 700, dtype=torch.long)
    segments[:, :100], segments[:, 400:] = -1, 1

    def attend(query, key, value):
        return focus_attention(
            query, key, value, membership=membership, window=8, sinks=2, segments=segments, backend=backend
        )

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for function in (attend, compiled):
        output = function(query, key, value)
        results.append((output, *torch.autograd.grad(output.square().sum(), (query, key, value))))
    for eager, traced in zip(*results):
        assert torch.equal(eager, traced)


@pytest.mark.usefixtures("as_in_production")
def test_values_of_another_size_than_keys_compile_too():
    query, key, _, membership, _ = inputs(700, torch.float32)
    value = torch.randn(1, 1, 700, 7)

    def attend(query):
        return focus_attention(query, key, value, membership=membership, window=8, backend="sdpa")

    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(query), attend(query))
