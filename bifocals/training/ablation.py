"""Which part of a recipe buys what: the same short fit, one thing changed at a time.

    python -m bifocals.training.ablation smollm2-135m --data pydoc --json results/ablation.json

Sequences are short (512 tokens, window 64) and a fit takes a few minutes, so differences between neighbours are within
the noise that the second seed shows; what matters at this size is the order of the large ones. A run that is stopped
goes on: variants that the JSON file holds are not run again.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console

from bifocals import lens_of
from bifocals.benchmarks.measuring import surroundings, write_json
from bifocals.config import FocusConfig
from bifocals.models import load_model
from bifocals.training.baselines import Baseline
from bifocals.training.mass import MassOptions
from bifocals.training.options import TrainOptions
from bifocals.training.run import Options, run_baseline, train

LENGTH, WINDOW = 512, 64


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing changed."""

    part: str
    name: str
    focus: FocusConfig
    options: Options


def variants() -> Iterator[Variant]:
    def focus(**changes: Any) -> FocusConfig:
        return FocusConfig(**{"window": WINDOW, **changes})

    mass = MassOptions(steps=120, query_steps=60, batch=2, rows=128)
    through_model: dict[str, Any] = {"steps": 60, "batch": 2, "watch_every": 60}
    yield Variant("recipe", "mass, centroids, 8 groups", focus(), mass)
    yield Variant("seed", "another seed", focus(), MassOptions(steps=120, query_steps=60, batch=2, rows=128, seed=1))
    yield Variant("score", "networks on queries and keys", FocusConfig.network(window=WINDOW), mass)
    yield Variant("sinks", "no sinks", focus(sinks=0), mass)
    yield Variant("routers", "one router for each layer", focus(routers="layer"), mass)
    yield Variant("sides", "same groups for queries and keys", focus(sides="same"), mass)
    yield Variant("balance", "potentials follow each step at once", focus(momentum=0.0), mass)
    yield Variant("balance", "potentials hardly move", focus(momentum=0.999), mass)
    yield Variant("objective", "lm, log gate", focus(), TrainOptions(**through_model))
    yield Variant("objective", "lm, sigmoid gate", focus(gate="sigmoid"), TrainOptions(**through_model))
    yield Variant("objective", "distill", focus(), TrainOptions(objective="distill", **through_model))
    for groups in (4, 16):
        yield Variant("groups", f"{groups} groups", focus(groups=groups), mass)
    for dim in (4, 64):
        yield Variant("dim", f"dim {dim}", focus(dim=dim), mass)


@click.command()
@click.argument("model")
@click.option("--data", "sources", multiple=True, default=("pydoc",), help="Sources of text.")
@click.option("--sequences", default=48, help="At most so many of each source are fitted on.")
@click.option("--held-out", default=12, help="So many of each source are measured on.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Results go here.")
def main(model: str, sources: tuple[str, ...], sequences: int, held_out: int, path: Path) -> None:
    """Fit every variant shortly and measure it on held-out text."""
    console = Console()
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    done = {row["name"] for row in stored["rows"]}
    loaded = load_model(model)
    how: dict[str, Any] = {"length": LENGTH, "sequences": sequences, "held_out": held_out}

    def keep(part: str, name: str, results: dict[str, Any]) -> None:
        own = {"part": part, "name": name, "mean": results["held_out"]["mean"], "seconds": results["seconds"]}
        stored["rows"].append({**own, "focus": results["focus"], "options": results["options"]})
        options = {"model": model, "data": sources, **how}
        write_json(
            path,
            {
                "command": shlex.join(["python", "-m", "bifocals.training.ablation", *sys.argv[1:]]),
                "options": options,
                "surroundings": surroundings(),
                **stored,
            },
        )
        for row in own["mean"]:
            console.print(f"{name}: {row['setting']}, recovered {row['recovered']:.1%}, far {row['far_kept']:.1%}")

    for variant in variants():
        if variant.name not in done:
            with TemporaryDirectory() as folder:
                out = Path(folder) / "out"
                results = train(
                    loaded.model, loaded.tokenizer, sources, out, variant.options, focus=variant.focus, **how
                )
            keep(variant.part, variant.name, results)
            _take_off(loaded.model)
    baselines: tuple[Baseline, ...] = ("random", "kmeans")
    for baseline in baselines:
        if baseline not in done:
            with TemporaryDirectory() as folder:
                out = Path(folder) / "out"
                focus = FocusConfig(window=WINDOW)
                results = run_baseline(loaded.model, loaded.tokenizer, sources, out, baseline, focus=focus, **how)
            keep("initialisation", baseline, results)
            _take_off(loaded.model)


def _take_off(model: Any) -> None:
    lens = lens_of(model)
    assert lens is not None
    lens.detach()


if __name__ == "__main__":
    main()
