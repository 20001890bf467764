"""One attention call that also returns its log-sum-exp, so that calls over disjoint keys can be merged exactly.

    out, lse = softmax(q k^T * scale + mask) v,  log sum exp(q k^T * scale + mask)
    merged:    out = sum_c exp(lse_c - lse) out_c      with lse = log sum_c exp(lse_c)

The backward of a part takes the MERGED output and log-sum-exp: its probabilities are then those of the
whole softmax, and the gradients of the parts add up to the exact gradient.

Fused kernels do it on CPU and CUDA; tensors elsewhere, and softcaps, take the plain way below.
The CUDA kernel has the same signature in this file but has never been run by our tests.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

Rows = Float[Tensor, "batch head query dim"]
Keys = Float[Tensor, "batch kv_head key dim"]
Mask = Float[Tensor, "#batch #head query key"]
LogSumExp = Float[Tensor, "batch head query"]

LEAF = 288  # rows of the smallest causal call, at most


def attend(
    query: Rows,
    key: Keys,
    value: Keys,
    mask: Mask | None,
    scale: float,
    softcap: float | None = None,
    *,
    is_causal: bool = False,
) -> tuple[Rows, LogSumExp]:
    """Attention and its log-sum-exp. What a row without any key returns is not defined: callers overwrite it.

    ``is_causal``: as many queries as keys, no mask, and query i reads keys 0 .. i.
    """
    if is_causal and query.device.type == "cpu" and _halvings(query.shape[2]):
        return _causal(query, key, value, scale, softcap)
    if softcap is None and query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    if softcap is None and query.device.type == "cuda":
        key, value = _repeat(key, query), _repeat(value, query)
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned(mask, query, key), True, 0.0, is_causal, scale=scale
        )
        return out, lse[..., : query.shape[2]]
    logits, _ = _plain_logits(query, key, mask, scale, softcap, is_causal)
    lse = logits.logsumexp(dim=-1)
    return (logits - lse[..., None]).exp().to(value.dtype) @ _repeat(value, query), lse


def causal_length(length: int) -> int:
    """What to pad rows and keys to, at the end, for a causal call: small blocks of full vectors, a power of two."""
    halvings = _halvings(length)
    return -(-length >> halvings + 3) << halvings + 3


def _halvings(length: int) -> int:
    return max(0, math.ceil(math.log2(max(length, 1) / LEAF)))


def _causal(query: Rows, key: Keys, value: Keys, scale: float, softcap: float | None) -> tuple[Rows, LogSumExp]:
    """Small causal blocks on the diagonal, then ever larger squares below it; all of one size are one call.

    The CPU kernel also computes what a causal call masks, unless that is long; so mask little.

        1
        2 1          1  causal
        3 3 1        2  a square
        3 3 2 1      3  a square of twice that size
    """
    batch, _, length, _ = query.shape

    def halves(tensor: Tensor, size: int) -> Tensor:
        """(batch, head, length, any) -> (half, batch, head, pair of halves, size, any), a view."""
        return tensor.unflatten(2, (-1, 2, size)).movedim(3, 0)

    def together(tensor: Tensor) -> Tensor:
        """Blocks side by side in the batch; a copy where strides ask for one."""
        return tensor.transpose(1, 2).flatten(0, 1)

    def apart(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (batch, -1)).transpose(1, 2)

    halvings = _halvings(length)
    size = length >> halvings
    rows, keys, values = (together(tensor.unflatten(2, (-1, size))) for tensor in (query, key, value))
    part, part_lse = attend(rows, keys, values, None, scale, softcap, is_causal=True)
    out, lse = apart(part).flatten(2, 3), apart(part_lse[..., None]).flatten(2, 3)
    for _ in range(halvings):
        rows, keys, values = halves(query, size)[1], halves(key, size)[0], halves(value, size)[0]
        part, part_lse = attend(together(rows), together(keys), together(values), None, scale, softcap)
        merge(halves(out, size)[1], halves(lse, size)[1, ..., 0], apart(part), apart(part_lse))
        size *= 2
    return out, lse[..., 0]


def merge(
    out: Float[Tensor, "*row dim"],
    lse: Float[Tensor, "*row"],
    part: Float[Tensor, "*row dim"],
    part_lse: Float[Tensor, "*row"],
) -> tuple[Float[Tensor, "*row dim"], Float[Tensor, "*row"]]:
    """Fold into the first pair, in place, what the same rows got from other keys; one of the two has read some."""
    out.lerp_(part, torch.sigmoid(part_lse - lse)[..., None].to(part.dtype))
    return out, lse.copy_(torch.logaddexp(lse, part_lse))


def attend_backward(
    grad: Rows,
    query: Rows,
    key: Keys,
    value: Keys,
    mask: Mask | None,
    scale: float,
    out: Rows,
    lse: LogSumExp,
    softcap: float | None = None,
    *,
    is_causal: bool = False,
) -> tuple[Rows, Keys, Keys]:
    """Gradients of query, key and value through one call, given the merged ``out`` and ``lse``."""
    if softcap is None and query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    if softcap is None and query.device.type == "cuda":
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        of_query, of_key, of_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad,
            query,
            _repeat(key, query),
            _repeat(value, query),
            _aligned(mask, query, key),
            out,
            torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32)),
            seed,
            seed,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
        return of_query, _fold(of_key, key), _fold(of_value, value)
    logits, slope = _plain_logits(query, key, mask, scale, softcap, is_causal)
    weights = (logits - lse[..., None]).exp()
    grad_precise = grad.to(weights.dtype)
    of_weights = grad_precise @ _repeat(value, query).to(weights.dtype).mT
    row = (grad_precise * out.to(weights.dtype)).sum(dim=-1, keepdim=True)
    of_logits = weights * (of_weights - row) * slope * scale
    of_query = of_logits @ _repeat(key, query).to(weights.dtype)
    of_key, of_value = of_logits.mT @ query.to(weights.dtype), weights.mT @ grad_precise
    return (
        of_query.to(query.dtype),
        _fold(of_key, key).to(key.dtype),
        _fold(of_value, value).to(value.dtype),
    )


def _plain_logits(
    query: Rows, key: Keys, mask: Mask | None, scale: float, softcap: float | None, is_causal: bool
) -> tuple[Tensor, Tensor | float]:
    """The logits in float32 at least, and the slope of the softcap there."""
    precision = torch.promote_types(query.dtype, torch.float32)
    logits = query.to(precision) @ _repeat(key, query).to(precision).mT * scale
    slope: Tensor | float = 1.0
    if softcap is not None:
        bent = torch.tanh(logits / softcap)
        logits, slope = softcap * bent, 1 - bent * bent
    if is_causal:
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    return logits if mask is None else logits + mask, slope


def _repeat(tensor: Keys, query: Rows) -> Float[Tensor, "batch head key dim"]:
    """Give every query head its own copy of its key-value head."""
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _fold(gradient: Float[Tensor, "batch head key dim"], like: Keys) -> Keys:
    """The reverse of ``_repeat``: sum over the query heads that share a key-value head."""
    if gradient.shape[1] == like.shape[1]:
        return gradient
    return gradient.unflatten(1, (like.shape[1], -1)).sum(dim=2)


def _aligned(mask: Mask | None, query: Rows, key: Keys) -> Tensor | None:
    """The CUDA kernel wants its bias in the precision of the query, rows at multiples of 16 bytes, and no broadcast."""
    if mask is None:
        return None
    keys = key.shape[2]
    mask = mask.clamp(min=torch.finfo(query.dtype).min / 2).to(query.dtype)  # finite
    padded = torch.nn.functional.pad(mask, (0, -keys % 8))[..., :keys]
    return padded.expand(query.shape[0], query.shape[1], -1, -1)
