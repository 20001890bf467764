"""The one tolerance: error against the float64 oracle <= 2 x (the oracle's own error in the tested dtype + one rounding).

The oracle's own error is that of the same formula, in the tested dtype, on the same numbers. In float64 it cannot be
seen, but rounding errors are proportional to the size of a rounding, so it is taken from float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Formula = Callable[[torch.dtype], Sequence[Tensor]]


def epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def largest(*tensors: Tensor) -> float:
    return max((tensor.abs().max().item() for tensor in tensors if tensor.numel()), default=0.0)


def errors(
    results: Sequence[Tensor], oracle: Formula, dtype: torch.dtype, terms: Sequence[Tensor] | None = None
) -> list[tuple[float, float]]:
    """The error of each result, and what is allowed.

    A rounding is as large as the terms of the sum that is rounded: of values that cancel, or of a gradient that is
    zero, the result does not tell their size. ``terms`` are their absolute values, summed; by default, the results.
    """
    found = []
    seen_in = torch.float32 if dtype == torch.float64 else dtype
    truths = oracle(torch.float64)
    for result, truth, same, summed in zip(results, truths, oracle(seen_in), terms or truths, strict=True):
        assert result.dtype == dtype
        assert result.shape == truth.shape
        own = largest(same.double() - truth) / epsilon(seen_in)
        found.append((largest(result.double() - truth), 2 * epsilon(dtype) * (own + largest(summed))))
    return found


def agrees(*of_errors: Any) -> bool:
    # A NaN is never at most anything.
    return all(error <= allowed for error, allowed in errors(*of_errors))


def assert_agrees(*of_errors: Any) -> None:
    for number, (error, allowed) in enumerate(errors(*of_errors)):
        assert error <= allowed, f"result {number}: error {error:.3g}, allowed {allowed:.3g}"
