"""A token routed alone goes where its router sends it."""

import pytest
import torch

from bifocals.config import FocusConfig
from bifocals.routing import Router
from bifocals.token_router import TokenRouter, may_route_alone


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    return torch.randn(200, 1, 24, dtype=torch.float64)


@pytest.mark.parametrize(
    "options", [{}, {"sides": "same"}, {"score": "dot"}, {"score": "dot", "sides": "same"}], ids=str
)
@pytest.mark.parametrize("routers", [1, 3])
@torch.no_grad()
def test_the_groups_are_those_of_the_router(options, routers, tokens):
    router = Router(24, routers, FocusConfig(groups=5, **options)).double().eval()
    router.potential.normal_()
    alone = TokenRouter(router)
    for top_k in (1, 2, 5):
        for got, expected in zip(alone.membership(tokens, top_k), router.membership(tokens, top_k)):
            assert torch.equal(got, expected)


@torch.no_grad()
def test_weights_that_changed_are_noticed(tokens):
    router = Router(24, 2, FocusConfig(groups=5)).double().eval()
    for change in (
        lambda: router.potential.add_(1),
        lambda: router.centroids.normal_(),
        lambda: router.load_state_dict(Router(24, 2, FocusConfig(groups=5)).state_dict()),
        lambda: router.float(),
    ):
        alone = TokenRouter(router)
        assert alone.is_fresh()
        change()
        assert not alone.is_fresh()


def test_only_a_single_token_outside_training_is_routed_alone(tokens):
    router = Router(24, 2, FocusConfig(groups=5)).double().eval()
    with torch.no_grad():
        assert may_route_alone(router, tokens)
        assert not may_route_alone(router, tokens.transpose(0, 1))
        assert not may_route_alone(router.train(), tokens)
    assert not may_route_alone(router.eval(), tokens)
