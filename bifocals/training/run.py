"""Fit a lens to a model, from text to a folder: what `bifocals train` does.

out/run.json          what is fitted, on what and how; a run resumes only as what it was
out/checkpoints/      where it stands; of a whole model, until it is done
out/runs/             what a fit by mass logs to files, if asked to; through the model, beside its checkpoints
out/adapter_*         the lens, once it is fitted
out/model/            the model, where it was trained as well
out/results.json      how good it is on text held out
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from bifocals.adapter import fingerprint, hash_of, load
from bifocals.benchmarks.measuring import surroundings, write_json
from bifocals.config import FocusConfig
from bifocals.evaluation.perplexity import evaluate
from bifocals.families import is_decoder
from bifocals.files import leftovers
from bifocals.lens import Lens, attach, lens_of
from bifocals.training.baselines import Baseline, balance, fit_kmeans
from bifocals.training.checkpoint import CheckpointError, last_checkpoint, remove_checkpoints
from bifocals.training.data import Blocks, load_blocks
from bifocals.training.mass import (
    MassOptions,
    MassProgress,
    calibrate,
    expect_fittable,
    fit_mass,
    unchanged_if_it_fails,
)
from bifocals.training.options import LoraOptions, PretrainOptions, TrainOptions
from bifocals.training.processes import (
    expect_several_processes,
    is_first_process,
    join_processes,
    wait_for_all,
    world_size,
)
from bifocals.training.tracking import NOWHERE, tracked, trackers
from bifocals.training.watch import Progress, Report, log_warnings, look

Options = TrainOptions | MassOptions
RUN, CHECKPOINTS, LOGS, MODEL, RESULTS = "run.json", "checkpoints", "runs", "model", "results.json"


def train(
    model: PreTrainedModel,
    tokenizer: Any,
    sources: Sequence[str],
    out: Path,
    options: Options | None = None,
    *,
    focus: FocusConfig | None = None,
    length: int = 2048,
    sequences: int | None = None,
    held_out: int = 4,
    resume: bool = False,
    report: Report = log_warnings,
    on_run: Callable[[str, str], None] = lambda text, setting: None,
) -> dict[str, Any]:
    """Fit the model's lens, or a new one, and write it with its results into ``out``; returns the results.

    ``sequences`` bounds the blocks taken from each source, ``held_out`` those it is measured on at the end. If it is
    stopped, the lens is as it was before, or gone if it was new; what was done is in ``out``, to be resumed.
    """
    options = MassOptions() if options is None else options
    join_processes()
    blocks = load_blocks(sources, tokenizer, length, part="fitting", limit=sequences)
    kept_out = load_blocks(sources, tokenizer, length, part="held-out", limit=held_out)
    with _lens_to_fit(model, focus, options.seed) as lens:
        _expect_fittable(lens, blocks, out, options)
        return _fit(lens, blocks, kept_out, out, options, resume=resume, report=report, on_run=on_run)


@contextmanager
def _lens_to_fit(model: PreTrainedModel, focus: FocusConfig | None, seed: int) -> Iterator[Lens]:
    """The model's own or a new one; if the block fails, as it was, or gone."""
    lens = lens_of(model)
    if lens is None:
        with gone_if_it_fails(_new_lens(model, FocusConfig.network() if focus is None else focus, seed)) as new:
            yield new
        return
    if lens.focus is None:
        raise ValueError("Expected a lens with Focus: its routers are what is fitted. Pass a FocusConfig.")
    if focus not in (None, lens.focus):
        raise ValueError(
            f"The model has a lens of its own: expected its {lens.focus}, or none, got {focus}. Leave focus out to fit "
            "that lens, or detach it."
        )
    with unchanged_if_it_fails(lens):
        yield lens


@contextmanager
def gone_if_it_fails(lens: Lens) -> Iterator[Lens]:
    try:
        yield lens
    except BaseException:
        lens.detach()
        raise


