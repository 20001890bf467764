"""The router of one layer, fitted by the mass objective on what was captured of the base.

A network router goes through phases: worth, which finds the keys that nobody attends to from afar; soft, in which
groups of the others form; hard (each key in its one group, no group crowded); then potentials that make
the largest group of any domain as small as possible, and updates of the queries alone on the final groups. A centroid
router has one phase.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bifocals.network import AnyRouter, NetworkRouter
from bifocals.training.capture import LayerCapture
from bifocals.training.even import even_groups, set_steepness
from bifocals.training.mass_loss import (
    Update,
    by_group,
    centroid_update,
    hard_groups,
    network_update,
    query_update,
)
from bifocals.training.processes import sum_gradients, sum_over_processes
from bifocals.training.sequences import Sequences
from bifocals.training.watch import COLLAPSED, PATIENCE, REMEDY
from bifocals.training.worth import attention_received, foretell_mean_worth, set_bars, worth_update

NETWORK_RATE, CENTROID_RATE = 1.5e-2, 5e-3
WARM_UP = 10  # steps
WORTH = 0.4  # updates of the keys' worth, for each of the joint steps
SOFT = 0.55  # share of the joint steps in which groups form; in the rest they are made even
POTENTIAL_RATE = 0.2
START_ROUNDS, FINAL_ROUNDS = 100, 300  # in which potentials are found that make groups even


@dataclass(frozen=True, slots=True)
class MassProgress:
    """How far a fit has come. ``mass_kept``: share of the far attention that queries reading one group keep."""

    stage: str  # "capture", "fit" or "weigh"
    layer: str
    step: int
    steps: int
    layers_done: int
    layers: int
    loss: float = 0.0
    mass_kept: float | None = None  # while there are groups
    far_kept: float | None = None
    dominance: float | None = None  # the largest group's share of the keys in groups
    warning: str | None = None


Report = Callable[[MassProgress], None]
Save = Callable[[int, dict[str, Tensor]], None]  # a step, and all but the router that the next one depends on


@dataclass(frozen=True, slots=True)
class Phase:
    """Some of a layer's steps: with an optimizer, a rate and rows of their own."""

    name: str
    first: int
    last: int
    rate: float
    rows: slice


