"""Counting by ranges equals counting pair by pair."""

import pytest
import torch

from bifocals import measure
from bifocals.config import FocusConfig
from bifocals.measure import measure_patterns
from bifocals.tape import Tape


def by_pairs(reads, holds, focus, real, is_causal, reach):
    """The definitions, one pair at a time."""
    counts = [0, 0, 0, 0]
    batch, heads, length, _ = reads.shape
    for row in range(batch):
        tokens = [index for index in range(length) if real[row, index]]
        for head in range(heads):
            of_key = holds[row, head * holds.shape[1] // heads]
            for i in tokens:
                for j in tokens:
                    if (is_causal and j > i) or (reach is not None and abs(i - j) >= reach):
                        continue
                    is_far = abs(i - j) > focus.window and j not in tokens[: focus.sinks]
                    is_shared = bool((reads[row, head, i] & of_key[j]).any())
                    counts[0] += is_far and is_shared
                    counts[1] += is_far
                    counts[2] += is_shared or not is_far
                    counts[3] += 1
    return counts


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("window", "sinks", "reach"), [(2, 1, None), (0, 0, 7), (3, 4, 5), (30, 2, None), (2, 30, 9)])
def test_ranges_count_what_pairs_do(is_causal, window, sinks, reach, monkeypatch):
    monkeypatch.setattr(measure, "KINDS_AT_ONCE", 3)
    generator = torch.Generator().manual_seed(window)
    reads = torch.rand(3, 4, 17, 4, generator=generator) < 0.3
    holds = torch.rand(3, 2, 17, 4, generator=generator) < 0.4
    real = torch.ones(3, 17, dtype=torch.bool)
    real[1, :5] = real[2, 12:] = False
    focus = FocusConfig(groups=4, window=window, sinks=sinks)
    expected = by_pairs(reads, holds, focus, real, is_causal, reach)
    found = measure_patterns(Tape({"0": reads}, {"0": holds}), focus, {"0": (is_causal, reach)}, real.long())
    assert found.far_kept == (expected[0] / expected[1] if expected[1] else 1.0)
    assert found.pairs_kept == expected[2] / expected[3]