def _expect_fittable(lens: Lens, blocks: Blocks, out: Path, options: Options) -> None:
    """Refuse what would be refused later, before a run is opened that could neither go on nor begin again."""
    assert lens.focus is not None
    if isinstance(options, MassOptions):
        expect_logger(options.report_to, [NOWHERE, *trackers()])
        expect_fittable(lens, blocks.tokens, options, blocks.domains)
        return
    if not is_decoder(lens.model):
        raise ValueError(
            f"{type(lens.model).__name__} reads the tokens that it would be asked to predict: expected a decoder for "
            "the objectives lm and distill. Fit it by mass."
        )
    expect_trainable(options, out)
    if lens.focus.score == "network":
        calibration(lens, blocks)


def _fit(
    lens: Lens,
    blocks: Blocks,
    kept_out: Blocks,
    out: Path,
    options: Options,
    *,
    resume: bool,
    report: Report,
    on_run: Callable[[str, str], None],
) -> dict[str, Any]:
    model, described = lens.model, describe(lens, blocks, options)
    open_run(out, described, resume)
    is_whole = isinstance(options, TrainOptions) and options.full_steps > 0
    done = finished(out, len(kept_out.tokens)) if is_whole else None
    if done is not None:
        _take_over(lens, out)
        return done
    start = time.perf_counter()
    if isinstance(options, MassOptions):
        losses = _fit_by_mass(lens, blocks, kept_out.tokens[0], out, options, report)
    else:
        losses = _fit_through_model(lens, blocks, kept_out.tokens[0], out / CHECKPOINTS, options, report)
    lens.mode = "hard"
    results = {"losses": losses, "seconds": time.perf_counter() - start, **described}
    if is_first_process():
        results |= {"held_out": evaluate(model, kept_out, dial(lens), on_run), "surroundings": surroundings()}
        results["measured_on"] = len(kept_out.tokens)
        if is_whole:
            model.save_pretrained(out / MODEL)
        lens.save(out)
        if is_whole:  # its checkpoints are three times as large as itself
            close_run(out, results)
        else:
            write_json(out / RESULTS, results)
    return results


def _take_over(lens: Lens, out: Path) -> None:
    """The weights of a run that is done: the model and its lens end as they would have."""
    model = lens.model
    trained = type(model).from_pretrained(out / MODEL, dtype=model.dtype)
    fitted = load(trained, out)
    model.load_state_dict(trained.state_dict())
    lens.load_state_dict(fitted.state_dict())
    lens.mode = "hard"


def run_baseline(
    model: PreTrainedModel,
    tokenizer: Any,
    sources: Sequence[str],
    out: Path,
    baseline: Baseline,
    *,
    focus: FocusConfig | None = None,
    options: LoraOptions | None = None,
    length: int = 2048,
    sequences: int | None = None,
    held_out: int = 4,
    report: Report = lambda progress: None,
    on_run: Callable[[str, str], None] = lambda text, setting: None,
) -> dict[str, Any]:
    """What a lens has to beat, on the text and by the measure that it gets itself; returns the results."""
    blocks = load_blocks(sources, tokenizer, length, part="fitting", limit=sequences)
    kept_out = load_blocks(sources, tokenizer, length, part="held-out", limit=held_out)
    options = LoraOptions() if options is None else options
    focus = FocusConfig() if focus is None else focus
    focus = replace(focus, sides="same") if baseline == "kmeans" else focus
    with gone_if_it_fails(_new_lens(model, focus, options.seed)) as lens:
        described = {"baseline": baseline, **describe(lens, blocks, options)}
        open_run(out, described, resume=False)
        start, losses, top_ks = time.perf_counter(), {}, []
        if baseline == "lora":
            from bifocals.training.lora import fit_lora

            with lens.disabled():
                losses["lora"] = fit_lora(model, blocks.tokens, out, options, report)
        elif baseline != "window":
            if baseline == "kmeans":
                fit_kmeans(lens, blocks.tokens, options.seed)
            balance(lens, blocks.tokens)
            lens.save(out)
            top_ks = dial(lens)
        results = {"losses": losses, "seconds": time.perf_counter() - start, **described}
        results |= {"held_out": evaluate(model, kept_out, top_ks, on_run), "surroundings": surroundings()}
        write_json(out / RESULTS, results)
        return results


