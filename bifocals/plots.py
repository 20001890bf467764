"""Figures, by matplotlib where it is installed: pip install 'bifocals[plots]'."""

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bifocals.files import write_file
from bifocals.maps import Maps

NAMED_WORDS = 40  # more tokens than this are not named beside a map


def new_figure(width: float, height: float) -> Any:
    if find_spec("matplotlib") is None:
        raise ValueError("Figures need matplotlib. Install it: pip install 'bifocals[plots]'")
    from matplotlib.figure import Figure  # without pyplot: no window, no state

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """All of the file or none; what it is follows from its ending, png or svg."""
    kind = check_picture(path)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=120)
    write_file(path, buffer.getvalue())


def check_picture(path: Path) -> str:
    kind = path.suffix.removeprefix(".")
    if kind not in ("png", "svg"):
        raise ValueError(f"{path}: expected a name that ends in .png or .svg.")
    return kind


def draw_temperatures(validation: list[dict[str, Any]]) -> Any:
    """Learned temperatures: of each head while training went on, and where they ended, layer by layer."""
    last = validation[-1]["temperatures"]
    figure = new_figure(9, 3.5)
    course, end = figure.subplots(1, 2)
    for number, layer in enumerate(last):
        color = f"C{number % 10}"
        for head in range(len(last[layer])):
            means = [entry["temperatures"][layer][head]["mean"] for entry in validation]
            course.plot([entry["step"] for entry in validation], means, color=color, label=None if head else layer)
            spread = last[layer][head]
            place = number + 0.6 * (head + 0.5) / len(last[layer]) - 0.3
            end.plot([place, place], [spread["min"], spread["max"]], color=color, linewidth=1)
            end.plot(place, spread["mean"], "o", color=color, markersize=4)
    course.set(xlabel="step", ylabel="temperature, mean over tokens", title="while training")
    course.legend(title="layer", fontsize="small", ncols=2)
    end.set(xlabel="layer", ylabel="temperature", title="at the end: mean and range of each head")
    end.set_xticks(range(len(last)), list(last))
    return figure


def draw_maps(maps: Maps, words: list[str]) -> Any:
    """The maps of one head side by side; below, entropy and effective tokens of every layer."""
    kinds = list(maps.attention)
    figure = new_figure(4 * max(2, len(kinds)), 7.5)
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    for place, kind in zip(above.subplots(1, len(kinds), squeeze=False)[0], kinds):
        # The square root: a few large weights would leave all others black.
        picture = place.imshow(maps.attention[kind].sqrt().numpy(), vmin=0, vmax=1, cmap="magma")
        place.set(title=kind, xlabel="key", ylabel="query")
        if len(words) <= NAMED_WORDS:
            place.set_xticks(range(len(words)), words, rotation=90, fontsize="x-small")
            place.set_yticks(range(len(words)), words, fontsize="x-small")
    above.colorbar(picture, ax=above.axes, label="square root of the weight")
    above.suptitle(f"layer {maps.layer}, head {maps.head}")
    entropy, effective = below.subplots(1, 2)
    for kind in kinds:
        line = "--" if kind == "Focus" else "-"  # on a short text it lies on the others
        entropy.plot(range(len(maps.entropy[kind])), list(maps.entropy[kind].values()), line, label=kind)
        effective.plot(range(len(maps.effective[kind])), list(maps.effective[kind].values()), line, label=kind)
    entropy.set(xlabel="layer", ylabel="entropy of attention, nats")
    effective.set(xlabel="layer", ylabel="effective tokens attended to", yscale="log")
    entropy.legend()
    return figure


def draw_adaptation(runs: dict[str, dict[str, Any]]) -> Any:
    """The held-out loss of each run while it was trained."""
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for name, run in runs.items():
        steps, losses = zip(*((each["step"], each["loss"]) for each in run["validation"]))
        axes.plot(steps, losses, ".-", label=name)
    axes.set(xlabel="step", ylabel="held-out loss, nats per token")
    axes.legend()
    return figure


def draw_study(rows: list[dict[str, Any]], summary: dict[str, Any]) -> Any:
    """The temperature study: loss by temperature, loss against tokens, by context, and recall."""
    figure = new_figure(11, 8)
    (by_temperature, by_tokens), (by_context, by_length) = figure.subplots(2, 2)
    for setting, found in summary["temperatures"].items():
        _draw_interval(by_temperature, setting, found["loss"])
    by_temperature.set(xlabel="temperature", ylabel="held-out loss, nats per token", title="mean and 95% over seeds")
    by_temperature.tick_params(axis="x", labelsize="small")  # names as wide as their places
    for setting in ("1.0", "0.4", "learned", "refined"):
        own = [row for row in rows if (row["part"], row["setting"]) == ("temperature", setting)]
        if own:
            tokens = [own[0]["tokens_per_step"] * entry["step"] for entry in own[0]["validation"]]
            curves = [[entry["loss"] for entry in row["validation"]] for row in own]
            by_tokens.plot(tokens, [sum(each) / len(each) for each in zip(*curves)], ".-", label=setting)
    by_tokens.set(xlabel="tokens trained on", ylabel="held-out loss", title="mean over seeds")
    for context, found in summary["contexts"].items():
        _draw_interval(by_context, str(context), found["more_than_standard"])
    by_context.axhline(0, color="grey", linewidth=1)
    by_context.set(xlabel="context", ylabel="loss at 0.4 less loss at 1.0", title="same seed, 95% over seeds")
    for setting, found_at in summary["recall"].items():
        if found_at:
            means = [found["mean"] for found in found_at.values()]
            by_length.plot([int(length) for length in found_at], means, ".-", label=setting)
    by_length.set(xlabel="context", xscale="log", ylabel="values recalled", ylim=(0, 1.02), title="associative recall")
    for axes in (by_tokens, by_length):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(title="temperature")
    return figure


def _draw_interval(axes: Any, place: str, found: dict[str, Any]) -> None:
    """A mean with its interval, if it has one."""
    if found["mean"] is not None:
        axes.plot(place, found["mean"], "o", color="C1")
        if found["interval"] is not None:
            axes.plot([place, place], found["interval"], color="C1")
