"""The groups of tokens as their router would say, without the scores that nobody asks for.

While decoding, routing is not work but calls: dozens of operators on a handful of numbers, for every layer. Here a
product or two with joined weights give all that decides, and the rest is done on the host. Only keys have to be
compared in full: the length of a query changes no order.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import gelu, normalize

from bifocals.fullness import Course, fullness
from bifocals.network import AnyRouter, HeadNetworks, NetworkRouter
from bifocals.routing import Membership, Router

KeyMembership = Bool[Tensor, "batch key_router length group"]


class QuickRouter:
    """Prepared from the weights of a router as they are, and never changed; ``is_fresh`` says if they still are so."""

    def __init__(self, router: AnyRouter) -> None:
        self.router, self.state = router, _state(router)
        self.held = [each.detach() for each in _weights(router)]  # or other weights could get their addresses
        self.one = np.eye(router.config.groups, dtype=bool)

    def is_fresh(self) -> bool:
        return self.state == _state(self.router)

    def membership(
        self, routed: tuple[Tensor, ...], top_k: int, course: Course | None = None
    ) -> tuple[Membership, KeyMembership]:
        """The groups that tokens read, and those that their keys are in."""
        reads = self.reads(routed[0], top_k)
        return reads, reads if self.router.config.sides == "same" else self.holds(routed[-1], top_k, course)

    def reads(self, routed: Tensor, top_k: int) -> Membership:
        raise NotImplementedError

    def holds(self, routed: Tensor, top_k: int, course: Course | None = None) -> KeyMembership:
        raise NotImplementedError


class CentroidQuickRouter(QuickRouter):
    """One product for each side."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        projection, centroids = router.projection.detach(), router.centroids.detach()
        precision = _precision(projection)
        projection, centroids = projection.to(precision), centroids.to(precision)
        self.is_cosine = router.config.score == "cosine"
        if self.is_cosine:
            centroids = normalize(centroids, dim=-1)
        of_queries, of_keys = (_columns(side @ centroids.mT / router.config.tau) for side in projection[[0, -1]])
        # Beside the scores of keys, for its length, the projected key.
        self.reading = of_queries
        self.holding = torch.cat([of_keys, _columns(projection[-1])], dim=1) if self.is_cosine else of_keys
        self.potential = router.potential.to(precision).cpu().numpy().copy()

    def reads(self, routed: Float[Tensor, "batch token hidden"], top_k: int) -> Membership:
        if self.router.config.sides == "same":
            return self._best(self._balanced(routed), top_k)
        return self._best(self._split((routed.to(self.reading.dtype) @ self.reading).numpy()), top_k)

    def holds(
        self, routed: Float[Tensor, "batch token hidden"], top_k: int, course: Course | None = None
    ) -> KeyMembership:
        return self._best(self._balanced(routed), 1)

    def _balanced(self, hidden: Float[Tensor, "batch token hidden"]) -> np.ndarray:
        """The scores of the keys, (batch, token, router, group)."""
        found = (hidden.to(self.holding.dtype) @ self.holding).numpy()
        scores = self._split(found[..., : self.potential.size])
        if self.is_cosine:
            keys = self._split(found[..., self.potential.size :])
            lengths = np.sqrt(np.einsum("...d,...d->...", keys, keys))
            scores = scores / np.maximum(lengths, 1e-12)[..., None]
        return np.asarray(scores + self.potential)

    def _split(self, found: np.ndarray) -> np.ndarray:
        """(batch, token, router * any) -> (batch, token, router, any)"""
        return found.reshape(*found.shape[:2], len(self.potential), -1)

    def _best(self, scores: np.ndarray, count: int) -> Membership:
        if count == 1:
            return torch.from_numpy(self.one[scores.argmax(axis=-1).swapaxes(1, 2)])
        best = np.argpartition(scores, -count, axis=-1)[..., -count:]
        return torch.from_numpy(self.one[best.swapaxes(1, 2)].any(axis=-2))


def _columns(weight: Float[Tensor, "router hidden any"]) -> Float[Tensor, "hidden columns"]:
    """The routers side by side."""
    return weight.transpose(0, 1).flatten(1)


