"""Potentials that make groups even: the largest group of any kind of text as small as can be found.

Every round counts the groups of each domain and lowers the potentials of crowded ones, by ever smaller steps; what was
best on the way is kept.
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
def even_groups(router: NetworkRouter, layer: LayerCapture, text: Sequences, rounds: int) -> None:
    """Move the potentials of ``router``, and nothing else."""
    groups = router.config.groups
    found = _scores_by_domain(router, layer, text)
    pace = 0.1 * _deviation([scores for scores, _ in found.values()])
    potential = router.potential.clone()
    best, least = potential.clone(), torch.full_like(potential[:, :1], torch.inf)
    for round_number in range(rounds):
        sizes = torch.zeros(text.domains, *potential.shape, dtype=potential.dtype, device=potential.device)
        for domain, (scores, held) in found.items():
            chosen = one_hot((scores + potential[:, None]).argmax(dim=-1), groups)
            sizes[domain] = (chosen * held[..., None]).sum(dim=1)
        sum_over_processes(sizes)
        sizes = sizes[sizes.sum(dim=(1, 2)) > 0]
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
        keys = [layer.routed_keys[sequence][:, ::stride] for sequence, of in enumerate(text.domain_of) if of == domain]
        together = torch.cat(keys, dim=1)
        found[domain] = router.key_scores(together), held_keys(router, together)
    return found


def _deviation(scores: list[Tensor]) -> float:
    """The standard deviation of all scores of all processes."""
    sums = torch.zeros(3, dtype=torch.double)
    for each in scores:
        wide = each.double()
        sums += torch.stack([torch.tensor(wide.numel()).double(), wide.sum().cpu(), wide.square().sum().cpu()])
    sum_over_processes(sums)
    count, total, squares = sums.tolist()
    return max(squares / count - (total / count) ** 2, 0.0) ** 0.5
