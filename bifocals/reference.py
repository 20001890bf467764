"""The dense oracles: what every fast path must equal.

Obvious, slow, capable of float64, and sharing no code with what they check. Shapes are
(batch, head, length, dim). Three patterns on eight tokens, one window, one sink, two groups (a, b):

    causal             window 1              Focus, groups a b a a b a b b, window 1, one sink
    x                  x                     x
    x x                x x                   x x
    x x x              . x x                 x x x
    x x x x            . . x x               x . x x
    x x x x x          . . . x x             x x . x x
    x x x x x x        . . . . x x           x . x x x x
    x x x x x x x      . . . . . x x         x x . . x x x
    x x x x x x x x    . . . . . . x x       x x . . x . x x
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Pattern = Bool[Tensor, "batch head query key"]


def distance(queries: int, keys: int, device: torch.device | None = None) -> Int[Tensor, "query key"]:
    """How far each key lies before each query; queries shorter than keys are the last positions."""
    query_position = torch.arange(keys - queries, keys, device=device)
    key_position = torch.arange(keys, device=device)
    return query_position[:, None] - key_position[None, :]


def visible_pairs(
    batch: int,
    queries: int,
    keys: int,
    segments: Int[Tensor, "batch key"] | None,
    is_causal: bool,
    reach: int | None = None,
) -> Bool[Tensor, "batch 1 query key"]:
    """The pairs that plain attention reads: same segment, no padding, not in the future, less than ``reach`` apart."""
    if segments is None:
        segments = torch.zeros(batch, keys, dtype=torch.long)
    of_query = segments[:, keys - queries :]
    same = (of_query[:, :, None] == segments[:, None, :]) & (of_query[:, :, None] >= 0)
    if is_causal:
        same = same & (distance(queries, keys, segments.device) >= 0)
    if reach is not None:
        same = same & (distance(queries, keys, segments.device).abs() < reach)
    return same[:, None]


def sink_keys(
    batch: int, keys: int, sinks: int, segments: Int[Tensor, "batch key"] | None
) -> Bool[Tensor, "batch key"]:
    """The first ``sinks`` tokens of each segment."""
    found = torch.zeros(batch, keys, dtype=torch.bool)
    for row in range(batch):
        seen = 0
        for position in range(keys):
            current = 0 if segments is None else int(segments[row, position])
            previous = None if position == 0 else 0 if segments is None else int(segments[row, position - 1])
            seen = seen + 1 if current == previous else 1
            found[row, position] = current >= 0 and seen <= sinks
    return found if segments is None else found.to(segments.device)


def focus_pairs(
    membership: Bool[Tensor, "batch router query group"],
    key_membership: Bool[Tensor, "batch router2 key group"],
    *,
    window: int,
    sinks: int,
    heads: int,
    segments: Int[Tensor, "batch key"] | None = None,
    is_causal: bool = True,
    reach: int | None = None,
) -> Pattern:
    """The pairs that Focus reads: near, sink, or sharing a group."""
    batch, queries, keys = membership.shape[0], membership.shape[2], key_membership.shape[2]
    near = distance(queries, keys, membership.device).abs() <= window
    sink = sink_keys(batch, keys, sinks, segments).to(membership.device)[:, None, None, :]
    share = (per_head(membership, heads)[:, :, :, None, :] & per_head(key_membership, heads)[:, :, None, :, :]).any(-1)
    visible = visible_pairs(batch, queries, keys, segments, is_causal, reach).to(membership.device)
    return visible & (near | sink | share)


def per_head(tensor: Tensor, heads: int) -> Tensor:
    """Repeat dimension 1 (one, or one for each key-value head) so that every query head has its own."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def attention(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    pairs: Bool[Tensor, "batch #head query key"],
    *,
    temperature: float | Tensor = 1.0,
    scale: float | None = None,
    softcap: float | None = None,
    gate: Float[Tensor, "batch head query key"] | None = None,
    gate_factor: Float[Tensor, "batch head query key"] | None = None,
) -> Float[Tensor, "batch head query value_dim"]:
    """Softmax attention over ``pairs``; a query that reads nothing returns 0.

    ``gate`` is added to the logits, ``gate_factor`` multiplies them. What no query reads (padding) may hold anything.
    """
    heads = query.shape[1]
    read = pairs.expand(-1, heads, -1, -1).any(dim=2)
    key = per_head(key, heads).masked_fill(~read[..., None], 0.0)
    value = per_head(value, heads).masked_fill(~read[..., None], 0.0)
    reads = pairs.any(dim=-1, keepdim=True)
    logits = query.masked_fill(~reads, 0.0) @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    if gate_factor is not None:
        logits = logits * gate_factor
    if gate is not None:
        logits = logits + gate
    logits = logits.masked_fill(~pairs, -torch.inf).masked_fill(~reads, 0.0)
    return torch.softmax(logits, dim=-1).masked_fill(~reads, 0.0) @ value


def focal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    temperature: float | Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    segments: Tensor | None = None,
    is_causal: bool = True,
    reach: int | None = None,
) -> Tensor:
    """Softmax of q k^T / (temperature sqrt(dim)); the temperature a number, or one that broadcasts over queries."""
    pairs = visible_pairs(query.shape[0], query.shape[2], key.shape[2], segments, is_causal, reach).to(query.device)
    return attention(query, key, value, pairs, temperature=temperature, scale=scale, softcap=softcap)


