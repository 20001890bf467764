"""What a fit looks at while it runs: the hard pattern on held-out text, and whether its groups collapse."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bifocals.evaluation.perplexity import block_loss
from bifocals.lens import Lens
from bifocals.tape import Tape
from bifocals.training.mass_kept import far_mass_kept

logger = logging.getLogger(__name__)

COLLAPSED, PATIENCE = 2.0, 50  # times the fair share, for so many steps
REMEDY = (
    "Dominance was above {limit:g} times the fair share for {steps} steps{where}: groups are collapsing. Lower the "
    "rate, or use more text, more varied text or fewer groups."
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fit has come; what it has not looked at yet is None."""

    phase: str
    step: int
    steps: int
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    soft_loss: float | None = None  # nats per token of held-out text, by gates
    hard_loss: float | None = None  # and by the pattern that will run
    mass_kept: float | None = None  # share of the base's far attention
    far_kept: float | None = None
    dominance: float | None = None  # the largest group's share of the keys
    warning: str | None = None


Report = Callable[[Progress], None]


class Warned(Protocol):
    @property
    def warning(self) -> str | None: ...


def log_warnings(seen: Warned) -> None:
    """The report of a fit that nobody watches."""
    if seen.warning is not None:
        logger.warning(seen.warning)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a lens on held-out text."""

    soft_loss: float
    hard_loss: float
    mass_kept: float
    far_kept: float
    dominance: float


def look(lens: Lens, block: Tensor) -> Look:
    """By the gates, in the mode that is trained, and hard, on the same text; the lens stays as it was."""
    before = lens.mode
    try:
        soft_loss = block_loss(lens.model, block)
        lens.mode = "hard"
        with lens.taped(Tape()) as tape:
            hard_loss = block_loss(lens.model, block)
    finally:
        lens.mode = before
    kept = lens.measure_tape(tape)
    return Look(soft_loss, hard_loss, far_mass_kept(lens, block, tape), kept.far_kept, kept.dominance)


class CollapseWatch:
    """Says when one group has been too large for too long: once, and again only after it had recovered.

    >>> watch = CollapseWatch(groups=8)
    >>> [watch.see(step, dominance=0.5) is None for step in (0, 25, 50, 75)]
    [True, True, False, True]
    """

    def __init__(self, groups: int) -> None:
        self.limit = COLLAPSED / groups
        self.since: int | None = None
        self.is_told = False

    def see(self, step: int, dominance: float) -> str | None:
        if dominance <= self.limit:
            self.since, self.is_told = None, False
            return None
        self.since = step if self.since is None else self.since
        if self.is_told or step - self.since < PATIENCE:
            return None
        self.is_told = True
        told = REMEDY.format(limit=COLLAPSED, steps=step - self.since, where="")
        return f"{told} Or fit by the mass objective, which has balance in its loss."
