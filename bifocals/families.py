"""Where attention lives in each transformers family: one entry in a table, no class for each model.

To add a family whose attention goes through transformers' attention interface, add one entry: the class of its
attention modules, where the rows that make the query are (which only ``fold`` needs), and where a token's own query
and key can be seen before rotation (which only routers with networks need). Masks, sliding windows, softcaps and scales
need no entry: the model itself passes them on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Query:
    """One place whose output is the query: the rows that ``of`` selects in the weight (and bias) of a submodule."""

    submodule: str
    of: Callable[[Any, Tensor], Tensor] = lambda attention, tensor: tensor


@dataclass(frozen=True, slots=True)
class Features:
    """Submodules whose outputs are a token's query and key before rotation; if it is one for both, how to part them."""

    query: str = "q_proj"
    key: str = "k_proj"
    part: Callable[[Tensor, int, int], tuple[Tensor, Tensor]] | None = None  # output, heads, key-value heads


@dataclass(frozen=True, slots=True)
class Family:
    """What has to be known of a family that its models do not tell by themselves."""

    attention: tuple[str, ...]
    queries: tuple[Query, ...] = (Query("q_proj"),)
    cross: str = ""  # ends the name of attention modules that read another sequence
    stacks: tuple[str, ...] = ("",)  # parts of an encoder-decoder, whose layers are counted one after the other
    softcap: str = ""  # the attribute of the attention module, and of the config, that caps the logits
    features: Features | None = Features()


def _first_rows(attention: Any, tensor: Tensor) -> Tensor:
    """Query rows first, then keys and values (Phi-3)."""
    return tensor[: attention.config.num_attention_heads * attention.head_dim]


def _first_third(attention: Any, tensor: Tensor) -> Tensor:
    """Query columns first: GPT-2 stores its weights transposed."""
    return tensor[..., : attention.embed_dim]


def _first_of_three(attention: Any, tensor: Tensor) -> Tensor:
    """Query, key and value rows of one head, then of the next (GPT-NeoX)."""
    return tensor.view(-1, 3, attention.head_size, *tensor.shape[1:])[:, 0]


def _part_thirds(output: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    query, key, _ = output.chunk(3, dim=-1)
    return query, key


def _part_rows(output: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    dim = output.shape[-1] // (heads + 2 * kv_heads)
    return output[..., : heads * dim], output[..., heads * dim : (heads + kv_heads) * dim]


def _part_heads(output: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    query, key, _ = output.unflatten(-1, (heads, 3, -1)).unbind(dim=-2)
    return query, key


NORMED = (Query("q_norm"),)  # a norm after the projection would erase what is folded into the projection
AFTER_NORMS = Features("q_norm", "k_norm")

FAMILIES: dict[str, Family] = {
    "bart": Family(("BartAttention",), cross="encoder_attn", stacks=("encoder.", "decoder.")),
    "bert": Family(
        ("BertSelfAttention", "BertCrossAttention"),
        (Query("query"),),
        cross="crossattention.self",
        features=Features("query", "key"),
    ),
    # Its keys are made anew from cached latents at every step: no submodule shows those of the new tokens alone.
    "deepseek_v3": Family(("DeepseekV3Attention",), (Query("q_proj"), Query("q_b_proj")), features=None),
    "gemma2": Family(("Gemma2Attention",), softcap="attn_logit_softcapping"),
    "gpt2": Family(
        ("GPT2Attention",),
        (Query("c_attn", _first_third), Query("q_attn")),
        cross="crossattention",
        features=Features("c_attn", "c_attn", _part_thirds),
    ),
    "gpt_neox": Family(
        ("GPTNeoXAttention",),
        (Query("query_key_value", _first_of_three),),
        features=Features("query_key_value", "query_key_value", _part_heads),
    ),
    "llama": Family(("LlamaAttention",)),
    "mistral": Family(("MistralAttention",)),
    "mixtral": Family(("MixtralAttention",)),
    "olmo2": Family(("Olmo2Attention",), NORMED, features=AFTER_NORMS),
    "phi3": Family(
        ("Phi3Attention",), (Query("qkv_proj", _first_rows),), features=Features("qkv_proj", "qkv_proj", _part_rows)
    ),
    "qwen2": Family(("Qwen2Attention",)),
    "qwen3": Family(("Qwen3Attention",), NORMED, features=AFTER_NORMS),
}
SUPPORTED = ", ".join(FAMILIES)
HOW_TO_ADD = "To add one, see bifocals/families.py."


@dataclass(frozen=True, slots=True)
class Site:
    """One attention module of a model, and what a lens has to know to sit on it."""

    name: str  # "3", or "3.cross": the layer, and whether it reads another sequence
    layer: int
    module: nn.Module
    is_cross: bool
    is_causal: bool
    may_focus: bool  # Focus is for self-attention; of an encoder-decoder, for the encoder's
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    features: Features | None


def family_of(model: PreTrainedModel) -> Family:
    """The model's entry in the table, or an error that names what is supported."""
    kind = type(model).__name__
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if not isinstance(model, nn.Module) or model_type is None:
        raise ValueError(f"A lens fits a transformers model with a config, got {kind}. Supported: {SUPPORTED}.")
    if model_type not in FAMILIES:
        raise ValueError(
            f"A lens cannot be attached to {kind}: no entry for model_type {model_type!r}. Supported: {SUPPORTED}. "
            f"{HOW_TO_ADD}"
        )
    return FAMILIES[model_type]


def attention_sites(model: PreTrainedModel) -> list[Site]:
    """Every attention module of the model, in the order of its layers."""
    family = family_of(model)
    found = list(_own_attention(model, family))
    if not found:
        raise ValueError(
            f"A lens cannot be attached to {type(model).__name__}: it has no {' or '.join(family.attention)} of "
            f"transformers' own, so it bypasses the attention interface. Supported: {SUPPORTED}. {HOW_TO_ADD}"
        )
    sites: list[Site] = []
    before = 0
    for stack in family.stacks:
        inside = [(name, module) for name, module in found if stack in name]
        for name, module in inside:
            sites.append(_site(model, family, name, module, before, stack))
        before += len({module.layer_idx for _, module in inside})
    return sites


def is_decoder(model: PreTrainedModel) -> bool:
    """Whether no token reads later ones, so that predicting them says something."""
    return all(site.is_causal for site in attention_sites(model))


def _own_attention(model: nn.Module, family: Family) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the family's attention classes; one defined elsewhere may compute anything, so it does not count."""
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__name__ in family.attention and kind.__module__.startswith("transformers.models."):
            yield name, module


def _site(model: PreTrainedModel, family: Family, name: str, module: nn.Module, before: int, stack: str) -> Site:
    is_cross = bool(family.cross) and name.endswith(family.cross)
    layer = before + int(module.layer_idx)  # type: ignore[arg-type]
    heads = int(getattr(module, "num_heads", None) or model.config.num_attention_heads)
    return Site(
        name=f"{layer}.cross" if is_cross else str(layer),
        layer=layer,
        module=module,
        is_cross=is_cross,
        is_causal=bool(getattr(module, "is_causal", True)),
        may_focus=not is_cross and stack == family.stacks[0],
        hidden_size=int(model.config.hidden_size),
        heads=heads,
        kv_heads=heads // int(getattr(module, "num_key_value_groups", 1)),
        head_dim=int(getattr(module, "head_dim", None) or model.config.hidden_size // heads),
        features=family.features,
    )