def learned_temperature(
    hidden: Float[Tensor, "batch length hidden"],
    weight: Float[Tensor, "out hidden"],
    bias: Float[Tensor, " out"],
    *,
    form: str,
    minimum: float,
    maximum: float,
    exponent: Float[Tensor, " out"] | None = None,
) -> Float[Tensor, "batch out length 1"]:
    """What a learned temperature is, in its four forms; ``sequence`` reads the future, ``length`` has an exponent."""
    raw = hidden @ weight.T + bias  # (batch, length, out)
    length = raw.shape[1]
    if form == "prefix":
        raw = torch.stack([raw[:, : i + 1].mean(dim=1) for i in range(length)], dim=1)
    elif form == "sequence":
        raw = raw.mean(dim=1, keepdim=True).expand(-1, length, -1)
    elif form == "length":
        assert exponent is not None
        tokens = torch.arange(1, length + 1, dtype=raw.dtype, device=raw.device)
        raw = raw - exponent * (1 + tokens.log()).log()[:, None]
        minimum, maximum = math.log(minimum), math.log(maximum)
    unit = (1 + raw / (1 + raw.abs())) / 2
    if form == "length":
        return (minimum + (maximum - minimum) * unit).exp().mT[..., None]
    return (minimum + (maximum - minimum) * unit).mT[..., None]


def focus_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    membership: Tensor,
    window: int,
    key_membership: Tensor | None = None,
    sinks: int = 0,
    segments: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = True,
    reach: int | None = None,
) -> Tensor:
    """The hard Focus pattern, with every pair of it written out."""
    queries = query.shape[2]
    of_keys = membership if key_membership is None else key_membership
    pairs = focus_pairs(
        membership[:, :, membership.shape[2] - queries :],
        of_keys,
        window=window,
        sinks=sinks,
        heads=query.shape[1],
        segments=segments,
        is_causal=is_causal,
        reach=reach,
    )
    return attention(query, key, value, pairs, temperature=temperature, scale=scale, softcap=softcap)


def soft_focus_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gates: Float[Tensor, "batch router query group"],
    key_gates: Float[Tensor, "batch router2 key group"],
    window: int,
    gate: str,
    slope: float = 10.0,
    sinks: int = 0,
    segments: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = True,
    reach: int | None = None,
) -> Tensor:
    """Every visible pair, the far ones gated by a = g_i.g_j: logit + log(a), or logit * sigmoid(slope a)."""
    batch, heads, queries, keys = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    pairs = visible_pairs(batch, queries, keys, segments, is_causal, reach).to(query.device)
    near = distance(queries, keys, query.device).abs() <= window
    sink = sink_keys(batch, keys, sinks, segments).to(query.device)[:, None, None, :]
    agreement = per_head(gates, heads) @ per_head(key_gates, heads).mT  # (batch, head, query, key)
    untouched = (near | sink).expand_as(agreement)
    if gate == "log":
        added = torch.where(untouched, 1.0, agreement).log()
        return attention(query, key, value, pairs, temperature=temperature, scale=scale, softcap=softcap, gate=added)
    factor = torch.where(untouched, 1.0, torch.sigmoid(slope * agreement))
    return attention(
        query, key, value, pairs, temperature=temperature, scale=scale, softcap=softcap, gate_factor=factor
    )


def gated_focus_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gates: Float[Tensor, "batch router query group"],
    key_gates: Float[Tensor, "batch router2 key group"],
    window: int,
    sinks: int = 0,
    segments: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    scale: float | None = None,
    softcap: float | None = None,
    is_causal: bool = True,
    reach: int | None = None,
) -> Tensor:
    """The hard pattern of the groups with gates above 0, its far pairs gated: logit + log(g_i.g_j).

    A gate of 0 is closed for good: it gets no gradient.
    """
    gates, key_gates = (torch.where(side > 0, side, 0.0) for side in (gates, key_gates))
    batch, heads, queries, keys = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    pairs = focus_pairs(
        gates > 0,
        key_gates > 0,
        window=window,
        sinks=sinks,
        heads=heads,
        segments=segments,
        is_causal=is_causal,
        reach=reach,
    )
    near = distance(queries, keys, query.device).abs() <= window
    sink = sink_keys(batch, keys, sinks, segments).to(query.device)[:, None, None, :]
    agreement = per_head(gates, heads) @ per_head(key_gates, heads).mT
    added = torch.where((near | sink) | ~pairs, 1.0, agreement).log()
    return attention(query, key, value, pairs, temperature=temperature, scale=scale, softcap=softcap, gate=added)


def sinkhorn(scores: Float[Tensor, "... token group"], rounds: int) -> Float[Tensor, "... token group"]:
    """As printed: normalise over tokens, then over groups, ``rounds`` times."""
    plan = torch.exp(scores - scores.amax(dim=(-1, -2), keepdim=True))
    for _ in range(rounds):
        plan = plan / plan.sum(dim=-2, keepdim=True)
        plan = plan / plan.sum(dim=-1, keepdim=True)
    return plan


def sort_keys(
    scores: Float[Tensor, "token group"], is_held: Bool[Tensor, " token"], *, steepness: float, piece: int, slack: int
) -> list[int]:
    """The group of each key of one head and sequence, one after the other; a full group loses score.

    Sizes count the keys that are held, up to the last multiple of ``piece``.
    """
    groups = scores.shape[1]
    sizes, counted, chosen = [0] * groups, [0] * groups, []
    for place in range(len(scores)):
        if place % piece == 0:
            counted = list(sizes)
        fair = (sum(counted) + slack) / groups
        lowered = [
            score - steepness * max(0.0, size / fair - 1) for score, size in zip(scores[place].tolist(), counted)
        ]
        chosen.append(lowered.index(max(lowered)))
        if is_held[place]:
            sizes[chosen[-1]] += 1
    return chosen
