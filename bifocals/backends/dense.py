"""All pairs, with a mask: the plain way, for short sequences, soft gates and softcaps.

    q k^T * scale   ->   softcap * tanh(. / softcap)   ->   / temperature   ->   * factor   ->   + bias   ->   softmax

Where neither softcap nor factor is asked for this is one call of torch's fused attention.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def dense_attention(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key value_dim"],
    pairs: Bool[Tensor, "*#shape query key"] | None,
    *,
    scale: float,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    bias: Float[Tensor, "batch #head query key"] | None = None,
    factor: Float[Tensor, "batch #head query key"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "batch head query value_dim"]:
    """Attention over ``pairs`` (None: all). Every query must read something. ``dropout`` is that of training."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if softcap is None and factor is None:
        if isinstance(temperature, Tensor):
            query = query / temperature.to(query.dtype)
        else:
            scale = scale / temperature
        mask: Tensor | None = pairs
        if bias is not None:
            mask = bias.to(query.dtype)
            mask = mask if pairs is None else mask.masked_fill(~pairs, -torch.inf)
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=heads != kv_heads
        )
    key, value = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (key, value))
    logits = query @ key.mT * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    if factor is not None:
        logits = logits * factor
    if bias is not None:
        logits = logits + bias
    if pairs is not None:
        logits = logits.masked_fill(~pairs, -torch.inf)
    precision = torch.promote_types(logits.dtype, torch.float32)
    weights = torch.nn.functional.dropout(logits.softmax(dim=-1, dtype=precision).to(value.dtype), dropout)
    return weights @ value
