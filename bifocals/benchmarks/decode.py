"""How much faster is one decoding step with the grouped cache than with the plain one?

Without a model, one attention layer: ``speedup`` is the time of dense attention of one token over all cached keys,
over that of near, sinks and the groups it reads. Appending is timed apart: ``append`` is the new token's way into the
cache, which copies all of a plain cache. ``memory`` is the memory of the grouped cache over that of the plain one.

With a model, the whole step. Base and Focus take turns in one process, the base on the attention implementation it
has by itself, with transformers' own cache. The cache is filled with the keys of a shorter prompt, over and over:
what is in it does not matter here, nor do the positions beyond those the model knows. The routers are untrained and
balanced.

Of Focus the parts are taken in more runs: ``routing`` finds the groups, ``near`` (with sinks) and ``far`` are the
attention calls, ``attention`` is what else attention does (merging, above all), ``append`` fills the cache, ``rest``
is the model. Where keys are read where they lie, near and far are one call: ``near`` is then what it takes where no
group is read, and ``far`` what it takes longer to read some.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import one_hot, scaled_dot_product_attention
from transformers.cache_utils import DynamicCache

from bifocals import filed, reference
from bifocals.backends import native
from bifocals.benchmarks.attention import WrongResult
from bifocals.benchmarks.measuring import interleave, median, stopwatch, surroundings
from bifocals.benchmarks.subject import Subject, load_subject
from bifocals.filed import Filed
from bifocals.grouped import GroupedLayer
from bifocals.growing import Growing, GrowingArray
from bifocals.layer import LayerLens

CHECKED = 1024  # tokens
SHORT = 1024  # tokens whose keys are repeated to fill a long cache

PARTS: dict[str, list[tuple[Any, str]]] = {
    "routing": [(LayerLens, "_route")],
    "near": [(Filed, "read_near")],
    "far": [(filed, "read_shelf"), (native, "step")],
    "attention": [(GroupedLayer, "attend")],
    "append": [(GroupedLayer, "update"), (GroupedLayer, "remember"), (Filed, "append")],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is measured."""

    context: tuple[int, ...]
    groups: int
    top_k: int
    window: int
    sinks: int
    heads: int
    kv_heads: int
    dim: int
    repeats: int
    model: str | None = None
    seed: int = 0


class Layer:
    """One attention layer's past in both forms, and the tokens that go on from it."""

    def __init__(self, setting: Setting, context: int, dtype: torch.dtype = torch.float32) -> None:
        self.setting = setting
        shape = (1, setting.kv_heads, context, setting.dim)
        self.key, self.value = (torch.randn(shape, dtype=dtype) for _ in range(2))
        self.numbers = GrowingArray(torch.randint(1, setting.groups + 1, shape[:3], dtype=torch.int16).numpy())
        self.scale = setting.dim**-0.5
        self.filed: Filed | None = None
        if native.obstacle(self.key, setting.groups) is None:  # keys are read where they lie
            self.flat = Growing(self.key), Growing(self.value)
        else:
            how = setting.groups, (0,), setting.sinks, setting.window
            self.filed = Filed.file(self.key, self.value, self.numbers.held, *how)

    def draw(self) -> tuple[Tensor, Tensor]:
        """A query, and the groups that it reads."""
        query = torch.randn(1, self.setting.heads, 1, self.setting.dim, dtype=self.key.dtype)
        chosen = torch.rand(1, self.setting.kv_heads, self.setting.groups).topk(self.setting.top_k).indices
        return query, one_hot(chosen, self.setting.groups).sum(dim=2).bool()

    def dense(self, query: Tensor) -> Tensor:
        is_grouped = self.setting.heads != self.setting.kv_heads
        return scaled_dot_product_attention(query, self.key, self.value, scale=self.scale, enable_gqa=is_grouped)

    def focus(self, query: Tensor, reads: Tensor) -> Tensor:
        if self.filed is not None:
            return self.filed.attend(query, reads, self.scale)
        key, value = (side.held for side in self.flat)
        how = (0,), self.setting.window, self.setting.sinks, self.scale
        return native.step(query, key, value, reads, self.numbers.held, *how)

    def append_to_plain(self) -> None:
        """As transformers' own cache does, but for keeping the result: the length stays."""
        for tensor in (self.key, self.value):
            torch.cat([tensor, tensor[:, :, :1]], dim=2)

    def append_to_grouped(self) -> None:
        self.numbers.append(self.numbers.held[:, :, :1])
        if self.filed is not None:
            self.filed.append(self.key[:, :, :1], self.value[:, :, :1], self.numbers.held)
        else:
            for grown, side in zip(self.flat, (self.key, self.value)):
                grown.append(side[:, :, :1])

    def memory(self) -> float:
        """Of the grouped form over the plain one."""
        if self.filed is None:
            held = sum(grown.room.nbytes for grown in self.flat)
        else:
            shelves = [shelf for head in self.filed.shelves[0] for shelf in head]
            held = sum(shelf.key.nbytes + shelf.value.nbytes for shelf in shelves)
            held += self.filed.near_key.nbytes + self.filed.near_value.nbytes
        return (held + self.numbers.room.nbytes) / (self.key.nbytes + self.value.nbytes)