def dial(lens: Lens) -> list[int]:
    """The settings that a lens is measured at."""
    assert lens.focus is not None
    return [top_k for top_k in (1, 2, 4) if top_k < lens.focus.groups] or [1]


def describe(lens: Lens, blocks: Blocks, options: Any) -> dict[str, Any]:
    """All that the fitted lens depends on."""
    assert lens.focus is not None
    return {
        "model": {"type": lens.model.config.model_type, "parameters": lens.model.num_parameters()},
        "weights": fingerprint(lens.model),
        "start": hash_of(lens.state_dict()),
        "focus": asdict(lens.focus),
        "options": asdict(options),
        "data": list(blocks.names),
        "length": blocks.tokens.shape[1],
        "blocks": len(blocks.tokens),
        "tokens": hashlib.sha256(blocks.tokens.numpy().tobytes()).hexdigest(),
    }


def _new_lens(model: PreTrainedModel, focus: FocusConfig, seed: int) -> Lens:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return attach(model, focus)


def open_run(out: Path, described: dict[str, Any], resume: bool) -> None:
    """A new folder, or with ``resume`` one of the same run."""
    path = out / RUN
    if resume:
        try:
            before = json.loads(path.read_text())
        except (OSError, ValueError) as reason:
            raise CheckpointError(
                f"Nothing to resume in {out}: expected {RUN} of an earlier run ({reason}). Start it without --resume."
            ) from reason
        differ = [name for name in described if not isinstance(before, dict) or before.get(name) != described[name]]
        if differ:
            raise CheckpointError(
                f"{out} holds a run with other {', '.join(differ)}: expected what it was started with. Give the same "
                "options and text, or another --out."
            )
    elif out.exists() and not set(out.iterdir()) <= set(leftovers(path)):
        raise ValueError(
            f"{out} is not empty: expected a new folder. Pass --resume to go on with its run, or another one."
        )
    wait_for_all()
    if is_first_process() and not resume:
        for aside in leftovers(path):
            aside.unlink()
        write_json(path, described)


def finished(out: Path, sequences: int) -> dict[str, Any] | None:
    """The results of a run that is done, if it is: nothing of it is trained or measured again."""
    path = out / RESULTS
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text())
        measured_on = results.get("measured_on", sequences)
    except (OSError, ValueError, AttributeError, RecursionError) as reason:
        raise CheckpointError(
            f"{path}: expected the results of a run ({reason}). Start anew in another folder."
        ) from reason
    if measured_on != sequences:
        raise CheckpointError(
            f"{out} holds a run that is done, measured on {measured_on} sequences held out: expected as many, got "
            f"{sequences}. Give the same --held-out, or another --out."
        )
    if is_first_process():
        remove_checkpoints(out / CHECKPOINTS)  # it may have been stopped before it had
    return results


def close_run(out: Path, results: dict[str, Any]) -> None:
    """Results are written last: where they are, everything is, and nothing is left to resume."""
    write_json(out / RESULTS, results)
    remove_checkpoints(out / CHECKPOINTS)


def expect_trainable(options: TrainOptions | PretrainOptions, out: Path) -> None:
    """Refuse what Trainer would refuse, before a run is opened that could neither go on nor begin again."""
    if find_spec("accelerate") is None:
        raise ValueError("Training by gradients needs accelerate. Install it: pip install 'bifocals[training]'")
    from transformers.integrations.integration_utils import get_available_reporting_integrations

    from bifocals.training.exact import arguments_of

    if options.shard:
        expect_several_processes()
    expect_logger(options.report_to, ["none", "all", *get_available_reporting_integrations()])
    arguments_of(options, out / CHECKPOINTS)


def expect_logger(name: str, known: list[str]) -> None:
    if name not in known:
        raise ValueError(
            f"report_to: expected one of {', '.join(known)}, got {name!r}. Check the spelling, or install its package."
        )


