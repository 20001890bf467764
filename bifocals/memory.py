"""A cache layer that a lens can go on from: it belongs to the lens and the mode that filled it."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Owner = tuple[object, ...]  # the lens's name, its mode and, where keys depend on it, top_k


class Memory:
    """Mixed into a cache layer: whose it is, and what it knows beside keys and values."""

    owner: Owner
    is_on: Callable[[], bool]  # the owner is as it was; a function, so that a copy of the cache asks the lens itself

    @property
    def known(self) -> int:
        """Of how many tokens the groups are remembered."""
        raise NotImplementedError

    @property
    def is_whole(self) -> bool:
        """Whether the last step ended."""
        return self.get_seq_length() == self.known  # type: ignore[attr-defined]

    def sizes(self, counted: Bool[Tensor, "#batch known"]) -> Int[Tensor, "batch router group"]:
        """How many of the keys that count are in each group."""
        raise NotImplementedError

    def last_sums(self) -> Tensor | None:
        """The running sums of the last token remembered."""
        raise NotImplementedError

    def expect_continuation(self, key: Tensor) -> None:
        """The new keys must be those of the same lens, model and rows, and the step before must have ended."""
        length = self.get_seq_length()  # type: ignore[attr-defined]
        if length > 0 and not self.is_on():
            raise ValueError(
                f"This cache was filled with a lens in mode {self.owner[1]!r}, and goes on without it or in another: "
                "the model would read keys that another model computed. Start from an empty cache after a change of "
                "mode, of top_k (with shared sides; with networks, to or from all groups), after detach and in "
                "disabled()."
            )
        if not self.is_whole:
            raise ValueError(
                "A step with this cache was interrupted, or ran without the lens: what it holds is not whole. Start "
                "from an empty cache."
            )
        if length == 0:
            return
        held = self.shape()
        if (held[0], held[1], held[3]) != (key.shape[0], key.shape[1], key.shape[3]):
            raise ValueError(
                f"This cache holds keys of {held[0]} rows, {held[1]} heads and size {held[3]}; the model gave "
                f"{key.shape[0]} rows, {key.shape[1]} heads and size {key.shape[3]}. A cache goes on with the rows and "
                "the model that filled it: start from an empty one, or use batch_select_indices for fewer rows."
            )

    def shape(self) -> torch.Size:
        return self.keys.shape  # type: ignore[attr-defined]
