"""How transformers calls us: one attention function and one mask function, registered at the first attach.

The attention function gets neither hidden states nor cache, so a hook on the attention module leaves them on its
lens. The mask function gets the base's own pattern; it hands it on in a form that grows with the length, never with
its square.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, prepare_padding_mask

from bifocals.backends.dense import dense_attention
from bifocals.config import FocusConfig
from bifocals.focal import focal_attention
from bifocals.segments import is_padding, row_blocks, segment_starts, visible_pairs

Mode = Literal["soft", "sparse", "hard", "off"]

NAME = "bifocals"  # of the attention implementation, and of the lens inside an attention module

STATIC_CACHE = (
    "A lens keeps groups beside keys in transformers' DynamicCache, got a static cache. "
    "Drop cache_implementation (or pass past_key_values=DynamicCache(config=model.config))."
)


class BasePattern(NamedTuple):
    """What the base model lets a layer read: everything, but for these.

    ``segments`` covers all tokens seen, also those that a sliding cache has dropped: the first ``dropped`` ones.
    ``starts`` is where each row begins, empty if all begin at 0, and None if there is other padding, or packing.
    """

    segments: Tensor | None = None
    kind: Literal["padding", "holes", "packed"] = "padding"  # of the segments; holes: padding between tokens
    reach: int | None = None
    dropped: int = 0
    is_causal: bool = True
    starts: tuple[int, ...] | None = ()
    seen: int = 0  # tokens, the new ones and those cached; 0: not told

    def segments_of(self, keys: int) -> Tensor | None:
        """The segments of the last ``keys`` tokens."""
        return None if self.segments is None else self.segments[:, self.segments.shape[1] - keys :]

    def without_last(self, tokens: int) -> "BasePattern":
        """The same before so many tokens came."""
        known = self.segments
        return self if known is None else self._replace(segments=known[:, : known.shape[1] - tokens])

    def reach_over(self, keys: int) -> int | None:
        """The reach, if it hides any of the keys."""
        return None if self.reach is None or self.reach >= keys else self.reach

    def places(self, known: int, new: int, device: torch.device) -> Tensor:
        """How many tokens of its sequence came before each ``new`` one, after those ``known``: (batch or 1, new)."""
        position = torch.arange(known, known + new, device=device)[None]
        if self.segments is None:
            return position
        if self.kind == "packed":
            return position - segment_starts(known + new, self.segments, device)[:, known:]
        return ((self.segments >= 0).cumsum(dim=1) - 1).clamp(min=0)[:, known : known + new]

    def contiguous(self) -> Tensor:
        """What transformers asks of masks that it makes ahead of a static cache."""
        raise ValueError(STATIC_CACHE)


def register() -> None:
    """Tell transformers of the implementation; doing it again changes nothing."""
    AttentionInterface.register(NAME, lens_attention)
    AttentionMaskInterface.register(NAME, base_pattern)


def base_pattern(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> BasePattern:
    """Where transformers would build a mask, say what it would mask."""
    if use_vmap:
        raise ValueError("A lens cannot follow a custom mask function: expected causal, sliding or full attention.")
    if isinstance(q_offset, Tensor):
        raise ValueError(STATIC_CACHE)
    is_causal = "allow_is_bidirectional_skip" not in others
    if attention_mask is not None:
        padded = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        assert padded is not None
        is_real = padded[:, : kv_offset + kv_length]
        segments, kind = _padding_segments(is_real)
        starts = () if segments is None else _starts(is_real, kind)
        return BasePattern(segments, kind, local_size, kv_offset, is_causal, starts, kv_offset + kv_length)
    if is_causal and q_length == kv_length and mask_function is not causal_mask_function:
        segments = _packed_segments(mask_function, batch_size, q_length, local_size, torch.device(device))
        starts = () if segments is None else None
        return BasePattern(segments, "packed", local_size, kv_offset, is_causal, starts, kv_length)
    return BasePattern(None, "padding", local_size, kv_offset, is_causal, (), kv_offset + kv_length)


def _starts(is_real: Tensor, kind: str) -> tuple[int, ...] | None:
    """The first token of each row, if that is where its padding ends."""
    if torch.compiler.is_compiling() or kind == "holes" or not bool(is_real[:, -1].all()):
        return None
    return tuple(is_real.int().argmax(dim=1).tolist())


def _padding_segments(is_real: Tensor) -> tuple[Tensor | None, Literal["padding", "holes"]]:
    """0 at tokens and -1 at padding, None if there is none; and whether there is padding between tokens."""
    if torch.compiler.is_compiling():
        return is_real.long() - 1, "padding"
    if bool(is_real.all()):
        return None, "padding"
    runs = (is_real[:, 1:] & ~is_real[:, :-1]).sum(dim=1) + is_real[:, 0]
    return is_real.long() - 1, "holes" if bool((runs > 1).any()) else "padding"


def _packed_segments(
    mask_function: Callable[..., Any], batch: int, length: int, local_size: int | None, device: torch.device
) -> Tensor | None:
    """Number the sequences of a packed row: a new one starts where a token may not read the one before it."""
    if length < 2 or local_size == 1:
        return None
    rows, later = torch.arange(batch, device=device)[:, None], torch.arange(1, length, device=device)[None]
    joined = mask_function(rows, torch.zeros_like(rows), later, later - 1).expand(batch, -1)
    if not torch.compiler.is_compiling() and bool(joined.all()):
        return None
    return nn.functional.pad((~joined).long().cumsum(dim=1), (1, 0))


def lens_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BasePattern | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own: the module's lens, or the base's pattern without one."""
    if isinstance(attention_mask, Tensor):
        raise ValueError(
            f"attention_mask: expected (batch, length), got shape {tuple(attention_mask.shape)}. A lens follows "
            "padding, packing (position_ids) and sliding windows; for any other mask use lens.disabled()."
        )
    if others.get("output_attentions"):
        raise ValueError("A lens keeps no attention weights: expected output_attentions=False. Use lens.disabled().")
    if others.get("position_bias") is not None:
        raise ValueError("A lens cannot follow a position bias inside attention.")
    pattern = attention_mask or BasePattern(is_causal=bool(getattr(module, "is_causal", True)))
    if pattern.segments is not None and pattern.segments.device != query.device:
        pattern = pattern._replace(segments=pattern.segments.to(query.device))  # layers on several devices
    lens: Any = module._modules.get(NAME)
    # A layer left alone that is not causal may read another sequence: its queries have no place among the keys.
    base = base_attention if pattern.is_causal else cross_attention
    attend = base if lens is None else lens.attend
    attended = attend(query, key, value, pattern, scale=scaling, softcap=softcap, dropout=dropout)
    return attended.transpose(1, 2).contiguous(), None