def _fit_by_mass(
    lens: Lens, blocks: Blocks, watched: Tensor, out: Path, options: MassOptions, report: Report
) -> dict[str, list[float]]:
    """Layer by layer, with a look at the end, when all of them can run; returns the last loss of each."""
    stage, start, first = "", 0.0, 0
    of_step = {"fit": options.batch}  # sequences; in the other stages one for each process

    def on_progress(seen: MassProgress) -> None:
        nonlocal stage, start, first
        layers_done, layers = (seen.layers_done, seen.layers) if seen.stage == "fit" else (0, 1)
        step, steps = layers_done * seen.steps + seen.step, layers * seen.steps
        if seen.stage != stage:
            stage, start, first = seen.stage, time.perf_counter(), step
        pace = (time.perf_counter() - start) / (step - first) if step > first else None
        fitted: dict[str, float] = {}
        if stage == "fit":
            known = {name: getattr(seen, name) for name in ("loss", "mass_kept", "far_kept", "dominance")}
            fitted = {name: value for name, value in known.items() if value is not None}
            log({f"{name}/layer {seen.layer}": value for name, value in fitted.items()}, step=step)
        phase = f"{stage}, layer {seen.layer}" if seen.layer else stage
        if pace is not None:
            fitted["seconds_left"] = pace * (steps - step)
            fitted["tokens_per_second"] = of_step.get(stage, world_size()) * blocks.tokens.shape[1] / pace
        report(Progress(phase, step, steps, warning=seen.warning, **fitted))

    with tracked(options.report_to, out / LOGS) as log:
        last = fit_mass(
            lens, blocks.tokens, options, domains=blocks.domains, checkpoints=out / CHECKPOINTS, report=on_progress
        )
        if is_first_process() and is_decoder(lens.model):
            lens.mode = "soft"
            looked = asdict(look(lens, watched))
            log(looked, step=len(last) * max((seen.steps for seen in last.values()), default=0))
            report(Progress("fitted", 1, 1, **looked))
    return {f"layer {name}": [seen.loss] for name, seen in last.items()}


def _fit_through_model(
    lens: Lens, blocks: Blocks, watched: Tensor, folder: Path, options: TrainOptions, report: Report
) -> dict[str, list[float]]:
    """Phase by phase; returns the losses of each."""
    from bifocals.training.sharding import sharded
    from bifocals.training.trainer import LensTrainer

    losses = {}
    lens.mode = "sparse" if options.sparse else "soft"
    with sharded(lens) if options.shard else nullcontext():
        for phase, is_full in (("lens", False), *([("everything", True)] if options.full_steps else [])):
            with training(lens, is_full):
                trainer = LensTrainer(
                    lens, blocks.tokens, watched, folder / phase, options, is_full=is_full, report=report
                )
                trainer.train_from(last_checkpoint(folder / phase))
                losses[phase] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if lens.focus is not None and lens.focus.score == "network":
        calibrate(lens, blocks.tokens, calibration(lens, blocks), domains=blocks.domains)
    return losses


def calibration(lens: Lens, blocks: Blocks) -> MassOptions:
    """As many queries of each block as have far keys, up to the usual number."""
    assert lens.focus is not None
    near, length = lens.focus.window + lens.focus.sinks, blocks.tokens.shape[1]
    if length < near + 2:
        raise ValueError(
            f"Expected sequences of at least {near + 2} tokens, window, sinks and two more, got {length}: networks are "
            "set by how often they read far keys. Use longer sequences or a smaller window."
        )
    options = MassOptions(batch=world_size(), rows=min(MassOptions().rows, length - near - 1))
    expect_fittable(lens, blocks.tokens, options, blocks.domains)
    return options


@contextmanager
def training(lens: Lens, is_full: bool) -> Iterator[None]:
    """Gradients for the lens, or for everything; afterwards as it was."""
    before = {name: parameter.requires_grad for name, parameter in lens.model.named_parameters()}
    modules = {module: module.training for module in lens.model.modules()}
    lens.model.requires_grad_(is_full)
    lens.requires_grad_(True)
    try:
        yield
    finally:
        for name, parameter in lens.model.named_parameters():  # perhaps others by now: shared out
            parameter.requires_grad_(before[name])
        for module, is_training in modules.items():
            module.training = is_training
