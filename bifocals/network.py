"""Routing by small networks on the base's own queries and keys: each query reads as many groups as it needs.

    x             the query or key of one head, before rotation, standardised: one token
    scores        s = x W + b + gelu(x V + c) U                        weights of their own for each head
    keys          one group for each key-value head: argmax(s + potential - fullness)
                  none if idle: if what they are foretold to be attended to from afar is below a bar
    fullness      steepness max(0, n / fair - 1)                       n_g: how many keys before are in group g
    queries       p = softmax(s), for each query head, over the groups and one class more: near or sink
    membership    a query reads every group with p >= threshold        none, some or all; a layer's own

p_g foretells the share of its attention that the query will spend on the far keys of group g. A query whose attention
stays near reads nothing far, another reads many groups; the thresholds, one for each top_k, are calibrated so that
queries read as many keys on average as top_k even groups of all keys would hold. Many keys are hardly ever attended to
from afar: with those in no group, the others are told apart more finely. Where top_k is all groups, no key is idle.

Potentials make groups even on the text they were found on; on any other, groups that are crowded lose score as it goes
on (fullness.py).
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import gelu

from bifocals.config import FocusConfig
from bifocals.fullness import Course, fullness
from bifocals.routing import Balance, Router, Routing, top_groups, top_margin


@dataclass(frozen=True, slots=True)
class NetworkRouting:
    """What the networks say of a sequence: log p of the queries, balanced scores of the keys."""

    query_scores: Float[Tensor, "batch head length group"]
    key_scores: Float[Tensor, "batch kv_head length group"]  # before any group was full
    thresholds: Float[Tensor, " group"]
    surplus: Float[Tensor, "batch kv_head length"] | None  # of the keys' worth over their bar: idle if negative
    steepness: Float[Tensor, "kv_head 1"]
    course: Course | None

    def settled(self, holds: Bool[Tensor, "batch kv_head some group"]) -> "NetworkRouting":
        """The same, if another run had sorted the first keys: groups are as full as it left them."""
        return self if self.course is None else replace(self, course=replace(self.course, settled=holds))

    def gates(self) -> tuple[Tensor, Tensor]:
        """How much a query reads each group and a key is in it: shares of what is far, so "near" has no gate."""
        of_keys = self.key_scores.softmax(dim=-1)
        if self.surplus is not None:
            of_keys = of_keys * self.surplus.sigmoid()[..., None]
        return self.query_scores.softmax(dim=-1), of_keys

    def sorted_gates(self, top_k: int) -> tuple[Tensor, Tensor]:
        """The same after keys gave way to full groups, for those that are kept."""
        return replace(self, key_scores=self._lowered(top_k)).gates()

    def groups(self, top_k: int) -> tuple[Tensor, Tensor]:
        """The groups that queries read and keys are in."""
        holds, surplus = top_groups(self._lowered(top_k), 1), self._surplus(top_k)
        if surplus is not None:
            holds = holds & (surplus >= 0)[..., None]
        return self.query_scores >= self.thresholds[top_k - 1].log(), holds

    def margins(self, top_k: int) -> tuple[Tensor, Tensor]:
        """By how much, in scores, the decisions were taken: for queries and for keys, (batch, head, length)."""
        from_threshold = self.query_scores.detach() - self.thresholds[top_k - 1].log()
        of_keys, surplus = top_margin(self._lowered(top_k), 1), self._surplus(top_k)
        if surplus is not None:
            from_bar = surplus.detach().abs()
            of_keys = torch.where(surplus >= 0, torch.minimum(of_keys, from_bar), from_bar)
        return from_threshold.abs().amin(dim=-1), of_keys

    def _surplus(self, top_k: int) -> Tensor | None:
        return None if top_k == len(self.thresholds) else self.surplus

    def _lowered(self, top_k: int) -> Tensor:
        """The scores of the keys, lower for full groups; where all groups are read, nobody asks in which a key is."""
        scores = self.key_scores
        if self.course is None or top_k == len(self.thresholds):
            return scores
        surplus = self._surplus(top_k)
        is_held = torch.ones_like(scores[..., 0], dtype=torch.bool) if surplus is None else surplus >= 0
        return scores - fullness(scores.detach(), is_held, self.steepness, self.course)


class HeadNetworks(nn.Module):
    """One network of one hidden layer for each head; standardises what it gets."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, heads: int, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Parameter(torch.randn(heads, inputs, outputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(heads, 1, outputs))
        self.inward = nn.Parameter(torch.randn(heads, inputs, width) / math.sqrt(inputs))
        self.inward_bias = nn.Parameter(torch.zeros(heads, 1, width))
        self.outward = nn.Parameter(torch.randn(heads, width, outputs) * 0.1 / math.sqrt(width))
        self.register_buffer("mean", torch.zeros(heads, 1, inputs))
        self.register_buffer("deviation", torch.ones(heads, 1, inputs))

    def forward(
        self, features: Float[Tensor, "*batch head length inputs"]
    ) -> Float[Tensor, "*batch head length outputs"]:
        """In float32 at least: what comes out decides."""
        precision = torch.promote_types(features.dtype, torch.float32)
        mean, deviation, linear, bias, inward, inward_bias, outward = (
            tensor.to(precision)
            for tensor in (
                self.mean, self.deviation, self.linear, self.bias, self.inward, self.inward_bias, self.outward
            )
        )  # fmt: skip
        x = (features.to(precision) - mean) / deviation
        return x @ linear + bias + gelu(x @ inward + inward_bias) @ outward


