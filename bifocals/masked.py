"""What a decoding step masks of a cache in time order: a row ready for each group, of which a step takes its own.

    positions   0 1 2 3 4 5 6 7 8 9     groups  a b a a b a b b a b     window 1, one sink

    none        0 x x x x x x x 0 0     sinks and near keys: 0 is added to their logits, x is minus infinity
    a           0 x 0 0 x 0 x x 0 0
    b           0 0 x x 0 x 0 0 0 0

A key is masked when it leaves the window, in every row but that of its group: one column for each token.
"""

from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int

from bifocals.growing import with_slack

Numbers = Int[np.ndarray, "batch router known"]  # the group of each key; from 1 on, 0 is none


class Masks:
    """The rows of a layer; ``starts`` is the first position of each row of the batch that is not padding."""

    def __init__(self, groups: int, starts: tuple[int, ...], sinks: int, routers: int) -> None:
        self.starts, self.sinks = starts, sinks
        self.far = 0  # positions that have left the window
        self.room = np.zeros((len(starts), routers, groups + 1, 0), dtype=np.float32)

    def cover(self, length: int) -> None:
        """Have room for so many positions; new ones are near."""
        before = self.room.shape[-1]
        if length <= before:
            return
        larger = np.zeros((*self.room.shape[:-1], with_slack(length)), dtype=np.float32)
        larger[..., :before] = self.room
        for of_row, start in zip(larger, self.starts):
            of_row[..., before : max(before, start)] = -np.inf
        self.room = larger

    def leave(self, numbers: Numbers, far: int) -> None:
        """All before ``far`` have left the window."""
        if far == self.far:
            return
        self.room[..., self.far : far] = _columns(self.room.shape[2])[numbers[:, :, self.far : far]].swapaxes(2, 3)
        if self.far < max(self.starts) + self.sinks:
            for of_row, start in zip(self.room, self.starts):
                of_row[..., start : start + self.sinks] = 0
        self.far = far

    def of(
        self, reads: Bool[np.ndarray, "batch told group"], readers: int, length: int
    ) -> Float[np.ndarray, "batch reader length"]:
        """What readers add to their logits; each of those told stands for as many of them."""
        batch, told = reads.shape[:2]
        routers = self.room.shape[1]
        if told == routers == readers and (reads.sum(axis=2) == 1).all():
            return self.room[*np.ogrid[:batch, :readers], reads.argmax(axis=2) + 1, :length]
        found = np.empty((batch, readers, length), dtype=np.float32)
        for mask, of_row, rows in zip(found, reads, self.room[..., :length]):
            for reader in range(readers):
                of_router = rows[reader * routers // readers]
                groups = np.flatnonzero(of_row[reader * told // readers]) + 1
                if len(groups) > 1:
                    of_router[groups].max(axis=0, out=mask[reader])
                else:
                    mask[reader] = of_router[groups[0] if len(groups) else 0]
        return found

    def select(self, rows: list[int]) -> None:
        """Other rows of the batch in place of these."""
        self.starts = tuple(self.starts[row] for row in rows)
        self.room = self.room[rows]


@lru_cache(maxsize=8)
def _columns(rows: int) -> Float[np.ndarray, "number row"]:
    """Of a far key, by its number, what each row adds: nobody reads a key that is in no group."""
    columns = np.full((rows, rows), -np.inf, dtype=np.float32)
    np.fill_diagonal(columns[1:, 1:], 0)
    return columns
