"""Routers: hidden states to scores to groups, balanced without looking ahead."""

import math

import pytest
import torch

from bifocals import FocusConfig, Router, reference
from bifocals.routing import dominance, entropy, sinkhorn_potentials

CAUSAL = FocusConfig(groups=4)
PAPER = FocusConfig.paper(groups=4, allow_look_ahead=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def changed_after(hidden, position):
    changed = hidden.clone()
    changed[:, position:] = torch.randn_like(changed[:, position:])
    return changed


def test_by_default_queries_are_in_two_groups_and_keys_in_one_of_their_own_router():
    router = Router(32, 3, FocusConfig())
    queries, keys = router.membership(torch.randn(2, 10, 32))
    assert queries.shape == keys.shape == (2, 3, 10, 8)
    assert (queries.sum(dim=-1) == 2).all()
    assert (keys.sum(dim=-1) == 1).all()
    assert router.projection.shape == (2, 3, 32, 16)
    assert router.centroids.shape == (3, 8, 16)


def test_top_k_is_a_dial_of_queries_alone():
    router = Router(32, 1, FocusConfig()).eval()
    hidden = torch.randn(1, 10, 32)
    keys = router.membership(hidden)[1]
    for top_k in (1, 3, 8):
        queries, same_keys = router.membership(hidden, top_k)
        assert (queries.sum(dim=-1) == top_k).all()
        assert torch.equal(keys, same_keys)


def test_scores_are_cosines_over_tau_and_their_best_are_the_groups():
    router = Router(16, 2, CAUSAL).double().eval()
    hidden = torch.randn(1, 9, 16, dtype=torch.float64)
    routing = router(hidden)
    for side, scores in enumerate((routing.query_scores, routing.key_scores)):
        for number in range(2):
            tokens = hidden @ router.projection[side, number]
            cosine = torch.cosine_similarity(tokens[:, :, None], router.centroids[number], dim=-1)
            torch.testing.assert_close(scores[:, number], cosine / 0.1)
    assert torch.equal(router.membership(hidden)[1].int().argmax(dim=-1), routing.key_scores.argmax(dim=-1))
    for gates, scores in zip(routing.gates(), (routing.query_scores, routing.key_scores)):
        torch.testing.assert_close(gates, scores.exp() / scores.exp().sum(dim=-1, keepdim=True))


def test_the_paper_has_dot_products_and_the_same_groups_on_both_sides():
    router = Router(16, 1, PAPER).double().eval()
    hidden = torch.randn(1, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(
        router.scores(hidden, 0)[:, 0], hidden @ router.projection[0, 0] @ router.centroids[0].mT / 0.1
    )
    queries, keys = router.membership(hidden)
    assert torch.equal(queries, keys)
    assert (queries.sum(dim=-1) == 1).all()


def test_causal_balance_puts_a_token_in_groups_by_that_token_alone():
    router = Router(16, 2, CAUSAL).train()
    for _ in range(3):
        router(torch.randn(2, 50, 16))
        router.step_balance()
    for mode in (router.train(), router.eval()):
        hidden = torch.randn(1, 12, 16)
        with torch.no_grad():
            whole, changed = mode(hidden), mode(changed_after(hidden, 7))
            alone = mode(hidden[:, 6:7])
        assert torch.equal(whole.key_scores[:, :, :7], changed.key_scores[:, :, :7])
        assert torch.equal(whole.query_scores[:, :, :7], changed.query_scores[:, :, :7])
        torch.testing.assert_close(alone.key_scores, whole.key_scores[:, :, 6:7])


@pytest.mark.parametrize("rounds", [1, 3, 10])
def test_sinkhorn_equals_the_printed_one(rounds):
    router = Router(16, 2, FocusConfig.paper(groups=4, rounds=rounds), is_causal=False).double()
    hidden = torch.randn(3, 12, 16, dtype=torch.float64)
    expected = reference.sinkhorn(router.scores(hidden, -1), rounds)
    for gates in router(hidden).gates():
        torch.testing.assert_close(gates, expected)


def test_sinkhorn_leaks_the_future_and_is_refused_for_decoders_unless_allowed():
    with pytest.raises(ValueError, match=r"depend on later tokens.*expected balance='causal'.*allow_look_ahead=True"):
        Router(16, 1, FocusConfig.paper(groups=4))
    Router(16, 1, FocusConfig.paper(groups=4), is_causal=False)
    router = Router(16, 1, PAPER).eval()
    hidden = torch.randn(1, 60, 16)
    before, after = (router.membership(tokens)[1][:, :, :30] for tokens in (hidden, changed_after(hidden, 30)))
    assert not torch.equal(before, after)


def test_forward_moves_nothing_and_a_step_moves_the_potentials_once():
    router = Router(16, 2, CAUSAL).train()
    saved = {name: tensor.clone() for name, tensor in router.state_dict().items()}
    hidden = torch.randn(2, 64, 16)
    first, second = router(hidden), router(hidden)
    assert torch.equal(first.key_scores, second.key_scores)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in router.state_dict().items())
    router.step_balance()
    moved = router.potential.clone()
    assert moved.abs().max() > 0
    router.step_balance()
    assert torch.equal(router.potential, moved)


def test_seeing_a_batch_twice_is_seeing_it_once():
    once, twice = (Router(16, 2, CAUSAL).train() for _ in range(2))
    twice.load_state_dict(once.state_dict())
    hidden = torch.randn(2, 64, 16)
    once(hidden)
    twice(hidden)
    twice(hidden)
    once.step_balance()
    twice.step_balance()
    assert torch.equal(once.potential, twice.potential)


def test_nothing_is_observed_in_eval():
    router = Router(16, 2, CAUSAL).eval()
    router(torch.randn(2, 64, 16))
    router.step_balance()
    assert torch.equal(router.potential, torch.zeros(2, 4))


def test_momentum_is_what_a_step_keeps():
    hidden = torch.randn(1, 200, 16)
    routers = [Router(16, 1, FocusConfig(groups=4, momentum=momentum)).train() for momentum in (0.0, 0.9)]
    routers[1].load_state_dict(routers[0].state_dict())
    for router in routers:
        router(hidden)
        router.step_balance()
    torch.testing.assert_close(routers[1].potential, 0.1 * routers[0].potential)


def test_potentials_balance_the_groups_over_steps():
    router = Router(16, 2, FocusConfig(groups=8)).train()
    shift = 2 * torch.randn(16)  # which makes some groups far more likely than others
    unseen = torch.randn(1, 4000, 16) + shift
    dominances = [dominance(router.membership(unseen)[1]).max().item()]
    router.step_balance()
    for _ in range(3):
        for _ in range(15):
            router(torch.randn(2, 300, 16) + shift)
            router.step_balance()
        dominances.append(dominance(router.eval().membership(unseen)[1]).max().item())
        router.train()
    assert dominances[0] > 0.5
    assert dominances[-1] < 0.5 * dominances[0]
    assert dominances[-1] < 2.5 / 8


def test_potentials_fill_all_groups_equally():
    scores = torch.randn(500, 6, dtype=torch.float64) + torch.arange(6)
    potential = sinkhorn_potentials(scores, 200)
    shares = (scores + potential).softmax(dim=-1).mean(dim=0)
    torch.testing.assert_close(shares, torch.full_like(shares, 1 / 6))
    assert abs(potential.mean()) < 1e-12


@pytest.mark.parametrize("config", [CAUSAL, PAPER])
@pytest.mark.parametrize("garbage", [0.0, 1e4, torch.nan])
def test_padding_does_not_count(config, garbage):
    hidden = torch.randn(2, 40, 16)
    is_real = torch.ones(2, 40, dtype=torch.bool)
    is_real[:, 25:] = False
    padded = hidden.masked_fill(~is_real[..., None], garbage)
    alone, with_padding = (Router(16, 2, config).train() for _ in range(2))
    with_padding.load_state_dict(alone.state_dict())
    for step in range(2):
        expected = alone(hidden[:, :25]).key_scores
        got = with_padding(padded, is_real).key_scores[:, :, :25]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=f"step {step}")
        alone.step_balance()
        with_padding.step_balance()
    torch.testing.assert_close(with_padding.potential, alone.potential)


