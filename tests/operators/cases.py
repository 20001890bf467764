"""Drawn inputs of the operators: every option, every odd length, every kind of membership and padding."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import one_hot

import bifocals
from bifocals import focus, reference
from bifocals.backends import call, pattern, strips, tiles
from tests.operators.tolerance import Expected, Formula

MEMBERSHIPS = ("one", "two", "three", "few", "many", "none", "all", "same")
TEMPERATURES = ("number", "()", "(head,)", "(batch, query)", "(batch, head, query)", "(batch, head, query, 1)")
SEGMENTS = ("none", "none", "whole", "left", "right", "packed", "gaps", "empty row")


@dataclass(frozen=True)
class Case:
    """The numbers from which tensors are made; printed by hypothesis when a test fails."""

    seed: int
    keys: int
    queries: int
    batch: int = 1
    kv_heads: int = 1
    repeat: int = 1
    dim: int = 8
    value_dim: int = 8
    size: float = 1.0  # of queries, and so of logits
    groups: int = 4
    reads: str = "one"
    holds: str | None = "one"  # None: the same as reads
    routers: str = "layer"
    key_routers: str = "layer"
    window: int = 3
    sinks: int = 0
    segments: str = "none"
    has_garbage: bool = False
    is_narrow: bool = False  # segments in int32
    temperature: str = "number"
    scale: float | None = None
    softcap: float | None = None
    reach: int | None = None
    is_causal: bool = True
    is_transposed: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.repeat


SMALL = (1, 2, 7, 17, 17, 33, 33, 63, 63, 130, 0)


@st.composite
def cases(draw: Callable, lengths: tuple[int, ...] = SMALL, **fixed: Any) -> Case:
    def pick(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    keys = pick(*lengths)
    dim = pick(4, 8, 16)
    case = Case(
        seed=draw(st.integers(0, 1 << 20)),
        keys=keys,
        queries=pick(keys, keys, keys, keys // 3, min(keys, 1)),
        batch=pick(1, 1, 2),
        kv_heads=pick(1, 2),
        repeat=pick(1, 3),
        dim=dim,
        value_dim=pick(dim, dim, 3, 12),
        size=pick(1.0, 1.0, 1.0, 50.0),
        groups=pick(1, 2, 4, 8, 64),
        reads=pick(*MEMBERSHIPS),
        holds=pick(None, "one", "one", *MEMBERSHIPS),
        routers=pick("layer", "kv_head", "head"),
        key_routers=pick("layer", "kv_head", "head"),
        window=pick(0, 1, 3, 10, 40, 200),
        sinks=pick(0, 0, 1, 4, 40, 300),
        segments=pick(*SEGMENTS),
        has_garbage=pick(False, True),
        is_narrow=pick(False, True),
        temperature=pick("number", *TEMPERATURES),
        scale=pick(None, None, 0.3),
        softcap=pick(None, None, None, 2.0),
        reach=pick(None, None, 1, 6, 50),
        is_causal=pick(True, True, False),
        is_transposed=pick(False, True),
    )
    return replace(case, **fixed)


def drawn(examples: int) -> Callable:
    """The same examples at every run."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


def membership(kind: str, shape: tuple[int, int, int], groups: int, generator: torch.Generator) -> Tensor:
    """(batch, router, length, group): in one group, two, three, few or none, many, none, all, or all in the same."""
    if kind in ("few", "many"):
        return torch.rand(*shape, groups, generator=generator) < {"few": 0.1, "many": 0.6}[kind]
    if kind == "same":
        return one_hot(torch.zeros(shape, dtype=torch.long), groups).bool()
    count = {"one": 1, "two": 2, "three": 3, "none": 0, "all": groups}[kind]
    return torch.rand(*shape, groups, generator=generator).argsort(dim=-1) < min(count, groups)


