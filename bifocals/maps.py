"""What a layer attends to in a text: standard beside focal beside Focus, from the same queries and keys.

    standard   A = softmax(q k^T / sqrt(dim))
    focal      the same at a temperature
    Focus      the same over the pairs that the lens keeps, at the lens's own temperature
    entropy    H_i = - sum_j A_ij log A_ij        exp(H_i): as many tokens, read evenly, would have this entropy

Each layer gets the input that it has in the model with its lens's temperature, or in the base model without a lens; so
the three differ by what the layer itself does with it.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from bifocals.config import FocalConfig
from bifocals.layer import LayerLens, Taken
from bifocals.lens import attach, evaluating, lens_of
from bifocals.segments import visible_pairs

Kinds = dict[str, Tensor]  # attention by kind, (head, query, key)


@dataclass(frozen=True, slots=True)
class Maps:
    """The attention of one head, and the entropies of all layers, by kind."""

    layer: str
    head: int
    attention: dict[str, Tensor]  # (query, key)
    entropy: dict[str, dict[str, float]]  # nats by layer, mean over queries and heads
    effective: dict[str, dict[str, float]]  # tokens by layer, mean of exp(H_i)


@torch.no_grad()
def attention_maps(
    model: PreTrainedModel, tokens: Tensor, *, layer: int, head: int, temperature: float | None = None
) -> Maps:
    """Of one text, (length,), in a causal model; without ``temperature``, focal is at the one of the model's lens."""
    lens = lens_of(model)
    bare = attach(model, FocalConfig(temperature=1.0)) if lens is None else None
    used = lens or bare
    assert used is not None
    try:
        covered = used.layers.get(str(layer))
        if covered is None or not 0 <= head < covered.heads:
            heads = next(iter(used.layers.values())).heads
            raise ValueError(
                f"Expected a layer of {', '.join(used.layers)} and a head in 0..{heads - 1}, got layer {layer} and "
                f"head {head}."
            )
        seen = _Seen(used.layers, temperature, str(layer), head)
        with evaluating(model), used.capturing(seen):
            model.base_model(input_ids=tokens[None].to(model.device), use_cache=False)
    finally:
        if bare is not None:
            bare.detach()
    return Maps(str(layer), head, seen.attention, seen.entropy, seen.effective)


@dataclass(slots=True)
class _Seen:
    """Takes what passes through each layer; keeps the map of one head and the entropies of all."""

    lenses: dict[str, LayerLens]
    temperature: float | None
    layer: str
    head: int
    attention: dict[str, Tensor] = field(default_factory=dict)
    entropy: dict[str, dict[str, float]] = field(default_factory=dict)
    effective: dict[str, dict[str, float]] = field(default_factory=dict)

    def take(self, layer: str, taken: Taken) -> None:
        for kind, attention in self._kinds(layer, taken).items():
            entropy = -torch.special.xlogy(attention, attention).sum(dim=-1)
            self.entropy.setdefault(kind, {})[layer] = entropy.mean().item()
            self.effective.setdefault(kind, {})[layer] = entropy.exp().mean().item()
            if layer == self.layer:
                self.attention[kind] = attention[self.head].cpu()

    def _kinds(self, layer: str, taken: Taken) -> Kinds:
        query, pattern = taken.query[0], taken.pattern
        heads, length = query.shape[:2]
        key = taken.key[0].repeat_interleave(heads // taken.key.shape[1], dim=0)
        logits = (query * taken.scale).float() @ key.float().mT  # (head, query, key)
        if taken.softcap is not None:
            logits = taken.softcap * torch.tanh(logits / taken.softcap)
        pairs = visible_pairs(length, length, None, pattern.is_causal, pattern.reach, query.device)[0]
        own = taken.temperature[0] if isinstance(taken.temperature, Tensor) else taken.temperature
        found = {"standard": _softmax(logits, pairs)}
        if self.temperature is not None or not isinstance(own, float) or own != 1:
            found["focal"] = _softmax(logits / (own if self.temperature is None else self.temperature), pairs)
        if self.lenses[layer].router is not None:
            found["Focus"] = _softmax(logits / own, pairs & self._kept(layer, taken.routed, heads))
        return found

    def _kept(self, layer: str, routed: tuple[Tensor, ...], heads: int) -> Tensor:
        """True where the lens keeps a pair: (head, query, key)."""
        lens = self.lenses[layer]
        assert lens.router is not None
        assert lens.focus is not None
        reads, holds = lens.router(*routed, None).groups(lens.settings.top_k)
        reads, holds = (each[0].float().repeat_interleave(heads // each.shape[1], dim=0) for each in (reads, holds))
        position = torch.arange(reads.shape[1], device=reads.device)
        near = position[:, None] - position <= lens.focus.window
        return near | (position < lens.focus.sinks) | (reads @ holds.mT > 0)


def _softmax(logits: Float[Tensor, "head query key"], pairs: Tensor) -> Float[Tensor, "head query key"]:
    return logits.masked_fill(~pairs, -torch.inf).softmax(dim=-1)
