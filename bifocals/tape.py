"""Memberships of one run, kept to be looked at or played again in another.

Top-k is a decision: two ways of computing the same hidden state differ by rounding, and a near-tie may flip a group.
Playing the groups of one run in the other leaves only what the two runs do with them to be compared. While it plays, a
tape counts the tokens that the other run would have sorted otherwise, though they were not near a tie.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bifocals.network import AnyRouting


@dataclass(slots=True)
class Tape:
    """Records the groups of queries and keys, layer by layer; once rewound, plays them as far as they go."""

    reads: dict[str, Tensor] = field(default_factory=dict)
    holds: dict[str, Tensor] = field(default_factory=dict)
    read_margins: dict[str, Tensor] = field(default_factory=dict)  # how far each query was from reading other groups
    hold_margins: dict[str, Tensor] = field(default_factory=dict)  # and each key from being in another
    flips: int = 0
    _played: dict[str, int] | None = None
    _tie: float = 0.0

    def rewind(self, tie: float = 0.0) -> "Tape":
        """Play from now on; a decision by less than ``tie`` may flip uncounted."""
        self._played, self._tie, self.flips = dict.fromkeys(self.reads, 0), tie, 0
        return self

    def cut(self, length: int) -> "Tape":
        """The first tokens alone."""
        reads, holds, *margins = ({name: each[:, :, :length] for name, each in kept.items()} for kept in self.tracks())
        return Tape(reads, holds, margins[0], margins[1])

    def tracks(self) -> tuple[dict[str, Tensor], ...]:
        return self.reads, self.holds, self.read_margins, self.hold_margins

    def near_ties(self, tolerance: float) -> tuple[int, int]:
        """Decisions that a difference of ``tolerance`` in the scores could flip, and all; over all layers."""
        margins = [*self.read_margins.values(), *self.hold_margins.values()]
        return sum(int((margin < tolerance).sum()) for margin in margins), sum(margin.numel() for margin in margins)

    def pass_on(self, layer: str, routing: AnyRouting, top_k: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """The groups that the layer should use, given those that it would choose."""
        groups = routing.groups(top_k)
        # Padding decides nothing.
        margins = [
            margin if real is None else margin.masked_fill(~real[:, None], torch.inf)
            for margin in routing.margins(top_k)
        ]
        if self._played is not None:
            return self._play(layer, groups, margins, self._played)
        for kept, new in zip(self.tracks(), (*groups, *margins)):
            kept[layer] = torch.cat([kept[layer], new], dim=2) if layer in kept else new
        return groups

    def _play(
        self, layer: str, live: tuple[Tensor, Tensor], margins: list[Tensor], played: dict[str, int]
    ) -> tuple[Tensor, Tensor]:
        start = played[layer]
        stop = played[layer] = start + live[0].shape[2]
        reads, holds, *recorded = (kept[layer][:, :, start:stop] for kept in self.tracks())
        length = reads.shape[2]
        for now, then, margin, margin_then in zip(live, (reads, holds), margins, recorded):
            differ = (now[:, :, :length] != then).any(dim=-1)
            self.flips += int((differ & (torch.minimum(margin[:, :, :length], margin_then) >= self._tie)).sum())
        return torch.cat([reads, live[0][:, :, length:]], dim=2), torch.cat([holds, live[1][:, :, length:]], dim=2)


class NearOnly(Tape):
    """Has every query read no group: near tokens and sinks alone."""

    def pass_on(self, layer: str, *others: Any) -> tuple[Tensor, Tensor]:
        reads, holds = super().pass_on(layer, *others)
        self.reads[layer] = torch.zeros_like(self.reads[layer])
        return torch.zeros_like(reads), holds
