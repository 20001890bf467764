"""Full groups lose score: as the oracle says, in any batch and from any place on, and without reading ahead."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from bifocals import FocusConfig, fullness, reference
from bifocals.fullness import Course
from bifocals.network import NetworkRouter

GROUPS, HEADS = 4, 2


def drawn(batch, length, seed=0):
    """Scores that crowd one group, keys of which some are idle, and two steepnesses."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch, HEADS, length, GROUPS, generator=generator, dtype=torch.double)
    scores[..., 1] += 1
    return scores, torch.rand(batch, HEADS, length, generator=generator) < 0.8, torch.tensor([[2.0], [5.0]]).double()


def groups_of(scores, is_held, steepness, course):
    return (scores - fullness.fullness(scores, is_held, steepness, course)).argmax(dim=-1)


def expected(scores, is_held, steepness):
    """Of one sequence, (kv_head, token)."""
    how = {"piece": fullness.PIECE, "slack": fullness.SLACK}
    return torch.tensor([
        reference.sort_keys(of_head, held, steepness=float(steep), **how)
        for of_head, held, steep in zip(scores, is_held, steepness)
    ])  # fmt: skip


def sizes(chosen, is_held):
    return (one_hot(chosen, GROUPS) * is_held[..., None]).sum(dim=-2)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(fullness, "PIECE", 7)
    monkeypatch.setattr(fullness, "SLACK", 5)


@pytest.mark.parametrize("length", [1, 7, 20, 63])
def test_keys_go_where_the_oracle_sends_them(length):
    scores, is_held, steepness = drawn(1, length)
    got = groups_of(scores, is_held, steepness, Course.of_sequence(length))[0]
    assert torch.equal(got, expected(scores[0], is_held[0], steepness))
    assert torch.equal(got, scores[0].argmax(dim=-1)) == (length <= 7)  # in the first piece no group is full


def test_crowded_groups_become_even_and_fair_ones_stay_as_they_are():
    scores, is_held, _ = drawn(1, 400)
    course, steepness = Course.of_sequence(400), torch.tensor([[10.0], [20.0]]).double()
    before = sizes(scores.argmax(dim=-1), is_held)
    after = sizes(groups_of(scores, is_held, steepness, course), is_held)
    fair = is_held.sum(dim=-1, keepdim=True) / GROUPS
    assert ((before / fair).amax(dim=-1) > 1.6).all()
    assert ((after / fair).amax(dim=-1) < 1.25).all()
    evenly = torch.eye(GROUPS).double().repeat(100, 1).expand(1, HEADS, -1, -1)
    assert not fullness.fullness(evenly, torch.ones_like(is_held), steepness, course).any()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), length=st.integers(2, 60), seed=st.integers(0, 99))
def test_a_sequence_may_come_in_pieces_cut_anywhere(data, length, seed):
    """What was before and what was begun is counted from the groups that are kept."""
    scores, is_held, steepness = drawn(1, length, seed)
    cuts = data.draw(st.lists(st.integers(1, length - 1), max_size=5))
    chosen = torch.empty(1, HEADS, 0, dtype=torch.long)
    for start, stop in zip([0, *sorted({*cuts})], [*sorted({*cuts}), length]):
        place = torch.arange(start, stop)[None]
        first = int(fullness.piece_start(place[:, :1]))
        known = is_held[:, :, :start]
        counted = sizes(chosen[:, :, :first], known[:, :, :first]), sizes(chosen[:, :, first:], known[:, :, first:])
        some = (each[:, :, start:stop] for each in (scores, is_held))
        chosen = torch.cat([chosen, groups_of(*some, steepness, Course(place, None, *counted))], dim=2)
    assert torch.equal(chosen[0], expected(scores[0], is_held[0], steepness))


