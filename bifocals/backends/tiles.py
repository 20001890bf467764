"""How the pairs are cut into calls: near tiles on the diagonal, far tiles under a staircase.

A tile is a few rows, the slice of keys that they read between them, and a mask on the edge of that slice. The keys that
all rows of a tile read need no mask: where they are many they are a call of their own, and where they are very many,
one call for several tiles. The masked edges are padded to one size and run together.

    1                       1  masked edges of tiles of two rows
    1 1                     2  a tile's keys without a mask
    2 2 1                   3  the same, shared by two tiles
    2 2 1 1 1
    3 3 3 3 3 1
    3 3 3 3 3 1 1
    3 3 3 3 3 2 2 1
    3 3 3 3 3 2 2 1 1 1
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bifocals.backends.call import causal_length
from bifocals.backends.pattern import Pattern, Staircase

NEAR = 32  # rows of a near tile, at least
TILE = 192  # rows of a far tile: fewer, and the kernel takes 32 at a time
BLOCK = 5  # tiles that share one call for the keys they all read: long calls then run at the speed of dense attention
WIDE = 384  # keys that are worth a call of their own, without a mask
SLACK = 64  # keys of padding that a narrow tile may always have; beyond, a quarter of its width
TOGETHER = 1 << 20  # elements of the masks of tiles that are run together
NEAR_TOGETHER = 1 << 18  # the same for near tiles
LISTED = 1 << 14  # rows of short groups that are run together
PADDING = 1 << 18  # pairs that are cheaper than another call
CLOSED = (
    1e30  # taken off a logit for each step that a key lies outside; finite, so that a row without keys stays finite
)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows, the keys they read between them, and a mask: one tile by slices, or several by indices, padded."""

    row: slice | Int[np.ndarray, "tile row"]
    key: slice | Int[np.ndarray, "tile key"]
    mask: Float[Tensor, "tile 1 row key"] | None
    is_row: Bool[np.ndarray, "tile row"] | None = None  # False at padding
    is_key: Bool[np.ndarray, "tile key"] | None = None
    pool: slice | None = None  # with slices: all keys of the group
    is_causal: bool = False  # rows and keys are the same, and each row reads up to itself

    def to_rows(self, where: Int[np.ndarray, "head place"], nowhere: int) -> Int[np.ndarray, "tile row head"]:
        """Where the results of the rows go; those of padding go ``nowhere``."""
        return _destination(where, self.row, self.is_row, nowhere)

    def to_keys(self, where: Int[np.ndarray, "head place"], nowhere: int) -> Int[np.ndarray, "tile key head"]:
        return _destination(where, self.key, self.is_key, nowhere)


def _destination(
    where: np.ndarray, which: slice | np.ndarray, is_real: np.ndarray | None, nowhere: int
) -> Int[np.ndarray, "tile length head"]:
    if is_real is None:
        return where.T[None, which]
    return np.where(is_real[..., None], where.T[which], nowhere)


class Span(NamedTuple):
    """Rows first .. last - 1 read keys from low on, all of them read left .. right - 1, and none reads high."""

    first: int
    last: int
    low: int
    left: int
    right: int
    high: int

    @property
    def width(self) -> int:
        return self.high - self.low


