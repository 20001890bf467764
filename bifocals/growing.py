"""A tensor that grows along its length without copying what it holds at every step.

Appending writes into the room that is left. Where it does not suffice, a tenth more is taken and everything moves once:
on average, constant work for each token.
"""

import numpy as np
import torch
from torch import Tensor

SLACK = 10  # one part of room for so many parts held


def with_slack(length: int) -> int:
    return length + length // SLACK + 1


def is_writable(tensor: Tensor) -> bool:
    """Neither part of a graph nor made in inference mode and now outside it."""
    return not tensor.requires_grad and tensor.is_inference() <= torch.is_inference_mode_enabled()


class Growing:
    """Along dimension 2, as keys and values of transformers: (batch, head, length, ...)."""

    def __init__(self, held: Tensor) -> None:
        self.room = self.held = held  # the second a view: written over once tokens are cut off and others appended

    @property
    def length(self) -> int:
        return self.held.shape[2]

    def append(self, new: Tensor) -> Tensor:
        before, count = self.held.shape[2], new.shape[2]
        if new.requires_grad or not is_writable(self.room):
            self.room = self.held = torch.cat([self.held, new], dim=2)
            return self.held
        if before + count > self.room.shape[2]:
            larger = self.room.new_empty(*new.shape[:2], with_slack(before + count), *new.shape[3:])
            larger.narrow(2, 0, before).copy_(self.held)
            self.room = larger
        self.room.narrow(2, before, count).copy_(new)
        self.held = self.room.narrow(2, 0, before + count)
        return self.held

    def cut(self, length: int) -> None:
        self.held = self.room.narrow(2, 0, length)

    def select(self, rows: list[int]) -> None:
        """Other rows of the batch in place of these, any of them once, often or not at all."""
        self.room = self.held = self.held.index_select(0, torch.tensor(rows, device=self.room.device))


class GrowingArray:
    """The same for small integers, (batch, router, length), on the host: there, appending costs a tenth."""

    def __init__(self, held: np.ndarray) -> None:
        self.room, self.length = held, held.shape[2]

    @property
    def held(self) -> np.ndarray:
        return self.room[:, :, : self.length]

    def append(self, new: np.ndarray) -> None:
        length = self.length + new.shape[2]
        if length > self.room.shape[2]:
            larger = np.empty((*new.shape[:2], with_slack(length)), dtype=self.room.dtype)
            larger[:, :, : self.length] = self.held
            self.room = larger
        self.room[:, :, self.length : length] = new
        self.length = length

    def cut(self, length: int) -> None:
        self.length = length

    def select(self, rows: list[int]) -> None:
        self.room = self.held[rows]
