"""How full groups are: a group that holds more than its fair share loses score until others have caught up.

    n_g         keys of the sequence that are in group g, up to the last multiple of PIECE places
    fair        (sum n + SLACK) / groups
    fullness    steepness max(0, n_g / fair - 1)

Potentials make groups even on the text they were found on. A text about one thing crowds groups that carry meaning, and
a token that comes again and again crowds one; no potential can know. What a group depends on is before it: so nothing
is read ahead, and decoding, which counts the keys that it has kept, equals prefill. A piece is sorted at once.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PIECE = 64
SLACK = 2 * PIECE  # keys: the first few tell nothing


@dataclass(frozen=True, slots=True)
class Course:
    """Tokens on their way through their sequences: their places, and the sizes of the groups of what came before.

    ``before`` counts the keys before the piece of the first token, ``begun`` those of that piece that came already;
    None where sequences begin. A row may hold several, each from place 0 on; what is not real is padding. The first
    tokens may be ``settled``: another run sorted them, and groups are as full as it left them.
    """

    place: Int[Tensor, "#batch length"]
    is_real: Bool[Tensor, "batch length"] | None = None
    before: Int[Tensor, "batch kv_head group"] | None = None
    begun: Int[Tensor, "batch kv_head group"] | None = None
    settled: Bool[Tensor, "batch kv_head some group"] | None = None

    @classmethod
    def of_sequence(cls, length: int, device: torch.device | None = None) -> "Course":
        """A whole sequence."""
        return cls(torch.arange(length, device=device)[None])


@torch.no_grad()
def fullness(
    scores: Float[Tensor, "batch kv_head length group"],
    is_held: Bool[Tensor, "batch kv_head length"],
    steepness: Float[Tensor, "kv_head 1"],
    course: Course,
) -> Float[Tensor, "batch kv_head length group"]:
    """What each group loses for each key; ``is_held`` is False at keys that are in no group."""
    batch = scores.shape[0]
    place, is_real = course.place.expand(batch, -1), course.is_real
    is_first = place == 0 if is_real is None else (place == 0) & is_real
    is_held = is_held if is_real is None else is_held & is_real[:, None]
    if course.settled is not None:
        some = course.settled.shape[2]
        scores, is_held = scores.clone(), is_held.clone()
        scores[:, :, :some].masked_fill_(course.settled, torch.inf)
        is_held[:, :, :some] = course.settled.any(dim=-1)
    return fill(scores, is_held, steepness, place // PIECE, is_first, course.before, course.begun, SLACK)


@torch.library.custom_op("bifocals::fill", mutates_args=())
def fill(
    scores: Tensor,
    is_held: Tensor,
    steepness: Tensor,
    piece: Tensor,
    is_first: Tensor,
    before: Tensor | None,
    begun: Tensor | None,
    slack: int,
) -> Tensor:
    """Piece by piece. One operator, as torch.compile cannot follow how many pieces and sequences there are."""
    batch, heads, length, groups = scores.shape
    sequence = is_first.long().cumsum(dim=1)  # of its row; 0 goes on from what came before
    count = int(sequence.max()) + 1
    sequence = (sequence + count * torch.arange(batch, device=scores.device)[:, None]).flatten()
    of_heads, held = (each.transpose(0, 1).flatten(1, 2) for each in (scores, is_held.to(scores)))  # (head, token, ...)
    sizes = scores.new_zeros(heads, batch * count, groups)
    if before is not None:
        sizes[:, ::count] = before.transpose(0, 1).to(sizes)
    lost = torch.empty_like(of_heads)
    numbers, lengths = piece.unique(return_counts=True)
    for number, tokens in zip(numbers, piece.flatten().argsort(stable=True).split(lengths.tolist())):
        of = sequence[tokens]
        fair = (sizes.sum(dim=-1, keepdim=True) + slack) / groups
        lost[:, tokens] = now = (steepness[:, None] * (sizes / fair - 1).relu())[:, of]
        best = (of_heads[:, tokens] - now).argmax(dim=-1)
        sizes.flatten(1).scatter_add_(1, of * groups + best, held[:, tokens])
        if begun is not None:
            goes_on = (piece[:, 0] == number)[None, :, None]
            sizes[:, ::count] += begun.transpose(0, 1).to(sizes) * goes_on
    return lost.unflatten(1, (batch, length)).transpose(0, 1)


@fill.register_fake
def _(scores: Tensor, *_: object) -> Tensor:
    batch, heads, length, groups = scores.shape
    return scores.new_empty(heads, batch, length, groups).transpose(0, 1)


def piece_start(place: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The place of the first token of its piece."""
    return place - place % PIECE
