"""Under torch.autocast: attention in its dtype, as torch's own; decisions and temperatures in float32 at least."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def as_autocast(*vectors: Tensor) -> tuple[Tensor, ...]:
    """What torch's own attention would work on: a projection and a rotation may have left two dtypes."""
    kind = vectors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return vectors
    dtype = torch.get_autocast_dtype(kind)
    is_cast = [vector.is_floating_point() and vector.dtype != torch.float64 for vector in vectors]
    return tuple(vector.to(dtype) if cast else vector for vector, cast in zip(vectors, is_cast))


def without_autocast(like: Tensor) -> AbstractContextManager[None]:
    """Products in the dtype of their factors: a near-tie must not hang on who calls."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
