"""The masks that are kept ready are those that the pattern asks for, token by token."""

import numpy as np
import pytest

from bifocals.masked import Masks

GROUPS, WINDOW, LENGTH = 3, 4, 30


def expected(numbers, reads, starts, sinks, length):
    """What each reader adds to its logits, position by position."""
    batch, readers, _ = reads.shape
    mask = np.full((batch, readers, length), -np.inf, dtype=np.float32)
    for row, reader, key in np.ndindex(mask.shape):
        number = numbers[row, reader * numbers.shape[1] // readers, key]
        is_read = number > 0 and reads[row, reader, number - 1]
        is_sink = starts[row] <= key < starts[row] + sinks
        is_near = key >= length - 1 - WINDOW
        if key >= starts[row] and (is_near or is_sink or is_read):
            mask[row, reader, key] = 0
    return mask


@pytest.mark.parametrize("readers", [2, 4])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("starts", [(0, 0), (0, 12)])
def test_every_step_takes_what_the_pattern_says(readers, share, sinks, starts):
    """Queries read one group or any, keys are in one or none, rows begin anywhere, and some tokens come together."""
    random = np.random.default_rng(0)
    numbers = random.integers(0, GROUPS + 1, (2, 2, LENGTH)).astype(np.int16)
    numbers[1, :, : starts[1]] = 0
    masks = Masks(GROUPS, starts, sinks, routers=2)
    for length in (14, 15, 16, 20, 21, LENGTH):
        one = np.eye(GROUPS, dtype=bool)[random.integers(0, GROUPS, (2, readers))]
        several = random.random((2, readers, GROUPS)) < share
        masks.cover(length)
        masks.leave(numbers, length - 1 - WINDOW)
        for reads in (one, several):
            assert np.array_equal(masks.of(reads, readers, length), expected(numbers, reads, starts, sinks, length))


def test_rows_of_the_batch_go_on_by_themselves_once_they_are_selected():
    numbers = np.array([[[1, 2, 1, 2, 0, 1]], [[2, 2, 1, 1, 1, 0]]], dtype=np.int16)
    masks = Masks(2, (0, 1), 1, routers=1)
    masks.cover(6)
    masks.leave(numbers, 4)
    masks.select([1, 1, 0])
    masks.leave(numbers[[1, 1, 0]], 5)
    reads = np.tile(np.array([True, False]), (3, 1, 1))
    shown = np.isfinite(masks.of(reads, 1, 6))[:, 0].astype(int)
    assert shown.tolist() == [[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1, 0, 1, 0, 0, 1]]
