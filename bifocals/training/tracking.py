"""What a fit by mass logs to TensorBoard, W&B and their like: by accelerate's trackers. Trainer logs by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from bifocals.training.processes import is_first_process

NOWHERE = "none"
RUN_NAME = "bifocals"


class Log(Protocol):
    def __call__(self, values: dict[str, float], *, step: int) -> None: ...


def trackers() -> list[str]:
    """Those whose package is installed."""
    if find_spec("accelerate") is None:
        return []
    from accelerate.tracking import get_available_trackers

    return sorted(map(str, get_available_trackers()))


@contextmanager
def tracked(name: str, folder: Path) -> Iterator[Log]:
    """Somewhere to log to, for the length of the block; of several processes the first one does."""
    if name == NOWHERE or not is_first_process():
        yield lambda values, *, step: None
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind: Any = LOGGER_TYPE_TO_CLASS[name]
    tracker = kind(RUN_NAME, folder) if kind.requires_logging_directory else kind(RUN_NAME)
    tracker.start()
    try:
        yield tracker.log
    finally:
        tracker.finish()
