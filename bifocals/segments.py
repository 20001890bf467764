"""Packing and padding: several sequences in one row, each token marked with the number of its own, padding with -1."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

PAIRS = 1 << 22  # that are written out together


def row_blocks(queries: int, keys: int, is_causal: bool) -> list[tuple[int, int]]:
    """Rows to be masked together: where all would be too many, a few at a time, so that no mask is length x length."""
    if not is_causal or queries * keys <= PAIRS:
        return [(0, queries)]
    rows = max(1, PAIRS // keys)
    return [(start, min(start + rows, queries)) for start in range(0, queries, rows)]


def segment_starts(keys: int, segments: Tensor | None, device: torch.device) -> Int[Tensor, "#batch key"]:
    """The first position of each token's segment."""
    position = torch.arange(keys, device=device)[None]
    if segments is None:
        return torch.zeros_like(position)
    is_first = torch.ones_like(segments, dtype=torch.bool)
    is_first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(is_first, position, 0).cummax(dim=1).values


def visible_pairs(
    queries: int,
    keys: int,
    segments: Int[Tensor, "batch key"] | None,
    is_causal: bool,
    reach: int | None,
    device: torch.device,
) -> Bool[Tensor, "#batch 1 query key"]:
    """What the base pattern reads: same segment, not the future, within reach. Padding reads padding: no empty row."""
    position = torch.arange(keys, device=device)
    apart = position[keys - queries :, None] - position
    pairs = apart >= 0 if is_causal else torch.ones_like(apart, dtype=torch.bool)
    if reach is not None:
        pairs &= apart.abs() < reach
    if segments is None:
        return pairs[None, None]
    return (pairs & (segments[:, keys - queries :, None] == segments[:, None, :]))[:, None]


def is_padding(segments: Int[Tensor, "batch key"], length: int) -> Bool[Tensor, "batch 1 length 1"]:
    return (segments[:, segments.shape[1] - length :] < 0)[:, None, :, None]


def blank_padding(query: Tensor, key: Tensor, value: Tensor, segments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros in place of whatever padding holds: a masked logit of NaN would still be NaN."""
    in_keys = is_padding(segments, key.shape[2])
    return (
        query.masked_fill(is_padding(segments, query.shape[2]), 0.0),
        key.masked_fill(in_keys, 0.0),
        value.masked_fill(in_keys, 0.0),
    )
