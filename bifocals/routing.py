"""Routing (Focus, arXiv 2604.03260): learned centroids sort tokens into groups.

    scores        s_ig = cos(h_i W, c_g) / tau                  the paper: (h_i W) . c_g / tau, one W for both sides
    gates         queries softmax(s),  keys softmax(s + b)      b_g: a potential that equalises the groups
    membership    the top-k groups of a query; the one group of a key

Sinkhorn, as printed, equalises the groups over the sequence at hand: a token's group then depends on
the tokens after it. Its fixed point is softmax(s + b) with one number b_g per group. So we keep b,
estimated from past steps and frozen afterwards: a token's groups depend on that token alone, and
decoding equals prefill.

Forward is pure: it only collects statistics. ``step_balance`` moves the potentials, once per optimizer step.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from bifocals.config import FocusConfig

Scores = Float[Tensor, "batch router length group"]
Membership = Bool[Tensor, "batch router length group"]


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router says of a sequence: balanced scores, whose softmax are the gates and whose best are the groups."""

    query_scores: Scores
    key_scores: Scores
    is_shared: bool = False  # queries and keys are in the same groups

    def settled(self, holds: Membership) -> "Routing":
        """The same, if another run had sorted the first keys: here no key depends on others."""
        return self

    def gates(self) -> tuple[Tensor, Tensor]:
        """How much a query reads each group and a key is in it."""
        return self.query_scores.softmax(dim=-1), self.key_scores.softmax(dim=-1)

    def sorted_gates(self, top_k: int) -> tuple[Tensor, Tensor]:
        """The same: here no key gives way."""
        return self.gates()

    def groups(self, top_k: int) -> tuple[Tensor, Tensor]:
        """The groups that queries read and keys are in."""
        of_queries = top_groups(self.query_scores, top_k)
        return of_queries, of_queries if self.is_shared else top_groups(self.key_scores, 1)

    def margins(self, top_k: int) -> tuple[Tensor, Tensor]:
        """By how much, in scores, the decisions were taken: for queries and for keys, (batch, router, length)."""
        return top_margin(self.query_scores, top_k), top_margin(self.key_scores, top_k if self.is_shared else 1)


