"""Focus attention (arXiv 2604.03260): near tokens in full, far tokens only inside shared groups.

    near     |i - j| <= window                          always read
    sink     j among the first tokens of its segment    always read
    far      the rest                                   read iff query i and key j share a group

    causal               near (window 1)      + far: groups a b a a b a b b, and one sink
    x                    x                    x
    x x                  x x                  x x
    x x x                . x x                x x x
    x x x x              . . x x              x . x x
    x x x x x            . . . x x            x x . x x
    x x x x x x          . . . . x x          x . x x x x
    x x x x x x x        . . . . . x x        x x . . x x x
    x x x x x x x x      . . . . . . x x      x x . . x . x x

With one group, or a window as long as the sequence, this is plain attention.
"""

import logging
import math
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from bifocals.autocast import as_autocast
from bifocals.backends import native
from bifocals.backends.dense import dense_attention
from bifocals.backends.operator import focus_forward
from bifocals.backends.strips import LONGEST, strips_attention
from bifocals.checks import check_focus, check_gates, check_group_count, check_membership, check_positive
from bifocals.focal import focal_attention
from bifocals.segments import blank_padding, is_padding, segment_starts, visible_pairs

logger = logging.getLogger(__name__)

# Up to so many queries and keys a mask is faster than sorting:
SHORT = 2048  # in strips
SHORT_SPARSE = 896  # in strips, if few queries read more than one group
SHORT_DENSE = 640  # all pairs at once, where strips cannot be
FEW_READ = 1.2  # groups of a query, on average
SAMPLE = 64  # tokens


def focus_attention(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    *,
    membership: Bool[Tensor, "batch router token group"],
    window: int,
    key_membership: Bool[Tensor, "batch key_router key group"] | None = None,
    sinks: int = 0,
    segments: Int[Tensor, "batch key"] | None = None,
    temperature: float | Tensor = 1.0,
    scale: float | None = None,
    softcap: float | None = None,
    reach: int | None = None,
    is_causal: bool = True,
    backend: Literal["auto", "dense", "sdpa", "native"] = "auto",
) -> Float[Tensor, "batch head query value_dim"]:
    """Attention over the near, sink and same-group pairs of each query; fewer queries than keys are the last positions.

    ``membership`` says which groups a query reads, ``key_membership`` (None: the same) which a key is in. ``segments``
    pack several sequences in a row (-1: padding, which returns 0); ``reach`` is the base's own sliding window,
    i - j < reach.

    >>> q = k = v = torch.randn(1, 2, 300, 16)
    >>> groups = torch.nn.functional.one_hot(torch.randint(8, (1, 1, 300)), 8).bool()
    >>> focus_attention(q, k, v, membership=groups, window=16).shape
    torch.Size([1, 2, 300, 16])
    """
    query, key, value = as_autocast(query, key, value)
    temperature = check_focus(query, key, value, window, sinks, segments, temperature, scale, softcap, reach)
    if key_membership is None:
        check_membership("membership", membership, query, key, key.shape[2])
        key_membership = membership
        membership = membership[:, :, key.shape[2] - query.shape[2] :]
    else:
        check_membership("membership", membership, query, key, query.shape[2])
        check_membership("key_membership", key_membership, query, key, key.shape[2])
        check_group_count("membership", membership, key_membership)
    if backend not in ("auto", "dense", "sdpa", "native"):
        raise ValueError(
            f"backend: expected 'auto', 'dense', 'sdpa' or 'native', got {backend!r}. 'auto' picks the fastest."
        )
    if backend == "native" and (why := native.obstacle(query, membership.shape[3], softcap)):
        raise ValueError(f"backend 'native' cannot run: {why}. Use backend='sdpa' or 'auto'.")
    if query.shape[:3].numel() == 0 or value.shape[3] == 0:
        # Nothing comes out; what it is made of still gets a gradient, of zeros.
        return query.new_zeros(*query.shape[:3], value.shape[3]) * (query.sum() + key.sum() + value.sum())
    if backend == "auto":
        is_plain = segments is None and softcap is None and reach is None
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        choice = fastest_backend(query, key, membership, key_membership, window, softcap, temperature, is_plain, learns)
    else:
        choice = backend
    if choice in ("strips", "sdpa", "native"):
        return _fused(
            query,
            key,
            value,
            membership,
            key_membership,
            window,
            sinks,
            segments,
            temperature,
            scale,
            softcap,
            reach,
            is_causal,
            choice=choice,
        )
    if choice == "full":
        return focal_attention(
            query, key, value, temperature=temperature, scale=scale, segments=segments, reach=reach, is_causal=is_causal
        )
    pairs = focus_pairs(query, key, membership, key_membership, window, sinks, segments, reach, is_causal)
    return _dense(query, key, value, pairs, segments, scale=scale, temperature=temperature, softcap=softcap)


