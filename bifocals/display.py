"""What one sees of a fit while it runs: one line that changes on a terminal; elsewhere one now and then, and in every
stage at least one.
"""

import math
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from bifocals.training.processes import is_first_process
from bifocals.training.watch import Progress as Fitted

PAUSE = 30.0  # seconds between two lines where nothing can be written over


class FitDisplay:
    """How far a fit has come; warnings stay. Of several processes the first one tells it."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, quiet=not is_first_process())
        columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn()
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("reading text", total=None)
        self.runs, self.told_at, self.stage = 0, -math.inf, ""

    def __enter__(self) -> "FitDisplay":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def report(self, seen: Fitted) -> None:
        self._tell(describe(seen), seen.step, seen.steps)
        if seen.warning is not None:
            self.console.print(seen.warning, markup=False)

    def on_run(self, text: str, setting: str) -> None:
        if self.runs == 0:  # an update cannot make a total unknown again
            self.progress.remove_task(self.task)
            self.task = self.progress.add_task("", total=None)
        self.runs += 1
        self._tell(f"measuring {Path(text).name}, {setting}", self.runs, None)

    def _tell(self, what: str, done: int, total: int | None) -> None:
        self.progress.update(self.task, completed=done, total=total, description=what)
        stage = what.split(",")[0]
        if not self.console.is_terminal and (stage != self.stage or time.monotonic() - self.told_at >= PAUSE):
            self.told_at, self.stage = time.monotonic(), stage
            self.console.print(f"{done}/{total or '?'} {what}", soft_wrap=True, highlight=False, markup=False)


def describe(seen: Fitted) -> str:
    """What is known of it, in one line."""
    left = seen.seconds_left
    parts = [
        (seen.phase, True),
        (f"loss {seen.loss or 0:.3f}", seen.loss),
        ("" if seen.soft_loss is None else f"perplexity soft {math.exp(seen.soft_loss):.2f}", seen.soft_loss),
        ("" if seen.hard_loss is None else f"hard {math.exp(seen.hard_loss):.2f}", seen.hard_loss),
        (f"far mass {seen.mass_kept or 0:.0%}", seen.mass_kept),
        (f"far pairs {seen.far_kept or 0:.0%}", seen.far_kept),
        (f"dominance {seen.dominance or 0:.0%}", seen.dominance),
        (f"{seen.tokens_per_second or 0:.0f} tokens/s", seen.tokens_per_second),
        ("" if left is None else f"{int(left) // 60}:{int(left) % 60:02d} left", left),
    ]
    return ", ".join(text for text, is_known in parts if is_known is not None)
