"""Which keys each query reads far away, as intervals of sorted lists.

Sort the tokens by group. A query reads the keys of its group that lie before its own position - window; in the sorted
list they are one interval, and the intervals of a group's queries only grow: a staircase.

    position   0 1 2 3 4 5 6 7         sorted by group     a: 0 2 3 5      b: 1 4 6 7
    group      a b a a b a b b         window 1            0              1
                                                           2 x            4 x
                                                           3 x            6 x x
                                                           5 x x x        7 x x

Sinks are keys that lie in every group, and in one more for the queries that are in none. A query in several groups has
a row in the staircase of each: its first row also reads the sinks, the others skip them. A key in several groups would
be read twice; so keys are then sorted by their whole set of groups, and a query has a row for every set that meets its
own. A "stream" is one row of the batch seen by one router: whatever is said of groups is said per stream.

Where every token is in one group and reads that one, rows and keys are the same lists; then also the near keys of the
group are left to it, and the staircase is a diagonal: causal attention, without any mask.

Plans are made on the host, in numpy: they are small integer work, ten times as cheap there as through tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PART = 1 << 20  # pairs that are worth a piece of work of their own
SEVERAL = 1 << 16  # keys whose streams are sorted together; beyond, sorted copies would grow large


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a query reads: everything within ``window``, the sinks, and beyond them the keys that share a group."""

    membership: Bool[Tensor, "batch router query group"]
    key_membership: Bool[Tensor, "batch router key group"]
    segments: Int[Tensor, "batch key"] | None
    starts: Int[Tensor, "batch key"] | None  # first position of each token's segment; None without segments
    ends: Int[Tensor, "batch key"] | None  # one past its last position
    window: int
    sinks: int
    reach: int  # keys at this distance or beyond are not read at all
    is_causal: bool
    groups: "Groups"
    is_diagonal: bool  # groups are shared and nothing else cuts them: what is near there is also read by group

    @property
    def queries(self) -> int:
        return self.membership.shape[2]

    @property
    def keys(self) -> int:
        return self.key_membership.shape[2]

    @property
    def offset(self) -> int:
        """Position of the first query: queries are the last positions."""
        return self.keys - self.queries


@dataclass(frozen=True, slots=True)
class Places:
    """A list of tokens, each by its stream and its index there."""

    stream: Int[np.ndarray, " place"]
    index: Int[np.ndarray, " place"]


@dataclass(frozen=True, slots=True)
class KeyOrder(Places):
    """The keys of some streams, sorted by stream, group and position."""

    code: Int[np.ndarray, " place"]  # (stream * buckets + group) * keys + position, ascending
    buckets: int  # groups, and one for the queries in none
    streams: slice
    turns: list[Int[np.ndarray, "stream query"]]  # the first group that each query reads (-1: none), the second, ...


@dataclass(frozen=True, slots=True)
class Staircase(Places):
    """Queries, sorted likewise; row r reads the keys low[r] .. high[r] - 1 of the order, and at least one."""

    low: Int[np.ndarray, " place"]
    high: Int[np.ndarray, " place"]
    sizes: list[int]  # rows of each group in turn; within a group, low and high only grow
    is_first: bool  # no other staircase with these rows came before
    is_counted: Bool[np.ndarray, " place"] | None = None  # diagonal: False at sinks that are listed in other groups

    @property
    def area(self) -> int:
        """How many pairs it reads."""
        return int((self.high - self.low).sum())

    def parts(self) -> Iterator["Staircase"]:
        """Whole groups of it, as few at a time as are worth it: parts share neither rows nor keys."""
        sizes = np.array(self.sizes)
        ends = np.cumsum(sizes)
        areas = np.add.reduceat(self.high - self.low, ends - sizes)
        number = np.maximum(np.cumsum(areas) - areas // 2, 0) // PART  # of the part that a group falls in
        cuts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(ends)]
        for first, last in pairwise(cuts):
            rows = slice(int(ends[first] - sizes[first]), int(ends[last - 1]))
            kept = (self.stream[rows], self.index[rows], self.low[rows], self.high[rows])
            is_counted = None if self.is_counted is None else self.is_counted[rows]
            yield Staircase(*kept, self.sizes[first:last], self.is_first, is_counted)


