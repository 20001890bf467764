"""Tokens routed quickly go where their router sends them."""

import pytest
import torch

from bifocals import fullness
from bifocals.config import FocusConfig
from bifocals.fullness import Course
from bifocals.network import NetworkRouter
from bifocals.quick_router import may_route_quickly, quick_router
from bifocals.routing import Router


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    return torch.randn(40, 5, 24, dtype=torch.float64)


@pytest.mark.parametrize(
    "options", [{}, {"sides": "same"}, {"score": "dot"}, {"score": "dot", "sides": "same"}], ids=str
)
@pytest.mark.parametrize("routers", [1, 3])
@torch.no_grad()
def test_the_groups_are_those_of_the_router(options, routers, tokens):
    router = Router(24, routers, FocusConfig(groups=5, **options)).double().eval()
    router.potential.normal_()
    quick = quick_router(router)
    for top_k in (1, 2, 5):
        for got, expected in zip(quick.membership((tokens,), top_k), router.membership(tokens, top_k)):
            assert torch.equal(got, expected)


@torch.no_grad()
def networks(idle=0.3):
    """Of 4 heads that share 2 key-value heads; nothing at its start."""
    torch.manual_seed(0)
    config = FocusConfig.network(groups=5, dim=7, tau=0.7, idle=idle)
    router = NetworkRouter(4, 2, 6, config).double().eval()
    for tensor in router.state_dict().values():
        tensor.uniform_(0.1, 1.0)
    router.thresholds.copy_(torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]))
    router.bars.fill_(-12.0)  # three keys in four are above
    return router


@pytest.mark.parametrize("idle", [0.0, 0.3])
@pytest.mark.parametrize("steepness", [0.0, 30.0])
@pytest.mark.parametrize("shape", [(40, 5), (4, 50)])
@torch.no_grad()
def test_the_groups_are_those_of_the_networks(idle, steepness, shape, tokens, monkeypatch):
    monkeypatch.setattr(fullness, "PIECE", 3)
    monkeypatch.setattr(fullness, "SLACK", 1)
    router = networks(idle)
    router.steepness.fill_(steepness)
    query = tokens.view(*shape, 4, 6).transpose(1, 2)
    key, quick = query[:, :2] - 1, quick_router(router)
    courses = [None, Course.of_sequence(shape[1]), *begun_courses(*shape)]
    for course in courses:
        for top_k in (1, 2, 5):
            expected = router.membership(query, key, course, top_k=top_k)
            assert 0 < expected[0].float().mean() <= 1
            assert expected[1].any(dim=-1).all() == (top_k == 5 or not idle)
            for got, right in zip(quick.membership((query, key), top_k, course), expected):
                assert torch.equal(got, right)
    is_moved = [not torch.equal(*(router.membership(query, key, each)[1] for each in (None, full))) for full in courses]
    assert is_moved == [False] + 2 * [steepness > 0]


def begun_courses(batch, length):
    sizes = torch.randint(9, (2, batch, 2, 5), generator=torch.Generator().manual_seed(0))
    yield Course(4 + torch.arange(length)[None], None, *sizes)


@torch.no_grad()
def test_networks_that_changed_are_noticed():
    router = networks()
    for tensor in router.state_dict(keep_vars=True).values():
        quick = quick_router(router)
        assert quick.is_fresh()
        tensor.add_(1)
        assert not quick.is_fresh()


@torch.no_grad()
def test_weights_that_changed_are_noticed(tokens):
    router = Router(24, 2, FocusConfig(groups=5)).double().eval()
    for change in (
        lambda: router.potential.add_(1),
        lambda: router.centroids.normal_(),
        lambda: router.load_state_dict(Router(24, 2, FocusConfig(groups=5)).state_dict()),
        lambda: router.float(),
    ):
        quick = quick_router(router)
        assert quick.is_fresh()
        change()
        assert not quick.is_fresh()


@pytest.mark.parametrize("kind", ["centroids", "networks"])
def test_weights_that_are_replaced_twice_are_noticed_wherever_they_lie(kind):
    """The second may get the address of the first."""
    router = networks() if kind == "networks" else Router(24, 2, FocusConfig(groups=5)).double().eval()
    owner, name = (router.keys, "linear") if kind == "networks" else (router, "centroids")
    for _ in range(20):
        quick = quick_router(router)
        for _ in range(2):
            setattr(owner, name, torch.nn.Parameter(torch.randn_like(getattr(owner, name).detach())))
        assert not quick.is_fresh()


@torch.no_grad()
def test_networks_route_after_a_model_was_cast_to_another_precision(tokens):
    query = tokens.view(40, 5, 4, 6).transpose(1, 2)
    for dtype in (torch.bfloat16, torch.float16):
        router = networks().to(dtype)
        routed = query.to(dtype), (query[:, :2] - 1).to(dtype)
        for got, expected in zip(quick_router(router).membership(routed, 2), router.membership(*routed, top_k=2)):
            assert (got == expected).float().mean() > 0.99


@pytest.mark.parametrize("kind", ["centroids", "networks"])
@torch.no_grad()
def test_what_was_prepared_stays_when_weights_change(kind, tokens):
    router = networks() if kind == "networks" else Router(24, 2, FocusConfig(groups=5)).double().eval()
    query = tokens.view(40, 5, 4, 6).transpose(1, 2)
    routed = (query, query[:, :2] - 1) if kind == "networks" else (tokens,)
    quick = quick_router(router)
    before = quick.membership(routed, 2)
    for tensor in router.state_dict().values():
        tensor.copy_(torch.rand_like(tensor))
    after = quick.membership(routed, 2)
    assert all(torch.equal(got, expected) for got, expected in zip(after, before))
    now = quick_router(router).membership(routed, 2)
    assert not all(torch.equal(got, expected) for got, expected in zip(now, before))


def test_training_and_gradients_take_the_router_itself(tokens):
    router = Router(24, 2, FocusConfig(groups=5)).double().eval()
    with torch.no_grad():
        assert may_route_quickly(router, tokens)
        assert not may_route_quickly(router.train(), tokens)
    assert not may_route_quickly(router.eval(), tokens)