def base_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BasePattern,
    *,
    scale: float | None,
    softcap: float | None = None,
    dropout: float = 0.0,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """The base's own pattern, at a temperature."""
    queries, keys = query.shape[2], key.shape[2]
    segments, reach = pattern.segments_of(keys), pattern.reach_over(keys)
    if softcap is None and dropout == 0 and pattern.kind != "holes":
        return focal_attention(
            query, key, value, temperature=temperature, scale=scale, segments=segments, reach=reach,
            is_causal=pattern.is_causal,
        )  # fmt: skip
    pairs = visible_pairs(queries, keys, segments, pattern.is_causal, reach, query.device)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attended = dense_attention(
        query, key, value, pairs, scale=scale, temperature=temperature, softcap=softcap, dropout=dropout
    )
    return attended if segments is None else attended.masked_fill(is_padding(segments, queries), 0.0)


def focus_over_all_pairs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reads: Tensor,
    holds: Tensor,
    pattern: BasePattern,
    focus: FocusConfig,
    *,
    mode: Mode,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    temperature: float | Tensor,
) -> Tensor:
    """Focus with every pair written out, for what the operators do not offer: padding between tokens, and dropout."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    segments = pattern.segments_of(keys)
    blocks = row_blocks(queries, keys * heads, pattern.is_causal)
    if len(blocks) > 1:
        how: dict[str, Any] = {"mode": mode, "scale": scale, "softcap": softcap, "dropout": dropout}
        parts = []
        for start, stop in blocks:
            rows, seen = slice(start, stop), slice(0, keys - queries + stop)
            cut = pattern.without_last(queries - stop)
            warmth = temperature[:, :, rows] if isinstance(temperature, Tensor) and temperature.ndim else temperature
            vectors = query[:, :, rows], key[:, :, seen], value[:, :, seen], reads[:, :, rows], holds[:, :, seen]
            parts.append(focus_over_all_pairs(*vectors, cut, focus, temperature=warmth, **how))
        return torch.cat(parts, dim=2)
    is_sink = _sinks(pattern, keys, focus.sinks, query.device)[:, None, None, :]
    position = torch.arange(keys, device=query.device)
    near = (position[keys - queries :, None] - position).abs() <= focus.window
    visible = visible_pairs(queries, keys, segments, pattern.is_causal, pattern.reach_over(keys), query.device)
    reads, holds = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (reads, holds))
    agreement = reads.to(query.dtype) @ holds.to(query.dtype).mT  # (batch, head, query, key)
    bias = factor = None
    if mode != "soft":
        visible = visible & (near | is_sink | (agreement > 0))
    if mode == "sparse" or (mode == "soft" and focus.gate == "log"):
        bias = torch.where(near | is_sink, 1.0, agreement.clamp(min=torch.finfo(agreement.dtype).tiny)).log()
    elif mode == "soft":
        factor = torch.where(near | is_sink, 1.0, torch.sigmoid(focus.slope * agreement))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    attended = dense_attention(
        query, key, value, visible, scale=scale, temperature=temperature, softcap=softcap, bias=bias, factor=factor,
        dropout=dropout,
    )  # fmt: skip
    return attended if segments is None else attended.masked_fill(is_padding(segments, queries), 0.0)


def _sinks(pattern: BasePattern, keys: int, sinks: int, device: torch.device) -> Tensor:
    """True at the first tokens of each segment, (batch or 1, keys); a hole does not start a segment."""
    if pattern.segments is None:
        return (torch.arange(keys, device=device) + pattern.dropped < sinks)[None]
    if pattern.kind == "packed":
        starts = segment_starts(keys, pattern.segments_of(keys), device)
        return torch.arange(keys, device=device) - starts < sinks
    is_real = pattern.segments >= 0
    return (is_real & (is_real.cumsum(dim=1) <= sinks))[:, -keys:]


def cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: BasePattern,
    *,
    scale: float | None,
    softcap: float | None = None,
    dropout: float = 0.0,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """Every query reads every token of the other sequence (or of its own, where nothing is causal)."""
    segments = pattern.segments_of(key.shape[2])
    pairs = None if segments is None else (segments >= 0)[:, None, None, :].expand(-1, 1, query.shape[2], -1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return dense_attention(
        query, key, value, pairs, scale=scale, temperature=temperature, softcap=softcap, dropout=dropout
    )
