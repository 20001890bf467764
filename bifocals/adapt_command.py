"""`bifocals adapt`: its options are read off the dataclasses that define them."""

from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bifocals.display import FitDisplay
from bifocals.pretrain_command import own_options
from bifocals.train_command import options_of
from bifocals.training.context import ContextOptions
from bifocals.training.options import AdaptOptions
from bifocals.training.processes import is_first_process


@click.command()
@click.argument("model")
@click.option("--temperature", type=float, default=0.4, help="In (0, 4]; 1 is standard attention.")
@click.option("--data", "sources", multiple=True, required=True, help="A source of text; repeat it for several.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for all results.")
@click.option("--held-out", type=click.IntRange(1), default=8, help="So many sequences of each source to measure on.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out, exactly from where it was.")
@options_of(ContextOptions)
@options_of(AdaptOptions)
def adapt(
    model: str, temperature: float, sources: tuple[str, ...], out: Path, held_out: int, resume: bool, **given: Any
) -> None:
    """Train MODEL to work at a temperature, and compare it with MODEL trained on at temperature 1.

    MODEL is smollm2-135m, a folder, a GGUF file or a name on the hub; a source is what it is for `bifocals train`.
    Sequences have 512 tokens, or as many as MODEL has positions, unless --context says otherwise.
    What is written is a stock transformers checkpoint (model) and a small lens beside it; `bifocals fold` puts the
    temperature into the weights.
    """
    from bifocals.models import load_model
    from bifocals.training.adapt import adapt as run

    given = {name: value for name, value in given.items() if value is not None}
    options = AdaptOptions(**own_options(AdaptOptions, given))
    longer = ContextOptions(**own_options(ContextOptions, given))
    loaded = load_model(model)
    how: dict[str, Any] = {"temperature": temperature, "options": options, "longer": longer, "held_out": held_out}
    with FitDisplay() as display:
        results = run(loaded.model, loaded.tokenizer, sources, out, resume=resume, report=display.report, **how)
    if is_first_process():
        Console().print(_table(results, temperature))
        click.echo(f"Written to {out}.")


def _table(results: dict[str, Any], temperature: float) -> Table:
    table = Table(title=f"Held-out perplexity, temperature {temperature:g}", box=SIMPLE)
    for name in ("model", "perplexity", "over the base's (95%)"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, found in results["held_out"].items():
        low, high = found["interval"]
        ratio = "" if name == "base" else f"{found['ratio']:.4f} ({low:.4f} to {high:.4f})"
        table.add_row(name, f"{found['perplexity']:.3f}", ratio)
    return table
