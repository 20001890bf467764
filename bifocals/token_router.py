"""The groups of a single token, as its router would say, in a fraction of the calls.

While decoding, routing is not work but calls: dozens of operators on a handful of numbers, for every layer. Here one
product with the joined weights of both sides gives all that is needed of the token, and the rest is done on the host.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from bifocals.routing import Membership, Router


class TokenRouter:
    """Prepared from the weights of a router as they are; ``is_fresh`` says whether they still are."""

    def __init__(self, router: Router) -> None:
        self.router, self.state = router, _state(router)
        projection, centroids = router.projection.detach(), router.centroids.detach()
        precision = torch.promote_types(projection.dtype, torch.float32)
        projection, centroids = projection.to(precision), centroids.to(precision)
        if router.config.score == "cosine":
            centroids = normalize(centroids, dim=-1)
        scored = projection @ centroids.mT / router.config.tau  # (side, router, hidden, group)
        self.sides, self.routers, _, self.dim = projection.shape
        # Side by side: the scores, and for its length the projected key. The length of a query changes no order.
        columns = [*scored, *([projection[-1]] if router.config.score == "cosine" else [])]
        self.weight = torch.cat([column.transpose(0, 1).flatten(1) for column in columns], dim=1)
        self.potential = router.potential.to(precision).cpu().numpy()
        self.one = np.eye(router.config.groups, dtype=bool)

    def is_fresh(self) -> bool:
        return self.state == _state(self.router)

    def membership(self, hidden: Float[Tensor, "batch 1 hidden"], top_k: int) -> tuple[Membership, Membership]:
        """The groups that the token reads, and those that its key is in."""
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


def _state(router: Router) -> list[tuple[int, int]]:
    return [(each.data_ptr(), each._version) for each in (router.projection, router.centroids, router.potential)]


def may_route_alone(router: object, hidden: Tensor) -> bool:
    """One token, nothing to learn from it, and no balance over the sequence."""
    return (
        isinstance(router, Router)
        and hidden.shape[1] == 1
        and hidden.device.type == "cpu"
        and not router.training
        and router.config.balance == "causal"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not router.projection.is_inference()
    )
