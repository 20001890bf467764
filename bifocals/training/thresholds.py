"""One threshold for each top_k, over all layers, at which queries read top_k / groups of their far keys on average.

A far key is read iff p, what its query foretells for its group, times the stake of the layer (stakes.py) reaches the
threshold. So the share of far keys read at any threshold is the upper end of a histogram of log (p stake), in which
every far key counts once; idle ones are read where all groups are, and else never. Domains count the same.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from bifocals.network import NetworkRouter
from bifocals.training.capture import LayerCapture
from bifocals.training.mass_loss import hard_groups
from bifocals.training.processes import sum_over_processes
from bifocals.training.sequences import Sequences

BINS, LOWEST = 1 << 14, -40.0  # of the histogram of log p


@torch.no_grad()
def calibrate_thresholds(
    networks: dict[str, NetworkRouter],
    captured: dict[str, LayerCapture],
    text: Sequences,
    stakes: dict[str, float] | None = None,
) -> None:
    """Set the thresholds of all ``networks`` to those that ``text`` asks for; stakes are 1 at most, and by default."""
    stakes = dict.fromkeys(networks, 1.0) if stakes is None else stakes
    histogram = torch.zeros(text.domains, BINS + 1, dtype=torch.double)  # the last bin: all far keys
    for name, router in networks.items():
        for sequence, domain in enumerate(text.domain_of):
            bins, counts = _far_keys_by_score(router, captured[name], text, sequence, math.log(stakes[name]))
            histogram[domain].index_add_(0, bins, counts)
    sum_over_processes(histogram)
    histogram, total = histogram[:, :-1], histogram[:, -1:]
    mean = (histogram.cumsum(dim=1) / total.clamp(min=1))[total[:, 0] > 0].mean(dim=0)
    thresholds, groups = [], text.focus.groups
    for top_k in range(1, groups + 1):
        below = int((mean <= text.options.budget * top_k / groups).sum())
        thresholds.append(0.0 if top_k == groups else float(torch.tensor(below * LOWEST / BINS).exp()))
    for name, router in networks.items():
        router.thresholds.copy_(torch.tensor(thresholds) / stakes[name])


def _far_keys_by_score(
    router: NetworkRouter, layer: LayerCapture, text: Sequences, sequence: int, log_stake: float
) -> tuple[Tensor, Tensor]:
    """For every row and group: the bin of its score, and how many far keys the group holds. Last, all far keys."""
    scores = (router.query_scores(layer.routed_rows[sequence])[..., :-1] + log_stake).clamp(min=LOWEST)
    holds = hard_groups(router, layer.routed_keys[sequence], layer.course(sequence))
    far = text.far(layer, sequence, holds.device)
    counts = (far.float() @ holds.float()).repeat_interleave(scores.shape[0] // holds.shape[0], dim=0)
    bins = pad(((scores / LOWEST) * (BINS - 1)).long().flatten(), (0, 1), value=BINS)
    counts = torch.cat([counts.flatten().double(), far.sum()[None].double() * scores.shape[0]])
    return bins.cpu(), counts.cpu()
