"""Several short fits of one model, on the same text and measured in the same way, into one JSON file.

Fits are short (512 tokens, window 64), so differences between neighbours are within the noise that another seed shows;
what matters at this size is the order of the large ones. A study that is stopped goes on: what its file holds is not
run again. Two processes may each run a half of it, on one core each.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console

from bifocals.benchmarks.measuring import surroundings, write_json
from bifocals.config import FocusConfig
from bifocals.models import load_model
from bifocals.training.baselines import Baseline
from bifocals.training.options import LoraOptions
from bifocals.training.run import Options, run_baseline, train

LENGTH, WINDOW = 512, 64
LEFT_OUT = "losses", "dominance_by_layer"  # of what is measured: too much to read


@dataclass(frozen=True, slots=True)
class Variant:
    """One fit, or one baseline."""

    part: str  # of the recipe that it is about
    name: str
    focus: FocusConfig
    options: Options | LoraOptions
    baseline: Baseline | None = None
    constants: dict[str, Any] = field(default_factory=dict)  # of modules of training, as they are for this fit


def command(variants: Callable[[], Iterable[Variant]]) -> click.Command:
    """The command line of a study."""

    @click.command(help=variants.__doc__)
    @click.argument("model")
    @click.option("--data", "sources", multiple=True, default=("pydoc", "stdlib"), help="Sources of text.")
    @click.option("--sequences", default=8, help="At most so many of each source are fitted on.")
    @click.option("--held-out", default=3, help="So many of each source are measured on.")
    @click.option("--half", type=click.IntRange(0, 1), help="Run every second fit; another process runs the others.")
    @click.option(
        "--json", "path", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Results go here."
    )
    def main(model: str, half: int | None, path: Path, **how: Any) -> None:
        for number, variant in enumerate(variants()):
            if half in (None, number % 2) and all(row["name"] != variant.name for row in stored_rows(path)):
                store(path, model, how, variant, run(model, variant, **how))

    return main


def run(model: str, variant: Variant, sources: tuple[str, ...], sequences: int, held_out: int) -> dict[str, Any]:
    loaded = load_model(model)  # anew: low-rank updates stay in the model
    how: dict[str, Any] = {"focus": variant.focus, "length": LENGTH, "sequences": sequences, "held_out": held_out}
    with TemporaryDirectory() as folder, constants(variant.constants):
        out = Path(folder) / "out"
        if variant.baseline is None:
            assert not isinstance(variant.options, LoraOptions)
            return train(loaded.model, loaded.tokenizer, sources, out, variant.options, **how)
        assert isinstance(variant.options, LoraOptions)
        return run_baseline(
            loaded.model, loaded.tokenizer, sources, out, variant.baseline, options=variant.options, **how
        )


@contextmanager
def constants(changed: dict[str, Any]) -> Iterator[None]:
    """``{"mass_loss.UNEVEN": 0.0}``: so for the length of the block."""
    before = []
    for name, value in changed.items():
        module, attribute = name.split(".")
        owner = import_module(f"bifocals.training.{module}")
        before.append((owner, attribute, getattr(owner, attribute)))
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)


def stored_rows(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def store(path: Path, model: str, how: dict[str, Any], variant: Variant, results: dict[str, Any]) -> None:
    """Add a row to those of now: another process may have added some."""
    measured = results["held_out"]
    row = {
        "part": variant.part,
        "name": variant.name,
        "seconds": results["seconds"],
        "focus": results["focus"],
        "options": results["options"],
        "constants": variant.constants,
        "texts": [{name: value for name, value in each.items() if name not in LEFT_OUT} for each in measured["rows"]],
        "mean": measured["mean"],
    }
    main: Any = sys.modules["__main__"]
    about = {
        "command": shlex.join(["python", "-m", main.__spec__.name if main.__spec__ else "", *sys.argv[1:]]),
        "options": {"model": model, "length": LENGTH, **how},
        "surroundings": surroundings(),
    }
    write_json(path, {**about, "rows": [*stored_rows(path), row]})
    console = Console()
    console.print(f"{variant.part}: {variant.name}, {results['seconds']:.0f} s", highlight=False)
    for each in measured["mean"] or measured["rows"]:
        shown = f"perplexity {each['perplexity']:.2f}" if "perplexity" in each else f"recovered {each['recovered']:.1%}"
        console.print(f"   {each['setting']}: {shown}, far {each.get('far_kept', 1.0):.1%}", highlight=False)