def far_tiles(staircase: Staircase, device: torch.device, dtype: torch.dtype) -> Iterator[Tile]:
    """Every row in one tile by indices, first; then in others by slices, which need no mask."""
    if staircase.is_counted is not None:
        yield from _diagonal_tiles(staircase, staircase.is_counted)
        return
    masked: list[Span] = []
    whole: list[Tile] = []
    for group in _spans(staircase):
        pool = slice(group[0].low, group[-1].high)
        for first in range(0, len(group), BLOCK):
            block = group[first : first + BLOCK]
            if block[-1].left > block[0].low:
                # Rows that do not begin with the same key: masked from end to end.
                masked += block
                continue
            leader = block[0]
            shared = leader.right if leader.right - leader.low >= WIDE and leader.high > leader.right else leader.low
            if shared > block[0].low:
                whole.append(_whole(block[0].first, block[-1].last, block[0].low, shared, pool))
            for span in block:
                edge = span.right if span.right - shared >= WIDE and span.high > span.right else shared
                if edge > shared:
                    whole.append(_whole(span.first, span.last, shared, edge, pool))
                masked.append(span._replace(low=edge, left=edge))
    masked.sort(key=lambda span: span.width)
    rows = max(span.last - span.first for span in masked)
    # One piece of memory for all masks, one after the other: a fresh one costs more than the mask.
    widest = int(1.25 * masked[-1].width) + SLACK
    count = max(1, min(len(masked), TOGETHER // (rows * masked[0].width)))
    scratch = torch.empty(max(min(TOGETHER, count * rows * widest), rows * widest), device=device)
    while masked:
        most = 1.25 * masked[0].width + SLACK
        some = [span for span in masked[: max(1, TOGETHER // int(rows * most))] if span.width <= most]
        yield _together(staircase, some, dtype, scratch)
        masked = masked[len(some) :]
    yield from whole


def _diagonal_tiles(staircase: Staircase, is_counted: Bool[np.ndarray, " place"]) -> Iterator[Tile]:
    """Each group is one causal call; short ones of about the same size are padded and run together."""
    last = np.cumsum(staircase.sizes)
    groups = sorted(zip(staircase.sizes, (last - staircase.sizes).tolist()))
    while groups:
        least = groups[0][0]
        most = max(1, LISTED // least)
        some = [
            group
            for number, group in enumerate(groups[:most], start=1)
            if number * (group[0] ** 2 - least**2) <= PADDING
        ]
        groups = groups[len(some) :]
        size, first = np.array(some).T[..., None]
        place = np.arange(causal_length(int(size.max())))
        row = first + np.minimum(place, size - 1)
        key = staircase.low[first] + np.minimum(place, size - 1)
        is_key = place < size
        yield Tile(row, key, None, is_key & is_counted[row], is_key, is_causal=True)


def _whole(first: int, last: int, low: int, high: int, pool: slice) -> Tile:
    return Tile(slice(first, last), slice(low, high), None, pool=pool)


def _spans(staircase: Staircase) -> list[list[Span]]:
    """Cut the rows of each group into tiles of about equal size."""
    ends = [0]
    for size in staircase.sizes:
        start, pieces = ends[-1], math.ceil(size / TILE)
        ends += [start + size * piece // pieces for piece in range(1, pieces + 1)]
    first, last = np.array(ends[:-1]), np.array(ends[1:]) - 1
    bounds = [bound[row].tolist() for bound in (staircase.low, staircase.high) for row in (first, last)]
    spans = iter([Span(*numbers) for numbers in zip(ends[:-1], ends[1:], *bounds)])
    return [list(islice(spans, math.ceil(size / TILE))) for size in staircase.sizes]


def _together(staircase: Staircase, spans: list[Span], dtype: torch.dtype, scratch: Tensor) -> Tile:
    """Tiles padded to the largest of them, the mask in ``scratch``."""
    first, last, low, _, _, high = np.array(spans).T[..., None]
    row = first + np.arange((last - first).max())
    key = low + np.arange((high - low).max())
    is_row, is_key = row < last, key < high
    row, key = np.where(is_row, row, first), np.where(is_key, key, low)
    ragged = any(span.left > span.low for span in spans)
    some_low = torch.from_numpy(staircase.low[row] - low) if ragged else None
    some_high = torch.from_numpy(np.where(is_row, staircase.high[row] - low, 0))
    mask = interval_mask(some_low, some_high, key.shape[1], scratch.device, dtype, scratch)[:, None]
    return Tile(row, key, mask, is_row, is_key)


def interval_mask(
    low: Int[Tensor, "*shape"] | None,
    high: Int[Tensor, "*shape"],
    keys: int,
    device: torch.device,
    dtype: torch.dtype,
    scratch: Float[Tensor, " element"] | None = None,
) -> Float[Tensor, "*shape key"]:
    """0 where low <= key < high, for keys 0, 1, ...; far below every logit elsewhere. ``scratch``: memory to use."""
    # Arithmetic on floats: several times as fast as comparing integers and choosing.
    key = _steps(keys, device)
    upper = high.to(device, torch.float32).sub_(0.5).mul_(CLOSED)[..., None]
    room = None if scratch is None else scratch[: high.numel() * keys].view(*high.shape, keys)
    mask = torch.sub(upper, key, out=room).clamp_(max=0)
    if low is not None:
        mask += (key - low.to(device, torch.float32).sub_(0.5).mul_(CLOSED)[..., None]).clamp_(max=0)
    return mask.to(dtype)


@lru_cache(maxsize=64)
def _steps(keys: int, device: torch.device) -> Float[Tensor, " key"]:
    return torch.arange(keys, dtype=torch.float32, device=device) * CLOSED


@dataclass(frozen=True, slots=True)
class NearTile:
    """Rows on the diagonal of one row of the batch and the keys around them; or several such tiles, at equal steps."""

    pattern: Pattern
    grouped: "Grouped | None"
    batch: int
    row: int
    rows_each: int
    key: int
    keys_each: int
    step: int = 1
    count: int = 1

    @property
    def area(self) -> int:
        return self.count * self.rows_each * self.keys_each

    def rows(self, tensor: Float[Tensor, "batch head query dim"]) -> Float[Tensor, "tile head row dim"]:
        return self._cut(tensor, self.row, self.rows_each)

    def keys(self, tensor: Float[Tensor, "batch kv_head key dim"]) -> Float[Tensor, "tile kv_head tile_key dim"]:
        return self._cut(tensor, self.key, self.keys_each)

    def _cut(self, tensor: Tensor, start: int, length: int) -> Tensor:
        used = tensor[self.batch, :, start : start + (self.count - 1) * self.step + length]
        return used.unfold(1, length, self.step).permute(1, 0, 3, 2)

    def mask(self, heads: int, dtype: torch.dtype) -> Float[Tensor, "#tile #head row key"]:
        """Which of its keys each row reads. Without segments or groups all tiles of a call have the same mask."""
        pattern, device = self.pattern, self.pattern.membership.device
        apart = min(pattern.window, pattern.reach - 1)
        position = pattern.offset + self.row
        if pattern.starts is None or pattern.ends is None:
            after = 0 if pattern.is_causal else apart
            of_band = (self.rows_each, self.keys_each, position - self.key, apart, after)
            if self.grouped is None:
                return _band(*of_band, dtype, device)
            band = _band(*of_band, torch.float32, device)
            reads, holds = (
                part.flatten(0, 1) for part in (self.rows(self.grouped.reads), self.keys(self.grouped.holds))
            )
            mask = torch.baddbmm(band[0], reads, holds.mT, alpha=-CLOSED).to(dtype).unflatten(0, (self.count, -1))
            routers = mask.shape[1]
            return mask if routers in (1, heads) else mask.repeat_interleave(heads // routers, dim=1)
        shift = torch.arange(self.count, device=device)[:, None] * self.step
        index = shift + torch.arange(position, position + self.rows_each, device=device)  # (tile, row)
        low = torch.maximum(index - apart, pattern.starts[self.batch, index])
        high = torch.minimum(index if pattern.is_causal else index + apart, pattern.ends[self.batch, index] - 1)
        first = shift + self.key
        return interval_mask(low - first, high - first + 1, self.keys_each, device, dtype)[:, None]


class Grouped(NamedTuple):
    """Of a diagonal pattern, the pairs that are read by group and so not as near: those with reads . holds > 0."""

    reads: Float[Tensor, "batch router token code"]
    holds: Float[Tensor, "batch router token code"]

    @classmethod
    def of(cls, pattern: Pattern) -> "Grouped":
        # On the host and alone: threads that torch had used for this would be in the way of our own.
        reads = holds = pattern.membership.cpu().numpy().astype(np.float32)
        if pattern.sinks:  # they are listed in every group
            is_sink = (np.arange(pattern.keys) < pattern.sinks)[:, None].astype(np.float32)
            reads = np.concatenate([reads, np.ones_like(reads[..., :1])], axis=-1)
            holds = np.concatenate([holds, np.broadcast_to(is_sink, reads[..., :1].shape)], axis=-1)
        device = pattern.membership.device
        return cls(*(torch.from_numpy(side).to(device) for side in (reads, holds)))


def near_tiles(query: Tensor, pattern: Pattern, *, is_disjoint: bool = False) -> Iterator[list[NearTile]]:
    """Tiles that cover the window of every query; those of one list share no rows.

    ``is_disjoint``: nor keys, so that gradients can be added in place.
    """
    rows = min(max(NEAR, pattern.window // 8), TILE)  # of a tile
    grouped = Grouped.of(pattern) if pattern.is_diagonal else None
    sites = [(pattern, grouped, batch) for batch in range(query.shape[0])]
    after = 0 if pattern.is_causal else pattern.window
    span = pattern.window + rows + after
    # Regular tiles are whole and all their keys exist; those at the two ends are cut to size, each alone.
    first = min(max(0, math.ceil((pattern.window - pattern.offset) / rows)), math.ceil(pattern.queries / rows))
    last = max(first, (pattern.queries - after) // rows)
    lists: list[list[NearTile]] = []
    for begin, stop in ((0, min(first * rows, pattern.queries)), (last * rows, pattern.queries)):
        for row in range(begin, stop, TILE):
            until = min(row + TILE, stop)
            low = max(0, pattern.offset + row - pattern.window)
            high = min(pattern.keys, pattern.offset + until + after)
            lists.append([NearTile(*site, row, until - row, low, high - low) for site in sites])
    phases = math.ceil(span / rows) if is_disjoint else 1
    calls = max(1, round((last - first) * rows * query.shape[1] * max(query.shape[3], span) / NEAR_TOGETHER / phases))
    most = max(1, math.ceil((last - first) / phases / calls))
    for phase in range(phases):
        regular = []
        for begin in range(first + phase, last, phases * most):
            key = pattern.offset + begin * rows - pattern.window
            count = min(most, math.ceil((last - begin) / phases))
            regular += [NearTile(*site, begin * rows, rows, key, span, phases * rows, count) for site in sites]
        lists.append(regular)
    yield from lists if is_disjoint else [[tile for tiles in lists for tile in tiles]]


@lru_cache(maxsize=64)
def _band(
    rows: int, keys: int, diagonal: int, before: int, after: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "1 1 row key"]:
    """The mask of a window: row r lies at key r + diagonal. Short, and the same at every call, so it is kept."""
    center = torch.arange(diagonal, diagonal + rows, device=device)
    return interval_mask(center - before, center + after + 1, keys, device, dtype)[None, None]
