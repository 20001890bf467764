"""Tiny random models of every family, for tests and for trying things out without a download."""

from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 64
LAYERS = 2
SLIDING_WINDOW = 12

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}

TINY: dict[str, dict[str, Any]] = {
    "bart": {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "bert": {**_COMMON, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    "deepseek_v3": {
        **_COMMON,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 6,
    },
    "gemma2": {
        **_GROUPED,
        "head_dim": 8,
        "sliding_window": SLIDING_WINDOW,
        "attn_logit_softcapping": 0.5,
        "query_pre_attn_scalar": 5,
    },
    "gpt2": {
        **{name: value for name, value in _COMMON.items() if name != "intermediate_size"},
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "gpt_neox": {
        **_COMMON,
        "hidden_dropout": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": SLIDING_WINDOW},
    "mixtral": {**_GROUPED, "num_local_experts": 3, "sliding_window": None},
    "olmo2": {**_COMMON, "num_key_value_heads": 4},
    "phi3": {**_GROUPED, "resid_pdrop": 0.0},
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 8},
}


def tiny_model(family: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of one family, in float64: there, a decision does not hang on rounding.

    Its weights are larger than at a usual start, so that attention is far from uniform, and biases are not zero.
    """
    config = CONFIG_MAPPING[family](**{**TINY[family], **changes})
    config._experts_implementation = "eager"  # the grouped product of experts does not know float64
    auto = {"bert": AutoModelForMaskedLM, "bart": AutoModelForSeq2SeqLM}.get(family, AutoModelForCausalLM)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config).to(dtype).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=0.3)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.1)
    return model


def tiny_tokens(batch: int = 2, length: int = 40, *, seed: int = 0) -> torch.Tensor:
    """Random tokens without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character, in the vocabulary of the tiny models."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 \n.,;:!?'\"()-_=+*/#[]"
    known = ["<pad>", "<s>", "</s>", "<unk>", *characters][:VOCABULARY]
    tokenizer = Tokenizer(WordLevel({text: index for index, text in enumerate(known)}, unk_token="<unk>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def inputs_of(model: PreTrainedModel, tokens: torch.Tensor, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    """What to pass to the model for these tokens: an encoder-decoder gets a few to decode as well."""
    if not model.config.is_encoder_decoder:
        return {"input_ids": tokens, **others}
    return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)[:, :10], **others}
