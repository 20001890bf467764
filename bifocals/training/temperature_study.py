"""Does a temperature help a small model that is trained from scratch, and which?

    python -m bifocals.training.temperature_study --json results/temperature.json

Three parts, each run a training from scratch that differs from its neighbours by temperature and seed alone:

    temperature   `nano` on pydoc and the standard library's source, at ten temperatures, two of them learned
    context       standard against 0.4 at a shorter and at a longer context, as many tokens a step
    recall        standard against 0.4 at associative recall (recall.py), asked in ever longer contexts

The same seed is the same start and the same order of text, so temperatures are compared in pairs. Intervals are
Student's, 95%, over seeds. A study that is stopped goes on: what its file holds is not run again, and a run that was
stopped goes on from its checkpoint. Two processes may each run a half of it.
"""

import json
import re
import shlex
import shutil
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np

from bifocals.benchmarks.measuring import surroundings, write_json
from bifocals.config import FocalConfig
from bifocals.display import FitDisplay
from bifocals.files import cache_folder
from bifocals.training.context import ContextOptions
from bifocals.training.presets import PRESETS
from bifocals.training.pretrain import pretrain
from bifocals.training.recall import TASK, train_recall
from bifocals.training.watch import Report

SOURCES = ("pydoc", "stdlib")
STANDARD, FOCAL, LEARNED, REFINED = "1.0", "0.4", "learned", "refined"
SETTINGS = {
    **{f"{tenths / 10}": FocalConfig(temperature=tenths / 10) for tenths in (1, 2, 3, 4, 5, 6, 7, 10)},
    LEARNED: FocalConfig(form="token"),
    REFINED: FocalConfig(form="length", per="head"),
}
MANY, FEW = 5, 3  # seeds
OTHER_CONTEXTS = (128, 512)
HELD_OUT_TOKENS = 8192  # of each source
# The 97.5% quantiles of Student's t, by degrees of freedom from 1 on.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trial:
    """One training."""

    part: str
    setting: str
    seed: int
    context: int = PRESETS["nano"].context

    @property
    def name(self) -> str:
        return f"{self.part} {self.setting} context {self.context} seed {self.seed}"


def trials() -> Iterator[Trial]:
    """Seed by seed, so that a study that is stopped early can be compared already."""
    for seed in range(MANY):
        for setting in SETTINGS:
            if seed < FEW or setting in (STANDARD, FOCAL, LEARNED, REFINED):
                yield Trial("temperature", setting, seed)
        for setting in (STANDARD, FOCAL):
            yield Trial("recall", setting, seed, TASK.preset.context)
            if seed < FEW:
                yield from (Trial("context", setting, seed, context) for context in OTHER_CONTEXTS)


@click.command()
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Results go here.")
@click.option("--only", default="", help="Run those alone whose name has this pattern: '^recall', ' 0.4 .* seed 0'.")
@click.option("--half", type=click.IntRange(0, 1), help="Run every second one; another process runs the others.")
@click.option("--list", "is_listed", is_flag=True, help="Name the runs and which are done; run none.")
def main(path: Path, only: str, half: int | None, is_listed: bool) -> None:
    """Train small models at many temperatures and compare them."""
    chosen = [trial for trial in trials() if re.search(only, trial.name)]
    for number, trial in enumerate(chosen):
        is_done = any(row["name"] == trial.name for row in stored_rows(path))
        if is_listed:
            click.echo(f"{'done' if is_done else 'open'}  {trial.name}")
        elif not is_done and half in (None, number % 2):
            with FitDisplay() as display:
                row = run(trial, display.report)
            store(path, row)
            click.echo(f"{trial.name}: {row['seconds']:.0f} s")


def run(trial: Trial, report: Report) -> Row:
    """Train it, or the rest of it, in a folder of the cache that is removed afterwards."""
    folder = cache_folder() / "temperature-study" / trial.name.replace(" ", "-")
    train = _recall_row if trial.part == "recall" else _text_row
    row = {"name": trial.name, **asdict(trial), **train(trial, folder, report)}
    shutil.rmtree(folder)
    return row


def _text_row(trial: Trial, folder: Path, report: Report) -> Row:
    nano = PRESETS["nano"]
    sequences = nano.options.batch * nano.context // trial.context
    options = replace(nano.options, seed=trial.seed, batch=sequences, micro_batch=sequences)
    found = pretrain(
        nano,
        SOURCES,
        folder,
        focal=SETTINGS[trial.setting],
        options=options,
        longer=ContextOptions(context=trial.context),
        held_out=HELD_OUT_TOKENS // trial.context,
        resume=(folder / "run.json").exists(),
        report=report,
    )
    learned = {name: each for name, each in found["validation"][-1].items() if name == "temperatures"}
    kept = ("held_out", "beyond", "parameters", "options", "focal", "seconds", "tokens")
    return {
        **{name: found[name] for name in kept},
        "tokens_per_step": sequences * trial.context,
        "validation": [{"step": each["step"], "loss": each["loss"]} for each in found["validation"]],
        **learned,
    }


