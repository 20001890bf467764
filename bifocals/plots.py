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
    end.set(xlabel="layer", ylabel="temperature", title="at the end: mean, least and greatest, each head")
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
        entropy.plot(range(len(maps.entropy[kind])), list(maps.entropy[kind].values()), ".-", label=kind)
        effective.plot(range(len(maps.effective[kind])), list(maps.effective[kind].values()), ".-", label=kind)
    entropy.set(xlabel="layer", ylabel="entropy of attention, nats")
    effective.set(xlabel="layer", ylabel="effective tokens attended to", yscale="log")
    entropy.legend()
    return figure
