"""Even groups, also on text of other kinds: potentials, and a jitter of the keys.

Potentials make the largest group of any domain as small as can be found: every round counts the groups of each domain
and lowers the potentials of crowded ones, by ever smaller steps; what was best on the way is kept.

Jitter is there for text of kinds that were not fitted, for which no potential can be found. So every head has some, and
more where that is cheap: as long as the keys that it moves to other groups are foretold to get no more than a given
share of the far attention. Heads that single sequences still crowd get more of it, whatever it costs: those of a first
layer, where a token always has the same key, and a text that repeats it would fill one group.

    crowding    (mean over sequences of (the largest group / its fair share)^4)^(1/4)       of one head
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bifocals.network import NetworkRouter
from bifocals.training.capture import LayerCapture
from bifocals.training.mass_loss import hard_groups, held_keys
from bifocals.training.processes import sum_over_processes
from bifocals.training.sequences import Sequences

KEYS_LOOKED_AT = 1 << 15
POWER = 4  # between the mean of the sequences and the worst of them
STRENGTHS = 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 13.0, 16.0  # of jitter, in standard deviations of a head's scores
EVEN = 1.2  # crowding up to which a head needs no more than is cheap


@torch.no_grad()
def stir_groups(router: NetworkRouter, layer: LayerCapture, text: Sequences, rounds: int) -> None:
    """Set the strength of the jitter of ``router``, and its potentials."""
    router.jitter.strength.zero_()
    even_groups(router, layer, text, rounds)
    if text.options.stir == 0:
        return
    deviations = _deviations([scores for scores, _ in _scores_by_domain(router, layer, text).values()])
    is_cheap = _moved(router, layer, text, deviations) <= text.options.stir
    levels = (is_cheap.sum(dim=0) - 1).clamp(min=0)
    while True:
        router.jitter.strength.copy_(torch.tensor(STRENGTHS)[levels][:, None].to(deviations) * deviations)
        even_groups(router, layer, text, rounds)
        needs_more = (_crowding(router, layer) > EVEN) & (levels < len(STRENGTHS) - 1)
        if not needs_more.any():
            return
        levels = levels + needs_more.long()


def _moved(router: NetworkRouter, layer: LayerCapture, text: Sequences, deviations: Tensor) -> Tensor:
    """The share of the far attention foretold whose keys each strength moves to other groups: (strength, kv_head)."""
    sums = torch.zeros(1 + len(STRENGTHS), len(deviations), dtype=torch.double)  # of all, and of those moved
    found = _scores_by_domain(router, layer, text)
    router.jitter.strength.copy_(deviations)
    for (keys, place), (scores, held) in zip(_keys_by_domain(layer, text).values(), found.values()):
        surplus, stirred = router.surplus(keys), router.key_scores(keys, place)
        attention = held.double() if surplus is None else held * surplus.double().exp()
        balanced, waves = scores + router.potential[:, None].to(scores.dtype), stirred - scores
        groups = balanced.argmax(dim=-1)
        moved = [(balanced + strength * waves).argmax(dim=-1) != groups for strength in STRENGTHS]
        sums += torch.stack([attention.sum(dim=1), *((attention * each).sum(dim=1) for each in moved)]).cpu()
    sum_over_processes(sums)
    return sums[1:] / sums[0].clamp(min=torch.finfo(sums.dtype).tiny)


def _crowding(router: NetworkRouter, layer: LayerCapture) -> Tensor:
    """Of each head, (kv_head,)."""
    total = torch.zeros(len(router.potential) + 1, dtype=torch.double)
    for keys in layer.routed_keys:
        sizes = hard_groups(router, keys).sum(dim=1).double()  # (kv_head, group)
        largest = sizes.amax(dim=-1) / sizes.sum(dim=-1).clamp(min=1) * router.config.groups
        total[:-1] += largest.pow(POWER).cpu()
        total[-1] += 1
    sum_over_processes(total)
    return (total[:-1] / total[-1]).pow(1 / POWER)


@torch.no_grad()
def even_groups(router: NetworkRouter, layer: LayerCapture, text: Sequences, rounds: int) -> None:
    """Move the potentials of ``router``, and nothing else."""
    groups = router.config.groups
    found = _scores_by_domain(router, layer, text)
    pace = 0.1 * _deviations([scores for scores, _ in found.values()])
    potential = router.potential.clone()
    best, least = potential.clone(), torch.full_like(potential[:, :1], torch.inf)
    for round_number in range(rounds):
        sizes = torch.zeros(text.domains, *potential.shape, dtype=potential.dtype, device=potential.device)
        for domain, (scores, held) in found.items():
            chosen = one_hot((scores + potential[:, None]).argmax(dim=-1), groups)
            sizes[domain] = (chosen * held[..., None]).sum(dim=1)
        sum_over_processes(sizes)
        sizes = sizes[sizes.sum(dim=(1, 2)) > 0]
        if len(sizes) == 0:
            raise ValueError("The fit diverged: expected keys worth something, got none. Lower the rate.")
        shares = sizes / sizes.sum(dim=-1, keepdim=True).clamp(min=1) * groups
        largest = shares.amax(dim=(0, 2))[:, None]
        best, least = torch.where(largest < least, potential, best), torch.minimum(largest, least)
        crowding = shares.pow(4).mean(dim=0).pow(0.25)
        step = (crowding - crowding.mean(dim=-1, keepdim=True)).clamp(-1, 1.5)
        potential = potential - pace * step * 0.99**round_number
    router.potential.copy_(best)


def _scores_by_domain(router: NetworkRouter, layer: LayerCapture, text: Sequences) -> dict[int, tuple[Tensor, Tensor]]:
    """Of some keys of each domain that this process has; and which of them are not idle."""
    return {
        domain: (router.key_scores(keys, place), held_keys(router, keys))
        for domain, (keys, place) in _keys_by_domain(layer, text).items()
    }


def _keys_by_domain(layer: LayerCapture, text: Sequences) -> dict[int, tuple[Tensor, Tensor]]:
    """Some keys, (kv_head, key, dim), and their places, (key, 1)."""
    total = torch.tensor(float(sum(each.shape[1] for each in layer.routed_keys)))
    sum_over_processes(total)
    stride = max(1, int(total) // KEYS_LOOKED_AT)
    found = {}
    for domain in sorted(set(text.domain_of)):
        keys = [layer.routed_keys[sequence][:, ::stride] for sequence, of in enumerate(text.domain_of) if of == domain]
        places = [torch.arange(some.shape[1], device=some.device)[:, None] * stride for some in keys]
        found[domain] = torch.cat(keys, dim=1), torch.cat(places)
    return found


def _deviations(scores: list[Tensor]) -> Tensor:
    """The standard deviation of the scores of all processes, of each head: (kv_head, 1)."""
    sums = torch.zeros(3, len(scores[0]), dtype=torch.double)  # of ones, scores and squares
    for each in scores:
        wide = each.double().flatten(1).cpu()
        sums += torch.stack([torch.ones_like(wide).sum(dim=1), wide.sum(dim=1), wide.square().sum(dim=1)])
    sum_over_processes(sums)
    count, total, squares = sums
    return (squares / count - (total / count).square()).clamp(min=0).sqrt()[:, None].to(scores[0])
