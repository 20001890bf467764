"""Measure side by side in one process: interleaved, medians, with what is needed to read the numbers later."""

import ctypes
import inspect
import json
import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bifocals.files import write_file


def interleave(
    rivals: dict[str, Callable[[], object]], repeats: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Seconds of each rival, taken in turns, by default after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(0 if warm_up else 1, repeats + 1):
        for name, run in rivals.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


@contextmanager
def stopwatch(parts: dict[str, list[tuple[Any, str]]]) -> Iterator[dict[str, float]]:
    """Seconds spent in some functions, by part; what one part does inside another counts for the inner one alone.

    A part is a list of functions, each by its module or class and its name there. Of a generator, the time counts
    until it is exhausted: what is done with each of its items too.
    """
    seconds = dict.fromkeys(parts, 0.0)
    inside = [0.0]  # what inner parts took, for each part that is running

    @contextmanager
    def running(part: str) -> Iterator[None]:
        start = time.perf_counter()
        inside.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - start
            seconds[part] += took - inside.pop()
            inside[-1] += took

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(function):

            def generate(*args: Any, **kwargs: Any) -> Any:
                with running(part):
                    yield from function(*args, **kwargs)

            return generate

        def call(*args: Any, **kwargs: Any) -> Any:
            with running(part):
                return function(*args, **kwargs)

        return call

    before = [(owner, name, getattr(owner, name)) for functions in parts.values() for owner, name in functions]
    try:
        for part, functions in parts.items():
            for owner, name in functions:
                setattr(owner, name, timed(part, getattr(owner, name)))
        yield seconds
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def peak_extra_bytes(run: Callable[[], object]) -> int:
    """How far the memory of this process rises while ``run`` runs, its result included; 0 where that cannot be seen."""
    page, statm = os.sysconf("SC_PAGE_SIZE"), Path("/proc/self/statm")
    if not statm.exists():
        return 0

    def resident() -> int:
        return int(statm.read_text().split()[1]) * page

    # Give back what was freed before, or it would be taken from there unseen.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    before = peak = resident()
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.001):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = run()
    is_done.set()
    watcher.join()
    peak = max(peak, resident())
    del kept
    return peak - before


def surroundings() -> dict[str, Any]:
    """Versions and hardware that a number depends on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "bifocals": version("bifocals"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Numbers that are not finite become null: JSON has none."""
    write_file(path, (json.dumps(_finite(content), indent=1, allow_nan=False) + "\n").encode())


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
