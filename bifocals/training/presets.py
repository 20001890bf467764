"""Models to pretrain, by name: LLaMA-style with query-key norm, which transformers calls Qwen3.

    0.4B ... 9.5B   named after their parameters: SwiGLU, RMSNorm, RoPE, as many key-value heads as heads, a vocabulary
                    of 32,000 and embeddings that are not tied; batches of 262,144 tokens, 128 sequences of 2,048
    nano, micro     the same on a laptop: minutes and hours

Names and the size of batches are the Focal paper's; depths and widths are chosen to have the parameters of the name.
"""

from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config

from bifocals.training.options import PretrainOptions

BATCH_TOKENS = 262_144


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """The shape of a model, and how it is trained unless told otherwise."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int = 32_000
    context: int = 2048
    options: PretrainOptions

    def config(self, **changes: Any) -> Qwen3Config:
        """For transformers; ``changes`` are of its own names."""
        shape: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.hidden // self.heads,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": False,
            "bos_token_id": None,
        }
        return Qwen3Config(**{**shape, **changes})


def _paper(hidden: int, intermediate: int, layers: int, heads: int, rate: float) -> Preset:
    options = PretrainOptions(
        steps=60_000,
        batch=BATCH_TOKENS // 2048,
        micro_batch=4,
        rate=rate,
        warm_up=2000,
        precision="bfloat16",
        gradient_checkpointing=True,
        save_every=500,
        evaluate_every=500,
    )
    return Preset(hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, options=options)


PRESETS: dict[str, Preset] = {
    "nano": Preset(
        hidden=128,
        intermediate=384,
        layers=4,
        heads=4,
        vocabulary=2048,
        context=256,
        options=PretrainOptions(),
    ),
    "micro": Preset(
        hidden=384,
        intermediate=1024,
        layers=8,
        heads=6,
        vocabulary=8192,
        context=512,
        options=PretrainOptions(steps=4000, batch=16, micro_batch=4, rate=1e-3, warm_up=200, evaluate_every=250),
    ),
    "0.4B": _paper(1024, 2816, 26, 16, 3e-4),
    "0.78B": _paper(1536, 4096, 24, 12, 2.5e-4),
    "1.3B": _paper(2048, 5248, 24, 16, 2e-4),
    "2.7B": _paper(2560, 6912, 32, 20, 1.6e-4),
    "6.7B": _paper(4096, 11008, 32, 32, 1.2e-4),
    "9.5B": _paper(4608, 12288, 36, 36, 1.2e-4),
}


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"Unknown preset {name!r}: expected one of {', '.join(PRESETS)}.")
    return PRESETS[name]