def segment_row(kind: str, row: int, keys: int, generator: torch.Generator) -> Tensor:
    def up_to(most: int) -> int:
        return int(torch.randint(most + 1, (), generator=generator))

    found = torch.zeros(keys, dtype=torch.long)
    if kind == "left":
        found[: up_to(keys)] = -1
    elif kind == "right":
        found[up_to(keys) :] = -1
    elif kind in ("packed", "gaps"):
        for number in (7, 3, 9):  # numbers need not grow
            found[up_to(keys) :] = number
        # A later start may lie before an earlier one: what remains are runs all the same.
        if kind == "gaps":
            start = up_to(keys)
            run = found[start : start + 1].clone()
            length = int((found[start:] == run).sum()) if start < keys else 0
            found[start : start + length] = -1  # to the end of a run, so that it stays one run
    elif kind == "empty row" and row == 0:
        found[:] = -1
    return found


@dataclass
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    temperature: float | Tensor
    options: dict[str, Any]

    @property
    def differentiable(self) -> list[Tensor]:
        """What a gradient is asked for."""
        tensors = [self.query, self.key, self.value, self.temperature]
        return [tensor for tensor in tensors if isinstance(tensor, Tensor)]

    def fresh(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers in another dtype, with a history of their own."""
        query, key, value, temperature = (
            tensor.detach().to(dtype).requires_grad_() if isinstance(tensor, Tensor) else tensor
            for tensor in (self.query, self.key, self.value, self.temperature)
        )
        return Inputs(query, key, value, temperature, self.options)


Attend = Callable[[Inputs], Tensor]


def make(case: Case, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    batch, heads, queries, keys = case.batch, case.heads, case.queries, case.keys

    def normal(heads: int, length: int, dim: int) -> Tensor:
        if case.is_transposed:
            return torch.randn(batch, length, heads, dim, generator=generator).to(dtype).transpose(1, 2)
        return torch.randn(batch, heads, length, dim, generator=generator).to(dtype)

    query, key = case.size * normal(heads, queries, case.dim), normal(case.kv_heads, keys, case.dim)
    value = normal(case.kv_heads, keys, case.value_dim)
    routers = {"layer": 1, "kv_head": case.kv_heads, "head": heads}
    of_queries = (batch, routers[case.routers], keys if case.holds is None else queries)
    options = {
        "membership": membership(case.reads, of_queries, case.groups, generator),
        "window": case.window,
        "sinks": case.sinks,
        "segments": None,
        "scale": case.scale,
        "softcap": case.softcap,
        "reach": case.reach,
        "is_causal": case.is_causal,
    }
    if case.holds is not None:
        shape = (batch, routers[case.key_routers], keys)
        options["key_membership"] = membership(case.holds, shape, case.groups, generator)
    if case.segments != "none":
        rows = [segment_row(case.segments, row, keys, generator) for row in range(batch)]
        options["segments"] = torch.stack(rows)
        if case.is_narrow:
            options["segments"] = options["segments"].int()
        if case.has_garbage:
            padding = (options["segments"] < 0)[:, None, :, None]
            key, value = key.masked_fill(padding, torch.nan), value.masked_fill(padding, torch.inf)
            query = query.masked_fill(padding[:, :, keys - queries :], torch.nan)
    shapes = {
        "()": (),
        "(head,)": (heads,),
        "(batch, query)": (batch, queries),
        "(batch, head, query)": (batch, heads, queries),
        "(batch, head, query, 1)": (batch, 1, queries, 1),
    }
    temperature: float | Tensor = 0.4
    if case.temperature != "number":
        temperature = (torch.rand(shapes[case.temperature], generator=generator) + 0.3).to(dtype)
    return Inputs(query, key, value, temperature, options)


def written_out(temperature: float | Tensor) -> float | Tensor:
    """As the oracle wants it: broadcast over (batch, head, query, 1)."""
    if not isinstance(temperature, Tensor):
        return temperature
    places = {0: (), 1: (None, slice(None), None, None), 2: (slice(None), None, slice(None), None), 3: (..., None)}
    return temperature[places.get(temperature.ndim, ())]


def dense_focus(inputs: Inputs) -> Tensor:
    return reference.focus_attention(
        inputs.query, inputs.key, inputs.value, temperature=written_out(inputs.temperature), **inputs.options
    )


def expected(inputs: Inputs, dtype: torch.dtype, attend: Attend = dense_focus) -> Expected:
    return Expected(lambda dtype: [attend(inputs.fresh(dtype)).detach()], dtype, terms(inputs, attend)[0])


def expected_gradients(inputs: Inputs, dtype: torch.dtype, attend: Attend = dense_focus) -> Expected:
    return Expected(oracle_gradients(inputs, attend), dtype, terms(inputs, attend)[1])


def oracle_gradients(inputs: Inputs, attend: Attend = dense_focus) -> Formula:
    def in_dtype(dtype: torch.dtype) -> list[Tensor]:
        same = inputs.fresh(dtype)
        return gradients(attend(same), same)

    return in_dtype


def output_weights(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def gradients(output: Tensor, inputs: Inputs) -> list[Tensor]:
    """Of a weighted sum of the output, the weights the same whatever made it."""
    if not output.requires_grad:  # nothing was read, so nothing depends on anything
        return [torch.zeros_like(tensor) for tensor in inputs.differentiable]
    weights = output_weights(output.shape).to(output.dtype)
    return list(torch.autograd.grad(output, inputs.differentiable, weights, materialize_grads=True))


def terms(inputs: Inputs, attend: Attend = dense_focus) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Of the output, of each gradient and of that of the logits: the absolute values of what is summed.

    out = p v    dv = p^T g    dlogits = p (g v^T - g out^T)    dq = dlogits k scale / t    dk = dlogits^T q scale / t
    """
    same = inputs.fresh(torch.float64)
    batch, kv_heads, keys = same.key.shape[:3]
    heads = same.query.shape[1]
    every_key = torch.eye(keys, dtype=torch.float64).expand(batch, kv_heads, -1, -1)
    p = attend(replace(same, value=every_key)).detach()  # (batch, head, query, key)
    query, key, value = (
        reference.per_head(tensor.detach().nan_to_num(0.0, 0.0, 0.0).abs(), heads)
        for tensor in (same.query, same.key, same.value)
    )
    temperature = written_out(same.temperature)
    scale = (same.query.shape[-1] ** -0.5 if same.options["scale"] is None else same.options["scale"]) / temperature
    logits = query @ key.mT * scale
    p = p * (1 + logits)  # a rounding of the exponent x is one of x times its exponential
    g = output_weights((*p.shape[:3], value.shape[-1])).double().abs()
    of_weights = g @ value.mT
    of_logits = p * (of_weights + (p * of_weights).sum(dim=-1, keepdim=True))
    of_query, of_key, of_value = of_logits * scale @ key, (of_logits * scale).mT @ query, p.mT @ g
    found = [of_query, *(tensor.unflatten(1, (kv_heads, -1)).sum(dim=2) for tensor in (of_key, of_value))]
    if isinstance(temperature, Tensor):
        of_temperature = (of_query * query).sum(dim=-1, keepdim=True) / temperature
        found.append(of_temperature.sum_to_size(temperature.shape))
    return [p @ value], found, of_logits


def run(inputs: Inputs, backend: str) -> Tensor:
    return bifocals.focus_attention(
        inputs.query, inputs.key, inputs.value, temperature=inputs.temperature, backend=backend, **inputs.options
    )


@contextlib.contextmanager
def small_tiles() -> Iterator[None]:
    """Every kind of tile, reached by short inputs."""
    with (
        mock.patch.multiple(
            tiles, NEAR=4, TILE=6, BLOCK=2, WIDE=5, SLACK=2, TOGETHER=512, NEAR_TOGETHER=512, LISTED=24
        ),
        mock.patch.object(call, "LEAF", 8),
        mock.patch.object(pattern, "SEVERAL", 100),
        mock.patch.multiple(focus, SHORT=12, SHORT_SPARSE=12, SHORT_DENSE=12),
        mock.patch.object(strips, "STRIP", 5),
    ):
        yield
