"""What a temperature costs of a training step: seconds with it over seconds without a lens, and over the constant's.

A step is forward, backward and AdamW, on random tokens: what they say does not matter here. Each form has a model of
its own with the same weights, and all take turns; the ratio is the median over the turns of ratios within one. It is of
this preset, length and machine: in a wider model the same temperature costs a smaller share.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from bifocals.benchmarks.measuring import interleave, median, surroundings
from bifocals.config import FocalConfig
from bifocals.lens import attach
from bifocals.training.presets import find_preset

WITHOUT, CONSTANT = "without a lens", "constant"
FORMS: dict[str, FocalConfig | None] = {
    WITHOUT: None,
    CONSTANT: FocalConfig(),
    "token": FocalConfig(form="token"),
    "token, each head": FocalConfig(form="token", per="head"),
    "prefix": FocalConfig(form="prefix"),
    "length, each head": FocalConfig(form="length", per="head"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is timed."""

    preset: str
    length: int
    batch: int
    repeats: int


def run(setting: Setting) -> dict[str, Any]:
    """Every form, in turns."""
    steps = {name: _step(setting, focal) for name, focal in FORMS.items()}
    seconds = interleave(steps, setting.repeats)
    return {"setting": asdict(setting), "rows": rows_of(seconds), "seconds": seconds, "surroundings": surroundings()}


def rows_of(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Medians: of the seconds, and of the ratios to two rivals in the same turn."""

    def ratio(own: list[float], rival: str) -> float:
        return median([mine / other for mine, other in zip(own, seconds[rival])])

    return [
        {
            "form": name,
            "seconds": median(own),
            "ratio": ratio(own, WITHOUT),
            "ratio_to_constant": ratio(own, CONSTANT),
        }
        for name, own in seconds.items()
    ]


def _step(setting: Setting, focal: FocalConfig | None) -> Callable[[], object]:
    preset = find_preset(setting.preset)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = Qwen3ForCausalLM(preset.config())
        tokens = torch.randint(preset.vocabulary, (setting.batch, setting.length))
    if focal is not None:
        attach(model, focal)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
