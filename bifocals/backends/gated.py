"""Gates on the far pairs of a pattern, at the cost of the pattern.

    log a_ij = log gq_i,g(j) + log gk_j          g(j): the one group of key j

is a product of features, so it rides along in the products of queries and keys that are computed anyway:

    far query    [q,  log gq_i / scale,  1]                (dim + groups + 1)
    far key      [k,  one at g(j),       log gk_j / scale]
    near         [q,  0],  [k,  0]

The far key of a sink has zeros there: it is gated by nothing. Gradients of the gates come with those of the features.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from bifocals.backends import sparse
from bifocals.backends.operator import as_pattern


def gated_attention(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key dim"],
    gates: Float[Tensor, "batch router query group"],
    key_gates: Float[Tensor, "batch key_router key group"],
    is_sink: Bool[Tensor, "#batch key"],
    segments: Int[Tensor, "batch key"] | None,
    window: int,
    sinks: int,
    reach: int,
    is_causal: bool,
    scale: float,
) -> Float[Tensor, "batch head query dim"]:
    """Attention over near, sink and far pairs, the far ones gated; a gate of 0 is closed, and a key has one open."""
    is_open = key_gates > 0
    pattern = as_pattern(gates > 0, is_open, segments, window, sinks, reach, is_causal)
    pattern = replace(pattern, is_diagonal=False)  # near pairs are read by themselves: no gate is on them
    if key_gates.shape[1] > key.shape[1]:  # keys that are in other groups for other query heads
        key, value = (side.repeat_interleave(key_gates.shape[1] // key.shape[1], dim=1) for side in (key, value))
    holds = (is_open & ~is_sink[:, None, :, None]).to(key.dtype)
    of_query = (_log(gates) / scale).to(query.dtype)
    of_key = (holds * _log(key_gates)).sum(dim=-1, keepdim=True) / scale
    of_query, holds, of_key = (
        side.repeat_interleave(heads // side.shape[1], dim=1)
        for side, heads in ((of_query, query.shape[1]), (holds, key.shape[1]), (of_key, key.shape[1]))
    )
    far_query = torch.cat([query, of_query, torch.ones_like(of_query[..., :1])], dim=-1)
    far_key = torch.cat([key, holds, of_key.to(key.dtype)], dim=-1)
    dim, more = query.shape[-1], far_query.shape[-1] - query.shape[-1]
    near = (pad(side, (0, more)) for side in (query, key, value))
    return _GatedAttention.apply(*near, far_query, far_key, pattern, scale)[..., :dim]


def _log(gates: Tensor) -> Tensor:
    """0 at closed gates, whose pairs are not read: the logarithm of 0 has no gradient."""
    return torch.where(gates > 0, gates, 1.0).log()


class _GatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        far_query, far_key, pattern, scale = others
        out, lse = sparse.forward(query, key, value, pattern, scale, None, (far_query, far_key))
        ctx.save_for_backward(query, key, value, out, lse, far_query, far_key)
        ctx.pattern, ctx.scale = pattern, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, *far = ctx.saved_tensors
        found = sparse.backward(grads[0], query, key, value, out, lse, ctx.pattern, ctx.scale, None, tuple(far))
        return (*found, None, None)
