"""Every key before a query, some rows at a time, with a mask: the fastest way while the sequence is short.

The mask closes what is neither near nor a sink nor in a shared group. Here with strips of two rows:

    1                    rows of strip 1 read the keys up to the end of strip 1,
    1 1
    2 2 2                those of strip 2 up to the end of strip 2
    2 2 2 2
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bifocals.backends.call import attend

STRIP = 256  # rows
LONGEST = 2048  # keys
CLOSED, LATER = -1e30, -1e36  # added to logits; sharing a group takes CLOSED back, and nothing LATER


def strips_attention(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key dim"],
    membership: Bool[Tensor, "batch router query group"],
    key_membership: Bool[Tensor, "batch key_router key group"],
    window: int,
    sinks: int,
    scale: float,
    is_causal: bool,
) -> Float[Tensor, "batch head query dim"]:
    """Exact and differentiable like any attention of torch; for at most LONGEST keys."""
    (batch, heads, queries), (kv_heads, keys) = query.shape[:3], key.shape[1:3]
    precision = torch.promote_types(query.dtype, torch.float32)
    routers = max(membership.shape[1], key_membership.shape[1])
    reads, holds = (
        side.to(precision).repeat_interleave(routers // side.shape[1], dim=1).flatten(0, 1)
        for side in (membership, key_membership)
    )
    if sinks:  # as a group that every query reads
        is_sink = (torch.arange(keys, device=key.device) < sinks).to(precision)[:, None].expand(len(holds), -1, -1)
        reads, holds = torch.cat([reads, torch.ones_like(reads[..., :1])], dim=-1), torch.cat([holds, is_sink], dim=-1)
    # Heads with the same mask are the heads of one row of the batch; kernels repeat the mask for them by themselves.
    shared = routers if routers <= kv_heads else 1
    query, key, value = (side.unflatten(1, (shared, -1)).flatten(0, 1) for side in (query, key, value))
    band = _band(STRIP, window, is_causal, precision, key.device)
    attended = []
    for first in range(0, queries, STRIP):
        rows, start = slice(first, min(first + STRIP, queries)), keys - queries + first
        end = keys - queries + rows.stop if is_causal else keys
        always = band[: rows.stop - first, LONGEST - start : LONGEST - start + end]
        mask = torch.baddbmm(always, reads[:, rows], holds[:, :end].mT, alpha=-CLOSED).clamp_(max=0)
        mask = mask.view(batch * shared, -1, *mask.shape[1:])
        if mask.shape[1] not in (1, query.shape[1]):
            mask = mask.repeat_interleave(query.shape[1] // mask.shape[1], dim=1)
        attended.append(attend(query[:, :, rows], key[:, :, :end], value[:, :, :end], mask, scale)[0])
    return torch.cat(attended, dim=2).view(batch, heads, queries, -1)


@lru_cache(maxsize=16)
def _band(
    rows: int, window: int, is_causal: bool, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "row distance"]:
    """What is added for a key at distance ``column - LONGEST`` from the first row. The same at every call, so kept."""
    with torch.inference_mode(False):  # kept for all modes
        apart = torch.arange(rows, device=device)[:, None] - torch.arange(-LONGEST, LONGEST + 1, device=device)
        band = torch.zeros(apart.shape, dtype=dtype, device=device)
        # In its own precision: what takes it back must be the same number.
        band.masked_fill_(apart.abs() > window, CLOSED)
        return band.masked_fill_(apart < 0, LATER) if is_causal else band
