"""Memberships of one run, kept to be looked at or played again in another.

Top-k is a decision: two ways of computing the same hidden state differ by rounding, and a near-tie may flip a group.
Playing the groups of one run in the other leaves only what the two runs do with them to be compared.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bifocals.routing import Routing


@dataclass(slots=True)
class Tape:
    """Records the groups of queries and keys, layer by layer; once ``rewind`` was called, plays them."""

    reads: dict[str, Tensor] = field(default_factory=dict)
    holds: dict[str, Tensor] = field(default_factory=dict)
    margins: list[Tensor] = field(default_factory=list)
    played: dict[str, int] | None = None

    def rewind(self) -> None:
        self.played = dict.fromkeys(self.reads, 0)

    def play(
        self, layer: str, groups: tuple[Tensor, Tensor], routing: Routing, top_k: int, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.played is None:
            self._record(layer, groups, routing, top_k, real)
            return groups
        start = self.played[layer]
        stop = self.played[layer] = start + groups[0].shape[2]
        return self.reads[layer][:, :, start:stop], self.holds[layer][:, :, start:stop]

    def _record(
        self, layer: str, groups: tuple[Tensor, Tensor], routing: Routing, top_k: int, real: Tensor | None
    ) -> None:
        for kept, new in zip((self.reads, self.holds), groups):
            kept[layer] = torch.cat([kept[layer], new], dim=2) if layer in kept else new
        is_shared = groups[0] is groups[1]
        for scores, best in ((routing.query_scores, top_k), (routing.key_scores, top_k if is_shared else 1)):
            if best < scores.shape[-1]:
                ordered = scores.sort(dim=-1, descending=True).values
                margin = ordered[..., best - 1] - ordered[..., best]
                self.margins.append(margin if real is None else margin[real[:, None].expand_as(margin)])

    def near_ties(self, tolerance: float) -> tuple[int, int]:
        """Decisions that a difference of ``tolerance`` in the scores could flip, and all decisions."""
        close = sum(int((margin < tolerance).sum()) for margin in self.margins)
        return close, sum(margin.numel() for margin in self.margins)
