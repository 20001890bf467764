"""The groups of a single token, as its router would say, in a fraction of the calls.

While decoding, routing is not work but calls: dozens of operators on a handful of numbers, for every layer. Here a
product or two with the joined weights of both sides give all that is needed of the token, and the rest is done on the
host.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu, normalize, pad

from bifocals.network import AnyRouter, NetworkRouter
from bifocals.routing import Membership, Router


class TokenRouter:
    """Prepared from the weights of a router as they are; ``is_fresh`` says whether they still are."""

    def __init__(self, router: AnyRouter) -> None:
        self.router, self.state = router, _state(router)
        self.one = np.eye(router.config.groups, dtype=bool)

    def is_fresh(self) -> bool:
        return self.state == _state(self.router)

    def membership(self, *routed: Tensor, top_k: int) -> tuple[Membership, Membership]:
        """The groups that the token reads, and those that its key is in."""
        raise NotImplementedError


class CentroidTokenRouter(TokenRouter):
    """One product with the joined weights of both sides."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        projection, centroids = router.projection.detach(), router.centroids.detach()
        precision = _precision(projection)
        projection, centroids = projection.to(precision), centroids.to(precision)
        if router.config.score == "cosine":
            centroids = normalize(centroids, dim=-1)
        scored = projection @ centroids.mT / router.config.tau  # (side, router, hidden, group)
        self.sides, self.routers, _, self.dim = projection.shape
        # Side by side: the scores, and for its length the projected key. The length of a query changes no order.
        columns = [*scored, *([projection[-1]] if router.config.score == "cosine" else [])]
        self.weight = torch.cat([column.transpose(0, 1).flatten(1) for column in columns], dim=1)
        self.potential = router.potential.to(precision).cpu().numpy()

    def membership(self, *routed: Float[Tensor, "batch 1 hidden"], top_k: int) -> tuple[Membership, Membership]:
        (hidden,) = routed
        found = (hidden.to(self.weight.dtype) @ self.weight).numpy()[:, 0]
        width = self.routers * len(self.one)
        of_keys = found[:, (self.sides - 1) * width : self.sides * width].reshape(-1, self.routers, len(self.one))
        if self.router.config.score == "cosine":
            token = found[:, self.sides * width :].reshape(-1, self.routers, self.dim)
            of_keys = of_keys / np.maximum(np.sqrt((token * token).sum(axis=-1, keepdims=True)), 1e-12)
        of_keys = of_keys + self.potential
        if self.sides == 1:
            reads = holds = self._best(of_keys, top_k)
        else:
            reads = self._best(found[:, :width].reshape(-1, self.routers, len(self.one)), top_k)
            holds = self._best(of_keys, 1)
        return torch.from_numpy(reads[:, :, None]), torch.from_numpy(holds[:, :, None])

    def _best(self, scores: np.ndarray, count: int) -> np.ndarray:
        if count == 1:
            return self.one[scores.argmax(axis=-1)]
        best = np.argpartition(scores, -count, axis=-1)[..., -count:]
        return np.asarray(self.one[best].any(axis=-2))


class NetworkTokenRouter(TokenRouter):
    """The networks of all heads of both sides in two products, standardised by their weights."""

    def __init__(self, router: NetworkRouter) -> None:
        super().__init__(router)
        sides = router.queries, router.keys
        self.heads, self.width, classes = router.queries.linear.shape[0], router.config.dim, router.config.groups + 1
        with torch.no_grad():
            inward, outward = [], []
            for side in sides:
                missing = classes - side.linear.shape[-1]  # keys have no class "near"
                weight = torch.cat([side.inward, pad(side.linear, (0, missing))], dim=-1).to(_precision(side.mean))
                bias = torch.cat([side.inward_bias, pad(side.bias, (0, missing))], dim=-1).to(weight.dtype)
                inward.append((weight / side.deviation.mT, bias - side.mean / side.deviation @ weight))
                outward.append(pad(side.outward, (0, missing)).to(weight.dtype))
            self.weight, self.bias = (torch.cat(both) for both in zip(*inward))
            self.outward = torch.cat(outward)
            self.bars = router.thresholds.to(self.weight.dtype).log().tolist()
            self.potential = router.potential.to(self.weight.dtype).numpy()[:, None]

    def membership(self, *routed: Float[Tensor, "batch head 1 dim"], top_k: int) -> tuple[Membership, Membership]:
        features = torch.cat(routed, dim=1)[:, :, 0].transpose(0, 1).to(self.weight.dtype)  # (head, batch, dim)
        inward = torch.baddbmm(self.bias, features, self.weight)
        found = torch.baddbmm(inward[..., self.width :], gelu(inward[..., : self.width]), self.outward)
        scores = found.numpy() / self.router.config.tau
        of_queries, of_keys = scores[: self.heads], scores[self.heads :, :, :-1] + self.potential
        top = of_queries.max(axis=-1, keepdims=True)
        total = top + np.log(np.exp(of_queries - top).sum(axis=-1, keepdims=True))
        reads = of_queries[..., :-1] - total >= self.bars[top_k - 1]
        holds = self.one[of_keys.argmax(axis=-1)]
        return _by_row(reads), _by_row(holds)


def _by_row(member: np.ndarray) -> Membership:
    """(head, batch, group) -> (batch, head, token, group)"""
    return torch.from_numpy(member.swapaxes(0, 1)[:, :, None])


def token_router(router: AnyRouter) -> TokenRouter:
    return NetworkTokenRouter(router) if isinstance(router, NetworkRouter) else CentroidTokenRouter(router)


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _state(router: AnyRouter) -> list[tuple[int, int]]:
    if isinstance(router, Router):
        held = [router.projection, router.centroids, router.potential]
    else:
        held = [router.thresholds, router.potential]
        for side in (router.queries, router.keys):
            held += [side.linear, side.bias, side.inward, side.inward_bias, side.outward, side.mean, side.deviation]
    return [(each.data_ptr(), each._version) for each in held]


def may_route_alone(router: AnyRouter, routed: Tensor) -> bool:
    """One token, nothing to learn from it, and no balance over the sequence."""
    return (
        routed.shape[-2] == 1
        and routed.device.type == "cpu"
        and not router.training
        and router.config.balance == "causal"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not router.potential.is_inference()
    )