class Balance(nn.Module):
    """The potentials that keep groups equally full, moved once per optimizer step by what past batches asked for."""

    potential: Tensor
    dual_sum: Tensor
    dual_count: Tensor

    def __init__(self, routers: int, config: FocusConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("potential", torch.zeros(routers, config.groups))
        self.register_buffer("dual_sum", torch.zeros(routers, config.groups), persistent=False)
        self.register_buffer("dual_count", torch.zeros(()), persistent=False)

    def balanced(self, key_scores: Scores, weights: Float[Tensor, "batch 1 length"] | None) -> Scores:
        """Scores plus potentials. The statistics are taken first but change nothing yet: forward is pure."""
        if self.training and key_scores.numel() > 0:
            self.observe(key_scores, weights)
        return key_scores + self.potential[:, None, :].to(key_scores.dtype)

    @torch.no_grad()
    def observe(self, key_scores: Scores, weights: Float[Tensor, "batch 1 length"] | None = None) -> None:
        """Collect the potentials that would balance each sequence: how they are batched does not change their mean."""
        duals = sinkhorn_potentials(key_scores.detach(), self.config.rounds, weights)  # (batch, router, group)
        self.dual_sum += duals.sum(dim=0).to(self.dual_sum.dtype)
        self.dual_count += len(duals)

    @torch.no_grad()
    def step_balance(self) -> None:
        """Move the potentials towards what the batches of this step asked for, over all processes; then forget them."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.dual_sum)
            torch.distributed.all_reduce(self.dual_count)
        if self.dual_count > 0:
            self.potential.lerp_((self.dual_sum / self.dual_count).to(self.potential.dtype), 1 - self.config.momentum)
        self.dual_sum.zero_()
        self.dual_count.zero_()


class Router(Balance):
    """Hidden states -> scores of each token for each group; one set of groups for the layer or each key-value head.

    >>> router = Router(hidden_size=32, routers=2, config=FocusConfig(groups=4))
    >>> router.membership(torch.randn(1, 10, 32))[0].shape
    torch.Size([1, 2, 10, 4])
    """

    def __init__(self, hidden_size: int, routers: int, config: FocusConfig, *, is_causal: bool = True) -> None:
        super().__init__(routers, config)
        if config.balance == "sinkhorn" and is_causal and not config.allow_look_ahead:
            raise ValueError(
                "Sinkhorn over the sequence makes a token's group depend on later tokens: expected balance='causal' "
                "for a decoder, got 'sinkhorn'. Pass allow_look_ahead=True to measure the leak."
            )
        sides = 1 if config.sides == "same" else 2
        self.projection = nn.Parameter(torch.randn(sides, routers, hidden_size, config.dim) / math.sqrt(hidden_size))
        self.centroids = nn.Parameter(torch.randn(routers, config.groups, config.dim))

    def scores(self, hidden: Float[Tensor, "batch length hidden"], side: int) -> Scores:
        """Unbalanced scores of one side (0: queries, -1: keys)."""
        return self._scores(hidden, self.projection[side, None])[:, 0]

    def _scores(
        self, hidden: Float[Tensor, "batch length hidden"], sides: Float[Tensor, "side router hidden dim"]
    ) -> Float[Tensor, "batch side router length group"]:
        """In float32 at least: top-k is a decision. Both sides at once: a single token costs by the call."""
        precision = torch.promote_types(hidden.dtype, torch.float32)
        tokens = hidden.to(precision)[:, None] @ sides.to(precision).flatten(0, 1)  # (batch, side * router, ...)
        centroids = self.centroids.to(precision)
        if self.config.score == "cosine":
            tokens, centroids = normalize(tokens, dim=-1), normalize(centroids, dim=-1)
        return tokens.unflatten(1, sides.shape[:2]) @ centroids.mT / self.config.tau

    def forward(
        self, hidden: Float[Tensor, "batch length hidden"], is_real: Bool[Tensor, "batch length"] | None = None
    ) -> Routing:
        """Balanced scores of both sides; ``is_real`` is False at padding, which no balance counts."""
        scores = self._scores(hidden, self.projection)
        query_scores, key_scores = scores[:, 0], scores[:, -1]
        weights = None if is_real is None else is_real[:, None].to(key_scores.dtype)
        if self.config.balance == "sinkhorn":
            key_scores = key_scores + sinkhorn_potentials(key_scores, self.config.rounds, weights)[..., None, :]
        else:
            key_scores = self.balanced(key_scores, weights)
        is_shared = self.config.sides == "same"
        return Routing(key_scores if is_shared else query_scores, key_scores, is_shared)

    def membership(
        self, hidden: Float[Tensor, "batch length hidden"], top_k: int | None = None
    ) -> tuple[Membership, Membership]:
        """The hard groups of queries and keys."""
        return self(hidden).groups(self.config.top_k if top_k is None else top_k)


def top_groups(scores: Scores, top_k: int) -> Membership:
    """True at the ``top_k`` best groups of each token."""
    best = scores.topk(top_k, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def top_margin(scores: Scores, top_k: int) -> Float[Tensor, "batch router length"]:
    """By how much the last group chosen beats the first one not chosen."""
    if top_k == scores.shape[-1]:
        return torch.full_like(scores[..., 0], torch.inf)
    ordered = scores.detach().sort(dim=-1, descending=True).values
    return ordered[..., top_k - 1] - ordered[..., top_k]


def sinkhorn_potentials(
    scores: Float[Tensor, "*batch token group"], rounds: int, weights: Float[Tensor, "*#batch token"] | None = None
) -> Float[Tensor, "*batch group"]:
    """The b for which softmax(scores + b) fills all groups equally: Sinkhorn, written by its potentials.

    ``weights`` are 0 at tokens that do not count.
    """
    # A token that does not count has log-weight -inf; where no token counts, all of them do, and b is harmless.
    counted = torch.zeros_like(scores[..., :1])
    if weights is not None:
        scores = torch.where(weights[..., None] > 0, scores, 0.0)  # padding may hold anything
        counted = torch.where(weights.sum(-1, keepdim=True) > 0, weights, 1.0).log()[..., None]
    of_tokens = torch.zeros_like(counted)
    potential = scores.new_zeros(*scores.shape[:-2], scores.shape[-1])
    for _ in range(rounds):
        potential = -(scores + of_tokens + counted).logsumexp(dim=-2)
        of_tokens = -(scores + potential[..., None, :]).logsumexp(dim=-1, keepdim=True)
    return potential - potential.mean(dim=-1, keepdim=True)


def dominance(membership: Membership, is_real: Bool[Tensor, "batch length"] | None = None) -> Float[Tensor, " router"]:
    """The largest group's share of all places in groups; 1 / groups is perfect balance."""
    return _shares(membership, is_real).amax(dim=-1)


def entropy(membership: Membership, is_real: Bool[Tensor, "batch length"] | None = None) -> Float[Tensor, " router"]:
    """Entropy of the group sizes over that of equal groups: 1 is perfect balance, 0 is collapse."""
    shares = _shares(membership, is_real)
    return torch.special.entr(shares).sum(dim=-1) / math.log(max(shares.shape[-1], 2))


def _shares(membership: Membership, is_real: Bool[Tensor, "batch length"] | None) -> Float[Tensor, "router group"]:
    counted = membership if is_real is None else membership & is_real[:, None, :, None]
    sizes = counted.sum(dim=(0, 2)).double()
    return sizes / sizes.sum(dim=-1, keepdim=True).clamp(min=1)
