"""The one tolerance, derived:

    error against the float64 oracle <= 2 x (the oracle's own error in the tested dtype + one rounding)

The oracle's own error is that of the same formula, in the tested dtype, on the same numbers. In float64 it cannot be
seen, but rounding errors are proportional to the size of a rounding, so it is taken from float32.

A rounding is as large as the terms of the sum that is rounded: of values that cancel, or of a gradient that is zero,
the result does not tell their size. So ``terms`` are their absolute values, summed.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Formula = Callable[[torch.dtype], Sequence[Tensor]]


def largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


class Expected:
    """What an oracle says, and how far from it a result in ``dtype`` may be."""

    def __init__(self, oracle: Formula, dtype: torch.dtype, terms: Sequence[Tensor]) -> None:
        seen_in = torch.float32 if dtype == torch.float64 else dtype
        self.dtype, self.truths = dtype, oracle(torch.float64)
        own = [
            largest(same.double() - truth) / torch.finfo(seen_in).eps
            for same, truth in zip(oracle(seen_in), self.truths, strict=True)
        ]
        roundings = [largest(summed) for summed in terms]
        self.allowed = [2 * torch.finfo(dtype).eps * sum(both) for both in zip(own, roundings, strict=True)]

    def errors(self, results: Sequence[Tensor]) -> list[float]:
        for result, truth in zip(results, self.truths, strict=True):
            assert result.dtype == self.dtype
            assert result.shape == truth.shape
        return [largest(result.double() - truth) for result, truth in zip(results, self.truths)]

    def is_met_by(self, results: Sequence[Tensor]) -> bool:
        # A NaN is never at most anything.
        return all(error <= allowed for error, allowed in zip(self.errors(results), self.allowed))

    def assert_met_by(self, results: Sequence[Tensor], whose: str = "") -> None:
        for number, (error, allowed) in enumerate(zip(self.errors(results), self.allowed)):
            assert error <= allowed, f"{whose} result {number}: error {error:.3g}, allowed {allowed:.3g}"
