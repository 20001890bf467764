"""`bifocals train`: its options are read off the dataclasses that define them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import click

from bifocals.config import FocalConfig, FocusConfig
from bifocals.display import FitDisplay
from bifocals.training.baselines import Baseline
from bifocals.training.context import ContextOptions
from bifocals.training.mass import MassOptions
from bifocals.training.options import AdaptOptions, LoraOptions, PretrainOptions, TrainOptions
from bifocals.training.processes import is_first_process

Kind = TypeVar("Kind")
KINDS = MassOptions, TrainOptions, LoraOptions
LABELS: dict[type, str] = {
    MassOptions: "mass", TrainOptions: "lm, distill", LoraOptions: "lora", FocusConfig: "default",
    PretrainOptions: "nano", AdaptOptions: "default", FocalConfig: "default", ContextOptions: "default",
}  # fmt: skip

other_weights = click.option(
    "--allow-other-weights", is_flag=True, help="Load a lens that was fitted to other weights."
)


def options_of(*kinds: type, leave_out: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """One command-line option for each field; None where it is not given, so that each kind keeps its own default."""
    found: dict[str, Any] = {}
    for kind in kinds:
        hints = get_type_hints(kind)
        for field in fields(kind):
            if field.name not in leave_out:
                found.setdefault(field.name, (hints[field.name], []))[1].append((kind, field))

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, (hint, places) in reversed(found.items()):
            defaults = "; ".join(f"{LABELS[kind]}: {field.default}" for kind, field in places)
            text = f"{places[0][1].metadata['help']}  [{defaults}]"
            flag = name.replace("_", "-")
            choices = get_args(hint)
            if hint is bool:
                option = click.option(f"--{flag}/--no-{flag}", name, default=None, help=text)
            else:
                option = click.option(f"--{flag}", name, type=click.Choice(choices) if choices else hint, help=text)
            command = option(command)
        return command

    return decorate


def chosen(kind: type[Kind], what: str, given: dict[str, Any]) -> Kind:
    """The options of ``kind`` that were given; one that only others have is an error."""
    own = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    known = own | {field.name for other in KINDS for field in fields(other)}
    wrong = sorted(name for name in given if name in known - own)
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise click.UsageError(f"{flags}: not an option of {what}, which has {', '.join(sorted(own))}.")
    return kind(**{name: value for name, value in given.items() if name in own})


def focus_of(given: dict[str, Any], default_score: str) -> FocusConfig:
    """The config that the options describe; networks bring their own defaults."""
    own = {field.name for field in fields(FocusConfig)}
    options = {name: value for name, value in given.items() if name in own}
    is_network = options.setdefault("score", default_score) == "network"
    return FocusConfig.network(**options) if is_network else FocusConfig(**options)


@contextmanager
def told_how_to_go_on(out: Path) -> Iterator[None]:
    """Whoever stops the block by Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        if (out / "run.json").exists():
            click.echo(f"Stopped. What was done is in {out}; the same command with --resume goes on from it.", err=True)
        raise


@click.command()
@click.argument("model")
@click.option("--data", "sources", multiple=True, required=True, help="A source of text; repeat it for several.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for the lens.")
@click.option(
    "--objective",
    type=click.Choice(["mass", "lm", "distill"]),
    default="mass",
    help="What routers learn to keep: the base's far attention, its language-model loss, or its predictions.",
)
@click.option(
    "--baseline", type=click.Choice(get_args(Baseline)), help="Instead of fitting, measure what a fit has to beat."
)
@click.option("--lens", "lens_folder", help="Go on fitting this saved lens, which brings its own options.")
@other_weights
@click.option("--length", type=click.IntRange(2), default=2048, help="Tokens of each sequence.")
@click.option(
    "--sequences",
    type=click.IntRange(1),
    default=12,
    help="At most so many of each source are fitted on. By mass, what is captured of all of them is held in memory.",
)
@click.option("--held-out", type=click.IntRange(1), default=4, help="So many of each source are measured on.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out, exactly from where it was.")
@options_of(*KINDS, leave_out=("objective",))
@click.option(
    "--score",
    type=click.Choice(["network", "cosine", "dot"]),
    help="How routers score tokens: small networks on the base's queries and keys (default), or likeness to centroids.",
)
@options_of(FocusConfig, leave_out=("score", "tau", "slope", "rounds", "momentum", "allow_look_ahead"))
def train(
    model: str,
    sources: tuple[str, ...],
    out: Path,
    objective: str,
    baseline: Baseline | None,
    lens_folder: str | None,
    allow_other_weights: bool,
    resume: bool,
    length: int,
    sequences: int,
    held_out: int,
    **given: Any,
) -> None:
    """Fit a Focus lens to MODEL, and measure it on a part of the text that is held out.

    A source is a text file, a folder of them, a .jsonl file with the field "text" (any may be .gz), a name known to the
    datasets package (name:config:split), or one of the built-in corpora pydoc and stdlib. The lens, its results and the
    checkpoints are written into --out.
    """
    from bifocals import load
    from bifocals.cli import print_perplexity
    from bifocals.models import load_model
    from bifocals.training.run import run_baseline
    from bifocals.training.run import train as fit

    given = {name: value for name, value in given.items() if value is not None}
    kind = LoraOptions if baseline is not None else MassOptions if objective == "mass" else TrainOptions
    options: Any = chosen(kind, f"--baseline {baseline}" if baseline else f"--objective {objective}", given)
    if isinstance(options, TrainOptions):
        options = replace(options, objective="lm" if objective == "lm" else "distill")
    wrong = [name for name in given if name in {field.name for field in fields(FocusConfig)}]
    if lens_folder is not None and (wrong or baseline is not None):
        raise click.UsageError("--lens brings its own options: expected neither --baseline nor options of a new lens.")
    if resume and baseline is not None:
        raise click.UsageError("a baseline is measured in one go: expected --resume without --baseline.")
    focus = focus_of(given, default_score="network" if baseline is None else "cosine")
    loaded = load_model(model)
    if isinstance(options, MassOptions) and lens_folder is not None:
        options = replace(options, is_new=given.get("is_new", False))
    if lens_folder is not None:
        lens = load(loaded.model, lens_folder, trainable=True, allow_other_weights=allow_other_weights)
        focus = lens.focus or focus
    how = {"focus": focus, "options": options, "length": length, "sequences": sequences, "held_out": held_out}
    with FitDisplay() as display:
        how |= {"report": display.report, "on_run": display.on_run}
        if baseline is not None:
            results = run_baseline(loaded.model, loaded.tokenizer, sources, out, baseline, **how)
        else:
            with told_how_to_go_on(out):
                results = fit(loaded.model, loaded.tokenizer, sources, out, resume=resume, **how)
    if is_first_process():
        print_perplexity(results["held_out"], focus.groups)
        click.echo(f"Written to {out}.")
