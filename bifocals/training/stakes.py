"""What is at stake in each layer: how much the predictions suffer for the far attention that it does not read.

    D        KL(base || lens) of the next tokens, every layer reading top_k 1
    gain_l   the share of D that is gone if layer l reads top_k 2                mean over sequences, 0 if negative
    mass_l   the far attention that it foretells to read by that
    stake_l  (gain_l / mean gain + 1) / (mass_l / mean mass + 1)                 the ones: small gains are mostly noise

A group is read if its share of the attention, times the stake of the layer, reaches the threshold: then the last pair
that is read buys as much in every layer.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bifocals.lens import Lens, evaluating
from bifocals.network import NetworkRouter
from bifocals.training.capture import LayerCapture
from bifocals.training.distill import divergence, log_probabilities
from bifocals.training.processes import most_of_processes, sum_over_processes
from bifocals.training.sequences import Sequences


@torch.no_grad()
def weigh_layers(
    lens: Lens,
    networks: dict[str, NetworkRouter],
    captured: dict[str, LayerCapture],
    text: Sequences,
    seen: Callable[[str], None],
    save: Callable[[int, Tensor], None],
    turn: int = 0,
    gains: Tensor | None = None,
) -> dict[str, float]:
    """The stake of each layer, over the greatest; needs calibrated thresholds. Calls ``seen`` after each of them.

    In each turn every process takes a sequence, if it has one left. Goes on from a ``turn`` and the ``gains`` up to it,
    which ``save`` got.
    """
    gains = torch.zeros(len(networks), dtype=torch.double) if gains is None else gains
    sequences = text.first_of_domains(text.options.weigh)
    before = lens.mode, lens.top_k
    lens.mode, lens.top_k = "hard", 1
    try:
        with evaluating(lens.model):
            for number in range(turn, most_of_processes(len(sequences))):
                save(number, gains)
                new = torch.zeros_like(gains)
                if number < len(sequences):
                    new += _gains(lens, networks, text.blocks[sequences[number]], seen)
                sum_over_processes(new)
                gains = gains + new
    finally:
        lens.mode, lens.top_k = before
    masses = torch.stack([_mass(router, captured[name]) for name, router in networks.items()])
    sum_over_processes(masses)
    stakes = _smoothed(gains.clamp(min=0)) / _smoothed(masses)
    return dict(zip(networks, (stakes / stakes.max()).tolist()))


def stakes_of(networks: dict[str, NetworkRouter]) -> dict[str, float]:
    """As thresholds were set by them: the lower, the more is at stake; all the same while none were."""
    lowest = min(float(router.thresholds[0]) for router in networks.values())
    return {name: lowest / float(router.thresholds[0]) for name, router in networks.items()}


def _gains(lens: Lens, networks: dict[str, NetworkRouter], block: Tensor, seen: Callable[[str], None]) -> Tensor:
    tokens = block[None].to(next(lens.model.parameters()).device)
    with lens.disabled() as base:
        wanted = log_probabilities(base, tokens)
    without, gains = divergence(wanted, log_probabilities(lens.model, tokens)), []
    for name, router in networks.items():
        threshold = router.thresholds[0].clone()
        router.thresholds[0] = router.thresholds[1]
        try:
            gains.append(without - divergence(wanted, log_probabilities(lens.model, tokens)))
        finally:
            router.thresholds[0] = threshold
        seen(name)
    tiny = torch.finfo(without.dtype).tiny
    return (torch.stack(gains) / without.clamp(min=tiny)).double().cpu()


def _mass(router: NetworkRouter, layer: LayerCapture) -> Tensor:
    total = torch.zeros((), dtype=torch.double)
    for rows in layer.routed_rows:
        shares = router.query_scores(rows)[..., :-1].exp()
        is_new = (shares < router.thresholds[0]) & (shares >= router.thresholds[1])
        total += (shares * is_new).sum(dtype=torch.double).cpu()
    return total


def _smoothed(of_layers: Tensor) -> Tensor:
    return of_layers / of_layers.mean().clamp(min=torch.finfo(of_layers.dtype).tiny) + 1
