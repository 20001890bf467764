"""Keys filed by group give the attention that the reference gives over all of them."""

import pytest
import torch
from torch.nn.functional import one_hot

from bifocals import filed as filing
from bifocals import reference
from bifocals.filed import Filed

LENGTH, MORE, DIM, SCALE = 120, 30, 8, 0.3
STARTS = (0, 9, 31)

# kv_heads, heads, routers of the keys, readers, groups, window, sinks
SHAPES = [
    (3, 9, 3, 3, 8, 16, 4),
    (2, 4, 1, 1, 4, 5, 0),
    (2, 4, 2, 4, 4, 7, 2),
    (2, 4, 1, 2, 3, 0, 1),
    (2, 2, 1, 2, 1, 3, 0),
    (1, 4, 1, 4, 16, 3, 4),
]


class Sequence:
    """Random queries, keys and groups of three rows; queries read no group, some or all."""

    def __init__(self, kv_heads, heads, routers, readers, groups, window, sinks):
        length = LENGTH + MORE
        self.groups, self.window, self.sinks, self.starts = groups, window, sinks, STARTS
        self.query = torch.randn(3, heads, length, DIM, dtype=torch.float64)
        self.key, self.value = torch.randn(2, 3, kv_heads, length, DIM, dtype=torch.float64)
        self.numbers = torch.randint(0, groups + 1, (3, routers, length), dtype=torch.int16).numpy()
        self.reads = torch.rand(3, readers, length, groups) < torch.rand(3, readers, length, 1)
        self.segments = torch.zeros(3, length, dtype=torch.long)
        for row, start in enumerate(STARTS):
            self.numbers[row, :, :start] = 0
            self.segments[row, :start] = -1

    def select(self, rows):
        for name in ("query", "key", "value", "numbers", "reads", "segments"):
            setattr(self, name, getattr(self, name)[rows])

    def filed(self):
        past = (tensor[:, :, :LENGTH] for tensor in (self.key, self.value, self.numbers))
        return Filed.file(*past, self.groups, self.starts, self.sinks, self.window)

    def append_to(self, filed):
        here = slice(filed.length, filed.length + 1)
        filed.append(self.key[:, :, here], self.value[:, :, here], self.numbers)

    def agrees_with(self, filed):
        seen, last = slice(0, filed.length), slice(filed.length - 1, filed.length)
        key, value = filed.in_time_order(self.numbers)
        assert torch.equal(key, self.key[:, :, seen])
        assert torch.equal(value, self.value[:, :, seen])
        expected = reference.focus_attention(
            self.query[:, :, last],
            key,
            value,
            membership=self.reads[:, :, last],
            key_membership=one_hot(torch.from_numpy(self.numbers)[:, :, seen].long(), self.groups + 1)[..., 1:].bool(),
            window=self.window,
            sinks=self.sinks,
            segments=self.segments[:, seen],
            scale=SCALE,
        )
        got = filed.attend(self.query[:, :, last], self.reads[:, :, filed.length - 1], SCALE)
        assert (got - expected).abs().max() < 1e-12


@pytest.fixture(params=SHAPES, ids=str)
def sequence(request, monkeypatch):
    monkeypatch.setattr(filing, "PIECE", 4)
    torch.manual_seed(0)
    return Sequence(*request.param)


@pytest.mark.parametrize("threads", [1, 3])
def test_appending_and_attending_equal_the_reference(sequence, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    filed = sequence.filed()
    sequence.agrees_with(filed)
    for _ in range(MORE):
        sequence.append_to(filed)
        sequence.agrees_with(filed)


def test_what_was_cropped_may_come_again(sequence):
    filed = sequence.filed()
    for tokens in (1, sequence.window // 2, sequence.window):
        if filed.may_crop(tokens):
            filed.crop(tokens, sequence.numbers)
            sequence.agrees_with(filed)
    while filed.length < LENGTH + MORE:
        sequence.append_to(filed)
    sequence.agrees_with(filed)


def test_rows_that_were_taken_twice_grow_apart(sequence):
    filed = sequence.filed()
    filed.select([2, 2, 0])
    sequence.select([2, 2, 0])
    sequence.key[0, :, LENGTH:] += 1
    sequence.numbers[0, :, LENGTH:] = sequence.groups
    for _ in range(MORE):
        sequence.append_to(filed)
    sequence.agrees_with(filed)


def test_a_piece_for_each_thread_is_masked_where_keys_end(monkeypatch):
    monkeypatch.setattr(filing, "PIECE", 8)
    for threads in (2, 3, 5, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for length in range(64, 90):
            rows = torch.randn(3, length + 5, 4, dtype=torch.float64)
            shelf = filing.Shelf(*rows[:2], torch.arange(length))
            out, lse = filing.read_shelf(rows[2, None, None, :3], shelf, 1.0)
            weights = lse.softmax(dim=0)[..., None]
            exact = reference.attention(
                rows[2, None, None, :3],
                rows[0, None, None, :length],
                rows[1, None, None, :length],
                torch.ones(1, 1, 3, length, dtype=torch.bool),
                scale=1.0,
            )
            assert ((weights * out).sum(dim=0) - exact[0, 0]).abs().max() < 1e-12