class NetworkRouter(Balance):
    """Queries and keys of each head -> scores for each group.

    >>> router = NetworkRouter(heads=4, kv_heads=2, inputs=8, config=FocusConfig.network(groups=4))
    >>> reads, holds = router.membership(torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8))
    >>> reads.shape, holds.shape
    (torch.Size([1, 4, 10, 4]), torch.Size([1, 2, 10, 4]))
    """

    thresholds: Tensor
    bars: Tensor
    steepness: Tensor

    def __init__(self, heads: int, kv_heads: int, inputs: int, config: FocusConfig) -> None:
        super().__init__(kv_heads, config)
        self.queries = HeadNetworks(heads, inputs, config.dim, config.groups + 1)
        self.keys = HeadNetworks(kv_heads, inputs, config.dim, config.groups)
        self.worth = HeadNetworks(kv_heads, inputs, max(1, config.dim // 4), 1) if config.idle > 0 else None
        self.register_buffer("bars", torch.zeros(kv_heads, 1))
        self.register_buffer("steepness", torch.zeros(kv_heads, 1))  # no group is lowered until it is fitted
        # Until they are calibrated: half the groups where p is even, all of them at the end of the dial.
        shares = torch.arange(1, config.groups + 1) / config.groups
        self.register_buffer("thresholds", 2 * (1 - shares) / (config.groups + 1))

    def query_scores(
        self, query: Float[Tensor, "*batch head length dim"]
    ) -> Float[Tensor, "*batch head length classes"]:
        """Of p, the logarithm; "near or sink" is the last class."""
        return (self.queries(query) / self.config.tau).log_softmax(dim=-1)

    def key_scores(
        self, key: Float[Tensor, "*batch kv_head length dim"]
    ) -> Float[Tensor, "*batch kv_head length group"]:
        """Before the potentials."""
        return self.keys(key) / self.config.tau

    def surplus(self, key: Float[Tensor, "*batch kv_head length dim"]) -> Float[Tensor, "*batch kv_head length"] | None:
        """How much more a key is worth than its bar; None where no key is ever idle."""
        if self.worth is None:
            return None
        worth = self.worth(key)[..., 0]
        return worth - self.bars.to(worth.dtype)

    def forward(
        self,
        query: Float[Tensor, "batch head length dim"],
        key: Float[Tensor, "batch kv_head length dim"],
        course: Course | None = None,
        is_real: Bool[Tensor, "batch length"] | None = None,
    ) -> NetworkRouting:
        """Scores of both sides; without a ``course`` no group is ever full. No balance counts what is not real."""
        key_scores = self.key_scores(key)
        weights = None if is_real is None else is_real[:, None].to(key_scores.dtype)
        return NetworkRouting(
            self.query_scores(query)[..., :-1],
            self.balanced(key_scores, weights),
            self.thresholds.to(key_scores.dtype),
            self.surplus(key),
            self.steepness.to(key_scores.dtype),
            course,
        )

    def membership(
        self, query: Tensor, key: Tensor, course: Course | None = None, *, top_k: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The hard groups of queries and keys."""
        return self(query, key, course).groups(self.config.top_k if top_k is None else top_k)


AnyRouter = Router | NetworkRouter
AnyRouting = Routing | NetworkRouting