Choice = Literal["full", "strips", "dense", "sdpa", "native"]


def fastest_backend(
    query: Tensor,
    key: Tensor,
    membership: Tensor,
    key_membership: Tensor,
    window: int,
    softcap: float | None,
    temperature: float | Tensor,
    is_plain: bool,
    learns: bool,
) -> Choice:
    """The cheapest exact way: plain attention if the pattern is full, a mask if it is short, else only its pairs.

    Only its pairs also where it is short, if torch's operators need not do it; but short gradients are cheaper by mask.
    """
    queries, keys = query.shape[2], key.shape[2]
    why_not_native = native.obstacle(query, membership.shape[3], softcap)
    by_pairs: Choice = "sdpa" if why_not_native else "native"
    if torch.compiler.is_compiling():
        # Neither contents nor the log can be looked at.
        return "dense" if queries * keys <= SHORT_DENSE * SHORT_DENSE else by_pairs
    choice: Choice
    is_full = window >= keys - 1 or _is_one_group(membership, key_membership)
    if is_full and softcap is None:
        choice, reason = "full", "every pair is read"
    elif is_full or (softcap is not None and isinstance(temperature, Tensor)):
        choice, reason = "dense", "a softcap, and every pair or a temperature tensor"
    elif not learns and not why_not_native:
        choice, reason = "native", "float32 on a CPU"
    else:
        may_strip = is_plain and keys <= LONGEST
        short = SHORT_DENSE if not may_strip else SHORT_SPARSE if _few_are_read(membership) else SHORT
        if queries * keys > short * short:
            choice, reason = by_pairs, f"more than {short} x {short} pairs"
            reason += f", and not 'native': {why_not_native}" if why_not_native else ""
        else:
            choice, reason = "strips" if may_strip else "dense", f"at most {short} x {short} pairs"
    _log_choice(choice, reason)
    return choice


def _is_one_group(membership: Tensor, key_membership: Tensor) -> bool:
    """Whether some group of each row is read by all its queries and holds all its keys, whichever the router."""
    for some in (slice(SAMPLE), slice(None)):  # mostly, a few tokens say no already
        reads, holds = (side[:, :, some].flatten(1, 2).all(dim=1) for side in (membership, key_membership))
        if not bool((reads & holds).any(dim=1).all()):
            return False
    return True


def _few_are_read(membership: Tensor) -> bool:
    return int(membership.sum()) <= FEW_READ * membership.shape[:3].numel()


