"""What a lens keeps, measured on a text.

far kept     attended far pairs / all far pairs          far: neither near nor a sink
pairs kept   attended pairs / all pairs the base reads
dominance    the largest group's share of the keys in groups; 1 / groups is perfect balance
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from bifocals.config import FocusConfig
from bifocals.routing import dominance
from bifocals.tape import Tape

KINDS_AT_ONCE = 64  # of keys, so that memory grows with the length alone


@dataclass(frozen=True, slots=True)
class Shares:
    """Of one layer, or of all."""

    far_kept: float
    pairs_kept: float
    dominance: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Overall, and layer by layer."""

    far_kept: float
    pairs_kept: float
    dominance: float
    layers: dict[str, Shares]


def measure_patterns(
    tape: Tape, focus: FocusConfig, patterns: dict[str, tuple[bool, int | None]], attention_mask: Tensor | None
) -> Measurement:
    """From the recorded groups; text without far pairs, or without any, keeps all of them."""
    layers, sums = {}, torch.zeros(4, dtype=torch.double)
    for name, (is_causal, reach) in patterns.items():
        reads, holds = tape.reads[name], tape.holds[name]
        real = None if attention_mask is None else attention_mask.to(reads.device) > 0
        counted = _count(reads, holds, focus, real, is_causal, reach)
        layers[name] = Shares(*_shares(counted), float(dominance(holds, real).amax()))
        sums += counted
    worst = max(layer.dominance for layer in layers.values())
    return Measurement(*_shares(sums), worst, layers)


def _shares(counted: Tensor) -> tuple[float, float]:
    far_kept, far, kept, pairs = counted.tolist()
    return far_kept / far if far else 1.0, kept / pairs if pairs else 1.0


def _count(
    reads: Tensor, holds: Tensor, focus: FocusConfig, real: Tensor | None, is_causal: bool, reach: int | None
) -> Tensor:
    """Far pairs attended, far pairs, pairs attended, pairs: over all rows and heads.

    The far keys of a query are a range of positions, so running counts of each kind of key (the keys that hold the same
    groups) give its far pairs without looking at any pair.
    """
    batch, heads, length, _ = reads.shape
    real = torch.ones(batch, length, dtype=torch.bool, device=reads.device) if real is None else real
    is_sink = real & (real.cumsum(dim=1) <= focus.sinks)
    position = torch.arange(length, device=reads.device)
    reach = length if reach is None else reach
    before = (position - reach + 1).clamp(min=0), position + 1  # the ranges are [start, stop)
    far_before = before[0], position - focus.window
    after = position + 1, (position + reach).clamp(max=length)
    far_after = position + focus.window + 1, after[1]
    visible, far = ([before], [far_before]) if is_causal else ([before, after], [far_before, far_after])
    pairs = sum(_in_range(real[..., None], *each) for each in visible) * real[..., None]
    far_pairs = sum(_in_range((real & ~is_sink)[..., None], *each) for each in far) * real[..., None]

    far_kept = torch.zeros((), dtype=torch.double, device=reads.device)
    kinds, kind_of_key = holds.flatten(0, 2).unique(dim=0, return_inverse=True)
    kind_of_key = kind_of_key.view(holds.shape[:3])
    for first in range(0, len(kinds), KINDS_AT_ONCE):
        some = torch.arange(first, min(first + KINDS_AT_ONCE, len(kinds)), device=reads.device)
        is_kind = (kind_of_key[..., None] == some) & (real & ~is_sink)[:, None, :, None]
        of_kind = sum(_in_range(is_kind, *each) for each in far) * real[:, None, :, None]
        shares = reads.float() @ kinds[some].float().mT > 0  # (batch, head, query, kind)
        of_kind = of_kind.repeat_interleave(heads // holds.shape[1], dim=1)
        far_kept += (of_kind * shares).sum(dtype=torch.double)
    all_far, all_pairs = heads * far_pairs.sum(dtype=torch.double), heads * pairs.sum(dtype=torch.double)
    return torch.stack([far_kept, all_far, all_pairs - all_far + far_kept, all_pairs]).cpu()


def _in_range(counted: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """How many tokens that count lie in [start, stop), for each query: (..., token, kind) -> (..., query, kind)."""
    so_far = pad(counted.to(torch.int32).cumsum(dim=-2), (0, 0, 1, 0))
    start = start.clamp(0, counted.shape[-2])
    stop = stop.clamp(0, counted.shape[-2]).maximum(start)
    return so_far.index_select(-2, stop) - so_far.index_select(-2, start)
