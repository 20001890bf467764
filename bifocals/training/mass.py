"""The mass objective: routers learn to keep the attention that the base itself spends far away.

The base runs once for each sequence and nothing is propagated back through it: each layer's router is fitted by
itself, with many updates for each forward. Even groups are part of the loss: for centroids by Sinkhorn, which may look
at the whole sequence here, as nothing is predicted from the gates.

A network router goes through phases: soft, hard (each key in its one group, no group crowded), then potentials that
make the largest group of any domain as small as possible, and updates of the queries alone on the final groups. Last,
one threshold for each top_k is calibrated over all layers.

Every draw comes from the seed and the counters, so a run that was stopped goes on bit for bit. With several processes,
sequences are shared out and gradients averaged.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as distributed
from safetensors import safe_open
from safetensors.torch import save as write_tensors
from torch import Tensor, nn
from torch.nn.functional import one_hot

from bifocals.config import as_dict, expect, option
from bifocals.files import write_file
from bifocals.lens import Lens
from bifocals.network import AnyRouter, NetworkRouter
from bifocals.routing import top_groups
from bifocals.training.capture import LayerCapture, capture_layers
from bifocals.training.mass_loss import (
    Update,
    balanced_scores,
    by_group,
    centroid_update,
    network_update,
    query_update,
)

logger = logging.getLogger(__name__)

CHECKPOINT = "mass.safetensors"
NETWORK_RATE, CENTROID_RATE = 1.5e-2, 5e-3
WARM_UP = 10  # steps
SOFT = 0.55  # share of the joint steps in which groups form; in the rest they are made even
POTENTIAL_RATE = 0.2
COLLAPSED, PATIENCE = 2.0, 50  # times the fair share, for so many steps
REMEDY = (
    "Dominance was above {limit:g} times the fair share for {steps} steps in layer {layer}: its groups are collapsing. "
    "Fit on more and more varied text, lower the rate, or use fewer groups."
)
KEYS_LOOKED_AT = 1 << 15  # keys that the potentials are found on
BINS, LOWEST = 1 << 14, -40.0  # of the histogram of log p that thresholds are read from


@dataclass(frozen=True, kw_only=True, slots=True)
class MassOptions:
    """How routers are fitted by the mass objective."""

    steps: int = option(550, "Updates of each layer's router, queries and keys together.")
    query_steps: int = option(200, "Updates of the queries alone afterwards, on the final groups (networks only).")
    batch: int = option(2, "Sequences in one update, over all processes.")
    rows: int = option(256, "Queries of a sequence that groups are formed from; as many more make them even.")
    rate: float = option(0.0, "Learning rate; 0 means 0.015 for networks and 0.005 for centroids.")
    query_rate: float = option(5e-3, "Learning rate of the updates of the queries alone.")
    budget: float = option(0.95, "Share of top_k / groups at which thresholds aim: unseen text should stay below 1.")
    is_new: bool = option(True, "Draw the routers anew; or go on from those of the lens, without the soft phase.")
    seed: int = option(0, "Of everything that is drawn.")
    save_every: int = option(100, "Steps between checkpoints.")
    report_every: int = option(10, "Steps between reports.")

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("query_steps", 0), ("batch", 1), ("rows", 1), ("save_every", 1)):
            expect(getattr(self, name) >= least, f"{name} >= {least}", getattr(self, name), "it counts")
        expect(self.report_every >= 1, "report_every >= 1", self.report_every, "it counts steps")
        expect(self.rate >= 0, "rate >= 0", self.rate, "0 means the default")
        expect(self.query_rate > 0, "query_rate > 0", self.query_rate, "0.005 is the default")
        expect(0 < self.budget <= 1, "budget in (0, 1]", self.budget, "0.95 leaves room for unseen text")


@dataclass(frozen=True, slots=True)
class MassProgress:
    """How far a fit has come. ``mass_kept``: share of the far attention that queries reading one group keep."""

    stage: str  # "capture" or "fit"
    layer: str
    step: int
    steps: int
    layers_done: int
    layers: int
    loss: float = 0.0
    mass_kept: float = 0.0
    far_kept: float = 0.0
    dominance: float = 0.0  # the largest group's share of the keys
    warning: str | None = None


Report = Callable[[MassProgress], None]


def fit_mass(
    lens: Lens,
    blocks: Tensor,
    options: MassOptions | None = None,
    *,
    domains: Tensor | None = None,
    checkpoints: Path | None = None,
    report: Report | None = None,
) -> dict[str, MassProgress]:
    """Fit every router of ``lens`` to ``blocks``, (sequence, length) tokens; returns each layer's last progress.

    ``domains`` numbers the kind of text of each block. With ``checkpoints``, a folder, the state is kept there, and a
    run with the same lens, blocks and options goes on from it.
    """
    options = MassOptions() if options is None else options
    _check(lens, blocks, options, domains)
    fit = _Fit(lens, blocks, options, domains, checkpoints, report or (lambda progress: None))
    with _gradients(lens):
        return fit.run()


def calibrate(lens: Lens, blocks: Tensor, options: MassOptions | None = None, *, domains: Tensor | None = None) -> None:
    """Thresholds anew, after networks were changed by another objective: top_k groups on average, over ``blocks``."""
    options = MassOptions(batch=1) if options is None else options
    _check(lens, blocks, options, domains)
    _Fit(lens, blocks, options, domains, None, lambda progress: None).calibrate()


def _check(lens: Lens, blocks: Tensor, options: MassOptions, domains: Tensor | None) -> None:
    if lens.focus is None:
        raise ValueError("The mass objective fits routers: expected a lens with Focus. Pass a FocusConfig to attach.")
    if blocks.ndim != 2 or blocks.is_floating_point() or len(blocks) < options.batch:
        raise ValueError(
            f"blocks: expected at least {options.batch} rows of tokens, (sequence, length), got {blocks.dtype} of "
            f"shape {tuple(blocks.shape)}. Give more text or a smaller batch."
        )
    farthest = lens.focus.window + lens.focus.sinks
    if blocks.shape[1] <= farthest + options.rows:
        raise ValueError(
            f"blocks: expected more than {farthest + options.rows} tokens in a row (window, sinks and rows), got "
            f"{blocks.shape[1]}: no query would have far keys. Use longer blocks, a smaller window or fewer rows."
        )
    if domains is not None and domains.shape != blocks.shape[:1]:
        raise ValueError(f"domains: expected one number for each of {len(blocks)} blocks, got {tuple(domains.shape)}.")
    if options.batch % _world():
        raise ValueError(f"batch: expected a multiple of the {_world()} processes, got {options.batch}.")


class _Fit:
    """A run: the sequences of this process, and the layers one after the other."""

    def __init__(
        self,
        lens: Lens,
        blocks: Tensor,
        options: MassOptions,
        domains: Tensor | None,
        checkpoints: Path | None,
        report: Report,
    ) -> None:
        assert lens.focus is not None
        self.lens, self.focus, self.options, self.report = lens, lens.focus, options, report
        self.path = None if checkpoints is None else Path(checkpoints) / CHECKPOINT
        domains = torch.zeros(len(blocks), dtype=torch.long) if domains is None else domains
        self.domains = int(domains.max()) + 1
        self.key = _key(lens, blocks, options, domains)
        # Each place in a batch has its own sequences, and a process has some of the places: so the batches are the same
        # however many processes there are.
        order = torch.randperm(len(blocks), generator=self.drawn("order"))
        places = [order[place :: options.batch] for place in range(options.batch)][_rank() :: _world()]
        self.places = list(range(options.batch))[_rank() :: _world()]
        self.sequences: list[list[int]] = []  # of each place, as indices into what this process captured
        taken = 0
        for place in places:
            self.sequences.append(list(range(taken, taken + len(place))))
            taken += len(place)
        own = torch.cat(places)
        self.blocks, self.domain_of = blocks[own], domains[own].tolist()
        first = lens.focus.window + lens.focus.sinks
        self.rows = torch.stack([self._rows(int(number), first, blocks.shape[1]) for number in own])
        self.layers: list[str] = []

    def drawn(self, *what: object) -> torch.Generator:
        """A generator of its own for each thing drawn: nothing depends on what was drawn before."""
        digest = hashlib.sha256(repr((self.options.seed, *what)).encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def _rows(self, sequence: int, first: int, length: int) -> Tensor:
        """Two random halves of queries that have far keys; each half in order."""
        drawn = first + torch.randperm(length - first, generator=self.drawn("rows", sequence))
        half = min(self.options.rows, len(drawn) // 2)
        return torch.cat([drawn[:half].sort().values, drawn[half : 2 * half].sort().values])

    def run(self) -> dict[str, MassProgress]:
        self.layers = list(self.lens.routers)
        start, step, moments = self._resume()
        captured = self._capture() if start < len(self.layers) else {}
        done: dict[str, MassProgress] = {}
        for number in range(start, len(self.layers)):
            name = self.layers[number]
            router = self.lens.routers[name]
            work = _LayerFit(self, number, name, router, captured[name])
            done[name] = work.run(step, moments)
            step, moments = 0, {}
            if number + 1 < len(self.layers):
                self.save(number + 1, 0, {})
        networks = self._networks()
        if networks and captured:
            self._calibrate(networks, captured)
            self.save(len(self.layers), 0, {})
        return done

    def calibrate(self) -> None:
        self._calibrate(self._networks(), self._capture())

    def _networks(self) -> dict[str, NetworkRouter]:
        return {name: router for name, router in self.lens.routers.items() if isinstance(router, NetworkRouter)}

    def _capture(self) -> dict[str, LayerCapture]:
        count = len(self.blocks)

        def seen(number: int) -> None:
            self.report(MassProgress("capture", "", number, count, 0, len(self.layers)))

        return capture_layers(self.lens, self.blocks, self.rows, seen)

    @torch.no_grad()
    def _calibrate(self, networks: dict[str, NetworkRouter], captured: dict[str, LayerCapture]) -> None:
        """One threshold for each top_k and all layers, at which the domains read top_k groups on average."""
        # Far keys by the log p of their group, (domain, bin): what a threshold keeps is the upper end of it.
        histogram = torch.zeros(self.domains, BINS, dtype=torch.double)
        for name, router in networks.items():
            layer = captured[name]
            for sequence, domain in enumerate(self.domain_of):
                scores = router.query_scores(layer.routed_rows[sequence])[..., :-1].clamp(min=LOWEST)
                holds = top_groups(balanced_scores(router, layer.routed_keys[sequence])[None], 1)[0]
                far = self.far(layer, sequence, holds.device)
                counts = (far.float() @ holds.float()).repeat_interleave(scores.shape[0] // holds.shape[0], dim=0)
                bins = ((scores / LOWEST) * (BINS - 1)).long().flatten()
                histogram[domain].index_add_(0, bins.cpu(), counts.flatten().double().cpu())
        _sum(histogram)
        kept = histogram.cumsum(dim=1) / histogram.sum(dim=1, keepdim=True).clamp(min=1)
        mean = kept[histogram.sum(dim=1) > 0].mean(dim=0)
        thresholds = []
        for top_k in range(1, self.focus.groups + 1):
            below = int((mean <= self.options.budget * top_k / self.focus.groups).sum())
            thresholds.append(0.0 if top_k == self.focus.groups else float(torch.tensor(below * LOWEST / BINS).exp()))
        for router in networks.values():
            router.thresholds.copy_(torch.tensor(thresholds))

    def far(self, layer: LayerCapture, sequence: int, device: torch.device) -> Tensor:
        length = layer.key[sequence].shape[-2]
        return layer.far_keys(self.rows[sequence].to(device), length, self.focus.window, self.focus.sinks)

    def save(self, layer: int, step: int, moments: dict[str, Tensor]) -> None:
        """All or nothing, and never the base."""
        if self.path is None or _rank() > 0:
            return
        tensors = {f"lens.{name}": tensor for name, tensor in self.lens.state_dict().items()} | moments
        state = json.dumps({"key": self.key, "layer": layer, "step": step})
        data = write_tensors({name: each.cpu().contiguous() for name, each in tensors.items()}, {"state": state})
        write_file(self.path, data)

    def _resume(self) -> tuple[int, int, dict[str, Tensor]]:
        """The layer and step to go on from, and the moments of its optimizer."""
        if _world() > 1:
            distributed.barrier()  # a process may be late, and the first one may have saved by then
        if self.path is None or not self.path.exists():
            return 0, 0, {}
        with safe_open(self.path, "pt") as file:
            state = json.loads((file.metadata() or {}).get("state", "{}"))
            if state.get("key") != self.key:
                raise ValueError(
                    f"{self.path} is of another run: expected the same lens, blocks and options. Remove it to start "
                    "anew, or give another folder."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.lens.load_state_dict(
            {name.removeprefix("lens."): each for name, each in tensors.items() if name.startswith("lens.")}
        )
        moments = {name: each for name, each in tensors.items() if not name.startswith("lens.")}
        return int(state["layer"]), int(state["step"]), moments


class _LayerFit:
    """The router of one layer."""

    def __init__(self, fit: _Fit, number: int, name: str, router: AnyRouter, layer: LayerCapture) -> None:
        self.fit, self.number, self.name, self.router, self.layer = fit, number, name, router, layer
        self.options, self.groups = fit.options, fit.focus.groups
        self.device = router.potential.device
        self.crowded = 0  # steps in a row
        self.shares: Tensor | None = None
        self.phases = list(self._phases())
        self.steps = self.phases[-1].last
        self.progress = MassProgress("fit", name, 0, self.steps, number, len(fit.layers))

    def _phases(self) -> "Iterator[_Phase]":
        """Every phase of a network router learns from queries that the one before it has not seen."""
        steps, half = self.options.steps, self.fit.rows.shape[1] // 2
        if not isinstance(self.router, NetworkRouter):
            yield _Phase("centroids", 0, steps, self.options.rate or CENTROID_RATE, slice(0, 2 * half))
            return
        rate, soft = self.options.rate or NETWORK_RATE, max(1, round(SOFT * steps))
        yield _Phase("soft", 0, soft, rate, slice(0, half))
        yield _Phase("hard", soft, steps, rate, slice(half, 2 * half))
        yield _Phase("queries", steps, steps + self.options.query_steps, self.options.query_rate, slice(0, 2 * half))

    def run(self, step: int, moments: dict[str, Tensor]) -> MassProgress:
        """From ``step`` on, with the moments that the optimizer had there."""
        router = self.router
        if step == 0 and not self.options.is_new:
            step = self.phases[1].first if isinstance(router, NetworkRouter) else 0
        elif step == 0:
            initialise(router, self.fit.drawn("router", self.number))
        for phase in self.phases:
            if step >= phase.last:
                continue
            if step == phase.first == 0 and isinstance(router, NetworkRouter):
                self._standardise(router)
                self._even(router, rounds=100)
            if step == phase.first and phase.name == "queries" and isinstance(router, NetworkRouter):
                self._even(router, rounds=300)
            targets = [self._target(phase, sequence) for sequence in range(len(self.fit.domain_of))]
            if step == 0 and isinstance(router, NetworkRouter):
                self._foretell_means(router, targets)
            self._updates(phase, step, moments, targets)
            step, moments = phase.last, {}
        return self.progress

    def _updates(self, phase: "_Phase", first: int, moments: dict[str, Tensor], targets: list[Tensor]) -> None:
        """AdamW with a warm-up and a linear decay, from step ``first`` to the end of the phase."""
        trained = (
            self.router.queries if phase.name == "queries" and isinstance(self.router, NetworkRouter) else self.router
        )
        parameters = list(trained.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=phase.rate, betas=(0.9, 0.98), weight_decay=0.0)
        _put_moments(optimizer, parameters, moments)
        for step in range(first, phase.last):
            progress = (step - phase.first) / (phase.last - phase.first)
            pace = min(1.0, (step - phase.first + 1) / WARM_UP) * (1 - progress)
            for group in optimizer.param_groups:
                group["lr"] = phase.rate * pace
            updates = [self._update(phase, progress, sequence, targets[sequence]) for sequence in self._items(step)]
            loss = torch.stack([update.loss for update in updates]).sum() / self.options.batch
            optimizer.zero_grad()
            loss.backward()
            _average_gradients(parameters)
            optimizer.step()
            self._after(step + 1, pace, loss.detach(), updates)
            if (step + 1) % self.options.save_every == 0 and step + 1 < phase.last:
                self.fit.save(self.number, step + 1, _moments(optimizer, parameters))

    def _update(self, phase: "_Phase", progress: float, sequence: int, target: Tensor) -> Update:
        rows, keys = self.layer.routed_rows[sequence][..., phase.rows, :], self.layer.routed_keys[sequence]
        if not isinstance(self.router, NetworkRouter):
            return centroid_update(self.router, rows, keys, target)
        if phase.name == "queries":
            return query_update(self.router, rows, target)
        is_hard = phase.name == "hard"
        return network_update(self.router, rows, keys, target, is_hard=is_hard or progress >= 0.5, is_strict=is_hard)

    def _items(self, step: int) -> Iterator[int]:
        """For each place of this process, the sequence of this step."""
        for place, sequences in zip(self.fit.places, self.fit.sequences):
            epoch, index = divmod(step, len(sequences))
            order = torch.randperm(len(sequences), generator=self.fit.drawn("epoch", self.number, place, epoch))
            yield sequences[int(order[index])]

    def _target(self, phase: "_Phase", sequence: int) -> Tensor:
        """What the rows of a phase learn from: their far attention or, on final groups, their mass in each of them."""
        attention = self._attention(sequence, phase.rows)
        if phase.name == "queries" and isinstance(self.router, NetworkRouter):
            return self._masses(self.router, attention, sequence)
        return attention

    def _attention(self, sequence: int, chosen: slice) -> Tensor:
        """Far attention of the rows, kept in half precision (float64 stays): it is summed over many keys."""
        rows = self.fit.rows[sequence].to(self.device)[chosen]
        far = self.fit.far(self.layer, sequence, self.device)[chosen]
        attention = self.layer.far_attention(sequence, chosen, rows, far)
        return attention if attention.dtype == torch.float64 else attention.half()

    @torch.no_grad()
    def _standardise(self, router: NetworkRouter) -> None:
        for network, features in ((router.queries, self.layer.routed_rows), (router.keys, self.layer.routed_keys)):
            together = torch.stack(
                [torch.stack([each.double().sum(1), each.double().square().sum(1)]) for each in features]
            )
            sums = together.sum(0)
            count = torch.tensor(float(sum(each.shape[1] for each in features)), dtype=torch.double)
            _sum(sums)
            _sum(count)
            mean, square = (sums / count).unbind(0)
            network.mean.copy_(mean[:, None])
            network.deviation.copy_((square - mean.square()).clamp(min=0).sqrt()[:, None] + 1e-3)

    @torch.no_grad()
    def _foretell_means(self, router: NetworkRouter, attention: list[Tensor]) -> None:
        """Queries start by foretelling the mean mass of each group: what is left to learn is to tell them apart."""
        total = torch.zeros(router.queries.bias.shape[0], self.groups + 1, dtype=torch.double)
        for sequence, each in enumerate(attention):
            total += self._masses(router, each, sequence).double().mean(dim=1).cpu()
        _sum(total)
        router.queries.bias.copy_((total / total.sum(dim=-1, keepdim=True)).clamp(min=1e-6).log()[:, None])

    @torch.no_grad()
    def _even(self, router: NetworkRouter, rounds: int) -> None:
        """Potentials at which the largest group of any domain is as small as can be found."""
        total = torch.tensor(float(sum(each.shape[1] for each in self.layer.routed_keys)))
        _sum(total)
        stride = max(1, int(total) // KEYS_LOOKED_AT)
        by_domain: list[list[Tensor]] = [[] for _ in range(self.fit.domains)]
        for sequence, domain in enumerate(self.fit.domain_of):
            by_domain[domain].append(router.key_scores(self.layer.routed_keys[sequence][:, ::stride]))
        scores = [torch.cat(each, dim=1) if each else None for each in by_domain]
        pace = 0.1 * _deviation([each for each in scores if each is not None])
        potential = router.potential.clone()
        best, least = potential.clone(), torch.full_like(potential[:, :1], torch.inf)
        for round_number in range(rounds):
            sizes = torch.zeros(self.fit.domains, *potential.shape, dtype=potential.dtype, device=potential.device)
            for domain, each in enumerate(scores):
                if each is not None:
                    sizes[domain] = one_hot((each + potential[:, None]).argmax(dim=-1), self.groups).sum(dim=1)
            _sum(sizes)
            sizes = sizes[sizes.sum(dim=(1, 2)) > 0]
            shares = sizes / sizes.sum(dim=-1, keepdim=True) * self.groups
            largest = shares.amax(dim=(0, 2))[:, None]
            best, least = torch.where(largest < least, potential, best), torch.minimum(largest, least)
            crowding = shares.pow(4).mean(dim=0).pow(0.25)
            step = (crowding - crowding.mean(dim=-1, keepdim=True)).clamp(-1, 1.5)
            potential = potential - pace * step * 0.99**round_number
        router.potential.copy_(best)

    @torch.no_grad()
    def _masses(self, router: NetworkRouter, attention: Tensor, sequence: int) -> Tensor:
        """What each row spends on each group and, last, near: (head, row, group + 1)."""
        holds = top_groups(balanced_scores(router, self.layer.routed_keys[sequence])[None], 1)[0]
        far = by_group(attention, holds)
        return torch.cat([far, 1 - far.sum(dim=-1, keepdim=True)], dim=-1)

    @torch.no_grad()
    def _after(self, step: int, pace: float, loss: Tensor, updates: list[Update]) -> None:
        """Move the potentials, watch the balance, report."""
        dominance = self.progress.dominance
        shares = [update.shares for update in updates if update.shares is not None]
        if shares:
            mean = torch.stack(shares).sum(dim=0) / self.options.batch
            _sum(mean)
            # Over some steps: each text crowds other groups, a collapse crowds always the same.
            self.shares = mean if self.shares is None else self.shares.lerp(mean, 0.1)
            dominance = float(self.shares.amax()) / self.groups
            duals = [update.duals for update in updates if update.duals is not None]
            if duals:
                dual = torch.stack(duals).sum(dim=0) / self.options.batch
                _sum(dual)
                self.router.potential.lerp_(dual, 1 - self.fit.focus.momentum)
            else:
                self.router.potential.sub_(POTENTIAL_RATE * pace * (mean - 1).clamp(-1, 1.5))
        self.crowded = self.crowded + 1 if dominance * self.groups > COLLAPSED else 0
        warning = None
        if self.crowded == PATIENCE:
            warning = REMEDY.format(limit=COLLAPSED, steps=PATIENCE, layer=self.name)
            logger.warning(warning)
        if warning is None and step % self.options.report_every and step != self.steps:
            return
        kept = torch.tensor([loss.item(), *_kept(updates, self.groups)], dtype=torch.double)
        _sum(kept)
        mass, all_mass, far, all_far = kept[1:].tolist()
        self.progress = MassProgress(
            "fit", self.name, step, self.steps, self.number, len(self.fit.layers), float(kept[0]),
            mass / max(all_mass, 1e-12), far / max(all_far, 1e-12), dominance, warning,
        )  # fmt: skip
        self.fit.report(self.progress)


@dataclass(frozen=True, slots=True)
class _Phase:
    """Some of a layer's steps: with an optimizer, a rate and rows of their own."""

    name: str
    first: int
    last: int
    rate: float
    rows: slice


