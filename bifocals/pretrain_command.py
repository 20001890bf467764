"""`bifocals pretrain`: its options are read off the dataclasses that define them."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from bifocals.config import FocalConfig, FocusConfig
from bifocals.display import FitDisplay
from bifocals.train_command import focus_of, options_of
from bifocals.training.context import ContextOptions
from bifocals.training.options import PretrainOptions
from bifocals.training.processes import is_first_process

FIXED = ("tau", "slope", "rounds", "momentum", "allow_look_ahead")  # of Focus: not worth a flag
LEARNED = "learned"


def focal_of(temperature: str, given: dict[str, Any]) -> FocalConfig:
    """A number is a constant, or where a learned form starts; "learned" is read off each token, unless told otherwise.

    >>> focal_of("0.3", {"form": "prefix"}).form, focal_of("learned", {}).form
    ('prefix', 'token')
    """
    if temperature == LEARNED:
        if given.get("form") == "constant":
            raise click.UsageError("--form constant: expected a form that is learned with --temperature learned.")
        return FocalConfig(**{"form": "token", **given})
    of_learned = [f"--{name}" for name in ("per", "minimum", "maximum") if name in given]
    if of_learned and given.get("form", "constant") == "constant":
        raise click.UsageError(
            f"{', '.join(of_learned)}: of learned temperatures, expected together with --temperature learned or a "
            "--form that is learned."
        )
    try:
        number = float(temperature)
    except ValueError as reason:
        raise click.UsageError(
            f"--temperature: expected a number in (0, 4] or '{LEARNED}', got {temperature!r}."
        ) from reason
    return FocalConfig(**{"temperature": number, **given})


def own_options(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the options given that ``kind`` has."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


@click.command()
@click.option("--preset", "preset_name", required=True, help="Shape and recipe: nano, micro, 0.4B, ... 9.5B.")
@click.option("--temperature", default="0.4", help="A number in (0, 4], where 1 is standard attention; or learned.")
@click.option("--data", "sources", multiple=True, required=True, help="A source of text; repeat it for several.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for all results.")
@click.option("--held-out", type=click.IntRange(1), default=16, help="So many sequences of each source to measure on.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out, exactly from where it was.")
@options_of(FocalConfig, leave_out=("temperature",))
@options_of(ContextOptions)
@options_of(PretrainOptions)
@click.option("--focus", "has_focus", is_flag=True, help="Train with Focus as well.")
@click.option("--sparse", is_flag=True, help="Gates on the far pairs kept alone: Focus at the cost of its pattern.")
@options_of(FocusConfig, leave_out=FIXED)
def pretrain(
    preset_name: str,
    temperature: str,
    sources: tuple[str, ...],
    out: Path,
    held_out: int,
    resume: bool,
    has_focus: bool,
    sparse: bool,
    **given: Any,
) -> None:
    """Train a model from scratch with a temperature, with a tokenizer of its own, and measure it on text held out.

    Without an option of the recipe, the preset's own holds. A source is what it is for `bifocals train`. What is
    written is a stock transformers checkpoint (model) and a small lens beside it; `bifocals fold` puts a constant
    temperature into the weights.
    """
    from bifocals.training.presets import find_preset
    from bifocals.training.pretrain import pretrain as run

    given = {name: value for name, value in given.items() if value is not None}
    routing = own_options(FocusConfig, given)
    if (routing or sparse) and not has_focus:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in (*routing, *(["sparse"] if sparse else [])))
        raise click.UsageError(f"{flags}: options of Focus, expected together with --focus.")
    preset, focal = find_preset(preset_name), focal_of(temperature, own_options(FocalConfig, given))
    options = replace(preset.options, **own_options(PretrainOptions, given))
    longer = ContextOptions(**own_options(ContextOptions, given))
    focus = focus_of(given, default_score="cosine") if has_focus else None
    with FitDisplay() as display:
        how: dict[str, Any] = {"is_sparse": sparse, "held_out": held_out, "resume": resume, "report": display.report}
        results = run(preset, sources, out, focal=focal, focus=focus, options=options, longer=longer, **how)
    if is_first_process():
        found = results["held_out"]
        click.echo(
            f"Held-out loss {found['loss']:.4f} nats per token ({found['unigram_loss']:.4f} by frequency alone), "
            f"{found['bits_per_byte']:.4f} bits per byte. Written to {out}."
        )
