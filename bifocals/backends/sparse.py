"""Only the pairs kept: near tiles, far tiles, merged.

Near and far pairs differ in distance, so no pair is in both, and the two results merge exactly by their log-sum-exp
(call.py). Which keys a query reads far away is said in pattern.py, how they are cut into calls in tiles.py.

Memory is linear in length: the output, sorted copies of the rows and keys of a few heads, and one tile.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bifocals.backends.call import attend, attend_backward
from bifocals.backends.pattern import Heads, Pattern, Sorted, key_orders, staircases
from bifocals.backends.tiles import far_tiles, near_tiles

Rows = Float[Tensor, "batch head query dim"]
Keys = Float[Tensor, "batch kv_head key dim"]


def forward(
    query: Rows, key: Keys, value: Keys, pattern: Pattern, scale: float, softcap: float | None
) -> tuple[Rows, Float[Tensor, "batch head query"]]:
    """Output and log-sum-exp over near and far pairs. What padding returns is not defined."""
    batch, heads, length, dim = query.shape
    routers = pattern.membership.shape[1]
    # In this layout transformers reshapes to (batch, length, head * dim) without a copy; one vector more for padding.
    all_out = query.new_zeros(batch * length * heads + 1, dim)
    all_lse = query.new_full((batch * length * heads + 1,), -torch.inf, dtype=_precision(query))
    out = all_out[:-1].view(batch, length, heads, dim).transpose(1, 2)
    lse = all_lse[:-1].view(batch, length, heads).transpose(1, 2)
    of_query, of_key, of_value, of_out = (Heads(tensor, routers) for tensor in (query, key, value, out))
    for order in key_orders(pattern):
        sorted_key, sorted_value = Sorted(of_key, order), Sorted(of_value, order)
        for staircase in staircases(pattern, order):
            sorted_query, out_where = Sorted(of_query, staircase), of_out.where(staircase)
            for tile in far_tiles(staircase, query.device, query.dtype):
                part, part_lse = attend(
                    sorted_query(tile.row),
                    sorted_key(tile.key, tile.pool),
                    sorted_value(tile.key, tile.pool),
                    tile.mask,
                    scale,
                    softcap,
                )
                part, part_lse = part.flatten(0, 2), part_lse.flatten()
                where = of_out.index(tile.to_rows(out_where, of_out.nowhere))
                if tile.is_more or not staircase.is_first:
                    part, part_lse = merge(
                        all_out.index_select(0, where), all_lse.index_select(0, where), part, part_lse
                    )
                all_out.index_copy_(0, where, part)
                all_lse.index_copy_(0, where, part_lse)
    for near in near_tiles(query, pattern):
        part, part_lse = attend(near.rows(query), near.keys(key), near.keys(value), near.mask, scale, softcap)
        merge(near.rows(out), near.rows(lse[..., None])[..., 0], part, part_lse)
    return out, lse


def merge(
    out: Float[Tensor, "*row dim"],
    lse: Float[Tensor, "*row"],
    part: Float[Tensor, "*row dim"],
    part_lse: Float[Tensor, "*row"],
) -> tuple[Float[Tensor, "*row dim"], Float[Tensor, "*row"]]:
    """Fold into the first pair, in place, what the same rows got from other keys; one of the two has read some."""
    out.lerp_(part, torch.sigmoid(part_lse - lse)[..., None].to(part.dtype))
    return out, lse.copy_(torch.logaddexp(lse, part_lse))


def backward(
    grad: Rows,
    query: Rows,
    key: Keys,
    value: Keys,
    out: Rows,
    lse: Float[Tensor, "batch head query"],
    pattern: Pattern,
    scale: float,
    softcap: float | None,
) -> tuple[Rows, Keys, Keys]:
    """Exact gradients at the cost of the pattern: each part's backward with the merged output and log-sum-exp."""
    to_key, to_value = (tensor.new_zeros(tensor.shape) for tensor in (key, value))
    all_to_query = query.new_zeros(query.shape[:3].numel() + 1, query.shape[3])  # one vector more for padding
    to_query = all_to_query[:-1].view(query.shape)
    for near in near_tiles(query, pattern, is_disjoint=True):
        parts = attend_backward(
            near.rows(grad),
            near.rows(query),
            near.keys(key),
            near.keys(value),
            near.mask,
            scale,
            near.rows(out),
            near.rows(lse[..., None])[..., 0],
            softcap,
        )
        near.rows(to_query).copy_(parts[0])
        near.keys(to_key).add_(parts[1])
        near.keys(to_value).add_(parts[2])
    routers = pattern.membership.shape[1]
    of_grad, of_query, of_key, of_value, of_out, of_lse = (
        Heads(tensor, routers) for tensor in (grad, query, key, value, out, lse[..., None])
    )
    rows = Heads(to_query, routers)
    for order in key_orders(pattern):
        sorted_key, sorted_value = Sorted(of_key, order), Sorted(of_value, order)
        heads, places = sorted_key.where.shape
        # In the sorted order, where the keys of a tile are together; one vector more for padding.
        key_part, value_part = (key.new_zeros(heads * places + 1, key.shape[-1]) for _ in range(2))
        key_where = np.arange(heads * places).reshape(heads, places)
        for staircase in staircases(pattern, order):
            sorted_grad, sorted_query, sorted_out, sorted_lse = (
                Sorted(part, staircase) for part in (of_grad, of_query, of_out, of_lse)
            )
            row_where = rows.where(staircase)
            for tile in far_tiles(staircase, query.device, query.dtype):
                parts = attend_backward(
                    sorted_grad(tile.row),
                    sorted_query(tile.row),
                    sorted_key(tile.key, tile.pool),
                    sorted_value(tile.key, tile.pool),
                    tile.mask,
                    scale,
                    sorted_out(tile.row),
                    sorted_lse(tile.row)[..., 0],
                    softcap,
                )
                all_to_query.index_add_(0, rows.index(tile.to_rows(row_where, rows.nowhere)), parts[0].flatten(0, 2))
                to_keys = rows.index(tile.to_keys(key_where, heads * places))
                key_part.index_add_(0, to_keys, parts[1].flatten(0, 2))
                value_part.index_add_(0, to_keys, parts[2].flatten(0, 2))
        for target, part in ((to_key, key_part), (to_value, value_part)):
            of_target = Heads(target, routers)
            of_target.vectors.index_add_(0, of_target.index(of_target.where(order)), part[:-1])
    return to_query, to_key, to_value


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