@torch.no_grad()
def initialise(router: AnyRouter, generator: torch.Generator) -> None:
    """Draw the router anew. The queries of networks start from nothing: their bias is set from the mean mass."""
    for name, parameter in router.named_parameters():
        fan_in = parameter.shape[-2] if parameter.ndim > 2 else 1
        scale = {"bias": 0.0, "inward_bias": 0.0, "outward": 0.1}.get(name.split(".")[-1], 1.0)
        if name in ("queries.linear", "queries.outward"):
            scale = 0.0
        if name == "centroids":
            fan_in = 1
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.copy_(drawn * scale / fan_in**0.5)
    router.potential.zero_()


def _kept(updates: list[Update], groups: int) -> list[float]:
    """Mass kept, all far mass, groups read, all groups: if one in ``groups`` is read, those of the best scores."""
    sums = [0.0, 0.0, 0.0, 0.0]
    for update in updates:
        bar = update.scores.flatten().float().quantile(1 - 1 / groups) if groups > 1 else -torch.inf
        read = update.scores >= bar
        new = (update.mass * read).sum(), update.mass.sum(), read.sum(), torch.tensor(read.numel())
        sums = [before + float(each) for before, each in zip(sums, new)]
    return sums


def _deviation(scores: list[Tensor]) -> float:
    """The standard deviation of all scores of all processes."""
    sums = torch.zeros(3, dtype=torch.double)
    for each in scores:
        wide = each.double()
        sums += torch.stack([torch.tensor(wide.numel()).double(), wide.sum().cpu(), wide.square().sum().cpu()])
    _sum(sums)
    count, total, squares = sums.tolist()
    return max(squares / count - (total / count) ** 2, 0.0) ** 0.5


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


def _key(lens: Lens, blocks: Tensor, options: MassOptions, domains: Tensor) -> str:
    """Of everything that a fit depends on but the base."""
    assert lens.focus is not None
    about = {"focus": as_dict(lens.focus), "options": asdict(options), "layers": list(lens.routers)}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for tensor in (blocks, domains):
        digest.update(tensor.long().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _gradients(lens: Lens) -> Iterator[None]:
    """Routers take gradients for the length of the block; what they needed before is restored."""
    before = [(parameter, parameter.requires_grad) for parameter in lens.parameters()]
    lens.requires_grad_()
    try:
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)
            parameter.grad = None


def _is_shared_out() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _world() -> int:
    return distributed.get_world_size() if _is_shared_out() else 1


def _rank() -> int:
    return distributed.get_rank() if _is_shared_out() else 0


def _sum(tensor: Tensor) -> None:
    """Over all processes, in place."""
    if _world() > 1:
        distributed.all_reduce(tensor)


def _average_gradients(parameters: list[nn.Parameter]) -> None:
    """Each process divided its losses by the whole batch, so their sum is the mean. One message: waiting costs most."""
    if _world() > 1:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(together)
        for gradient, summed in zip(gradients, together.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(summed.view_as(gradient))
