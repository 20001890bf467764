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
    margins: dict[str, Tensor] = field(default_factory=dict)  # how far each token was from other groups
    played: dict[str, int] | None = None

    def rewind(self) -> "Tape":
        self.played = dict.fromkeys(self.reads, 0)
        return self

    def play(
        self, layer: str, groups: tuple[Tensor, Tensor], routing: Routing, top_k: int, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.played is None:
            self._record(layer, groups, routing, top_k, real)
            return groups
        start = self.played[layer]
        self.played[layer] = start + groups[0].shape[2]
        return _over(groups[0], self.reads[layer][:, :, start:]), _over(groups[1], self.holds[layer][:, :, start:])

    def _record(
        self, layer: str, groups: tuple[Tensor, Tensor], routing: Routing, top_k: int, real: Tensor | None
    ) -> None:
        is_shared = groups[0] is groups[1]
        margins = torch.minimum(
            _margin(routing.query_scores, top_k, real), _margin(routing.key_scores, top_k if is_shared else 1, real)
        )
        for kept, new in zip((self.reads, self.holds, self.margins), (*groups, margins)):
            kept[layer] = torch.cat([kept[layer], new], dim=2) if layer in kept else new

    def cut(self, length: int) -> "Tape":
        """The first tokens alone."""
        reads, holds, margins = ({name: each[:, :, :length] for name, each in kept.items()} for kept in self._all())
        return Tape(reads, holds, margins)

    def near_ties(self, tolerance: float) -> tuple[int, int]:
        """Tokens whose groups a difference of ``tolerance`` in the scores could flip, and all; over all layers."""
        close = sum(int((margin < tolerance).sum()) for margin in self.margins.values())
        return close, sum(margin.numel() for margin in self.margins.values())

    def flips(self, other: "Tape", tolerance: float) -> int:
        """Tokens that another run of the same length sorted otherwise, though no near-tie excuses it."""
        count = 0
        for name, margin in self.margins.items():
            differ = (self.reads[name] != other.reads[name]) | (self.holds[name] != other.holds[name])
            count += int((differ.any(dim=-1) & (margin >= tolerance)).sum())
        return count

    def _all(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        return self.reads, self.holds, self.margins


def _over(live: Tensor, recorded: Tensor) -> Tensor:
    """What was recorded as far as it goes, then what comes live."""
    length = live.shape[2]
    return torch.cat([recorded[:, :, :length], live[:, :, min(recorded.shape[2], length) :]], dim=2)


def _margin(scores: Tensor, best: int, real: Tensor | None) -> Tensor:
    """By how much the last group chosen beats the first one not chosen; padding decides nothing."""
    if best == scores.shape[-1]:
        return torch.full_like(scores[..., 0], torch.inf)
    ordered = scores.detach().sort(dim=-1, descending=True).values
    margin = ordered[..., best - 1] - ordered[..., best]
    return margin if real is None else margin.masked_fill(~real[:, None], torch.inf)