@pytest.mark.parametrize("length", [0, 5])
def test_a_batch_without_real_tokens_asks_for_nothing(length):
    router = Router(16, 2, CAUSAL).train()
    router(torch.full((1, length, 16), torch.nan), torch.zeros(1, length, dtype=torch.bool))
    router.step_balance()
    assert torch.equal(router.potential, torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_is_computed_in_float32_at_least(dtype):
    router = Router(16, 2, CAUSAL)
    hidden = torch.randn(1, 9, 16).to(dtype)
    assert router(hidden).key_scores.dtype == torch.float32
    torch.testing.assert_close(router(hidden).key_scores, router(hidden.float()).key_scores)
    assert router(hidden.double()).query_scores.dtype == torch.float64


def test_gates_give_gradients_to_projections_and_centroids():
    router = Router(16, 2, CAUSAL)
    queries, keys = router(torch.randn(1, 9, 16)).gates()
    (queries @ keys.mT).square().sum().backward()
    for parameter in router.parameters():
        assert (parameter.grad.flatten(2).abs().amax(dim=-1) > 0).all()


def one_hot(numbers):
    return torch.nn.functional.one_hot(torch.tensor(numbers), 4).bool()[None, None]


def test_dominance_is_the_largest_share_and_entropy_that_of_the_shares():
    even, skewed, collapsed = one_hot([0, 1, 2, 3]), one_hot([0, 0, 0, 1]), one_hot([2, 2, 2, 2])
    assert [dominance(each).item() for each in (even, skewed, collapsed)] == [0.25, 0.75, 1.0]
    assert entropy(even).item() == pytest.approx(1.0)
    assert entropy(skewed).item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4))
    assert entropy(collapsed).item() == 0.0
    both = torch.cat([even, skewed], dim=1)
    assert dominance(both).tolist() == [0.25, 0.75]


def test_tokens_in_no_group_do_not_make_the_others_look_even():
    idle, several = one_hot([0, 0, 1, 2]), one_hot([0, 0, 1, 2]) | one_hot([3, 3, 3, 3])
    idle[:, :, 3] = False
    assert dominance(idle).item() == pytest.approx(2 / 3)
    assert dominance(several).item() == 0.5


def test_dominance_and_entropy_do_not_count_padding_and_survive_nothing():
    membership, is_real = one_hot([0, 1, 0, 0]), torch.tensor([[True, True, False, False]])
    assert dominance(membership, is_real).item() == 0.5
    assert entropy(membership, is_real).item() == pytest.approx(0.5)
    assert dominance(membership, torch.zeros_like(is_real)).item() == 0.0
