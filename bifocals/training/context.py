"""A longer context by transformers' own rope parameters, and what a model is worth past the context it was trained at.

    linear   every position divided by the factor
    ntk      a larger base, theta x factor^(dim / (dim - 2)): fast dimensions stay, the slowest is divided by the factor
    yarn     between the two, dimension by dimension

transformers' own "dynamic" form of ntk is not offered: its base follows the length of the sequence at hand, so that
decoding would not equal prefill.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bifocals.config import check_types, expect, option
from bifocals.evaluation.perplexity import token_losses
from bifocals.training.data import DataError, load_blocks

PARTS = 8  # of a sequence twice the context, whose losses are told apart
MOST = 1000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextOptions:
    """How long sequences are, and how positions are stretched to them."""

    context: int = option(0, "Tokens of each sequence; 0 means the usual number.")
    rope: Literal["plain", "linear", "ntk", "yarn"] = option("plain", "How rotary positions are stretched.")
    factor: float = option(1.0, "By how much they are stretched.")

    def __post_init__(self) -> None:
        check_types(self)
        expect(self.context == 0 or self.context >= 2, "context >= 2", self.context, "leave it out for the usual one")
        if self.rope == "plain":
            expect(self.factor == 1, "factor 1 without rope", self.factor, "choose how with rope: linear, ntk or yarn")
        else:
            expect(
                1 < self.factor <= MOST,
                f"a factor in (1, {MOST:g}] with rope {self.rope!r}",
                self.factor,
                "it is the new context over the old one",
            )


def stretch(config: PreTrainedConfig, options: ContextOptions) -> PreTrainedConfig:
    """A copy of ``config`` with what ``options`` ask for."""
    config = copy.deepcopy(config)
    known: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if options.rope != "plain" and known.get("rope_type") != "default":
        raise ValueError(
            f"rope {options.rope!r}: expected a model with plain rotary positions, got {known} in "
            f"{type(config).__name__}. Leave --rope out, or start from a model that was not stretched before."
        )
    original = config.max_position_embeddings
    if options.rope == "ntk":
        dim = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
        dim = int(dim * known.get("partial_rotary_factor", 1.0))  # the others are not rotated
        theta = known["rope_theta"] * options.factor ** (dim / (dim - 2))
        config.rope_parameters = {**known, "rope_theta": theta}
    elif options.rope != "plain":
        config.rope_parameters = {**known, "rope_type": options.rope, "factor": options.factor}
        if options.rope == "yarn":
            config.rope_parameters["original_max_position_embeddings"] = original
    config.max_position_embeddings = max(original, options.context, round(original * options.factor))
    return config


def put_positions(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Give a model the positions of ``config``: its rotary embeddings are made anew."""
    model.config.max_position_embeddings = config.max_position_embeddings
    if getattr(model.config, "rope_parameters", None) == getattr(config, "rope_parameters", None):
        return
    model.config.rope_parameters = config.rope_parameters
    for owner in list(model.modules()):
        for name, part in list(owner.named_children()):
            if hasattr(part, "inv_freq") and hasattr(part, "rope_type"):
                setattr(owner, name, type(part)(model.config).to(model.device))


@torch.no_grad()
def measure_beyond(
    model: PreTrainedModel, sources: Sequence[str], tokenizer: Any, context: int, limit: int
) -> dict[str, Any] | None:
    """Nats per token within the context and in as many tokens past it.

    None if the held-out text is too short, or if the model has learned a vector for each position and has no more.
    """
    has_rotary = bool(getattr(model.config, "rope_parameters", None))
    if not has_rotary and 2 * context > model.config.max_position_embeddings:
        return None
    try:
        blocks = load_blocks(sources, tokenizer, 2 * context, part="held-out", limit=limit)
    except DataError:
        return None
    losses = torch.stack([token_losses(model, block) for block in blocks.tokens]).mean(dim=0)  # of tokens 1, 2, ...
    return {
        "length": 2 * context,
        "blocks": len(blocks.tokens),
        "within": losses[: context - 1].mean().item(),
        "beyond": losses[context - 1 :].mean().item(),
        "by_part": [part.mean().item() for part in losses.tensor_split(PARTS)],
    }
