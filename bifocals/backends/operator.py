"""The sparse path as one operator of torch: autograd sees an exact backward, torch.compile sees one opaque node."""

import torch
from torch import Tensor

from bifocals.backends import native, sparse
from bifocals.backends.pattern import Groups, Pattern
from bifocals.segments import segment_starts


@torch.library.custom_op("bifocals::focus_forward", mutates_args=())
def focus_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    membership: Tensor,
    key_membership: Tensor,
    segments: Tensor | None,
    window: int,
    sinks: int,
    reach: int,
    is_causal: bool,
    scale: float,
    softcap: float | None,
    is_native: bool,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the pairs of the pattern."""
    if is_native:
        how = (segments, window, sinks, reach, is_causal, scale)
        return native.forward(query, key, value, membership, key_membership, *how)
    pattern = as_pattern(membership, key_membership, segments, window, sinks, reach, is_causal, softcap)
    return sparse.forward(query, key, value, pattern, scale, softcap)


@focus_forward.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, heads, length, dim = query.shape
    precision = torch.promote_types(query.dtype, torch.float32)
    return (
        query.new_empty(batch, length, heads, dim).transpose(1, 2),
        query.new_empty(batch, length, heads, dtype=precision).transpose(1, 2),
    )


@torch.library.custom_op("bifocals::focus_backward", mutates_args=())
def focus_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    membership: Tensor,
    key_membership: Tensor,
    segments: Tensor | None,
    window: int,
    sinks: int,
    reach: int,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    pattern = as_pattern(membership, key_membership, segments, window, sinks, reach, is_causal, softcap)
    to_query, to_key, to_value = sparse.backward(grad, query, key, value, out, lse, pattern, scale, softcap)
    return to_query, to_key, to_value


@focus_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, membership, key_membership, segments, *ctx.options, _ = inputs
    ctx.save_for_backward(query, key, value, *output, membership, key_membership, segments)


def _differentiate(ctx, grad, _):  # type: ignore[no-untyped-def]
    gradients = focus_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *[None] * (4 + len(ctx.options)))


focus_forward.register_autograd(_differentiate, setup_context=_keep)


def as_pattern(
    membership: Tensor,
    key_membership: Tensor,
    segments: Tensor | None,
    window: int,
    sinks: int,
    reach: int,
    is_causal: bool,
    softcap: float | None = None,
) -> Pattern:
    """One router for both sides: the finer of the two."""
    routers = max(membership.shape[1], key_membership.shape[1])
    membership, key_membership = (
        side if side.shape[1] == routers else side.repeat_interleave(routers // side.shape[1], dim=1)
        for side in (membership, key_membership)
    )
    starts = ends = None
    if segments is not None:
        keys = segments.shape[1]
        starts = segment_starts(keys, segments, segments.device)
        ends = keys - segment_starts(keys, segments.flip(1), segments.device).flip(1)
    groups = Groups.of(membership.flatten(0, 1), key_membership.flatten(0, 1))
    # With a softcap a call is written out in tensors: only tiles keep that small.
    is_whole = softcap is None and is_causal and segments is None and reach > key_membership.shape[2]
    is_diagonal = is_whole and groups.are_shared
    return Pattern(
        membership, key_membership, segments, starts, ends, window, sinks, reach, is_causal, groups, is_diagonal
    )
