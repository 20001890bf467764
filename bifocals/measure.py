"""What a lens keeps, measured on a text.

far kept     attended far pairs / all far pairs          far: neither near nor a sink
pairs kept   attended pairs / all pairs the base reads
dominance    the largest group's share of the keys; 1 / groups is perfect balance
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bifocals.config import FocusConfig
from bifocals.focus import always_read
from bifocals.routing import dominance
from bifocals.segments import visible_pairs
from bifocals.tape import Tape

ROWS_AT_ONCE = 512  # queries: pairs are counted in blocks, so that memory grows with the length alone


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
    """From the recorded groups; text without far pairs keeps all of them."""
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
    return far_kept / far if far else 1.0, kept / pairs


def _count(
    reads: Tensor, holds: Tensor, focus: FocusConfig, real: Tensor | None, is_causal: bool, reach: int | None
) -> Tensor:
    """Far pairs attended, far pairs, pairs attended, pairs: over all rows and routers."""
    length = reads.shape[2]
    segments = None if real is None else real.long() - 1
    total = torch.zeros(4, dtype=torch.double)
    for start in range(0, length, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, length)
        keys = stop if is_causal else length
        shape = (length - start if not is_causal else stop - start, keys)
        cut = None if segments is None else segments[:, :keys]
        visible = visible_pairs(*shape, cut, is_causal, reach, reads.device)[:, :, : stop - start]
        if cut is not None:
            visible = visible & (cut[:, start:stop, None] >= 0)[:, None]
        always = always_read(*shape, focus.window, focus.sinks, cut, reads.device)[:, :, : stop - start]
        share = reads[:, :, start:stop].float() @ holds[:, :, :keys].float().mT > 0  # (batch, router, query, key)
        far = (visible & ~always).expand_as(share)
        kept = (visible & (always | share)).expand_as(share)
        counts = [(far & share).sum(), far.sum(), kept.sum(), visible.expand_as(share).sum()]
        total += torch.stack(counts).double().cpu()
    return total
