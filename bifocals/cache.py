"""What a lens must remember of past tokens, kept beside their keys and values.

A layer of transformers' cache is replaced by one of ours, which knows the groups of the past keys (and the running sums
of a prefix temperature):

    GroupedLayer       hard groups, keys in one each: filed by group once they are many (grouped.py)
    CompanionLayer     everything else: a second layer of the same kind beside the first, so that whatever happens to
                       keys and values (growing, cropping, beams, sliding windows) happens to it too
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from bifocals.config import FocusConfig
from bifocals.grouped import GroupedLayer
from bifocals.memory import Memory, Owner


class Companion(Memory):
    """Hands every change on to the layer that remembers."""

    remembered: DynamicLayer

    @property
    def known(self) -> int:
        return self.remembered.get_seq_length()

    def remember(self, groups: Tensor, sums: Tensor) -> Tensor:
        """Store what is to be known of the new tokens, after their keys went in; return the groups of all cached.

        ``groups`` and ``sums`` are (batch, any, new tokens, any).
        """
        return self.remembered.update(groups, sums)[0]

    def sizes(self, counted: Tensor) -> Tensor:
        groups = self.remembered.keys
        assert groups is not None, "the groups of keys are remembered before they are asked for"
        return ((groups > 0) & counted[:, None, :, None]).sum(dim=2)

    def last_sums(self) -> Tensor | None:
        sums = self.remembered.values
        return None if sums is None or sums.numel() == 0 else sums[:, :, -1:]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.expect_continuation(key_states)
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


def memory_of(
    cache: Cache,
    layer: int,
    owner: Owner,
    is_on: Callable[[], bool],
    key: Tensor,
    new: int,
    focus: FocusConfig | None,
) -> Companion | GroupedLayer:
    """The layer of the cache that remembers, made if need be; the keys of ``new`` tokens went in already.

    ``key`` is what attention is going to read; ``focus`` is None where keys cannot be filed by group.
    """
    held: Any = cache.layers[layer]
    length = held.get_seq_length()
    if isinstance(held, Companion | GroupedLayer):
        if held.owner != owner and length > new:
            raise ValueError(
                f"This cache was filled by {_named(held.owner)}, and goes on with {_named(owner)}: its keys belong to "
                "another model. Start from an empty cache after a change of mode, lens or (with shared sides) top_k."
            )
        if held.owner == owner or isinstance(held, CompanionSlidingLayer):
            held.owner, held.is_on = owner, is_on
            return held
        held = _plain(held)
    if length != new:
        raise ValueError(
            f"This cache holds {length - new} tokens that were computed without this lens (mode 'off', "
            "disabled() or another model). Start from an empty cache."
        )
    memory: Companion | GroupedLayer
    if type(held) is DynamicSlidingWindowLayer:
        memory = CompanionSlidingLayer(held)
    elif type(held) is DynamicLayer:
        # Latents are expanded after the cache, a layer that is offloaded is gone before attention, and a compiler
        # cannot follow what depends on the groups: there, attention gets all keys.
        gets_all = cache.offloading or torch.compiler.is_compiling() or not _is_same(held.keys, key)
        memory = CompanionLayer(held) if gets_all or focus is None else GroupedLayer(held, focus)
    else:
        raise ValueError(
            f"A lens keeps groups beside keys in transformers' DynamicCache, got a layer {type(held).__name__}. "
            "Drop cache_implementation (or pass past_key_values=DynamicCache(config=model.config))."
        )
    memory.owner, memory.is_on = owner, is_on
    cache.layers[layer] = memory
    return memory


def _is_same(held: Tensor | None, key: Tensor) -> bool:
    return held is not None and held.shape == key.shape and held.data_ptr() == key.data_ptr()


def _plain(memory: Any) -> DynamicLayer:
    """The layer as transformers would have it."""
    plain = DynamicLayer()
    keys, values = memory.keys, memory.values
    plain.lazy_initialization(keys, values)
    plain.keys, plain.values = keys, values
    return plain


def _named(owner: Owner) -> str:
    return f"lens {owner[0]} in mode {owner[1]!r}" + (f" with top_k {owner[2]}" if owner[2] else "")


def nothing_remembered(batch: int, length: int, device: torch.device) -> Tensor:
    """Stands where a lens has nothing to remember, so that lengths still count."""
    return torch.ones(batch, 1, length, 1, dtype=torch.bool, device=device)
