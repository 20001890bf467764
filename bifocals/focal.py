"""Focal Attention (arXiv 2511.06818): divide the logits by a temperature below one.

    standard   softmax(q k^T / sqrt(dim)) v
    focal      softmax(q k^T / (temperature * sqrt(dim))) v        temperature = 1 is standard
    learned    temperature = soft_clamp(x w + b)                   x: the hidden state entering attention
    length     log temperature = soft_clamp(x w + b - s log(1 + log n))     n: the tokens up to the query

A smaller temperature moves weight from many weak keys to a few strong ones. A constant is only
another scale, so every fused attention kernel already computes it. A learned one divides the query.

The paper's learned form takes the mean over the whole sequence: it reads the future and is not
defined while decoding. Ours reads each token, or the mean over its prefix. The paper's hard clip has
no gradient outside its range; the soft clamp here never loses it.

The length form is ours: a query that has more keys to tell apart needs sharper attention to be as sure of one of
them. With s = 1 its logits grow like those of Scalable-Softmax (arXiv 2501.19399), s log n; s is learned, from 0 on,
so that it starts as the constant. Logarithms make a step of the same size halve or double a temperature anywhere.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bifocals.autocast import as_autocast, without_autocast
from bifocals.checks import check_heads, check_positive, check_segments, temperature_per_query
from bifocals.segments import blank_padding, is_padding, row_blocks, visible_pairs


def focal_attention(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    *,
    temperature: float | Tensor,
    scale: float | None = None,
    segments: Int[Tensor, "batch key"] | None = None,
    reach: int | None = None,
    is_causal: bool = True,
) -> Float[Tensor, "batch head query value_dim"]:
    """Attention whose softmax is sharpened by ``temperature``: a number, or a tensor per layer, head or token.

    ``segments`` pack several sequences in a row (-1: padding, which returns 0); ``reach`` is a sliding window,
    i - j < reach.

    >>> q = k = v = torch.ones(1, 2, 5, 4)
    >>> focal_attention(q, k, v, temperature=0.4).shape
    torch.Size([1, 2, 5, 4])
    """
    query, key, value = as_autocast(query, key, value)
    check_heads(query, key, value)
    check_segments(segments, key)
    check_positive("temperature", temperature)
    if isinstance(temperature, Tensor):
        temperature = temperature_per_query(temperature, query)
    check_positive("scale", scale)
    check_positive("reach", reach)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if segments is not None:
        query, key, value = blank_padding(query, key, value, segments)
    if isinstance(temperature, Tensor):
        query = query / temperature.to(query.dtype)
    else:
        scale = scale / temperature
    grouped = query.shape[1] != key.shape[1]
    queries, keys = query.shape[2], key.shape[2]
    if segments is None and reach is None and (not is_causal or queries == keys or queries == 1):
        is_square = is_causal and queries > 1
        return scaled_dot_product_attention(query, key, value, is_causal=is_square, scale=scale, enable_gqa=grouped)
    blocks = []
    for start, stop in row_blocks(queries, keys, is_causal):
        seen = keys - queries + stop
        some = None if segments is None else segments[:, :seen]
        pairs = visible_pairs(stop - start, seen, some, is_causal, reach, query.device)
        rows, to_read = query[:, :, start:stop], (key[:, :, :seen], value[:, :, :seen])
        blocks.append(scaled_dot_product_attention(rows, *to_read, attn_mask=pairs, scale=scale, enable_gqa=grouped))
    attended = torch.cat(blocks, dim=2)
    return attended if segments is None else attended.masked_fill(is_padding(segments, queries), 0.0)


def soft_clamp(raw: Tensor, minimum: float, maximum: float) -> Tensor:
    """Into (minimum, maximum), by x / (1 + |x|).

    Its slope falls with the square of x, so it never underflows to zero as that of a sigmoid does.
    """
    # Not nn.functional.softsign: its gradient is a difference of nearly equal numbers and is 0 from ten million on.
    # Not abs: its slope at 0 is 0.
    rest = 0.5 / (1 + torch.where(raw >= 0, raw, -raw))
    return minimum + (maximum - minimum) * torch.where(raw >= 0, 1 - rest, rest)


def inverse_soft_clamp(clamped: float, minimum: float, maximum: float) -> float:
    unit = 2 * (clamped - minimum) / (maximum - minimum) - 1
    return unit / (1 - abs(unit))


class ConstantTemperature(nn.Module):
    """One number, of every token alike; nothing to learn."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        check_positive("temperature", temperature)
        self.temperature = temperature

    def forward(self, hidden: Float[Tensor, "batch length hidden"]) -> float:
        return self.temperature


