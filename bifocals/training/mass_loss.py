"""The losses of the mass objective: what one sequence teaches the router of one layer.

A_ij    the base's attention;  far_i: the keys neither near nor sinks;  M_i = sum of A_ij over far_i
P_ig    = sum over far_i of A_ij gk_jg                what query i spends on group g;  gk: the keys' gates, 0 if idle

networks     - sum_g P_ig log p_ig - (1 - sum_g P_ig) log p_i,near      cross-entropy: p foretells P
centroids    M_i (log cover_i - log(sum_g P_ig gq_ig / M_i)),   cover_i = gq_i . mean_j gk_j
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, relu

from bifocals.fullness import Course, fullness
from bifocals.network import NetworkRouter
from bifocals.routing import Router, sinkhorn_potentials, top_groups

SHARP, SHARP_STRICT = 4.0, 3.0
UNEVEN, CROWDED, CROWD = 0.3, 5.0, 1.1  # weights of uneven shares and of those above CROWD times the fair share


@dataclass(frozen=True, slots=True)
class Update:
    """The loss of one sequence, and what is reported of it."""

    loss: Tensor
    scores: Tensor  # of queries for groups, (head, row, group)
    mass: Tensor  # what they spend on them
    far_mass: Tensor  # what they spend on all far keys
    shares: Tensor | None  # hard group sizes over the fair size, (kv_head, group)
    duals: Tensor | None  # the potentials that this sequence asks for, where they are averaged


def network_update(
    router: NetworkRouter,
    rows: Tensor,
    keys: Tensor,
    attention: Tensor,
    course: Course | None = None,
    *,
    is_hard: bool,
    is_strict: bool,
) -> Update:
    """Cross-entropy between what queries foretell and what they spend, plus what makes groups uneven.

    ``is_hard``: a key counts for its one group, with the gradient of its gates. ``is_strict``: no group may be crowded,
    not even if none were ever full, so that few keys have to give way.
    """
    scores = balanced_scores(router, keys)  # (kv_head, key, group)
    groups = scores.shape[-1]
    gates = scores.softmax(dim=-1)
    is_held = held_keys(router, keys)
    hard = one_hot(_lowered(router, scores, is_held, course).argmax(dim=-1), groups).to(gates.dtype)
    held = is_held[..., None].to(gates.dtype)
    mass = by_group(attention, held * (hard + gates - gates.detach() if is_hard else gates))
    foretold = router.query_scores(rows)
    entropy = -((mass * foretold[..., :-1]).sum(dim=-1) + (1 - mass.sum(dim=-1)) * foretold[..., -1]).mean()
    # Sharper gates than the keys' own: what is to be even is the hard groups.
    weight = held * (groups / held.sum(dim=1, keepdim=True).clamp(min=1))
    shares = (((SHARP_STRICT if is_strict else SHARP) * scores).softmax(dim=-1) * weight).sum(dim=1)
    uneven = UNEVEN * (shares - 1).square().mean()
    if is_strict:
        uneven = uneven + CROWDED * relu(shares - CROWD).square().sum(dim=-1).mean()
    far_mass = attention.sum(dtype=gates.dtype)
    return Update(
        entropy + uneven, foretold[..., :-1].detach(), mass.detach(), far_mass, (hard * weight).sum(dim=1), None
    )


def query_update(router: NetworkRouter, rows: Tensor, mass: Tensor) -> Update:
    """Cross-entropy with the mass in the final groups, then on idle keys and, last, near; it foretells both as near."""
    foretold, kept = router.query_scores(rows), mass[..., :-2]
    loss = -((kept * foretold[..., :-1]).sum(dim=-1) + mass[..., -2:].sum(dim=-1) * foretold[..., -1]).mean()
    return Update(loss, foretold[..., :-1].detach(), kept, mass[..., :-1].sum(), None, None)


def centroid_update(router: Router, rows: Tensor, keys: Tensor, attention: Tensor) -> Update:
    """Far mass kept against far pairs covered, in logarithms; every group full by Sinkhorn."""
    scores = router.scores(keys[None], -1)[0]  # (router, key, group)
    groups = scores.shape[-1]
    duals = sinkhorn_potentials(scores, router.config.rounds)
    gates = (scores + duals[:, None]).softmax(dim=-1)
    query_scores = router.scores(rows[None], 0)[0]
    read = query_scores.softmax(dim=-1)
    of_head = attention.to(gates.dtype).unflatten(0, (scores.shape[0], -1)).mean(dim=1)  # (router, row, key)
    mass = of_head @ gates
    far_mass = of_head.sum(dim=-1)
    tiny = torch.finfo(gates.dtype).tiny
    kept = (mass * read).sum(dim=-1) / far_mass.clamp(min=tiny)
    cover = (read * gates.mean(dim=1, keepdim=True)).sum(dim=-1)
    loss = (far_mass * (cover.clamp(min=tiny).log() - kept.clamp(min=tiny).log())).mean()
    with torch.no_grad():
        hard = one_hot((scores + router.potential[:, None]).argmax(dim=-1), groups).to(gates.dtype)
    return Update(
        loss,
        query_scores.detach(),
        (of_head @ hard).detach(),
        far_mass.sum(),
        hard.mean(dim=1) * groups,
        duals.detach(),
    )


def balanced_scores(router: NetworkRouter, keys: Tensor) -> Tensor:
    scores = router.key_scores(keys)
    return scores + router.potential[:, None].to(scores.dtype)


@torch.no_grad()
def hard_groups(router: NetworkRouter, keys: Tensor, course: Course | None) -> Tensor:
    """Which group each key is in, if any: (kv_head, key, group)."""
    is_held = held_keys(router, keys)
    scores = _lowered(router, balanced_scores(router, keys), is_held, course)
    return top_groups(scores[None], 1)[0] & is_held[..., None]


def _lowered(router: NetworkRouter, scores: Tensor, is_held: Tensor, course: Course | None) -> Tensor:
    """Of one sequence, (kv_head, key, group)."""
    if course is None or not router.steepness.any():
        return scores
    return scores - fullness(scores.detach()[None], is_held[None], router.steepness.to(scores.dtype), course)[0]


@torch.no_grad()
def held_keys(router: NetworkRouter, keys: Tensor) -> Tensor:
    """Which keys are not idle, (kv_head, key)."""
    surplus = router.surplus(keys)
    return torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device) if surplus is None else surplus >= 0


def by_group(attention: Tensor, gates: Tensor) -> Tensor:
    """Attention (head, row, key) summed by the groups of its keys (kv_head, key, group): (head, row, group)."""
    gates = gates.to(torch.promote_types(gates.dtype, torch.float32))
    heads, count, length = attention.shape
    return (attention.to(gates.dtype).reshape(gates.shape[0], -1, length) @ gates).view(heads, count, -1)