class LayerFit:
    """The router of one layer."""

    def __init__(
        self, text: Sequences, start: MassProgress, router: AnyRouter, layer: LayerCapture, report: Report, save: Save
    ) -> None:
        self.text, self.router, self.layer, self.report, self.save = text, router, layer, report, save
        self.options, self.groups, self.number = text.options, text.focus.groups, start.layers_done
        self.device = router.potential.device
        self.crowded = 0  # steps in a row
        self.shares: Tensor | None = None
        self.phases = list(self._phases())
        self.steps = self.phases[-1].last
        self.progress = replace(start, steps=self.steps)

    def _phases(self) -> Iterator[Phase]:
        """Every phase of a network router learns from queries that the one before it has not seen."""
        steps, half = self.options.steps, self.text.rows.shape[1] // 2
        if not isinstance(self.router, NetworkRouter):
            yield Phase("centroids", 0, steps, self.options.rate or CENTROID_RATE, slice(0, 2 * half))
            return
        rate, first = self.options.rate or NETWORK_RATE, 0
        if self.router.worth is not None:
            first = max(1, round(WORTH * steps))
            yield Phase("worth", 0, first, rate, slice(0, 2 * half))
        soft, last = first + max(1, round(SOFT * steps)), first + steps
        yield Phase("soft", first, soft, rate, slice(0, half))
        yield Phase("hard", soft, last, rate, slice(half, 2 * half))
        yield Phase("queries", last, last + self.options.query_steps, self.options.query_rate, slice(0, 2 * half))

    def run(self, step: int, state: dict[str, Tensor]) -> MassProgress:
        """From ``step`` on, with the state that was saved there."""
        router = self.router
        self.shares = state["shares"].to(self.device) if "shares" in state else None
        self.crowded = int(state.get("crowded", 0))
        moments = {name: each for name, each in state.items() if name.startswith("optimizer.")}
        if step == 0 and not self.options.is_new:
            step = self.phases[-2].first if isinstance(router, NetworkRouter) else 0
        elif step == 0:
            initialise(router, self.text.drawn("router", self.number))
        for phase in self.phases:
            if step >= phase.last:
                continue
            starting = router if step == phase.first and isinstance(router, NetworkRouter) else None
            if starting is not None:
                self._prepare(starting, phase)
            targets = [self._target(phase, sequence) for sequence in range(len(self.text.domain_of))]
            if starting is not None and phase.name == "worth":
                foretell_mean_worth(starting, targets)
            if starting is not None and phase.name == "soft":
                self._foretell_means(starting, targets)
            self._updates(phase, step, moments, targets)
            step, moments = phase.last, {}
        return self.progress

    def _prepare(self, router: NetworkRouter, phase: Phase) -> None:
        """What the networks need before they learn."""
        if phase is self.phases[0]:
            self._standardise(router)
        if phase.name == ("soft" if self.options.is_new else "hard"):  # the first with groups
            set_bars(router, self.layer, self.text)
        if phase.name in ("soft", "hard", "queries"):
            even_groups(router, self.layer, self.text, FINAL_ROUNDS if phase.name == "queries" else START_ROUNDS)
        if phase.name in ("hard", "queries"):
            set_steepness(router, self.layer, self.text)
            self.shares = self._shares(router)

    def _shares(self, router: NetworkRouter) -> Tensor:
        """Group sizes over the fair size, as they are now: (kv_head, group)."""
        sizes = torch.zeros_like(router.potential)
        for sequence, keys in enumerate(self.layer.routed_keys):
            sizes += hard_groups(router, keys, self.layer.course(sequence)).sum(dim=1)
        sum_over_processes(sizes)
        return sizes / sizes.sum(dim=-1, keepdim=True).clamp(min=1) * self.groups

    def _updates(self, phase: Phase, first: int, moments: dict[str, Tensor], targets: list[Tensor]) -> None:
        """AdamW with a warm-up and a linear decay, from step ``first`` to the end of the phase."""
        parameters = self._trained(phase)
        optimizer = torch.optim.AdamW(parameters, lr=phase.rate, betas=(0.9, 0.98), weight_decay=0.0)
        _put_moments(optimizer, parameters, moments)
        for step in range(first, phase.last):
            progress = (step - phase.first) / (phase.last - phase.first)
            pace = min(1.0, (step - phase.first + 1) / WARM_UP) * (1 - progress)
            for group in optimizer.param_groups:
                group["lr"] = phase.rate * pace
            updates = [
                self._update(phase, progress, sequence, targets[sequence])
                for sequence in self.text.of_step(step, self.number)
            ]
            # Divided by the whole batch: the sum over all processes is the mean.
            loss = torch.stack([update.loss for update in updates]).sum() / self.options.batch
            optimizer.zero_grad()
            loss.backward()
            sum_gradients(parameters)
            optimizer.step()
            self._after(phase, step + 1, pace, loss.detach(), updates)
            if (step + 1) % self.options.save_every == 0 and step + 1 < phase.last:
                self.save(step + 1, _moments(optimizer, parameters) | self._balance_seen())

    def _trained(self, phase: Phase) -> list[nn.Parameter]:
        router = self.router
        if not isinstance(router, NetworkRouter):
            return list(router.parameters())
        if phase.name == "worth":
            assert router.worth is not None
            return list(router.worth.parameters())
        return [*router.queries.parameters(), *(() if phase.name == "queries" else router.keys.parameters())]

    def _update(self, phase: Phase, progress: float, sequence: int, target: Tensor) -> Update:
        rows, keys = self.layer.routed_rows[sequence][..., phase.rows, :], self.layer.routed_keys[sequence]
        if not isinstance(self.router, NetworkRouter):
            return centroid_update(self.router, rows, keys, target)
        if phase.name == "worth":
            return worth_update(self.router, keys, target)
        if phase.name == "queries":
            return query_update(self.router, rows, target)
        is_hard = phase.name == "hard"
        return network_update(
            self.router, rows, keys, target, self.layer.course(sequence),
            is_hard=is_hard or progress >= 0.5, is_strict=is_hard,
        )  # fmt: skip

    def _target(self, phase: Phase, sequence: int) -> Tensor:
        """What the rows of a phase learn from: their far attention or, on final groups, their mass in each of them."""
        attention = self._attention(sequence, phase.rows)
        if not isinstance(self.router, NetworkRouter):
            return attention
        if phase.name == "worth":
            far = self.text.far(self.layer, sequence, self.device)[phase.rows]
            return attention_received(attention, far, len(self.router.bars))
        return self._masses(self.router, attention, sequence) if phase.name == "queries" else attention

    def _attention(self, sequence: int, chosen: slice) -> Tensor:
        """Far attention of the rows, kept in half precision (float64 stays): it is summed over many keys."""
        rows = self.text.rows[sequence].to(self.device)[chosen]
        far = self.text.far(self.layer, sequence, self.device)[chosen]
        attention = self.layer.far_attention(sequence, chosen, rows, far)
        return attention if attention.dtype == torch.float64 else attention.half()

    @torch.no_grad()
    def _standardise(self, router: NetworkRouter) -> None:
        sides = [(router.queries, self.layer.routed_rows), (router.keys, self.layer.routed_keys)]
        if router.worth is not None:
            sides.append((router.worth, self.layer.routed_keys))
        for network, features in sides:
            together = torch.stack(
                [torch.stack([each.double().sum(1), each.double().square().sum(1)]) for each in features]
            )
            sums = together.sum(0)
            count = torch.tensor(float(sum(each.shape[1] for each in features)), dtype=torch.double)
            sum_over_processes(sums)
            sum_over_processes(count)
            mean, square = (sums / count).unbind(0)
            network.mean.copy_(mean[:, None])
            network.deviation.copy_((square - mean.square()).clamp(min=0).sqrt()[:, None] + 1e-3)

    @torch.no_grad()
    def _foretell_means(self, router: NetworkRouter, attention: list[Tensor]) -> None:
        """Queries start by foretelling the mean mass of each group: what is left to learn is to tell them apart."""
        total = torch.zeros(router.queries.bias.shape[0], self.groups + 1, dtype=torch.double)
        for sequence, each in enumerate(attention):
            *of_groups, idle, near = self._masses(router, each, sequence).double().mean(dim=1).cpu().unbind(dim=-1)
            total += torch.stack([*of_groups, idle + near], dim=-1)
        sum_over_processes(total)
        router.queries.bias.copy_((total / total.sum(dim=-1, keepdim=True)).clamp(min=1e-6).log()[:, None])

    @torch.no_grad()
    def _masses(self, router: NetworkRouter, attention: Tensor, sequence: int) -> Tensor:
        """What each row spends on each group, on idle keys and near: (head, row, group + 2)."""
        of_groups = by_group(
            attention, hard_groups(router, self.layer.routed_keys[sequence], self.layer.course(sequence))
        )
        far = attention.sum(dim=-1, keepdim=True, dtype=of_groups.dtype)
        return torch.cat([of_groups, far - of_groups.sum(dim=-1, keepdim=True), 1 - far], dim=-1)

    def _balance_seen(self) -> dict[str, Tensor]:
        found = {"crowded": torch.tensor(self.crowded)}
        return found if self.shares is None else {**found, "shares": self.shares}

    @torch.no_grad()
    def _after(self, phase: Phase, step: int, pace: float, loss: Tensor, updates: list[Update]) -> None:
        """Move the potentials, watch the balance, report."""
        shares = [update.shares for update in updates if update.shares is not None]
        if shares:
            mean = torch.stack(shares).sum(dim=0) / self.options.batch
            sum_over_processes(mean)
            # Over some steps: each text crowds other groups, a collapse crowds always the same.
            self.shares = mean if self.shares is None else self.shares.lerp(mean, 0.1)
            duals = [update.duals for update in updates if update.duals is not None]
            if duals:
                dual = torch.stack(duals).sum(dim=0) / self.options.batch
                sum_over_processes(dual)
                self.router.potential.lerp_(dual, 1 - self.text.focus.momentum)
            else:
                self.router.potential.sub_(POTENTIAL_RATE * pace * (mean - 1).clamp(-1, 1.5))
        largest = 0.0 if self.shares is None else float(self.shares.amax())
        self.crowded = self.crowded + 1 if largest > COLLAPSED else 0
        if phase.name == "soft":  # groups still form: if they are crowded, the next step tells
            self.crowded = min(self.crowded, PATIENCE - 1)
        warning = None
        if self.crowded == PATIENCE:
            warning = REMEDY.format(limit=COLLAPSED, steps=PATIENCE, where=f" in layer {self.progress.layer}")
        if warning is None and step % self.options.report_every and step != self.steps:
            return
        kept = torch.tensor([loss.item(), *_kept(updates, self.groups, self.text.focus.idle)], dtype=torch.double)
        sum_over_processes(kept)
        mass, all_mass, far, all_far = kept[1:].tolist()
        self.progress = replace(
            self.progress,
            step=step,
            loss=float(kept[0]),
            mass_kept=mass / max(all_mass, 1e-12) if all_far else None,
            far_kept=far / all_far if all_far else None,
            dominance=None if self.shares is None else largest / self.groups,
            warning=warning,
        )
        self.report(self.progress)


