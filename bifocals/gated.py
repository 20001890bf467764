"""Gates on the pairs that the hard pattern keeps: routers learn through them, at the cost of the pattern.

    near, sink    read as they are
    far           read iff query i and key j share a group;  logit + log(g_i.g_j)

The gates are those of soft Focus, closed (0) at the groups that a query does not read or a key is not in. So this is
soft Focus without the pairs that hard Focus would drop, and hard Focus in the limit of gates that are 1.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from bifocals.autocast import as_autocast
from bifocals.backends.dense import dense_attention
from bifocals.backends.gated import gated_attention
from bifocals.checks import check_focus, check_gates
from bifocals.focus import SHORT_DENSE, always_read, focus_pairs
from bifocals.segments import blank_padding, is_padding, segment_starts


def gated_focus_attention(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    *,
    gates: Float[Tensor, "batch router query group"],
    key_gates: Float[Tensor, "batch key_router key group"],
    window: int,
    sinks: int = 0,
    segments: Int[Tensor, "batch key"] | None = None,
    temperature: float | Tensor = 1.0,
    scale: float | None = None,
    softcap: float | None = None,
    reach: int | None = None,
    is_causal: bool = True,
    backend: Literal["auto", "dense", "sdpa"] = "auto",
) -> Float[Tensor, "batch head query value_dim"]:
    """Attention over the pattern of the open gates, differentiable in them; closed ones are 0 and get no gradient.

    With a softcap, or keys in several groups, all pairs are written out: 'sdpa' is for neither.
    """
    query, key, value = as_autocast(query, key, value)
    temperature = check_focus(query, key, value, window, sinks, segments, temperature, scale, softcap, reach)
    check_gates(gates, key_gates, query, key)
    _check_backend(backend, key_gates, softcap)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    queries, keys = query.shape[2], key.shape[2]
    if segments is not None:
        query, key, value = blank_padding(query, key, value, segments)
    if backend == "auto":
        may_be_sparse = (
            softcap is None and not torch.compiler.is_compiling() and queries * keys > SHORT_DENSE * SHORT_DENSE
        )
        backend = "sdpa" if may_be_sparse and _most_groups(key_gates) <= 1 else "dense"
    if backend == "dense" or query.shape[:3].numel() == 0:
        pairs = focus_pairs(query, key, gates > 0, key_gates > 0, window, sinks, segments, reach, is_causal)
        agreement = _of_heads(gates, query) @ _of_heads(key_gates, query).mT
        ungated = always_read(queries, keys, window, sinks, segments, query.device) | (agreement <= 0)
        bias = torch.where(ungated, 1.0, agreement).log()
        attended = dense_attention(
            query, key, value, pairs, scale=scale, temperature=temperature, softcap=softcap, bias=bias
        )
    else:
        if isinstance(temperature, Tensor):
            query = query / temperature.to(query.dtype)
        else:
            scale = scale / temperature
        position = torch.arange(keys, device=query.device)
        is_sink = (position - segment_starts(keys, segments, query.device) < sinks).expand(-1, keys)
        # The fused kernels want values as long as queries: zeros change nothing.
        widest, value_dim = max(query.shape[-1], value.shape[-1]), value.shape[-1]
        query, key, value = (pad(side, (0, widest - side.shape[-1])) for side in (query, key, value))
        reach = keys + 1 if reach is None else reach
        attended = gated_attention(
            query, key, value, gates, key_gates, is_sink, segments, window, sinks, reach, is_causal, scale
        )[..., :value_dim]
    return attended if segments is None else attended.masked_fill(is_padding(segments, queries), 0.0)


def _check_backend(backend: str, key_gates: Tensor, softcap: float | None) -> None:
    if backend not in ("auto", "dense", "sdpa"):
        raise ValueError(f"backend: expected 'auto', 'dense' or 'sdpa', got {backend!r}. 'auto' picks the fastest.")
    if backend != "sdpa":
        return
    if softcap is not None:
        raise ValueError(
            f"backend 'sdpa' cannot run a softcap with gates: expected none, got {softcap!r}. Use backend='dense' or "
            "'auto'."
        )
    most = _most_groups(key_gates)
    if most > 1:
        raise ValueError(
            f"backend 'sdpa' gates keys in one group: expected at most one open gate for each key, got {most}. "
            "Use backend='dense' or 'auto'."
        )


def _most_groups(key_gates: Tensor) -> int:
    """Of any key."""
    counts = (key_gates > 0).sum(dim=-1)
    return int(counts.max()) if counts.numel() else 0


def _of_heads(gates: Tensor, query: Tensor) -> Tensor:
    """For each query head; closed gates cut off from their gradient."""
    gates = torch.where(gates > 0, gates, 0.0)
    return gates.repeat_interleave(query.shape[1] // gates.shape[1], dim=1)
