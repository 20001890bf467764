"""The grouped cache: a layer of transformers' cache that reads for a decoding step only what its query attends to.

Keys and values lie in time order, and in float32 on a CPU a step reads them where they lie (backends/native.py). Else
it masks what its query does not read while the sequence is short, which is fastest there; once it is long, keys and
values are filed by group (filed.py). Whatever needs the time order then (a long piece of a prompt, padding between
tokens, a graph) gets it back, and the next single token files them anew.

The groups of the last keys are not needed while they are near: they are found later, for many tokens at once.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from bifocals.autocast import without_autocast
from bifocals.backends import native
from bifocals.backends.call import attend
from bifocals.config import FocusConfig
from bifocals.filed import Filed, Numbers
from bifocals.fullness import Course, piece_start
from bifocals.growing import Growing, GrowingArray, is_writable
from bifocals.memory import Memory
from bifocals.quick_router import QuickRouter

LONG = 2048  # tokens from which on reading some groups pays for keeping them apart, for each reader of a key
FEW = 16  # new tokens that are attended one by one; for more, all keys go back to time order
POSTPONED = 32  # near keys, at most, whose groups are not found yet


@dataclass(frozen=True, slots=True)
class Later:
    """What a new token's key is routed by, and the router as it then was: for when its groups are asked for."""

    routed: Shaped[Tensor, "... 1 _"]
    router: QuickRouter
    top_k: int
    place: Int[Tensor, "#batch 1"] | None  # in its sequence; None where no group is ever full

    @property
    def rows(self) -> int:
        """That have a place of their own; 0 where no group is ever full."""
        return 0 if self.place is None else len(self.place)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Later":
        """Itself: it never changes, and a copy of the cache copies no lens."""
        return self