def test_padding_and_packing_change_nothing():
    scores, is_held, steepness = drawn(2, 60)
    alone = [expected(scores[0, :, 13:], is_held[0, :, 13:], steepness), expected(scores[1], is_held[1], steepness)]
    is_real = torch.arange(60) >= torch.tensor([[13], [0]])
    place = (is_real.cumsum(dim=1) - 1).clamp(min=0)
    padded = groups_of(scores, is_held, steepness, Course(place, is_real))
    assert torch.equal(padded[0, :, 13:], alone[0])
    assert torch.equal(padded[1], alone[1])
    lengths = [1, 1, 20, 38]
    packed = groups_of(scores, is_held, steepness, Course(torch.cat([torch.arange(some) for some in lengths])[None]))
    for row in range(2):
        parts = zip(scores[row].split(lengths, dim=1), is_held[row].split(lengths, dim=1))
        assert torch.equal(packed[row], torch.cat([expected(*part, steepness) for part in parts], dim=1))


def test_padding_between_tokens_is_passed_over():
    scores, is_held, steepness = drawn(1, 60)
    is_real = torch.arange(60)[None] % 4 != 1
    course = Course((is_real.cumsum(dim=1) - 1).clamp(min=0), is_real)
    got = groups_of(scores, is_held, steepness, course)[:, :, is_real[0]]
    assert torch.equal(got[0], expected(scores[0, :, is_real[0]], is_held[0, :, is_real[0]], steepness))


def test_keys_that_another_run_sorted_count_where_it_put_them():
    """A tie that rounding broke otherwise must not move the keys after it."""
    scores, is_held, steepness = drawn(1, 60)
    first = groups_of(scores, is_held, steepness, Course.of_sequence(60))
    flipped = scores.clone()
    flipped[:, :, 3:6] = -flipped[:, :, 3:6]
    settled = one_hot(first[:, :, :50], GROUPS).bool() & is_held[:, :, :50, None]
    course = Course(torch.arange(60)[None], settled=settled)
    second = groups_of(flipped, is_held, steepness, course)
    assert torch.equal(first[:, :, 6:], second[:, :, 6:])
    assert not torch.equal(first[:, :, 6:], groups_of(flipped, is_held, steepness, Course.of_sequence(60))[:, :, 6:])


def test_what_comes_later_changes_nothing_before_it():
    scores, is_held, steepness = drawn(1, 60)
    changed = scores.clone()
    changed[:, :, 30:] = torch.randn_like(changed[:, :, 30:])
    course = Course.of_sequence(60)
    first, second = (groups_of(each, is_held, steepness, course) for each in (scores, changed))
    assert torch.equal(first[:, :, :30], second[:, :, :30])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("top_k", [1, 4])
def test_the_keys_of_a_router_give_way_unless_all_groups_are_read(top_k):
    torch.manual_seed(0)
    router = NetworkRouter(4, HEADS, 8, FocusConfig.network(groups=GROUPS, dim=6)).double().eval()
    query, key = torch.randn(1, 4, 60, 8).double(), torch.randn(1, HEADS, 60, 8).double()
    router.potential[:, 2] = 2.0
    never = router.membership(query, key, Course.of_sequence(60), top_k=top_k)[1]
    router.steepness.fill_(4.0)
    unlike, full = (router.membership(query, key, course, top_k=top_k)[1] for course in (None, Course.of_sequence(60)))
    assert torch.equal(unlike, never)
    assert torch.equal(full, never) == (top_k == GROUPS)
    if top_k < GROUPS:
        assert full.sum(dim=2).amax() < 0.7 * never.sum(dim=2).amax()
        assert torch.equal(full.any(dim=-1), never.any(dim=-1))  # idle keys stay idle


def test_full_groups_pass_no_gradient_and_leave_gates_alone():
    torch.manual_seed(0)
    router = NetworkRouter(4, HEADS, 8, FocusConfig.network(groups=GROUPS, dim=6)).double().eval()
    query, key = torch.randn(1, 4, 60, 8).double(), torch.randn(1, HEADS, 60, 8).double()
    before = router(query, key).gates()
    router.steepness.fill_(4.0)
    routing = router(query, key, Course.of_sequence(60))
    for got, gates in zip(routing.gates(), before):
        assert torch.equal(got, gates)
    lost = (routing.key_scores - routing._lowered(1)).sum()
    assert lost > 0
    grads = torch.autograd.grad(lost, list(router.keys.parameters()), allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in grads)