class SoftClamp(nn.Module):
    """From what is linear in the hidden states, (batch, length, outputs), to temperatures inside a range.

    A module, so that what was learned can be seen by a hook on it, whichever way a temperature was computed.
    """

    def __init__(self, minimum: float, maximum: float, *, in_logs: bool) -> None:
        super().__init__()
        self.minimum, self.maximum, self.in_logs = minimum, maximum, in_logs

    def forward(self, raw: Float[Tensor, "batch length outputs"]) -> Float[Tensor, "batch outputs length 1"]:
        if self.in_logs:
            clamped = self.minimum * soft_clamp(raw, 0.0, math.log(self.maximum / self.minimum)).exp()
        else:
            clamped = soft_clamp(raw, self.minimum, self.maximum)
        return clamped.mT[..., None]

    def inverse(self, temperature: float) -> float:
        """The raw number that becomes ``temperature``."""
        if self.in_logs:
            return inverse_soft_clamp(math.log(temperature / self.minimum), 0.0, math.log(self.maximum / self.minimum))
        return inverse_soft_clamp(temperature, self.minimum, self.maximum)


class LearnedTemperature(nn.Module):
    """A temperature read off the hidden states: per token, by the length, or from their mean over prefix or sequence.

    ``outputs`` is 1 (shared by the layer) or the number of query heads. It starts at ``start`` for every token.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        start: float,
        minimum: float,
        maximum: float,
        outputs: int = 1,
        form: Literal["token", "length", "prefix", "sequence"] = "token",
        is_causal: bool = True,
    ) -> None:
        super().__init__()
        if not 0 < minimum < start < maximum:
            raise ValueError(
                f"Expected 0 < minimum < start < maximum, got {minimum}, {start}, {maximum}: "
                "a learned temperature starts inside its range."
            )
        if form == "sequence" and is_causal:
            raise ValueError(
                "The mean over the whole sequence reads tokens after the query, and is not defined while decoding: "
                "expected form 'token' or 'prefix' for a causal model, got 'sequence'. Use it for encoders only."
            )
        self.form = form
        self.clamp = SoftClamp(minimum, maximum, in_logs=form == "length")
        self.weight = nn.Parameter(torch.zeros(outputs, hidden_size))
        self.bias = nn.Parameter(torch.full((outputs,), self.clamp.inverse(start)))
        self.exponent = nn.Parameter(torch.zeros(outputs)) if form == "length" else None

    @property
    def is_running(self) -> bool:
        """Whether a token's temperature needs sums over the tokens before it."""
        return self.form in ("prefix", "length")

    def raw(self, hidden: Float[Tensor, "batch length hidden"]) -> Float[Tensor, "batch length outputs"]:
        """What is averaged and clamped, x w + b, in float32 at least."""
        precision = torch.promote_types(hidden.dtype, torch.float32)
        with without_autocast(hidden):
            return nn.functional.linear(hidden.to(precision), self.weight.to(precision), self.bias.to(precision))

    def summed(
        self, raw: Float[Tensor, "batch length outputs"], is_real: Bool[Tensor, "batch length"] | None
    ) -> Float[Tensor, "batch length sums"]:
        """What a running form adds up over the prefix: how many tokens there are and, for a mean, their raw numbers."""
        counted = torch.ones_like(raw[..., :1]) if is_real is None else is_real[..., None].to(raw.dtype)
        return counted if self.form == "length" else torch.cat([torch.where(counted > 0, raw, 0.0), counted], dim=-1)

    def from_sums(
        self, raw: Float[Tensor, "batch length outputs"], sums: Float[Tensor, "batch length sums"]
    ) -> Float[Tensor, "batch outputs length 1"]:
        """The temperature of each query, from the sums over its prefix, itself included."""
        tokens = sums[..., -1:].clamp(min=1)
        if self.exponent is None:
            return self.clamp(sums[..., :-1] / tokens)
        return self.clamp(raw - self.exponent.to(raw.dtype) * torch.log1p(tokens.log()))

    def forward(
        self, hidden: Float[Tensor, "batch length hidden"], is_real: Bool[Tensor, "batch length"] | None = None
    ) -> Float[Tensor, "batch outputs length 1"]:
        """The temperature of each query; ``is_real`` is False at padding, which nothing counts."""
        raw = self.raw(hidden)
        if self.form == "token":
            return self.clamp(raw)
        summed = self.summed(raw, is_real)
        if self.is_running:
            return self.from_sums(raw, summed.cumsum(dim=1))
        return self.from_sums(raw, summed.sum(dim=1, keepdim=True).expand_as(summed))