def _recall_row(trial: Trial, folder: Path, report: Report) -> Row:
    found = train_recall(SETTINGS[trial.setting], trial.seed, folder, report=report)
    return {name: found[name] for name in ("accuracy", "validation", "options", "seconds")}


def stored_rows(path: Path) -> list[Row]:
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def store(path: Path, row: Row) -> None:
    """Add a row to those of now: another process may have added some. Summary and figure are made anew."""
    rows = [*stored_rows(path), row]
    summary = summarise(rows)
    command = shlex.join(["python", "-m", "bifocals.training.temperature_study", *sys.argv[1:]])
    write_json(path, {"command": command, "surroundings": surroundings(), "summary": summary, "rows": rows})
    if find_spec("matplotlib") is not None:
        from bifocals.plots import draw_study, save_figure

        save_figure(draw_study(rows, summary), path.with_suffix(".png"))


def summarise(rows: list[Row]) -> dict[str, Any]:
    """Means over seeds, and what each temperature is worth against standard attention of the same seed."""
    of_text = [row for row in rows if row["part"] != "recall"]
    losses = {(row["context"], row["setting"], row["seed"]): row["held_out"]["loss"] for row in of_text}
    usual = PRESETS["nano"].context
    temperatures = {setting: _compare(losses, usual, setting) for setting in SETTINGS if _seeds(losses, usual, setting)}
    contexts = sorted({context for context, setting, _ in losses if setting == FOCAL})
    saved = [_saved(rows, seed) for seed in _seeds(losses, usual, FOCAL) if (usual, STANDARD, seed) in losses]
    return {
        "temperatures": temperatures,
        "order": sorted(temperatures, key=lambda setting: temperatures[setting]["loss"]["mean"]),
        "contexts": {context: _compare(losses, context, FOCAL) for context in contexts},
        "tokens_saved": _interval(saved),
        "recall": {setting: _recall(rows, setting) for setting in (STANDARD, FOCAL)},
    }


Losses = dict[tuple[int, str, int], float]


def _seeds(losses: Losses, context: int, setting: str) -> list[int]:
    return sorted(seed for known, other, seed in losses if (known, other) == (context, setting))


def _compare(losses: Losses, context: int, setting: str) -> dict[str, Any]:
    """Nats per token, and by how much more than standard attention."""
    own = [losses[context, setting, seed] for seed in _seeds(losses, context, setting)]
    both = [seed for seed in _seeds(losses, context, setting) if (context, STANDARD, seed) in losses]
    apart = [losses[context, setting, seed] - losses[context, STANDARD, seed] for seed in both]
    return {"loss": _interval(own), "more_than_standard": _interval(apart)}


def _interval(numbers: list[float]) -> dict[str, Any]:
    """The mean and, from two numbers on, its 95% interval.

    >>> _interval([1.0, 2.0, 3.0])
    {'mean': 2.0, 'interval': [-0.484338, 4.484338], 'seeds': 3}
    """
    if not numbers:
        return {"mean": None, "interval": None, "seeds": 0}
    mean, interval = statistics.fmean(numbers), None
    if len(numbers) > 1:
        half = STUDENT[len(numbers) - 2] * statistics.stdev(numbers) / len(numbers) ** 0.5
        interval = [round(mean - half, 6), round(mean + half, 6)]
    return {"mean": mean, "interval": interval, "seeds": len(numbers)}


def _saved(rows: list[Row], seed: int) -> float:
    """The share of the tokens after which 0.4 is where standard attention ends; less than 0 where it ends behind it."""
    curves = {setting: _curve(rows, setting, seed) for setting in (STANDARD, FOCAL)}
    last = {setting: losses[-1] for setting, (_, losses) in curves.items()}
    ahead, behind = (FOCAL, STANDARD) if last[FOCAL] <= last[STANDARD] else (STANDARD, FOCAL)
    tokens, losses = curves[ahead]
    first = next(place for place, loss in enumerate(losses) if loss <= last[behind])
    before = max(first - 1, 0)
    crossing = float(np.interp(-last[behind], [-losses[before], -losses[first]], [tokens[before], tokens[first]]))
    share = 1 - crossing / tokens[-1]
    return share if ahead == FOCAL else -share


def _curve(rows: list[Row], setting: str, seed: int) -> tuple[list[int], list[float]]:
    """Tokens trained on, and the loss on held-out text after them."""
    wanted = "temperature", setting, seed
    row = next(row for row in rows if (row["part"], row["setting"], row["seed"]) == wanted)
    return (
        [row["tokens_per_step"] * entry["step"] for entry in row["validation"]],
        [entry["loss"] for entry in row["validation"]],
    )


def _recall(rows: list[Row], setting: str) -> dict[str, Any]:
    own = [row["accuracy"] for row in rows if row["part"] == "recall" and row["setting"] == setting]
    return {length: _interval([accuracy[length] for accuracy in own]) for length in (own[0] if own else ())}


if __name__ == "__main__":
    main()
