"""The mass objective: routers learn to keep the attention that the base itself spends far away.

The base runs once for each sequence and nothing is propagated back through it: each layer's router is fitted by
itself, with many updates for each forward (layer_fit.py, its losses in mass_loss.py). Even groups are part of the loss:
for centroids by Sinkhorn, which may look at the whole sequence here, as nothing is predicted from the gates. Last, one
threshold for each top_k is calibrated over all layers (thresholds.py), weighed by what is at stake in each (stakes.py).

A run that was stopped goes on bit for bit. With several processes, sequences are shared out and gradients averaged.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as write_tensors
from torch import Tensor
from transformers import PreTrainedModel

from bifocals.config import as_dict
from bifocals.files import leftovers, write_file
from bifocals.lens import Lens
from bifocals.network import NetworkRouter
from bifocals.training.capture import LayerCapture, capture_layers
from bifocals.training.checkpoint import CheckpointError
from bifocals.training.even import set_steepness
from bifocals.training.layer_fit import LayerFit, MassProgress, Report
from bifocals.training.options import MassOptions
from bifocals.training.processes import process_number, processes_met, wait_for_all
from bifocals.training.sequences import Sequences
from bifocals.training.stakes import stakes_of, weigh_layers
from bifocals.training.thresholds import calibrate_thresholds
from bifocals.training.watch import log_warnings
from bifocals.training.worth import set_bars

__all__ = ["MassOptions", "MassProgress", "calibrate", "expect_fittable", "fit_mass"]

CHECKPOINT = "mass.safetensors"
GAINS = "gains"  # of layers that are being weighed


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
    expect_fittable(lens, blocks, options, domains)
    fit = _Fit(lens, blocks, options, domains, checkpoints, report or log_warnings)
    with _gradients(lens):
        return fit.run()


def calibrate(lens: Lens, blocks: Tensor, options: MassOptions | None = None, *, domains: Tensor | None = None) -> None:
    """Thresholds and bars anew, after networks were changed by another objective: as ``blocks`` ask for."""
    options = MassOptions(batch=1) if options is None else options
    expect_fittable(lens, blocks, options, domains)
    with unchanged_if_it_fails(lens):
        _Fit(lens, blocks, options, domains, None, lambda progress: None).calibrate()


@contextmanager
def unchanged_if_it_fails(lens: Lens) -> Iterator[None]:
    """Whatever stops the block, the lens is then as it was before."""
    before = {name: tensor.clone() for name, tensor in lens.state_dict().items()}
    mode, top_k = lens.mode, lens.top_k
    try:
        yield
    except BaseException:
        lens.load_state_dict(before)
        lens.mode, lens.top_k = mode, top_k
        raise


def expect_fittable(lens: Lens, blocks: Tensor, options: MassOptions, domains: Tensor | None) -> None:
    """Refuse what cannot be fitted before anything is begun."""
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
    if options.batch % processes_met():
        raise ValueError(f"batch: expected a multiple of the {processes_met()} processes, got {options.batch}.")


class _Fit:
    """A run: the layers one after the other."""

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
        self.lens, self.report = lens, report
        self.path = None if checkpoints is None else Path(checkpoints) / CHECKPOINT
        domains = torch.zeros(len(blocks), dtype=torch.long) if domains is None else domains
        self.key = _key(lens, blocks, options, domains)
        self.text = Sequences(blocks, domains, lens.focus, options)
        self.layers = list(lens.routers)
        self.done: dict[str, MassProgress] = {}

    def run(self) -> dict[str, MassProgress]:
        start, step, state = self._resume()
        is_done = start == len(self.layers) and GAINS not in state
        captured = {} if is_done else self._capture()
        for number in range(start, len(self.layers)):
            name = self.layers[number]
            beginning = MassProgress("fit", name, 0, 0, number, len(self.layers))
            save = partial(self.save, number)
            work = LayerFit(self.text, beginning, self.lens.routers[name], captured[name], self.report, save)
            self.done[name] = work.run(step, state)
            step, state = 0, {}
            if number + 1 < len(self.layers):
                self.save(number + 1, 0, {})
        if self._networks() and captured:
            self._set_thresholds(captured, step, state.get(GAINS))
            self.save(len(self.layers), 0, {})
        return self.done

    def calibrate(self) -> None:
        captured = self._capture()
        for name, router in self._networks().items():
            set_bars(router, captured[name], self.text)
            if router.steepness.any():  # in deviations of its scores, which have changed
                set_steepness(router, captured[name], self.text)
        self._set_thresholds(captured)

    def _set_thresholds(self, captured: dict[str, LayerCapture], turn: int = 0, gains: Tensor | None = None) -> None:
        """The same for all layers, and then by what is at stake in them, where the model predicts tokens."""
        networks, model = self._networks(), self.lens.model
        is_kept = self.text.options.weigh == 0 and not self.text.options.is_new
        calibrate_thresholds(networks, captured, self.text, stakes_of(networks) if is_kept else None)
        predicts = isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None
        if self.text.options.weigh == 0 or self.text.focus.groups == 1 or not predicts:
            return
        count = len(self.text.first_of_domains(self.text.options.weigh)) * len(networks)
        weighed = turn * len(networks)

        def seen(layer: str) -> None:
            nonlocal weighed
            weighed += 1
            self.report(MassProgress("weigh", layer, weighed, count, len(self.layers), len(self.layers)))

        def save(turn: int, gains: Tensor) -> None:
            self.save(len(self.layers), turn, {GAINS: gains})

        stakes = weigh_layers(self.lens, networks, captured, self.text, seen, save, turn, gains)
        calibrate_thresholds(networks, captured, self.text, stakes)

    def _networks(self) -> dict[str, NetworkRouter]:
        return {name: router for name, router in self.lens.routers.items() if isinstance(router, NetworkRouter)}

    def _capture(self) -> dict[str, LayerCapture]:
        count = len(self.text.blocks)

        def seen(number: int) -> None:
            self.report(MassProgress("capture", "", number, count, 0, len(self.layers)))

        return capture_layers(self.lens, self.text.blocks, self.text.rows, seen)

    def save(self, layer: int, step: int, state: dict[str, Tensor]) -> None:
        """All or nothing, and never the base."""
        if self.path is None or process_number() > 0:
            return
        tensors = {f"lens.{name}": tensor for name, tensor in self.lens.state_dict().items()} | state
        done = {name: asdict(seen) for name, seen in self.done.items()}
        about = json.dumps({"key": self.key, "layer": layer, "step": step, "done": done})
        data = write_tensors({name: each.cpu().contiguous() for name, each in tensors.items()}, {"state": about})
        write_file(self.path, data)

    def _resume(self) -> tuple[int, int, dict[str, Tensor]]:
        """The layer and step to go on from, and the state that was saved there."""
        wait_for_all()  # a process may be late, and the first one may have saved by then
        if self.path is not None and process_number() == 0:
            for aside in leftovers(self.path):
                aside.unlink()
        if self.path is None or not self.path.exists():
            return 0, 0, {}
        try:
            with safe_open(self.path, "pt") as file:
                about = json.loads((file.metadata() or {})["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            key, layer, step = about["key"], int(about["layer"]), int(about["step"])
            done = {str(name): MassProgress(**seen) for name, seen in about["done"].items()}
        except (OSError, AttributeError, KeyError, TypeError, ValueError, SafetensorError) as reason:
            raise CheckpointError(f"{self.path}: cannot be read ({reason!r}). Remove it to start anew.") from reason
        if key != self.key:
            raise CheckpointError(
                f"{self.path} is of another run: expected the same lens, blocks and options. Remove it to start "
                "anew, or give another folder."
            )
        self.lens.load_state_dict(
            {name.removeprefix("lens."): each for name, each in tensors.items() if name.startswith("lens.")}
        )
        self.done = done
        return layer, step, {name: each for name, each in tensors.items() if not name.startswith("lens.")}


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
