"""Tiny models gain nothing from threads, and lose much where cores are shared."""

import pytest
import torch

from bifocals import fullness


@pytest.fixture(autouse=True)
def one_thread_and_one_seed():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that groups are full now and then in the short sequences of these tests."""
    monkeypatch.setattr(fullness, "PIECE", 5)
    monkeypatch.setattr(fullness, "SLACK", 3)