class NetworkQuickRouter(QuickRouter):
    """Two products for each side; the weights standardise."""

    def __init__(self, router: NetworkRouter) -> None:
        super().__init__(router)
        self.reading = _Networks(router.queries)
        self.holding = _Networks(router.keys) if router.worth is None else _Networks(router.keys, router.worth)
        precision = self.reading.weight.dtype
        self.bars = router.thresholds.to(precision).log().tolist()
        self.potential = router.potential.to(precision).numpy().copy()[:, None]
        self.key_bars = router.bars.to(precision).numpy().copy()
        self.steepness = router.steepness.to(precision, copy=True)
        self.may_be_full = bool(self.steepness.any())

    def reads(self, routed: Float[Tensor, "batch head token dim"], top_k: int) -> Membership:
        scores = self.reading(routed) / self.router.config.tau
        top = scores.max(axis=-1, keepdims=True)
        total = top + np.log(np.exp(scores - top).sum(axis=-1, keepdims=True))
        return _by_row(scores[..., :-1] - total >= self.bars[top_k - 1], routed)

    def holds(
        self, routed: Float[Tensor, "batch kv_head token dim"], top_k: int, course: Course | None = None
    ) -> KeyMembership:
        found, groups = self.holding(routed), len(self.one)
        scores = found[..., :groups] / self.router.config.tau + self.potential
        is_held = np.ones(scores.shape[:-1], dtype=bool)
        if self.router.worth is not None and top_k < groups:
            is_held = found[..., groups] >= self.key_bars
        if course is not None and self.may_be_full and top_k < groups:
            by_row = _by_row(scores, routed), _by_row(is_held[..., None], routed)[..., 0]
            scores -= fullness(*by_row, self.steepness, course).transpose(0, 1).flatten(1, 2).numpy()
        return _by_row(self.one[scores.argmax(axis=-1)] & is_held[..., None], routed)


class _Networks:
    """The networks of all heads of a side, joined: (batch, head, token, dim) -> (head, batch * token, outputs)."""

    def __init__(self, *joined: HeadNetworks) -> None:
        with torch.no_grad():
            precision = _precision(joined[0].mean)
            inward = [_standardising(side, side.inward, side.inward_bias, precision) for side in joined]
            linear = [_standardising(side, side.linear, side.bias, precision) for side in joined]
            self.width = sum(side.inward.shape[-1] for side in joined)
            self.weight, self.bias = (torch.cat(each, dim=-1) for each in zip(*inward, *linear))
            by_head = zip(*(side.outward.to(precision) for side in joined))
            self.outward = torch.stack([torch.block_diag(*blocks) for blocks in by_head])

    def __call__(self, features: Float[Tensor, "batch head token dim"]) -> np.ndarray:
        of_heads = features.transpose(0, 1).flatten(1, 2).to(self.weight.dtype)
        inward = torch.baddbmm(self.bias, of_heads, self.weight)
        found = torch.baddbmm(inward[..., self.width :], gelu(inward[..., : self.width]), self.outward)
        return np.asarray(found.numpy())


def _standardising(side: HeadNetworks, weight: Tensor, bias: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weight and bias for features as they come."""
    weight, bias, mean, deviation = (each.to(precision) for each in (weight, bias, side.mean, side.deviation))
    return weight / deviation.mT, bias - mean / deviation @ weight


def _by_row(found: np.ndarray, routed: Tensor) -> Shaped[Tensor, "batch head token any"]:
    """(head, batch * token, any) -> (batch, head, token, any)"""
    batch, heads, tokens, _ = routed.shape
    return torch.from_numpy(found.reshape(heads, batch, tokens, -1).swapaxes(0, 1))


def quick_router(router: AnyRouter) -> QuickRouter:
    return NetworkQuickRouter(router) if isinstance(router, NetworkRouter) else CentroidQuickRouter(router)


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _weights(router: AnyRouter) -> list[Tensor]:
    if isinstance(router, Router):
        return [router.projection, router.centroids, router.potential]
    found = [router.thresholds, router.potential, router.bars]
    for side in (router.queries, router.keys, *(() if router.worth is None else (router.worth,))):
        found += [side.linear, side.bias, side.inward, side.inward_bias, side.outward, side.mean, side.deviation]
    return [*found, router.steepness]


def _state(router: AnyRouter) -> list[tuple[int, int]]:
    return [(each.data_ptr(), each._version) for each in _weights(router)]


def may_route_quickly(router: AnyRouter, routed: Tensor) -> bool:
    """On the host, nothing to learn from it, and no balance over the sequence."""
    return (
        routed.device.type == "cpu"
        and not router.training
        and router.config.balance == "causal"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and not router.potential.is_inference()
    )