@lru_cache(maxsize=64)
def _log_choice(choice: str, reason: str) -> None:
    """Once for each reason: the cache forgets nothing that was logged."""
    logger.info("focus_attention runs %r: %s.", choice, reason)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    membership: Tensor,
    key_membership: Tensor,
    window: int,
    sinks: int,
    segments: Tensor | None,
    temperature: float | Tensor,
    scale: float | None,
    softcap: float | None,
    reach: int | None,
    is_causal: bool,
    *,
    choice: Choice,
) -> Tensor:
    """By fused kernels, exactly. Temperatures scale the query, so that they get gradients like it."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if segments is not None:
        query, key, value = blank_padding(query, key, value, segments)
    if isinstance(temperature, Tensor):
        if softcap is not None:
            raise ValueError(
                f"backend {choice!r} cannot run a softcap with a temperature tensor: expected a number for one of "
                "them. Use backend='dense' or 'auto'."
            )
        query = query / temperature.to(query.dtype)
    else:
        # softcap(x) / t is a softcap of size softcap / t on x / t.
        scale, softcap = scale / temperature, None if softcap is None else softcap / temperature
    # The fused kernels want values as long as queries (latent attention has others): zeros change nothing.
    widest, value_dim = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    query, key, value = (
        tensor if tensor.shape[-1] == widest else pad(tensor, (0, widest - tensor.shape[-1]))
        for tensor in (query, key, value)
    )
    if choice == "strips":
        attended = strips_attention(query, key, value, membership, key_membership, window, sinks, scale, is_causal)
        return attended[..., :value_dim]
    attended, _ = focus_forward(
        query,
        key,
        value,
        membership,
        key_membership,
        segments,
        window,
        sinks,
        key.shape[2] + 1 if reach is None else reach,
        is_causal,
        scale,
        softcap,
        choice == "native",
    )
    attended = attended[..., :value_dim]
    return attended if segments is None else attended.masked_fill(is_padding(segments, query.shape[2]), 0.0)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: Tensor,
    segments: Tensor | None,
    *,
    scale: float | None,
    temperature: float | Tensor,
    softcap: float | None,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if segments is not None:
        query, key, value = blank_padding(query, key, value, segments)
    attended = dense_attention(
        query, key, value, pairs, scale=scale, temperature=temperature, softcap=softcap, bias=bias, factor=factor
    )
    return attended if segments is None else attended.masked_fill(is_padding(segments, query.shape[2]), 0.0)


def always_read(
    queries: int, keys: int, window: int, sinks: int, segments: Tensor | None, device: torch.device
) -> Bool[Tensor, "#batch 1 query key"]:
    """Near or sink: the pairs that no gate touches."""
    position = torch.arange(keys, device=device)
    near = (position[keys - queries :, None] - position).abs() <= window
    return near | (position - segment_starts(keys, segments, device) < sinks)[:, None, None, :]


def focus_pairs(
    query: Tensor,
    key: Tensor,
    membership: Tensor,
    key_membership: Tensor,
    window: int,
    sinks: int,
    segments: Tensor | None,
    reach: int | None,
    is_causal: bool,
) -> Bool[Tensor, "batch head query key"]:
    """The pattern, pair by pair."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    reads = membership.repeat_interleave(heads // membership.shape[1], dim=1).to(torch.float32)
    holds = key_membership.repeat_interleave(heads // key_membership.shape[1], dim=1).to(torch.float32)
    share = reads @ holds.mT > 0
    share |= always_read(queries, keys, window, sinks, segments, query.device)
    return share & visible_pairs(queries, keys, segments, is_causal, reach, query.device)


def soft_focus_attention(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    *,
    gates: Float[Tensor, "batch router query group"],
    key_gates: Float[Tensor, "batch key_router key group"],
    window: int,
    gate: Literal["log", "sigmoid"] = "log",
    slope: float = 10.0,
    sinks: int = 0,
    segments: Int[Tensor, "batch key"] | None = None,
    temperature: float | Tensor = 1.0,
    scale: float | None = None,
    softcap: float | None = None,
    reach: int | None = None,
    is_causal: bool = True,
) -> Float[Tensor, "batch head query value_dim"]:
    """Attention over every visible pair, the far ones gated by a = g_i.g_j; differentiable in the gates.

    log        logit + log(a)                closes, and equals the hard pattern in the limit
    sigmoid    logit * sigmoid(slope * a)    the paper's; never closes
    """
    query, key, value = as_autocast(query, key, value)
    temperature = check_focus(query, key, value, window, sinks, segments, temperature, scale, softcap, reach)
    check_positive("slope", slope)
    check_gates(gates, key_gates, query, key)
    if gate not in ("log", "sigmoid"):
        raise ValueError(f"gate: expected 'log' or 'sigmoid', got {gate!r}. 'log' becomes the hard pattern.")
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    untouched = always_read(queries, keys, window, sinks, segments, query.device)
    pairs = visible_pairs(queries, keys, segments, is_causal, reach, query.device)
    gates = gates.repeat_interleave(heads // gates.shape[1], dim=1)
    agreement = gates @ key_gates.repeat_interleave(heads // key_gates.shape[1], dim=1).mT
    if gate == "log":
        # Gates are products of softmaxes: they may underflow, and the logarithm of 0 has no gradient.
        bias = torch.where(untouched, 1.0, agreement.clamp(min=torch.finfo(agreement.dtype).tiny)).log()
        factor = None
    else:
        bias = None
        factor = torch.where(untouched, 1.0, torch.sigmoid(slope * agreement)).to(query.dtype)
    return _dense(
        query,
        key,
        value,
        pairs,
        segments,
        scale=scale,
        temperature=temperature,
        softcap=softcap,
        bias=bias,
        factor=factor,
    )
