"""Even groups: potentials for text like that of the fit, and how much a group loses for being full, for any other.

Potentials make the largest group of any domain as small as can be found: every round counts the groups of each domain
and lowers the potentials of crowded ones, by ever smaller steps; what was best on the way is kept. Text of kinds that
were not fitted crowds groups whatever the potentials are: there, full groups lose score as the text goes on
(fullness.py), in every head by as many deviations of its scores.
"""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from bifocals.network import NetworkRouter
from bifocals.training.capture import LayerCapture
from bifocals.training.mass_loss import held_keys
from bifocals.training.processes import sum_over_processes
from bifocals.training.sequences import Sequences

KEYS_LOOKED_AT = 1 << 15


@torch.no_grad()
def set_steepness(router: NetworkRouter, layer: LayerCapture, text: Sequences) -> None:
    scores = [scores for scores, _ in _scores_by_domain(router, layer, text).values()]
    router.steepness.copy_(text.options.steepness * _deviations(scores))


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
    total = torch.tensor(float(sum(each.shape[1] for each in layer.routed_keys)))
    sum_over_processes(total)
    stride = max(1, int(total) // KEYS_LOOKED_AT)
    found = {}
    for domain in sorted(set(text.domain_of)):
        some = [layer.routed_keys[sequence][:, ::stride] for sequence, of in enumerate(text.domain_of) if of == domain]
        keys = torch.cat(some, dim=1)
        found[domain] = router.key_scores(keys), held_keys(router, keys)
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
