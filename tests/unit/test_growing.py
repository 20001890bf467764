"""A growing tensor holds what was appended, and seldom moves."""

import torch

from bifocals.growing import Growing


def test_what_is_held_is_what_was_appended():
    whole = torch.randn(2, 3, 50, 4)
    growing = Growing(whole[:, :, :7])
    for start, stop in ((7, 8), (8, 20), (20, 21), (21, 50)):
        assert torch.equal(growing.append(whole[:, :, start:stop]), whole[:, :, :stop])
    growing.cut(30)
    assert torch.equal(growing.append(whole[:, :, 30:45]), whole[:, :, :45])
    growing.select([1, 1, 0])
    assert torch.equal(growing.held, whole[[1, 1, 0], :, :45])


def test_appending_moves_what_is_held_once_in_ten_and_takes_a_tenth_more():
    growing, moves = Growing(torch.zeros(1, 1, 1000, 1)), 0
    for _ in range(1000):
        before = growing.room.data_ptr()
        growing.append(torch.zeros(1, 1, 1, 1))
        moves += growing.room.data_ptr() != before
        assert growing.room.shape[2] <= 1.1 * growing.length + 2
    assert moves <= 9


def test_what_a_graph_refers_to_is_not_written_over():
    weight = torch.ones(1, 1, 1, 2, requires_grad=True)
    growing = Growing(torch.zeros(1, 1, 3, 2))
    first = growing.append(weight * 2)
    second = growing.append(weight * 3)
    (first.square().sum() + second.sum()).backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2 * 2 * 2 + 2 + 3))


def test_what_was_made_in_inference_mode_grows_outside_it():
    with torch.inference_mode():
        growing = Growing(torch.zeros(1, 1, 3, 2))
        growing.append(torch.ones(1, 1, 1, 2))
    assert growing.append(torch.ones(1, 1, 1, 2)).sum() == 4
