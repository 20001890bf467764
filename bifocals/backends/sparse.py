"""Only the pairs kept: near tiles, far tiles, merged.

Near and far pairs differ in distance, so no pair is in both, and the two results merge exactly by their log-sum-exp
(call.py). Which keys a query reads far away is said in pattern.py, how they are cut into calls in tiles.py.

Memory is linear in length: the output, sorted copies of the rows and keys of a few heads, and one tile.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bifocals.backends.call import attend, attend_backward, merge
from bifocals.backends.pattern import Heads, KeyOrder, Pattern, Sorted, Staircase, key_orders, staircases
from bifocals.backends.tiles import CLOSED, NearTile, far_tiles, near_tiles
from bifocals.backends.workers import SMALL, Piece, run

Rows = Float[Tensor, "batch head query dim"]
Keys = Float[Tensor, "batch kv_head key dim"]


def forward(
    query: Rows,
    key: Keys,
    value: Keys,
    pattern: Pattern,
    scale: float,
    softcap: float | None,
    far: tuple[Rows, Keys] | None = None,
) -> tuple[Rows, Float[Tensor, "batch head query"]]:
    """Output and log-sum-exp over near and far pairs. What padding returns is not defined.

    ``far``: what queries and keys are to far pairs and sinks, where it is not what they are to near ones.
    """
    batch, heads, length, dim = query.shape
    routers = pattern.membership.shape[1]
    # In this layout transformers reshapes to (batch, length, head * dim) without a copy; one vector more for padding.
    all_out = query.new_empty(batch * length * heads + 1, dim)
    all_lse = query.new_empty(batch * length * heads + 1, dtype=_precision(query))
    if not pattern.is_diagonal:  # there, every query has far keys, if only itself
        all_out.zero_()
        all_lse.fill_(-torch.inf)
    out = all_out[:-1].view(batch, length, heads, dim).transpose(1, 2)
    lse = all_lse[:-1].view(batch, length, heads).transpose(1, 2)
    of_query, of_key = (Heads(tensor, routers) for tensor in far or (query, key))
    of_value, of_out = (Heads(tensor, routers) for tensor in (value, out))

    def read_far(key_where: np.ndarray, value_where: np.ndarray, staircase: Staircase) -> None:
        sorted_query, out_where = Sorted(of_query, of_query.where(staircase)), of_out.where(staircase)
        sorted_key, sorted_value = Sorted(of_key, key_where), Sorted(of_value, value_where)
        for tile in far_tiles(staircase, query.device, lse.dtype):
            part, part_lse = attend(
                sorted_query(tile.row),
                sorted_key(tile.key, tile.pool),
                sorted_value(tile.key, tile.pool),
                tile.mask,
                scale,
                softcap,
                is_causal=tile.is_causal,
            )
            part, part_lse = part.transpose(1, 2).flatten(0, 2), part_lse.transpose(1, 2).flatten()
            where = of_out.index(tile.to_rows(out_where, of_out.nowhere))
            if isinstance(tile.row, slice) or not staircase.is_first:
                part, part_lse = merge(all_out.index_select(0, where), all_lse.index_select(0, where), part, part_lse)
            all_out.index_copy_(0, where, part)
            all_lse.index_copy_(0, where, part_lse)

    def read_near(tile: NearTile) -> None:
        part, part_lse = attend(
            tile.rows(query), tile.keys(key), tile.keys(value), tile.mask(heads, lse.dtype), scale, softcap
        )
        merge(tile.rows(out), tile.rows(lse[..., None])[..., 0], part, part_lse)

    is_awake = False  # the worker threads
    for order in key_orders(pattern):
        read = partial(read_far, of_key.where(order), of_value.where(order))
        for staircase in staircases(pattern, order):
            run(_pieces(staircase, read), query.device)
            is_awake |= staircase.area > SMALL
    for tiles in near_tiles(query, pattern):
        run([Piece(tile.area, partial(read_near, tile)) for tile in tiles], query.device, is_awake=is_awake)
    return out, lse


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
    far: tuple[Rows, Keys] | None = None,
) -> tuple[Tensor, ...]:
    """Exact gradients at the cost of the pattern: each part's backward with the merged output and log-sum-exp.

    Of query, key and value; with ``far``, then of those two.
    """
    to_key, to_value = (tensor.new_zeros(tensor.shape) for tensor in (key, value))
    all_to_query = query.new_zeros(query.shape[:3].numel() + 1, query.shape[3])  # one vector more for padding
    to_query = all_to_query[:-1].view(query.shape)
    of_near = (to_query, to_key) if far is None else (torch.zeros_like(to_query), torch.zeros_like(to_key))

    def return_near(tile: NearTile) -> None:
        parts = attend_backward(
            tile.rows(grad),
            tile.rows(query),
            tile.keys(key),
            tile.keys(value),
            tile.mask(query.shape[1], lse.dtype),
            scale,
            tile.rows(out),
            tile.rows(lse[..., None])[..., 0],
            softcap,
        )
        tile.rows(of_near[0]).copy_(parts[0])
        tile.keys(of_near[1]).add_(parts[1])
        tile.keys(to_value).add_(parts[2])

    routers = pattern.membership.shape[1]
    of_query, of_key = (Heads(tensor, routers) for tensor in far or (query, key))
    of_grad, of_value, of_out, of_lse = (Heads(tensor, routers) for tensor in (grad, value, out, lse[..., None]))
    rows = Heads(to_query, routers)

    def return_far(order: KeyOrder, key_part: Tensor, value_part: Tensor, staircase: Staircase) -> None:
        sorted_key, sorted_value = (Sorted(part, part.where(order)) for part in (of_key, of_value))
        sorted_grad, sorted_query, sorted_out, sorted_lse = (
            Sorted(part, part.where(staircase)) for part in (of_grad, of_query, of_out, of_lse)
        )
        row_where = rows.where(staircase)
        key_where = np.arange(sorted_key.where.size).reshape(sorted_key.where.shape)
        for tile in far_tiles(staircase, query.device, lse.dtype):
            tile_lse = sorted_lse(tile.row)[..., 0]
            if tile.is_row is not None:  # rows of padding return nothing, whatever they read
                is_row = torch.from_numpy(tile.is_row).to(tile_lse.device)[:, None]
                tile_lse = torch.where(is_row, tile_lse, CLOSED)
            parts = attend_backward(
                sorted_grad(tile.row),
                sorted_query(tile.row),
                sorted_key(tile.key, tile.pool),
                sorted_value(tile.key, tile.pool),
                tile.mask,
                scale,
                sorted_out(tile.row),
                tile_lse,
                softcap,
                is_causal=tile.is_causal,
            )
            to_row, to_keys, to_values = (part.transpose(1, 2).flatten(0, 2) for part in parts)
            all_to_query.index_add_(0, rows.index(tile.to_rows(row_where, rows.nowhere)), to_row)
            where = rows.index(tile.to_keys(key_where, key_where.size))
            key_part.index_add_(0, where, to_keys)
            value_part.index_add_(0, where, to_values)

    for tiles in near_tiles(query, pattern, is_disjoint=True):
        run([Piece(tile.area, partial(return_near, tile)) for tile in tiles], query.device)
    for order in key_orders(pattern):
        key_where = of_key.where(order)
        # In the sorted order, where the keys of a tile are together; one vector more for padding.
        key_part, value_part = (key.new_zeros(key_where.size + 1, key.shape[-1]) for _ in range(2))
        for staircase in staircases(pattern, order):
            run(_pieces(staircase, partial(return_far, order, key_part, value_part)), query.device)
        for target, part in ((to_key, key_part), (to_value, value_part)):
            of_target = Heads(target, routers)
            of_target.vectors.index_add_(0, of_target.index(of_target.where(order)), part[:-1])
    return (*of_near, to_value, *(() if far is None else (to_query, to_key)))


def _pieces(staircase: Staircase, work: Callable[[Staircase], None]) -> list[Piece]:
    """Parts of a large staircase run side by side."""
    parts = staircase.parts() if staircase.area > SMALL else [staircase]
    return [Piece(part.area, partial(work, part)) for part in parts]


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
