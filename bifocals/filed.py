"""Keys and values filed by group, so that a decoding step reads only what its query attends to.

    positions   0 1 2 3 4 5 6 7 8 9     groups  a b a a b a b b a b     window 1, one sink

    near        0 | 8 9                 the sinks, then a ring of window + 1 places: read as a whole, whatever its order
    a           2 3 5                   a shelf for each group of a key-value head of a row of the batch, in time order
    b           1 4 6 7

A new token takes the place in the ring of the one that leaves the window, which goes to the end of its group's shelf.
So every token is in one place, no pair is read twice, and the parts merge exactly by their log-sum-exp (backends/call).
Tokens in no group, padding among them, have a shelf that nobody reads: it keeps the time order complete.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bifocals.backends.call import attend
from bifocals.growing import is_writable, with_slack

PIECE = 512  # keys that are worth a thread of their own
MOST_PIECES = 64  # fewer than a piece has keys

Numbers = Int[np.ndarray, "batch router known"]  # the group of each key, the last ones not; from 1 on, 0 is none


class Shelf:
    """The keys and values of one group, in time order, with room for more."""

    __slots__ = ("key", "length", "value")

    def __init__(self, key: Float[Tensor, "token dim"], value: Float[Tensor, "token value_dim"], place: Tensor) -> None:
        self.length = len(place)
        self.key, self.value = (_room(tensor, self.length) for tensor in (key, value))
        torch.index_select(key, 0, place, out=self.key[: self.length])
        torch.index_select(value, 0, place, out=self.value[: self.length])

    def append(self, key: Float[Tensor, " dim"], value: Float[Tensor, " value_dim"]) -> None:
        if self.length == self.key.shape[0] or not is_writable(self.key):
            for name in ("key", "value"):
                held = getattr(self, name)
                larger = _room(held, self.length + 1)
                larger[: self.length] = held[: self.length]
                setattr(self, name, larger)
        self.key[self.length] = key
        self.value[self.length] = value
        self.length += 1

    def copy(self) -> "Shelf":
        return Shelf(self.key, self.value, torch.arange(self.length, device=self.key.device))


def _room(like: Tensor, length: int) -> Tensor:
    """Zeros, not whatever memory holds: a key behind a mask still has to be finite."""
    return like.new_zeros(with_slack(length), like.shape[1])


@dataclass(slots=True)
class Filed:
    """The keys and values of a layer. Which group a past key is in is told by its number, which is kept elsewhere."""

    near_key: Float[Tensor, "batch kv_head near dim"]  # the sinks, then position p at place sinks + p % ring
    near_value: Float[Tensor, "batch kv_head near value_dim"]
    shelves: list[list[list[Shelf]]]  # by row, key-value head and number of the group
    starts: tuple[int, ...]  # the first position of each row that is not padding
    sinks: int
    ring: int
    length: int

    @classmethod
    def file(
        cls,
        key: Float[Tensor, "batch kv_head token dim"],
        value: Float[Tensor, "batch kv_head token value_dim"],
        numbers: Numbers,
        groups: int,
        starts: tuple[int, ...],
        sinks: int,
        window: int,
    ) -> "Filed":
        """From time order; every row has its sinks and a whole window behind them."""
        ring = window + 1
        filed = cls(key, value, [], starts, sinks, ring, key.shape[2])
        for of_keys, of_values, heads in zip(key, value, filed._places(numbers, groups)):
            every = zip(of_keys, of_values, heads)
            filed.shelves.append([[Shelf(keys, values, place) for place in places] for keys, values, places in every])
        near = filed._near_places(key.device)
        filed.near_key, filed.near_value = (
            torch.stack([row.index_select(1, place) for row, place in zip(tensor, near)]) for tensor in (key, value)
        )
        return filed

    def in_time_order(self, numbers: Numbers) -> tuple[Tensor, Tensor]:
        """Keys and values as they came."""
        shape = (*self.near_key.shape[:2], self.length)
        key = self.near_key.new_empty(*shape, self.near_key.shape[3])
        value = self.near_value.new_empty(*shape, self.near_value.shape[3])
        groups = len(self.shelves[0][0]) - 1
        for row, heads in enumerate(self._places(numbers, groups)):
            for head, places in enumerate(heads):
                for shelf, place in zip(self.shelves[row][head], places):
                    key[row, head].index_copy_(0, place, shelf.key[: shelf.length])
                    value[row, head].index_copy_(0, place, shelf.value[: shelf.length])
        for row, place in enumerate(self._near_places(key.device)):
            key[row].index_copy_(1, place, self.near_key[row])
            value[row].index_copy_(1, place, self.near_value[row])
        return key, value

    def _near_places(self, device: torch.device) -> list[Int[Tensor, " near"]]:
        """For each row, the position of what each place of the near part holds."""
        last = torch.arange(self.length - self.ring, self.length, device=device).roll(self.length % self.ring)
        return [torch.cat([torch.arange(start, start + self.sinks, device=device), last]) for start in self.starts]

    def _places(self, numbers: Numbers, groups: int) -> Iterator[list[list[Int[Tensor, " _"]]]]:
        """For each row, head and shelf, the positions of what the shelf holds."""
        kv_heads = self.near_key.shape[1]
        for row, start in zip(numbers[:, :, : self.length - self.ring], self.starts):
            far = row.copy()
            far[:, start : start + self.sinks] = -1
            routers = [[self._index(router == number) for number in range(groups + 1)] for router in far]
            yield [routers[head * len(routers) // kv_heads] for head in range(kv_heads)]

    def _index(self, is_there: Bool[np.ndarray, " token"]) -> Int[Tensor, " place"]:
        return torch.from_numpy(np.flatnonzero(is_there)).to(self.near_key.device)

    def append(
        self,
        key: Float[Tensor, "batch kv_head 1 dim"],
        value: Float[Tensor, "batch kv_head 1 value_dim"],
        numbers: Numbers,
    ) -> None:
        """One token more; its place in the ring is that of the one that leaves the window."""
        place = self.sinks + self.length % self.ring
        old_key, old_value = self.near_key[:, :, place], self.near_value[:, :, place]
        for row, of_row in enumerate(numbers[:, :, self.length - self.ring].tolist()):
            for head, shelves in enumerate(self.shelves[row]):
                number = of_row[head * len(of_row) // len(self.shelves[row])]
                shelves[number].append(old_key[row, head], old_value[row, head])
        old_key.copy_(key[:, :, 0])
        old_value.copy_(value[:, :, 0])
        self.length += 1

    def may_crop(self, tokens: int) -> bool:
        """Whether the ring still lies behind the sinks of every row, and filling it again is little work."""
        return tokens < self.ring and self.length - tokens - self.ring >= max(self.starts) + self.sinks

    def crop(self, tokens: int, numbers: Numbers) -> None:
        """Forget the last tokens: as many come back into the ring from the ends of their shelves."""
        for position in range(self.length - self.ring - 1, self.length - self.ring - 1 - tokens, -1):
            place = self.sinks + position % self.ring
            for row, of_row in enumerate(numbers[:, :, position].tolist()):
                for head, shelves in enumerate(self.shelves[row]):
                    shelf = shelves[of_row[head * len(of_row) // len(self.shelves[row])]]
                    shelf.length -= 1
                    self.near_key[row, head, place] = shelf.key[shelf.length]
                    self.near_value[row, head, place] = shelf.value[shelf.length]
        self.length -= tokens

    def select(self, rows: list[int]) -> None:
        """Other rows of the batch in place of these; a row that is taken again is copied."""
        index = torch.tensor(rows, device=self.near_key.device)
        self.near_key, self.near_value = self.near_key.index_select(0, index), self.near_value.index_select(0, index)
        self.starts = tuple(self.starts[row] for row in rows)
        taken: set[int] = set()
        shelves = []
        for row in rows:
            old = self.shelves[row]
            shelves.append([[shelf.copy() for shelf in head] for head in old] if row in taken else old)
            taken.add(row)
        self.shelves = shelves

    def attend(
        self, query: Float[Tensor, "batch head 1 dim"], reads: Bool[Tensor, "batch reader group"], scale: float
    ) -> Float[Tensor, "batch head 1 value_dim"]:
        """The attention of the last token over near, sinks and the shelves of the groups that each head reads."""
        batch, kv_heads, _, dim = self.near_key.shape
        rows = query.reshape(batch, kv_heads, -1, dim)  # the heads that share keys are the rows of one call
        out, lse = self.read_near(rows, scale)
        parts = [[part] for part in zip(out.flatten(0, 1)[:, None, None], lse.flatten(0, 1)[:, None, None])]
        each_row = rows.flatten(0, 1)[:, None, None].unbind()
        each = max(1, reads.shape[1] // kv_heads)  # readers of a key-value head
        for row, readers in enumerate(reads.tolist()):
            for head, shelves in enumerate(self.shelves[row]):
                first = head * len(readers) // kv_heads
                for shelf, *wanted in zip(shelves[1:], *readers[first : first + each]):
                    if shelf.length and any(wanted):
                        here = row * kv_heads + head
                        part = read_shelf(each_row[here], shelf, scale)
                        parts[here].append(part if all(wanted) else _closed(part, wanted))
        return _merge(parts).view(*query.shape[:3], -1)

    def read_near(
        self, rows: Float[Tensor, "batch kv_head row dim"], scale: float
    ) -> tuple[Float[Tensor, "batch kv_head row value_dim"], Float[Tensor, "batch kv_head row"]]:
        return attend(rows, self.near_key, self.near_value, None, scale)


Part = tuple[Float[Tensor, "_ 1 row value_dim"], Float[Tensor, "_ 1 row"]]  # pieces of one list of keys


def read_shelf(query: Float[Tensor, "1 1 row dim"], shelf: Shelf, scale: float) -> Part:
    """Attention over a shelf, cut into pieces so that every thread has one: the kernel itself splits rows only."""
    pieces = min(torch.get_num_threads(), MOST_PIECES, shelf.length // PIECE) if query.device.type == "cpu" else 1
    each = -(-shelf.length // max(pieces, 1))
    if pieces <= 1 or pieces * each > shelf.key.shape[0]:
        key, value = shelf.key[None, None, : shelf.length], shelf.value[None, None, : shelf.length]
        return attend(query, key, value, None, scale)
    key, value = (room[: pieces * each].view(pieces, 1, each, -1) for room in (shelf.key, shelf.value))
    mask = _tail_mask(pieces, each, pieces * each - shelf.length, query)
    return attend(query.expand(pieces, -1, -1, -1), key, value, mask, scale)


def _tail_mask(pieces: int, each: int, over: int, query: Tensor) -> Float[Tensor, "piece 1 row key"] | None:
    """Closes the last ``over`` keys of the last piece: a window that slides over zeros and ends beyond them."""
    if over == 0:
        return None
    zeros = 1 << (each + pieces * over).bit_length()
    start = zeros + over - (pieces - 1) * over - each
    return _edge(zeros, query.dtype, query.device).as_strided((pieces, 1, query.shape[2], each), (over, 0, 0, 1), start)


@lru_cache(maxsize=64)
def _edge(zeros: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat([torch.zeros(zeros), torch.full((MOST_PIECES,), -torch.inf)]).to(device, dtype)


def _closed(part: Part, wanted: Sequence[bool]) -> Part:
    """Without what some heads read though they did not want to."""
    out, lse = part
    bias = [0.0 if is_wanted else -torch.inf for is_wanted in wanted]
    return out, lse + torch.tensor(bias, dtype=lse.dtype, device=lse.device)


def _merge(parts: list[list[Part]]) -> Float[Tensor, "list row value_dim"]:
    """Each list of parts, over disjoint keys of the same rows, as one; the first of a list has read something."""
    counts = [sum(len(lse) for _, lse in some) for some in parts]
    most = max(counts)
    if most > min(counts):
        out, lse = parts[0][0]
        nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        parts = [[*some, *[nothing] * (most - count)] for some, count in zip(parts, counts)]
    sides = zip(*(part for some in parts for part in some))
    outs, lses = (torch.cat(side).view(len(parts), most, *side[0].shape[2:]) for side in sides)
    weights = lses.softmax(dim=1)[..., None].to(outs.dtype)  # of each part in the softmax over all keys
    return (weights * outs).sum(dim=1)
