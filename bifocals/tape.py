"""Memberships of one run, kept to be looked at or played again in another.

Top-k is a decision: two ways of computing the same hidden state differ by rounding, and a near-tie may flip a group.
Playing the groups of one run in the other leaves only what the two runs do with them to be compared. While it plays, a
tape counts the tokens that the other run would have sorted otherwise, though they were not near a tie.
"""

from dataclasses import dataclass, field

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
        if self._played is not None:
            start = self._played[layer]
            stop = self._played[layer] = start + routing.key_scores.shape[2]
            kept = [track[layer][:, :, start:stop] for track in self.tracks()]
            routing = routing.settled(kept[1])
            return self._play(routing.groups(top_k), _margins(routing, top_k, real), *kept)
        groups = routing.groups(top_k)
        for track, new in zip(self.tracks(), (*groups, *_margins(routing, top_k, real))):
            track[layer] = torch.cat([track[layer], new], dim=2) if layer in track else new
        return groups

    def _play(
        self, live: tuple[Tensor, Tensor], margins: list[Tensor], reads: Tensor, holds: Tensor, *recorded: Tensor
    ) -> tuple[Tensor, Tensor]:
        length = reads.shape[2]
        for now, then, margin, margin_then in zip(live, (reads, holds), margins, recorded):
            differ = (now[:, :, :length] != then).any(dim=-1)
            self.flips += int((differ & (torch.minimum(margin[:, :, :length], margin_then) >= self._tie)).sum())
        return torch.cat([reads, live[0][:, :, length:]], dim=2), torch.cat([holds, live[1][:, :, length:]], dim=2)


def _margins(routing: AnyRouting, top_k: int, real: Tensor | None) -> list[Tensor]:
    """Padding decides nothing."""
    margins = routing.margins(top_k)
    return [margin if real is None else margin.masked_fill(~real[:, None], torch.inf) for margin in margins]


class NearOnly(Tape):
    """Has every query read no group: near tokens and sinks alone, and nobody is asked for groups."""

    def nothing(self, layer: str, batch: int, length: int, groups: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The groups that new tokens read and are in: none."""
        none = torch.zeros(batch, 1, length, groups, dtype=torch.bool, device=device)
        for kept in (self.reads, self.holds):
            kept[layer] = torch.cat([kept[layer], none], dim=2) if layer in kept else none
        return none, none
