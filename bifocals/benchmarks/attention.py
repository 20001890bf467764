"""How much faster is Focus attention than dense causal attention, on this machine?

``speedup`` is dense seconds over Focus seconds for one call of the operator, both on the same tensors, in turns, with
torch's fused attention underneath; finding the groups is not part of it. ``bound`` is what the pattern allows: all
causal pairs over the pairs kept. ``fraction_of_bound`` says how much of that is reached. How fast a model is, it does
not say.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot, scaled_dot_product_attention

from bifocals import reference
from bifocals.benchmarks.measuring import interleave, median, peak_extra_bytes, surroundings
from bifocals.focus import focus_attention

CHECKED_LENGTH = 1024
UNBALANCED = 1.5  # the largest group over its fair share
SIDES = ("same", "separate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is measured."""

    lengths: tuple[int, ...]
    groups: int
    top_k: int
    window: int
    sinks: int
    heads: int
    dim: int
    repeats: int
    backward: bool
    sides: str
    backend: str = "auto"
    seed: int = 0


class WrongResult(RuntimeError):
    """The fast path differs from the oracle: no timing would mean anything."""


def draw_membership(setting: Setting, length: int, *, is_balanced: bool) -> tuple[Tensor, Tensor]:
    """Random groups of queries and keys, keys in one; with top_k 1 and sides 'same' a query is in that of its key."""
    share = torch.ones(setting.groups)
    if not is_balanced and setting.groups > 1:
        share[0] = UNBALANCED
        share[1:] = (setting.groups - UNBALANCED) / (setting.groups - 1)

    def draw(count: int) -> Tensor:
        chosen = torch.multinomial(share.expand(setting.heads * length, -1), count)
        return one_hot(chosen, setting.groups).sum(dim=1).bool().view(1, setting.heads, length, setting.groups)

    of_keys = draw(1)
    return (of_keys if setting.top_k == 1 and setting.sides == "same" else draw(setting.top_k)), of_keys


def count_pairs(membership: Tensor, key_membership: Tensor, window: int, sinks: int) -> int:
    """Pairs that a causal pattern reads, keys in one group each, without writing them out."""
    length = membership.shape[2]
    before = torch.arange(length) - window  # far keys of query i are those before this position
    near = length * (window + 1) - sum(range(max(0, window + 1 - length), window + 1)) if length else 0
    far_sinks = before.clamp(0, sinks).sum() * membership.shape[0] * membership.shape[1]
    seen = key_membership.long()
    seen[:, :, :sinks] = 0
    total = torch.nn.functional.pad(seen.cumsum(dim=2), (0, 0, 1, 0))
    far = (total[:, :, before.clamp(min=0)] * membership).sum()
    return int(near * membership.shape[0] * membership.shape[1] + far_sinks + far)


def check_against_oracle(setting: Setting) -> float:
    """The largest error in float32 against the float64 oracle, which must be of the size of the oracle's own."""
    length = min(CHECKED_LENGTH, max(setting.lengths))
    membership, key_membership = draw_membership(setting, length, is_balanced=False)
    vectors = [torch.randn(1, setting.heads, length, setting.dim) for _ in range(3)]
    pattern: dict[str, Any] = {"membership": membership, "key_membership": key_membership}
    pattern |= {"window": setting.window, "sinks": setting.sinks}
    exact = reference.focus_attention(*(vector.double() for vector in vectors), **pattern)
    own_error = (reference.focus_attention(*vectors, **pattern) - exact).abs().max().item()
    error = (focus_attention(*vectors, **pattern, backend=setting.backend) - exact).abs().max().item()  # type: ignore[arg-type]
    allowed = 2 * (own_error + torch.finfo(torch.float32).eps * exact.abs().max().item())
    if error > allowed:
        raise WrongResult(f"Focus differs from the float64 oracle by {error:.2e}; expected at most {allowed:.2e}.")
    return error


def measure_length(setting: Setting, length: int, *, is_balanced: bool, max_error: float) -> dict[str, Any]:
    """One row of the table."""
    membership, key_membership = draw_membership(setting, length, is_balanced=is_balanced)
    query, key, value = (
        torch.randn(1, setting.heads, length, setting.dim, requires_grad=setting.backward) for _ in range(3)
    )

    def dense() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    def focus() -> Tensor:
        return focus_attention(
            query,
            key,
            value,
            membership=membership,
            key_membership=None if membership is key_membership else key_membership,
            window=setting.window,
            sinks=setting.sinks,
            backend=setting.backend,  # type: ignore[arg-type]
        )

    gradient = torch.randn_like(query)

    def trained(attend: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), (query, key, value), gradient)

    rivals: dict[str, Callable[[], object]] = {"dense": dense, "focus": focus}
    if setting.backward:
        rivals = {"dense": trained(dense), "focus": trained(focus)}
    seconds = interleave(rivals, setting.repeats)
    pairs_kept = count_pairs(membership, key_membership, setting.window, setting.sinks) / (
        setting.heads * length * (length + 1) / 2
    )
    speedup = median(seconds["dense"]) / median(seconds["focus"])
    return {
        "length": length,
        "groups": "balanced" if is_balanced else "unbalanced",
        "dense_seconds": median(seconds["dense"]),
        "focus_seconds": median(seconds["focus"]),
        "dense_spread": [min(seconds["dense"]), max(seconds["dense"])],
        "focus_spread": [min(seconds["focus"]), max(seconds["focus"])],
        "speedup": speedup,
        "pairs_kept": pairs_kept,
        "bound": 1 / pairs_kept,
        "fraction_of_bound": speedup * pairs_kept,
        "dense_peak_bytes": peak_extra_bytes(rivals["dense"]),
        "focus_peak_bytes": peak_extra_bytes(rivals["focus"]),
        "input_bytes": 3 * query.numel() * query.element_size(),
        "max_error": max_error,
    }


def run(setting: Setting, on_row: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Check, then measure each length with balanced and unbalanced groups; ``on_row`` is told of each."""
    torch.manual_seed(setting.seed)
    max_error = check_against_oracle(setting)
    rows = []
    for length in setting.lengths:
        for is_balanced in (True, False):
            rows.append(measure_length(setting, length, is_balanced=is_balanced, max_error=max_error))
            on_row(rows[-1])
    return {"benchmark": "attention", "setting": asdict(setting), "surroundings": surroundings(), "rows": rows}
