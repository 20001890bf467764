"""How much faster does a model with Focus read a prompt than the base?

Both read the same tokens and fill an empty cache, in turns, in one process; the base on the attention implementation
it has by itself. ``speedup`` is base seconds over Focus seconds. The routers are untrained and balanced: how good the
answers are, this does not say. The parts: ``routing`` finds the groups, ``near`` and
``far`` are the attention calls with what prepares and merges them, ``attention`` is what else attention does (plans
and checks; all of it, where the pattern is short and a mask is faster), ``append`` fills the cache, and ``rest`` is
the model.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from bifocals import layer
from bifocals.backends import native, sparse
from bifocals.benchmarks.measuring import interleave, median, stopwatch, surroundings
from bifocals.benchmarks.subject import Subject, load_subject
from bifocals.grouped import GroupedLayer
from bifocals.layer import LayerLens

WARM_UP = 512  # tokens, read by both before the first length counts

PARTS: dict[str, list[tuple[Any, str]]] = {
    "routing": [(LayerLens, "_route")],
    "near": [(native, "read_near"), (sparse, "near_tiles")],
    "far": [(native, "read_far"), (sparse, "forward")],
    "attention": [(layer, "focus_attention")],
    "append": [(DynamicLayer, "update"), (GroupedLayer, "update"), (GroupedLayer, "remember")],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is measured."""

    model: str
    lengths: tuple[int, ...]
    groups: int
    top_k: int
    window: int
    sinks: int
    repeats: int
    seed: int = 0


def measure_length(subject: Subject, length: int, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    tokens = subject.tokens(length)

    def focus() -> None:
        subject.model(tokens, use_cache=True, logits_to_keep=1)

    def base() -> None:
        with subject.lens.disabled():
            focus()

    # Under the watch all the time: beside a prompt it costs nothing, and a long one is not read once more for it.
    with stopwatch(PARTS) as parts:
        seconds = interleave({"base": base, "focus": focus}, repeats, warm_up=False)
    parts = {name: took / repeats for name, took in parts.items()}
    return {
        "length": length,
        "base_seconds": median(seconds["base"]),
        "focus_seconds": median(seconds["focus"]),
        "base_spread": [min(seconds["base"]), max(seconds["base"])],
        "focus_spread": [min(seconds["focus"]), max(seconds["focus"])],
        "speedup": median(seconds["base"]) / median(seconds["focus"]),
        "parts": parts | {"rest": sum(seconds["focus"]) / repeats - sum(parts.values())},
    }


@torch.no_grad()
def run(setting: Setting, on_row: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure each length; ``on_row`` is told of each."""
    torch.manual_seed(setting.seed)
    how = {"groups": setting.groups, "top_k": setting.top_k, "window": setting.window, "sinks": setting.sinks}
    subject = load_subject(setting.model, **how)
    measure_length(subject, WARM_UP, 1)
    rows = []
    for length in setting.lengths:
        rows.append(measure_length(subject, length, setting.repeats))
        on_row(rows[-1])
    return {"benchmark": "prefill", "setting": asdict(setting), "surroundings": surroundings(), "rows": rows}