class GroupedLayer(Memory, DynamicLayer):
    """Keys in one group each, and the number of that group; ``focus`` says how many there are and what is near."""

    _flat: tuple[Growing, Growing] | None  # keys and values in time order; or
    _filed: Filed | None  # by group, and
    _new: tuple[Tensor, Tensor] | None  # those that came in and are not yet filed
    _numbers: GrowingArray | None  # of the groups that the keys are in, but for
    _later: list[Later]  # the last ones, which are near
    _sums: Growing | None

    def __init__(self, layer: DynamicLayer, focus: FocusConfig) -> None:
        # The base's is not called: it would set keys and values, which here are computed.
        self.focus = focus
        self.reset()
        if layer.keys is not None and layer.values is not None:
            self._flat = Growing(layer.keys), Growing(layer.values)

    def reset(self) -> None:
        self._flat = self._filed = self._new = self._numbers = self._sums = None
        self._later = []

    @property
    def is_filed(self) -> bool:
        """Whether keys and values lie by group, not in time order."""
        return self._filed is not None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self._flat is not None or self._filed is not None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """In time order, as those of any cache; once filed, a copy."""
        return self.in_time_order()[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return self.in_time_order()[1] if self.is_initialized else None

    @property
    def is_whole(self) -> bool:
        return super().is_whole and self._new is None

    @property
    def known(self) -> int:
        return 0 if self._numbers is None else self._numbers.length + len(self._later)

    def shape(self) -> torch.Size:
        return self._some_keys().shape

    def _some_keys(self) -> Tensor:
        if self._filed is not None:
            return self._filed.near_key
        assert self._flat is not None
        return self._flat[0].room

    def get_seq_length(self) -> int:
        if self._filed is not None:
            return self._filed.length + (0 if self._new is None else self._new[0].shape[2])
        return 0 if self._flat is None else self._flat[0].length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values in. Once filed, attention is not given the old ones: it asks ``attend``."""
        self.expect_continuation(key_states)
        if self._filed is not None:
            if key_states.shape[2] <= FEW and not key_states.requires_grad and is_writable(self._filed.near_key):
                self._new = key_states, value_states
                return self._new
            self.unfile()
        if self._flat is None:
            self._flat = Growing(key_states.contiguous()), Growing(value_states.contiguous())
            return self._flat[0].held, self._flat[1].held
        return self._flat[0].append(key_states), self._flat[1].append(value_states)

    def remember(
        self,
        holds: Bool[Tensor, "batch router new group"] | Later,
        is_real: Bool[Tensor, "batch new"] | None,
        sums: Float[Tensor, "batch 1 new size"] | None,
    ) -> None:
        """What is to be known of the new tokens, after their keys went in."""
        if sums is not None and self._sums is not None:
            self._sums.append(sums)
        elif sums is not None:
            self._sums = Growing(sums)
        if isinstance(holds, Later):
            self._later.append(holds)
            if len(self._later) > min(self.focus.window, POSTPONED):
                self._settle()
        else:
            self._settle()
            self._number(holds, is_real)

    def _settle(self) -> None:
        """Find the groups that were left for later."""
        later, self._later = self._later, []
        for (_, top_k, rows), alike in groupby(later, lambda one: (id(one.router), one.top_k, one.rows)):
            some = list(alike)
            routed = torch.cat([one.routed for one in some], dim=-2)
            course = None if rows == 0 else self._course([one.place for one in some])
            with without_autocast(routed):
                self._number(some[0].router.holds(routed, top_k, course), None)

    def _course(self, places: list[Any]) -> Course:
        """Of new tokens after those whose groups are known; padding is in none."""
        place = torch.cat(places, dim=1)
        of_known = torch.arange(self.known) - self.known + place[:, :1]
        is_before = of_known < piece_start(place[:, :1])
        return Course(place, None, self.sizes(is_before), self.sizes(~is_before))

    def sizes(self, counted: Bool[Tensor, "#batch known"]) -> Int[Tensor, "batch router group"]:
        """How many of the keys that count are in each group."""
        self._settle()
        numbers = np.where(counted.cpu().numpy()[:, None], self._known_numbers(), 0)
        found = np.stack([(numbers == group).sum(axis=-1) for group in range(1, self.focus.groups + 1)], axis=-1)
        return torch.from_numpy(found).to(self._some_keys().device)

    def _number(self, holds: Bool[Tensor, "batch router new group"], is_real: Bool[Tensor, "batch new"] | None) -> None:
        is_in = holds.cpu().numpy()
        if is_real is not None:
            is_in = is_in & is_real.cpu().numpy()[:, None, :, None]
        numbers = ((is_in.argmax(axis=-1) + 1) * is_in.any(axis=-1)).astype(np.int16)
        if self._numbers is not None:
            self._numbers.append(numbers)
        else:
            self._numbers = GrowingArray(numbers)

    def last_sums(self) -> Tensor | None:
        return None if self._sums is None or self._sums.length == 0 else self._sums.held[:, :, -1:]

    def membership(self) -> Bool[Tensor, "batch router token group"]:
        """The groups of all keys."""
        self._settle()
        is_in = self._known_numbers()[..., None] == np.arange(1, self.focus.groups + 1)
        return torch.from_numpy(is_in).to(self._some_keys().device)

    def _known_numbers(self) -> Numbers:
        """Of all keys that have left the window, at least."""
        assert self._numbers is not None, "the groups of keys are remembered before they are asked for"
        return self._numbers.held

    def in_time_order(self) -> tuple[Tensor, Tensor]:
        """All keys and values, those that came in last among them."""
        if self._filed is not None:
            key, value = self._filed.in_time_order(self._known_numbers())
            if self._new is None:
                return key, value
            return torch.cat([key, self._new[0]], dim=2), torch.cat([value, self._new[1]], dim=2)
        assert self._flat is not None
        return self._flat[0].held, self._flat[1].held

    def unfile(self) -> tuple[Tensor, Tensor]:
        """Back to time order; all keys and values."""
        if self._filed is not None:
            key, value = self.in_time_order()
            self._flat, self._filed, self._new = (Growing(key), Growing(value)), None, None
        return self.in_time_order()

    def may_attend(self, new: int, starts: tuple[int, ...] | None) -> bool:
        """Whether ``attend`` can do it: few new tokens, and no padding but before the ``starts`` of the rows."""
        if self._filed is not None:
            return self._new is not None and starts is not None and self._starts(starts) == self._filed.starts
        return new == 1 and starts is not None

    def _starts(self, starts: tuple[int, ...]) -> tuple[int, ...]:
        return starts or (0,) * self.shape()[0]

    def attend(
        self,
        query: Float[Tensor, "batch head new dim"],
        reads: Bool[Tensor, "batch reader new group"],
        starts: tuple[int, ...],
        scale: float,
    ) -> Float[Tensor, "batch head new value_dim"]:
        """The attention of the new tokens, whose keys came in and whose groups are remembered."""
        starts, sinks, window = self._starts(starts), self.focus.sinks, self.focus.window
        if self._flat is not None and self._may_step(query):
            key, value = self.in_time_order()
            numbers = self._known_numbers()
            return native.step(query, key, value, reads[:, :, 0], numbers, starts, window, sinks, scale)
        if self._flat is not None and self._is_worth_filing(starts, reads.shape[1]):
            key, value = self.in_time_order()
            numbers, groups = self._known_numbers(), self.focus.groups
            self._filed, self._flat = Filed.file(key, value, numbers, groups, starts, sinks, window), None
            return self._filed.attend(query, reads[:, :, 0], scale)
        if self._flat is not None:
            return self._attend_masked(query, reads[:, :, 0], starts, scale)
        assert self._filed is not None
        assert self._new is not None
        attended = []
        for token in range(query.shape[2]):
            key, value = (side[:, :, token : token + 1] for side in self._new)
            self._filed.append(key, value, self._known_numbers())
            attended.append(self._filed.attend(query[:, :, token : token + 1], reads[:, :, token], scale))
        self._new = None
        return attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)

    def _may_step(self, query: Tensor) -> bool:
        """Whether what is read can be read where it lies."""
        key, value = self.in_time_order()
        is_watched = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        return not is_watched and key.shape == value.shape and native.obstacle(query, self.focus.groups) is None

    def _is_worth_filing(self, starts: tuple[int, ...], readers: int) -> bool:
        """Long, no part of a graph, and in every row the ring lies behind the sinks.

        Several readers of the same keys read more groups between them, in more calls.
        """
        key, value = self.in_time_order()
        far = key.shape[2] - self.focus.window - 1 - self.focus.sinks - max(starts)
        is_long = key.shape[2] >= LONG * max(1, readers // key.shape[1])
        return is_long and far >= 0 and not key.requires_grad and not value.requires_grad

    def _attend_masked(
        self,
        query: Float[Tensor, "batch head 1 dim"],
        reads: Bool[Tensor, "batch reader group"],
        starts: tuple[int, ...],
        scale: float,
    ) -> Float[Tensor, "batch head 1 value_dim"]:
        """In time order: every key, with a mask (made on the host: cheaper calls) over those not read."""
        key, value = self.in_time_order()
        batch, kv_heads, length, dim = key.shape
        near, mask = length - 1 - self.focus.window, None
        rows = query.reshape(batch, kv_heads, -1, dim)  # the heads that share keys are the rows of one call
        if near > 0 or any(starts):
            far = max(near, 0)
            # Of each number that a key can have, what is added to its logit.
            added = np.full((*reads.shape[:2], self.focus.groups + 1), -np.inf, dtype=np.float32)
            added[:, :, 1:][reads.cpu().numpy()] = 0
            numbers = self._known_numbers()[:, :, :far]
            finest = max(reads.shape[1], numbers.shape[1], kv_heads)
            added, numbers = _repeat(added, finest), _repeat(numbers, finest)
            masked = np.zeros((batch, finest, length), dtype=np.float32)
            for row, start in enumerate(starts):
                for reader in range(finest):
                    # "clip" finds nothing to clip: any other mode goes by way of a copy.
                    added[row, reader].take(numbers[row, reader], out=masked[row, reader, :far], mode="clip")
                masked[row, :, start : start + self.focus.sinks] = 0
                masked[row, :, :start] = -np.inf
            mask = torch.from_numpy(masked).to(query.device, torch.promote_types(query.dtype, torch.float32))
            mask = mask.view(batch, kv_heads, -1, length).expand(-1, -1, rows.shape[2], -1)
        return attend(rows, key, value, mask, scale)[0].reshape(*query.shape[:3], -1)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: expected the number of tokens to remove as a negative number, got {tokens_to_remove}."
            )
        tokens = min(-tokens_to_remove, self.get_seq_length())
        if tokens == 0:
            return
        if self._filed is not None and self._filed.may_crop(tokens) and is_writable(self._filed.near_key):
            self._filed.crop(tokens, self._known_numbers())
        else:
            self.unfile()
            for side in self._flat or ():
                side.cut(side.length - tokens)
        if self._sums is not None:
            self._sums.cut(self._sums.length - tokens)
        if self._numbers is not None:
            self._numbers.cut(self._numbers.length - max(0, tokens - len(self._later)))
            self._later = self._later[: max(0, len(self._later) - tokens)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.shape()[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.is_initialized:
            return
        self._settle()
        rows = torch.arange(self.shape()[0], device=indices.device)[indices].tolist()
        for part in (*(self._flat or ()), self._filed, self._numbers, self._sums):
            if part is not None:
                part.select(rows)


def _repeat(side: np.ndarray, times: int) -> np.ndarray:
    """One for each of so many readers or heads."""
    return side if side.shape[1] == times else side.repeat(times // side.shape[1], axis=1)
