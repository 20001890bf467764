"""The share of the base's far attention that a hard pattern keeps.

    kept = sum of A_ij over the far pairs that are read / sum of A_ij over all far pairs

A is the base's own attention, over all heads and layers, of some queries of one block.
"""

import torch
from torch import Tensor

from bifocals.lens import Lens
from bifocals.tape import Tape
from bifocals.training.capture import capture_layers

ROWS = 256  # queries looked at, at most


@torch.no_grad()
def far_mass_kept(lens: Lens, block: Tensor, tape: Tape) -> float:
    """Of the run of ``block`` that is on ``tape``; text without far pairs keeps all of it."""
    assert lens.focus is not None
    window, sinks = lens.focus.window, lens.focus.sinks
    length, device = len(block), lens.model.device
    first = min(window + 1, length - 1)
    rows = torch.arange(first, length, -(-(length - first) // ROWS), device=device)
    kept = total = 0.0
    for name, layer in capture_layers(lens, block[None], rows[None]).items():
        attention = layer.far_attention(0, slice(None), rows, layer.far_keys(rows, length, window, sinks))
        heads = attention.shape[0]
        reads, holds = (
            side[0].repeat_interleave(heads // side.shape[1], dim=0).to(attention.dtype)
            for side in (tape.reads[name][:, :, rows], tape.holds[name])
        )
        kept += float((attention * (reads @ holds.mT > 0)).sum(dtype=torch.double))
        total += float(attention.sum(dtype=torch.double))
    return kept / total if total else 1.0
