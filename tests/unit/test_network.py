"""Routers of small networks: what they compute."""

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import gelu, one_hot

from bifocals import FocusConfig
from bifocals.network import NetworkRouter

CONFIG = FocusConfig.network(groups=4, top_k=2, dim=6)


@pytest.fixture
def router():
    torch.manual_seed(0)
    router = NetworkRouter(4, 2, 8, CONFIG).double().eval()
    with torch.no_grad():
        for tensor in (*router.parameters(), router.potential, router.bars):
            tensor.normal_()
        for network in (router.queries, router.keys, router.worth):
            network.mean.normal_()
            network.deviation.uniform_(0.5, 2)
    return router


def tokens(batch=2, length=10):
    return torch.randn(batch, 4, length, 8).double(), torch.randn(batch, 2, length, 8).double()


def test_scores_are_a_linear_map_and_a_hidden_layer_on_standardised_features(router):
    query, key = tokens()
    routing = router(query, key)
    for head in range(2):
        network = router.keys
        x = (key[:, head] - network.mean[head]) / network.deviation[head]
        inside = gelu(x @ network.inward[head] + network.inward_bias[head])
        scores = x @ network.linear[head] + network.bias[head] + inside @ network.outward[head]
        torch.testing.assert_close(routing.key_scores[:, head], scores + router.potential[head])
    shares = router.query_scores(query).exp()
    assert shares.shape == (2, 4, 10, 5)
    torch.testing.assert_close(shares.sum(dim=-1), torch.ones(2, 4, 10).double())


def test_a_query_reads_every_group_above_the_threshold_and_a_key_that_is_not_idle_is_in_its_best_one(router):
    query, key = tokens()
    shares = router.query_scores(query).exp()[..., :-1]
    is_idle = router.worth(key)[..., 0] < router.bars
    assert is_idle.any()
    assert not is_idle.all()
    best = one_hot(router(query, key).key_scores.argmax(dim=-1), 4).bool()
    for top_k in (1, 2, 3, 4):
        reads, holds = router.membership(query, key, top_k=top_k)
        assert torch.equal(reads, shares >= router.thresholds[top_k - 1])
        assert torch.equal(holds, best if top_k == 4 else best & ~is_idle[..., None])
    assert reads.all()
    assert len(router.membership(query, key, top_k=2)[0].sum(dim=-1).unique()) > 1


def test_the_dial_opens_group_by_group(router):
    query, key = tokens()
    reads = [router.membership(query, key, top_k=top_k)[0] for top_k in (1, 2, 3, 4)]
    for fewer, more in pairwise(reads):
        assert not (fewer & ~more).any()


def test_without_idle_keys_every_key_is_in_a_group():
    router = NetworkRouter(4, 2, 8, FocusConfig.network(groups=4, idle=0)).eval()
    assert router.worth is None
    query, key = (each.float() for each in tokens())
    assert (router.membership(query, key, top_k=1)[1].sum(dim=-1) == 1).all()


def test_the_gates_of_a_key_fade_as_it_becomes_idle(router):
    query, key = tokens()
    routing = router(query, key)
    assert routing.surplus.min() < 0 < routing.surplus.max()
    torch.testing.assert_close(routing.gates()[1].sum(dim=-1), routing.surplus.sigmoid())


def test_margins_are_the_distance_to_the_threshold_to_the_second_group_and_to_the_bar(router):
    query, key = tokens()
    routing = router(query, key)
    of_queries, of_keys = routing.margins(2)
    distance = (router.query_scores(query)[..., :-1] - router.thresholds[1].log()).abs()
    torch.testing.assert_close(of_queries, distance.amin(dim=-1))
    best = routing.key_scores.sort(dim=-1, descending=True).values
    ahead, surplus = best[..., 0] - best[..., 1], router.worth(key)[..., 0] - router.bars
    torch.testing.assert_close(of_keys, torch.where(surplus < 0, -surplus, torch.minimum(ahead, surplus)))
    torch.testing.assert_close(routing.margins(4)[1], ahead)
    assert routing.margins(4)[0].isinf().all()


def test_a_tokens_groups_depend_on_that_token_alone_while_no_group_is_full(router):
    query, key = tokens()
    whole = router.membership(query, key)
    alone = router.membership(query[:1, :, 6:7], key[:1, :, 6:7])
    for groups, group in zip(whole, alone, strict=True):
        assert torch.equal(groups[:1, :, 6:7], group)


def test_half_precision_is_routed_in_float32():
    router = NetworkRouter(4, 2, 8, CONFIG).eval()
    routing = router(torch.randn(1, 4, 5, 8).bfloat16(), torch.randn(1, 2, 5, 8).bfloat16())
    assert routing.query_scores.dtype == routing.key_scores.dtype == torch.float32


def test_only_networks_have_idle_keys_and_never_all_of_them():
    with pytest.raises(ValueError, match="idle=0 without networks"):
        FocusConfig(idle=0.3)
    with pytest.raises(ValueError, match=r"idle in \[0, 1\)"):
        FocusConfig.network(idle=1.0)


def test_networks_refuse_what_does_not_go_with_them():
    for options in ({"routers": "layer"}, {"sides": "same"}, {"balance": "sinkhorn"}):
        with pytest.raises(ValueError, match=r"with score='network'.*FocusConfig.network\(\)"):
            FocusConfig.network(**options)