def check_against_oracle(setting: Setting) -> float:
    """The largest error in float32 against the float64 oracle, which must be of the size of the oracle's own."""
    layer = Layer(setting, max(CHECKED, setting.window + setting.sinks + 1))
    query, reads = layer.draw()
    holds = one_hot(torch.from_numpy(layer.numbers.held).long() - 1, setting.groups).bool()
    vectors = query, layer.key, layer.value
    pattern: dict[str, Any] = {"membership": reads[:, :, None], "key_membership": holds}
    pattern |= {"window": setting.window, "sinks": setting.sinks}
    exact = reference.focus_attention(*(vector.double() for vector in vectors), **pattern)
    own_error = (reference.focus_attention(*vectors, **pattern) - exact).abs().max().item()
    error = (layer.focus(query, reads) - exact).abs().max().item()
    allowed = 2 * (own_error + torch.finfo(torch.float32).eps * exact.abs().max().item())
    if error > allowed:
        raise WrongResult(f"A step differs from the float64 oracle by {error:.2e}; expected at most {allowed:.2e}.")
    return error


def measure_layer(setting: Setting, context: int, max_error: float) -> dict[str, Any]:
    """One row: a single attention layer."""
    layer = Layer(setting, context)
    drawn = [layer.draw() for _ in range(setting.repeats + 1)]
    of_dense, of_focus, of_near = iter(drawn), iter(drawn), iter(drawn)
    no_group = torch.zeros_like(drawn[0][1])
    rivals: dict[str, Callable[[], object]] = {
        "dense": lambda: layer.dense(next(of_dense)[0]),
        "focus": lambda: layer.focus(*next(of_focus)),
        "near": lambda: layer.focus(next(of_near)[0], no_group),
        "dense_append": layer.append_to_plain,
        "focus_append": layer.append_to_grouped,
    }
    seconds = interleave(rivals, setting.repeats)
    middle = {name: median(some) for name, some in seconds.items()}
    return {
        "what": "attention of one layer",
        "context": context,
        "dense_seconds": middle["dense"],
        "focus_seconds": middle["focus"],
        "dense_append_seconds": middle["dense_append"],
        "focus_append_seconds": middle["focus_append"],
        "dense_spread": [min(seconds["dense"]), max(seconds["dense"])],
        "focus_spread": [min(seconds["focus"]), max(seconds["focus"])],
        "speedup": middle["dense"] / middle["focus"],
        "speedup_with_append": (middle["dense"] + middle["dense_append"]) / (middle["focus"] + middle["focus_append"]),
        "parts": {
            "near": middle["near"],
            "far": middle["focus"] - middle["near"],
            "append": middle["focus_append"],
        },
        "memory": layer.memory(),
        "max_error": max_error,
    }


def fill_caches(subject: Subject, context: int) -> tuple[DynamicCache, DynamicCache]:
    """A plain cache of the base and one of the lens, with the same keys."""
    tokens = subject.tokens(min(SHORT, context))
    focus = subject.model(tokens, use_cache=True, logits_to_keep=1).past_key_values
    plain = DynamicCache(config=subject.model.config)
    missing = context - tokens.shape[1]
    for number, layer in enumerate(focus.layers):
        if missing > 0:
            times = -(-missing // tokens.shape[1])
            more = [
                tensor.repeat(1, 1, times, 1)[:, :, :missing]
                for tensor in (layer.keys, layer.values, layer.membership())
            ]
            layer.update(*more[:2])
            layer.remember(more[2], None, None)
        plain.update(layer.keys, layer.values, number)
    return plain, focus


def measure_model(subject: Subject, context: int, repeats: int) -> dict[str, Any]:
    """One row: a whole step of the model."""
    plain, grouped = fill_caches(subject, context)
    token = subject.tokens(1)

    def focus() -> None:
        subject.model(token, past_key_values=grouped, use_cache=True)

    def base() -> None:
        with subject.lens.disabled():
            subject.model(token, past_key_values=plain, use_cache=True)

    focus()  # files the keys by group, once
    seconds = interleave({"base": base, "focus": focus}, repeats)
    with stopwatch(PARTS) as parts:
        took = interleave({"focus": focus}, repeats)["focus"]
    step: Callable[..., Tensor] = native.step

    def read_no_group(query: Tensor, key: Tensor, value: Tensor, reads: Tensor, *others: Any) -> Tensor:
        return step(query, key, value, torch.zeros_like(reads), *others)

    with patch.object(native, "step", read_no_group), stopwatch({"near": [(native, "step")]}) as near_alone:
        interleave({"focus": focus}, repeats)
    parts["near"] += near_alone["near"]
    parts["far"] -= near_alone["near"]
    parts = {name: part / (repeats + 1) for name, part in parts.items()}
    return {
        "what": "whole model",
        "context": context,
        "dense_seconds": median(seconds["base"]),
        "focus_seconds": median(seconds["focus"]),
        "dense_spread": [min(seconds["base"]), max(seconds["base"])],
        "focus_spread": [min(seconds["focus"]), max(seconds["focus"])],
        "speedup": median(seconds["base"]) / median(seconds["focus"]),
        "parts": parts | {"rest": sum(took) / repeats - sum(parts.values())},
    }


@torch.no_grad()
def run(setting: Setting, on_row: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Check, then measure each context; ``on_row`` is told of each."""
    torch.manual_seed(setting.seed)
    max_error = check_against_oracle(setting)
    how = {"groups": setting.groups, "top_k": setting.top_k, "window": setting.window, "sinks": setting.sinks}
    subject = None if setting.model is None else load_subject(setting.model, **how)
    rows = []
    for context in setting.context:
        if subject is None:
            rows.append(measure_layer(setting, context, max_error))
        else:
            rows.append(measure_model(subject, context, setting.repeats))
        on_row(rows[-1])
    return {"benchmark": "decode", "setting": asdict(setting), "surroundings": surroundings(), "rows": rows}
