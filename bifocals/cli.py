"""The command line: parse, call, print."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bifocals import __version__
from bifocals.adapt_command import adapt
from bifocals.maps_command import maps
from bifocals.pretrain_command import pretrain
from bifocals.train_command import other_weights, train
from bifocals.training.processes import end_process

console = Console()


class Lengths(click.ParamType):
    """Several whole numbers, separated by commas."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"expected whole numbers separated by commas, like 1024,4096; got {value!r}.", param, ctx)
        if min(numbers) < 1:
            self.fail(f"expected lengths of at least 1, got {min(numbers)}.", param, ctx)
        return numbers


class Commands(click.Group):
    """Errors that are the user's to mend are printed as one message, without a traceback."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except SystemExit as ended:
            end_process(ended.code if isinstance(ended.code, int) else 1)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__)
def main() -> None:
    """Two lenses for transformers: Focal sharpens attention, Focus selects what is worth attending to."""


@main.group()
def bench() -> None:
    """Measure, side by side with what you have, on this machine."""


@bench.command("attention")
@click.option("--lengths", type=Lengths(), default="1024,4096,16384", help="Sequence lengths.")
@click.option("--groups", type=click.IntRange(1), default=8, help="Groups that the tokens are in.")
@click.option("--top-k", type=click.IntRange(1), default=1, help="Groups that each query reads; keys are in one.")
@click.option("--window", type=click.IntRange(0), default=128, help="Keys at most this far away are always read.")
@click.option("--sinks", type=click.IntRange(0), default=0, help="First tokens that are always read.")
@click.option("--heads", type=click.IntRange(1), default=2, help="Attention heads, each with its own groups.")
@click.option("--dim", type=click.IntRange(1), default=64, help="Size of a head.")
@click.option("--repeats", type=click.IntRange(1), default=5, help="Timed runs of each; medians are reported.")
@click.option("--backward", is_flag=True, help="Time forward and backward together.")
@click.option(
    "--sides",
    type=click.Choice(["same", "separate"]),
    default="same",
    help="With one group per query: the group of its own key, or one drawn apart. More groups are always drawn apart.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
def bench_attention(json_path: Path | None, **options: Any) -> None:
    """Focus attention against dense causal attention: one call of each, in turns, checked against the oracle first.

    speedup is dense time over Focus time; bound is what the pattern allows (all causal pairs over those kept).
    """
    from bifocals.benchmarks import attention, measuring

    if options["top_k"] > options["groups"]:
        raise click.BadParameter(f"expected at most the {options['groups']} groups, got {options['top_k']}.")
    setting = attention.Setting(**options)
    with _progress() as progress:
        task = progress.add_task("checking against the oracle", total=2 * len(setting.lengths))

        def on_row(row: dict[str, Any]) -> None:
            progress.update(task, advance=1, description=f"{row['length']} tokens, {row['groups']} groups")

        result = attention.run(setting, on_row)
    console.print(_attention_table(result["rows"]))
    if json_path is not None:
        measuring.write_json(json_path, {"command": _command(), **result})
        console.print(f"Written to {json_path}.")


@bench.command("capture")
@click.argument("model")
@click.option("--length", type=click.IntRange(600), default=2048, help="Tokens in the sequence.")
@click.option("--repeats", type=click.IntRange(1), default=5, help="Timed runs of each; medians are reported.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
def bench_capture(model: str, length: int, repeats: int, json_path: Path | None) -> None:
    """One forward of MODEL with all that fitting by mass needs of it, against a plain forward."""
    from bifocals.benchmarks import capture, measuring
    from bifocals.models import load_model

    result = capture.run(load_model(model).model, length, repeats)
    row = result["rows"][0]
    console.print(
        f"{length:,} tokens: plain {row['plain_seconds']:.2f} s, captured {row['captured_seconds']:.2f} s, "
        f"{row['ratio']:.2f} times as long"
    )
    if json_path is not None:
        measuring.write_json(json_path, {"command": _command(), "model": model, **result})
        console.print(f"Written to {json_path}.")


def pattern_options(command: Callable[..., None]) -> Callable[..., None]:
    """What is read, for benchmarks of the cache and of whole models."""
    options = (
        click.option("--groups", type=click.IntRange(1), default=8, help="Groups that the tokens are in."),
        click.option(
            "--top-k", type=click.IntRange(1), default=1, help="Groups that each query reads; keys are in one."
        ),
        click.option("--window", type=click.IntRange(0), default=128, help="Keys at most this far are always read."),
        click.option("--sinks", type=click.IntRange(0), default=4, help="First tokens that are always read."),
        click.option(
            "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@bench.command("decode")
@click.argument("model", required=False)
@click.option("--context", type=Lengths(), default="4096,16384,32768", help="Tokens in the cache.")
@pattern_options
@click.option("--heads", type=click.IntRange(1), default=9, help="Query heads of the layer.")
@click.option("--kv-heads", type=click.IntRange(1), default=3, help="Key-value heads of the layer.")
@click.option("--dim", type=click.IntRange(1), default=64, help="Size of a head.")
@click.option("--repeats", type=click.IntRange(1), default=20, help="Timed steps of each; medians are reported.")
def bench_decode(model: str | None, json_path: Path | None, **options: Any) -> None:
    """A decoding step with the grouped cache against dense attention with the plain one, checked against the oracle.

    Without MODEL, the attention of one layer; with it (smollm2-135m, a folder, a name on the hub), the whole step of
    the model, whose own heads count. speedup is dense time over Focus time.
    """
    from bifocals.benchmarks import decode, measuring

    _check_pattern(options)
    if options["heads"] % options["kv_heads"]:
        raise click.BadParameter(
            f"expected heads that are a multiple of the {options['kv_heads']} key-value heads, got {options['heads']}."
        )
    too_short = options["window"] + options["sinks"] + 1
    if min(options["context"]) < too_short:
        raise click.BadParameter(f"expected contexts of at least {too_short} tokens: window, sinks and one more.")
    setting = decode.Setting(model=model, **options)
    with _progress() as progress:
        task = progress.add_task("checking against the oracle", total=len(setting.context))

        def on_row(row: dict[str, Any]) -> None:
            progress.update(task, advance=1, description=f"{row['context']} tokens in the cache")

        result = decode.run(setting, on_row)
    what = "A decoding step" if model is None else f"A decoding step of {model}"
    console.print(_parts_table(what, result["rows"], "context", "dense"))
    _store(json_path, result, measuring.write_json)


@bench.command("prefill")
@click.argument("model")
@click.option("--lengths", type=Lengths(), default="2048,8192,16384", help="Prompt lengths.")
@pattern_options
@click.option("--repeats", type=click.IntRange(1), default=3, help="Timed prompts of each; medians are reported.")
def bench_prefill(model: str, json_path: Path | None, **options: Any) -> None:
    """How fast MODEL reads a prompt with Focus, against the base with its own attention, in turns.

    MODEL is smollm2-135m, a folder, a GGUF file or a name on the hub. speedup is base time over Focus time.
    """
    from bifocals.benchmarks import measuring, prefill

    _check_pattern(options)
    setting = prefill.Setting(model=model, **options)
    with _progress() as progress:
        task = progress.add_task("loading", total=len(setting.lengths))

        def on_row(row: dict[str, Any]) -> None:
            progress.update(task, advance=1, description=f"{row['length']} tokens")

        result = prefill.run(setting, on_row)
    console.print(_parts_table(f"A prompt of {model}", result["rows"], "length", "base"))
    _store(json_path, result, measuring.write_json)


@bench.command("temperature")
@click.option("--preset", default="micro", help="The model that is trained: nano, micro, 0.4B, ...")
@click.option("--length", type=click.IntRange(2), default=512, help="Tokens of each sequence.")
@click.option("--batch", type=click.IntRange(1), default=4, help="Sequences in a step.")
@click.option("--repeats", type=click.IntRange(1), default=10, help="Timed steps of each; medians are reported.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
def bench_temperature(json_path: Path | None, **options: Any) -> None:
    """A training step with a temperature, constant and learned, against one without a lens, in turns."""
    from bifocals.benchmarks import measuring, temperature

    result = temperature.run(temperature.Setting(**options))
    table = Table(title=f"A training step of {options['preset']}, {options['length']:,} tokens", box=SIMPLE)
    for name in ("temperature", "ms", "over no lens", "over constant"):
        table.add_column(name, justify="left" if name == "temperature" else "right")
    for row in result["rows"]:
        ratios = [f"{row[name]:.3f}" for name in ("ratio", "ratio_to_constant")]
        table.add_row(row["form"], f"{1000 * row['seconds']:.1f}", *ratios)
    console.print(table)
    _store(json_path, result, measuring.write_json)


def _check_pattern(options: dict[str, Any]) -> None:
    if options["top_k"] > options["groups"]:
        raise click.BadParameter(f"expected at most the {options['groups']} groups, got {options['top_k']}.")


def _store(path: Path | None, result: dict[str, Any], write: Callable[[Path, dict[str, Any]], None]) -> None:
    if path is not None:
        write(path, {"command": _command(), **result})
        console.print(f"Written to {path}.")


def _parts_table(title: str, rows: Sequence[dict[str, Any]], counted: str, rival: str) -> Table:
    table = Table(title=f"{title}: Focus against {rival}, in milliseconds; where the time of Focus goes", box=SIMPLE)
    for name in ("tokens", f"{rival} ms", "Focus ms", "speedup", *rows[0]["parts"]):
        table.add_column(name, justify="right")
    for row in rows:
        milliseconds = [1000 * row[name] for name in (f"{rival}_seconds", "focus_seconds")]
        parts = [f"{1000 * part:.2f}" for part in row["parts"].values()]
        times = [f"{some:.2f}" for some in milliseconds]
        table.add_row(f"{row[counted]:,}", *times, f"{row['speedup']:.2f}x", *parts)
    return table


def _attention_table(rows: Sequence[dict[str, Any]]) -> Table:
    error = max(row["max_error"] for row in rows)
    table = Table(
        title="Focus against dense causal attention",
        caption=f"memory: of Focus, in sizes of its inputs. Largest error against float64: {error:.0e}",
        box=SIMPLE,
    )
    for name in ("tokens", "groups", "dense s", "Focus s", "speedup", "bound", "pairs", "memory"):
        table.add_column(name, justify="left" if name == "groups" else "right")
    for row in rows:
        table.add_row(
            f"{row['length']:,}",
            "even" if row["groups"] == "balanced" else "uneven",
            f"{row['dense_seconds']:.4f}",
            f"{row['focus_seconds']:.4f}",
            f"{row['speedup']:.2f}x",
            f"{row['bound']:.2f}x",
            f"{row['pairs_kept']:.1%}",
            f"{row['focus_peak_bytes'] / row['input_bytes']:.1f}",
        )
    return table


def _progress() -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


@main.command()
@click.argument("model")
@click.option("--lens", "lens_folder", help="A saved lens; without it, untrained ones of the kinds below are put on.")
@click.option("--focal", "temperature", type=float, help="Put Focal on, with this temperature.")
@click.option("--focus/--no-focus", default=True, help="Put Focus on, with its defaults.")
@click.option(
    "--mode", type=click.Choice(["hard", "soft"]), default="hard", help="Run Focus sparsely, or by its gates."
)
@other_weights
def check(
    model: str,
    lens_folder: str | None,
    temperature: float | None,
    focus: bool,
    mode: str,
    allow_other_weights: bool,
) -> None:
    """Run the promises on MODEL: off is off, no look-ahead, decode equals prefill, padding, save and load.

    MODEL is smollm2-135m, a folder, a GGUF file or a name on the hub. Exit code 1 if a promise is broken.
    """
    from bifocals import FocalConfig, FocusConfig, attach, load
    from bifocals.models import load_model
    from bifocals.promises import check as run_promises

    if lens_folder is not None and temperature is not None:
        raise click.UsageError("a saved lens has its own temperature: expected --lens or --focal, got both.")
    configs = [FocalConfig(temperature=temperature)] if temperature is not None else []
    if lens_folder is None and not configs and not focus:
        raise click.UsageError("nothing to check: expected --focal, --focus or --lens, got none of them.")
    loaded = load_model(model)
    if lens_folder is not None:
        lens = load(loaded.model, lens_folder, allow_other_weights=allow_other_weights)
    else:
        lens = attach(loaded.model, *configs, *([FocusConfig()] if focus else []))
    lens.mode = mode  # type: ignore[assignment]
    report = run_promises(loaded.model, loaded.tokenizer)
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    sys.exit(0 if report.is_kept else 1)


@main.command("eval")
@click.argument("model")
@click.option("--lens", "lens_folder", help="A folder, a shipped lens, or a hub name; without it, the two ends alone.")
@click.option(
    "--data", "sources", multiple=True, required=True, help="A text; repeat it for several. See train --help."
)
@click.option("--length", type=click.IntRange(2), default=2048, help="Tokens of each block.")
@click.option("--blocks", type=click.IntRange(1), default=8, help="Blocks of each text, spread evenly over it.")
@click.option("--top-k", "top_ks", type=Lengths(), default="1,2,4", help="Settings of the lens's dial.")
@other_weights
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all numbers here.")
def evaluate(
    model: str,
    lens_folder: str | None,
    sources: tuple[str, ...],
    length: int,
    blocks: int,
    top_ks: tuple[int, ...],
    allow_other_weights: bool,
    json_path: Path | None,
) -> None:
    """Perplexity of MODEL with a lens, between the model as it is and its window and sinks alone.

    recovered: the share of what window and sinks lose that the lens brings back, with its 95% interval over blocks.
    far kept: the mean over blocks, and the most of any. dominance: the largest group of the worst head in the worst
    block, in fair shares of the keys in groups.
    """
    from bifocals import load
    from bifocals.benchmarks import measuring
    from bifocals.evaluation import perplexity
    from bifocals.models import load_model
    from bifocals.training.data import load_blocks

    loaded = load_model(model)
    packed = load_blocks(sources, loaded.tokenizer, length, limit=blocks)
    focus = None
    if lens_folder is None:
        top_ks = ()
    else:
        focus = load(loaded.model, lens_folder, allow_other_weights=allow_other_weights).focus
    with _progress() as progress:
        task = progress.add_task("", total=len(packed.tokens) * (2 + len(top_ks)))

        def on_run(text: str, setting: str) -> None:
            progress.update(task, advance=1, description=f"{Path(text).name}, {setting}")

        result = perplexity.evaluate(loaded.model, packed, top_ks, on_run)
    print_perplexity(result, 1 if focus is None else focus.groups)
    if json_path is not None:
        options: dict[str, Any] = {
            "model": model,
            "lens": lens_folder,
            "data": sources,
            "length": length,
            "blocks": blocks,
        }
        options |= {"top_k": top_ks, "focus": None if focus is None else asdict(focus)}
        about = {"command": _command(), "options": options, "surroundings": measuring.surroundings()}
        measuring.write_json(json_path, {**about, **result})
        console.print(f"Written to {json_path}.")


def print_perplexity(result: dict[str, Any], groups: int) -> None:
    table = Table(title=f"Perplexity at {result['length']:,} tokens", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("text", "setting", "perplexity", "recovered (95%)", "far kept", "pairs", "dominance"):
        table.add_column(name, justify="left" if name in ("text", "setting") else "right")
    for row in [*result["rows"], *({"text": "mean", **row} for row in result["mean"])]:
        low, high = row.get("interval") or (0, 0)
        interval = f" ({100 * low:.1f} to {100 * high:.1f})" if low < high else ""  # one block has none
        most = row.get("most_far_kept")
        table.add_row(
            escape(Path(row["text"]).name),
            row["setting"],
            _shown(row.get("perplexity"), ".2f"),
            _shown(row.get("recovered"), ".1%") + interval,
            _shown(row.get("far_kept"), ".1%") + (f" ({most:.1%})" if most else ""),
            _shown(row.get("pairs_kept"), ".1%"),
            _shown(row["dominance"] * groups if "dominance" in row else None, ".2f"),
        )
    console.print(table)


def _shown(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def _command() -> str:
    """What was typed, to store beside what it measured."""
    return shlex.join(["bifocals", *sys.argv[1:]])


@main.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the stock checkpoint; new.")
@click.option("--temperature", type=float, default=0.4, help="The temperature that goes into the weights.")
@click.option("--lens", "lens_folder", help="Fold the temperature of this saved lens instead.")
@other_weights
def fold(model: str, out: Path, temperature: float, lens_folder: str | None, allow_other_weights: bool) -> None:
    """Put a constant temperature into the weights of MODEL, so that any engine runs it, without bifocals."""
    from bifocals import FocalConfig, attach, load
    from bifocals import fold as fold_in
    from bifocals.files import new_folder
    from bifocals.models import load_model

    if out.exists():
        raise click.BadParameter(f"expected a folder that does not exist yet, got {out}. Choose another or remove it.")
    loaded = load_model(model)
    if lens_folder is None:
        attach(loaded.model, FocalConfig(temperature=temperature))
    else:
        load(loaded.model, lens_folder, allow_other_weights=allow_other_weights)
    stock = fold_in(loaded.model)
    with new_folder(out) as aside:
        stock.save_pretrained(aside)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(aside)
    console.print(f"Written to {out}: a stock checkpoint; transformers loads it without bifocals.")


main.add_command(train)
main.add_command(pretrain)
main.add_command(adapt)
main.add_command(maps)


@main.command()
@click.option("--fit", "with_fit", is_flag=True, help="Fit a small lens first, instead of the shipped one.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write what is shown into this file too.")
def demo(with_fit: bool, save: Path | None) -> None:
    """Show the lenses at work on a real model, measured on this machine, in a few minutes."""
    from bifocals.demo import run
    from bifocals.display import FitDisplay
    from bifocals.files import write_file

    shown = Console(record=True, width=None if sys.stdout.isatty() else 100)
    if with_fit:
        with FitDisplay() as display:
            run(shown, with_fit=True, report=display.report)
    else:
        run(shown, with_fit=False)
    if save is not None:
        write_file(save, shown.export_text().encode())