def key_orders(pattern: Pattern) -> Iterator[KeyOrder]:
    """Sort the keys by group, a few streams at a time so that sorted copies stay small."""
    routers = pattern.membership.shape[1]
    group, buckets = pattern.groups.of_keys, pattern.groups.count + 1
    position = np.arange(pattern.keys)
    start = 0 if pattern.starts is None else pattern.starts.cpu().numpy()
    is_real = None if pattern.segments is None else pattern.segments.cpu().numpy() >= 0
    several = max(1, SEVERAL // pattern.keys)
    for first in range(0, len(group), several):
        streams = slice(first, min(first + several, len(group)))
        stream = np.arange(streams.start, streams.stop)
        batch = stream // routers
        is_listed = group[streams] >= 0
        if is_real is not None:
            is_listed &= is_real[batch]
        code = (stream[:, None] * buckets + group[streams]) * pattern.keys + position
        if pattern.sinks:
            is_sink = np.broadcast_to(position - start < pattern.sinks, (pattern.membership.shape[0], pattern.keys))
            sinks = (is_sink if is_real is None else is_sink & is_real)[batch]
            which, where = sinks.nonzero()
            in_every_group = (stream[which] * buckets)[:, None] + np.arange(buckets)
            in_every_group = (in_every_group * pattern.keys + where[:, None]).ravel()
            code = np.concatenate([code[is_listed & ~sinks], in_every_group])
        else:
            code = code[is_listed]
        code.sort()
        if len(code):
            of_stream = code // (buckets * pattern.keys)
            yield KeyOrder(
                of_stream, code % pattern.keys, code, buckets, streams, [turn[streams] for turn in pattern.groups.turns]
            )


@dataclass(frozen=True, slots=True)
class Groups:
    """Of each stream: the groups that its queries read, one by one, and the group that each key is in; -1: none."""

    turns: list[Int[np.ndarray, "stream query"]]  # the first of each query, the second, ...
    of_keys: Int[np.ndarray, "stream key"]
    count: int

    @classmethod
    def of(cls, reads: Bool[Tensor, "stream query group"], holds: Bool[Tensor, "stream key group"]) -> "Groups":
        """Where keys are in several groups, their sets of groups become the groups."""
        of_keys, count = _listed(holds), holds.shape[-1]
        if len(of_keys) > 1:
            label = torch.zeros(holds.shape[:2], dtype=torch.long, device=holds.device)
            for some in holds.split(40, dim=-1):  # as many groups as fit beside a label in one integer
                bits = (some.long() << torch.arange(some.shape[-1], device=some.device)).sum(dim=-1)
                label = torch.unique(label << 40 | bits, return_inverse=True)[1]
            count = int(label.max()) + 1
            sets = torch.zeros(count, holds.shape[-1], device=holds.device)
            sets[label] = holds.float()
            of_keys = [np.where(of_keys[0] >= 0, label.cpu().numpy(), -1)]
            reads = reads.float() @ sets.T > 0
        return cls(_listed(reads), of_keys[0], count)

    @property
    def are_shared(self) -> bool:
        """Every token is in one group, and reads that one."""
        (first, *others), of_keys = self.turns, self.of_keys
        return not others and bool((of_keys >= 0).all()) and np.array_equal(first, of_keys)


def _listed(membership: Bool[Tensor, "stream token group"]) -> list[Int[np.ndarray, "stream token"]]:
    """The first group of each token (-1: none), the second, and so on; as many lists as any token has groups."""
    streams, tokens, groups = membership.shape
    where = np.flatnonzero(membership.cpu().numpy())
    if len(where) == streams * tokens:
        group = where - np.arange(len(where)) * groups
        if ((group >= 0) & (group < groups)).all():
            return [group.reshape(streams, tokens)]
    token, group = np.divmod(where, groups)
    turn = np.arange(len(where)) - np.searchsorted(token, token)
    turns = np.full((turn.max(initial=0) + 1, streams * tokens), -1)
    turns[turn, token] = group
    return list(turns.reshape(-1, streams, tokens))


def staircases(pattern: Pattern, order: KeyOrder) -> Iterator[Staircase]:
    """One for each group that a query reads (its first, its second, ...), and on each side if not causal."""
    if pattern.is_diagonal:
        yield _diagonal(pattern, order)
        return
    routers = pattern.membership.shape[1]
    segments, starts, ends = (
        None if bound is None else bound.cpu().numpy() for bound in (pattern.segments, pattern.starts, pattern.ends)
    )
    streams = np.arange(order.streams.start, order.streams.stop)
    for turn, group in enumerate(order.turns):
        is_row = group >= 0
        if turn == 0 and pattern.sinks:
            group = np.where(is_row, group, order.buckets - 1)
            is_row = np.ones_like(is_row)
        if segments is not None:
            is_row = is_row & (segments[:, pattern.offset :] >= 0)[streams // routers]
        code = (streams[:, None] * order.buckets + group) * pattern.keys + np.arange(pattern.offset, pattern.keys)
        code = code[is_row]
        code.sort()
        position, bucket = code % pattern.keys, code // pattern.keys
        stream = bucket // order.buckets
        start, end = 0, pattern.keys
        if starts is not None and ends is not None:
            start, end = starts[stream // routers, position], ends[stream // routers, position]
        if turn > 0:
            start = start + pattern.sinks  # the first row of the query has read them
        sides = [(np.maximum(position - pattern.reach + 1, start), position - pattern.window)]
        if not pattern.is_causal:
            sides.append((np.maximum(position + pattern.window + 1, start), np.minimum(position + pattern.reach, end)))
        for side, bounds in enumerate(sides):
            low, high = (
                np.searchsorted(order.code, code - position + np.clip(bound, 0, pattern.keys)) for bound in bounds
            )
            (reading,) = (low < high).nonzero()
            if len(reading):
                cuts = np.flatnonzero(np.diff(bucket[reading])) + 1
                sizes = np.diff(cuts, prepend=0, append=len(reading)).tolist()
                yield Staircase(
                    stream[reading],
                    position[reading] - pattern.offset,
                    low[reading],
                    high[reading],
                    sizes,
                    is_first=turn == side == 0,
                )


def _diagonal(pattern: Pattern, order: KeyOrder) -> Staircase:
    """Rows and keys in the same order: each row reads the keys of its group up to itself."""
    bucket = order.code // pattern.keys
    sizes = np.bincount(bucket)
    sizes = sizes[sizes > 0]
    place = np.arange(len(bucket))
    low = np.repeat(np.cumsum(sizes) - sizes, sizes)
    is_counted = np.ones(len(bucket), dtype=bool)
    if pattern.sinks:
        is_counted = bucket % order.buckets == order.turns[0][order.stream - order.streams.start, order.index]
    return Staircase(order.stream, order.index, low, place + 1, sizes.tolist(), is_first=True, is_counted=is_counted)


class Heads:
    """The vectors of a (batch, head, length, dim) tensor as one list; a router's heads are taken from it by place."""

    def __init__(self, tensor: Tensor, routers: int) -> None:
        _, heads, length, dim = tensor.shape
        is_transposed = not tensor.is_contiguous() and tensor.transpose(1, 2).is_contiguous()
        self.vectors = (tensor.transpose(1, 2) if is_transposed else tensor.contiguous()).view(-1, dim)
        self.routers, self.of_batch = routers, heads * length
        self.of_head, self.of_index = (1, heads) if is_transposed else (length, 1)
        self.count = max(1, heads // routers)  # heads of a router
        self.sharing = max(1, routers // heads)  # routers of a head

    def where(self, places: Places) -> Int[np.ndarray, "head place"]:
        """Where the tokens at some places lie in the list, for each head of their router."""
        head = places.stream % self.routers // self.sharing * self.count
        first = places.stream // self.routers * self.of_batch + head * self.of_head + places.index * self.of_index
        return first + np.arange(self.count)[:, None] * self.of_head

    @property
    def nowhere(self) -> int:
        """One past the last vector."""
        return len(self.vectors)

    def take(self, where: Int[np.ndarray, "*shape"]) -> Float[Tensor, "*shape dim"]:
        return self.vectors.index_select(0, self.index(where)).view(*where.shape, self.vectors.shape[1])

    def index(self, where: Int[np.ndarray, "*shape"]) -> Int[Tensor, " flat"]:
        return torch.from_numpy(where.reshape(-1)).to(self.vectors.device)


class Sorted:
    """Vectors in some order, copied when they are asked for."""

    def __init__(self, heads: Heads, where: Int[np.ndarray, "head place"]) -> None:
        self.heads, self.where = heads, where
        self._pool, self._copy = slice(0, 0), torch.empty(0)

    def __call__(
        self, which: slice | Int[np.ndarray, "tile length"], pool: slice | None = None
    ) -> Float[Tensor, "tile head length dim"]:
        """One list of vectors by a slice, or several. Slices of one ``pool`` share its copy."""
        if not isinstance(which, slice):
            return self.heads.take(self.where.T[which]).transpose(1, 2)
        pool = which if pool is None else pool
        if pool != self._pool:
            self._pool, self._copy = pool, self.heads.take(self.where.T[pool]).transpose(0, 1)
        return self._copy[None, :, which.start - pool.start : which.stop - pool.start]
