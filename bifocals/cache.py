"""What a lens must remember of past tokens, kept beside their keys and values.

A layer of transformers' cache is replaced by one that carries a companion: a second layer of the same kind that
holds the groups of the past keys (and the running sums of a prefix temperature). Whatever happens to keys and values
(growing, cropping, beams, sliding windows) happens to the companion, so the two never part.

A cache belongs to the lens and the mode that filled it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

Owner = tuple[object, ...]  # the lens's name, its mode and, where keys depend on it, top_k


class Companion:
    """Mixed into a cache layer: hands every change on to the layer that remembers."""

    remembered: DynamicLayer
    owner: Owner
    is_on: Callable[[], bool]  # a function, so that a copy of the cache still asks the lens itself

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        length = self.get_seq_length()  # type: ignore[attr-defined]
        if (length > 0 and not self.is_on()) or self.remembered.get_seq_length() != length:
            raise ValueError(
                f"This cache was filled with a lens in mode {self.owner[1]!r}, and goes on without it: the model would "
                "read keys that another model computed. Start from an empty cache after mode, detach or disabled()."
            )
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)  # type: ignore[misc]
        self.remembered.crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.remembered.reset()

    def reorder_cache(self, beam_idx: Any) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.remembered.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.remembered.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.remembered.batch_select_indices(indices)


class CompanionLayer(Companion, DynamicLayer):
    """A growing layer that remembers."""

    def __init__(self, layer: DynamicLayer) -> None:
        super().__init__()
        self.__dict__.update(layer.__dict__)
        self.remembered = DynamicLayer()


class CompanionSlidingLayer(Companion, DynamicSlidingWindowLayer):
    """A layer that forgets what its window has left behind, and remembers as long."""

    remembered: DynamicSlidingWindowLayer

    def __init__(self, layer: DynamicSlidingWindowLayer) -> None:
        super().__init__(layer.sliding_window)
        self.__dict__.update(layer.__dict__)
        self.remembered = DynamicSlidingWindowLayer(layer.sliding_window)
        self.remembered.record_past = layer.record_past

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self.remembered.activate_past_recording()


def self_attention_cache(cache: Cache | None) -> Cache | None:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def remember(companion: Companion, groups: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Store what is to be known of the new tokens, after their keys went in; return it for all that are cached.

    ``groups`` and ``sums`` are (batch, any, new tokens, any).
    """
    return companion.remembered.update(groups, sums)


def last_sums(companion: Companion) -> Tensor | None:
    """The running sums of the last token remembered."""
    sums = companion.remembered.values
    return None if sums is None or sums.numel() == 0 else sums[:, :, -1:]


def companion_of(cache: Cache, layer: int, owner: Owner, is_on: Callable[[], bool], new: int) -> Companion:
    """The layer of the cache that remembers, made if need be; the keys of ``new`` tokens went in already."""
    held: Any = cache.layers[layer]
    if isinstance(held, CompanionLayer | CompanionSlidingLayer):
        if held.owner != owner and held.get_seq_length() > new:
            raise ValueError(
                f"This cache was filled by {_named(held.owner)}, and goes on with {_named(owner)}: its keys belong to "
                "another model. Start from an empty cache after a change of mode, lens or (with shared sides) top_k."
            )
        held.owner, held.is_on = owner, is_on
        return held
    if held.get_seq_length() != new:
        raise ValueError(
            f"This cache holds {held.get_seq_length() - new} tokens that were computed without this lens (mode 'off', "
            "disabled() or another model). Start from an empty cache."
        )
    if type(held) is DynamicSlidingWindowLayer:
        held = CompanionSlidingLayer(held)
    elif type(held) is DynamicLayer:
        held = CompanionLayer(held)
    else:
        raise ValueError(
            f"A lens keeps groups beside keys in transformers' DynamicCache, got a layer {type(held).__name__}. "
            "Drop cache_implementation (or pass past_key_values=DynamicCache(config=model.config))."
        )
    held.owner, held.is_on = owner, is_on
    cache.layers[layer] = held
    return held


def _named(owner: Owner) -> str:
    return f"lens {owner[0]} in mode {owner[1]!r}" + (f" with top_k {owner[2]}" if owner[2] else "")


def nothing_remembered(batch: int, length: int, device: torch.device) -> Tensor:
    """Stands where a lens has nothing to remember, so that lengths still count."""
    return torch.ones(batch, 1, length, 1, dtype=torch.bool, device=device)