@torch.no_grad()
def initialise(router: AnyRouter, generator: torch.Generator) -> None:
    """Draw the router anew. What foretells starts from nothing: its bias is set from the mean."""
    for name, parameter in router.named_parameters():
        fan_in = parameter.shape[-2] if parameter.ndim > 2 else 1
        scale = {"bias": 0.0, "inward_bias": 0.0, "outward": 0.1}.get(name.split(".")[-1], 1.0)
        if name in ("queries.linear", "queries.outward", "worth.linear", "worth.outward"):
            scale = 0.0
        if name == "centroids":
            fan_in = 1
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.copy_(drawn * scale / fan_in**0.5)
    router.potential.zero_()
    if isinstance(router, NetworkRouter):
        router.steepness.zero_()


def _kept(updates: list[Update], groups: int, idle: float) -> list[float]:
    """Mass kept, all far mass, keys read, all keys: if one key in ``groups`` is read, those of the best scores."""
    sums = [0.0, 0.0, 0.0, 0.0]
    share = min(1.0, 1 / groups / (1 - idle))  # of the groups, which hold keys that are not idle alone
    for update in updates:
        if update.scores.numel() == 0:
            continue  # nothing is read yet
        bar = update.scores.flatten().float().quantile(1 - share) if share < 1 else -torch.inf
        read = update.scores >= bar
        new = (update.mass * read).sum(), update.far_mass, read.sum() * (1 - idle), torch.tensor(read.numel())
        sums = [before + float(each) for before, each in zip(sums, new)]
    return sums


def _moments(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> dict[str, Tensor]:
    return {
        f"optimizer.{index}.{name}": value
        for index, parameter in enumerate(parameters)
        for name, value in optimizer.state[parameter].items()
    }


def _put_moments(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], moments: dict[str, Tensor]) -> None:
    for name, tensor in moments.items():
        _, index, kind = name.split(".")
        parameter = parameters[int(index)]
        optimizer.state[parameter][kind] = tensor if kind == "step" else tensor.to(parameter.device)
