"""Measure side by side in one process: interleaved, medians, with what is needed to read the numbers later."""

import ctypes
import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bifocals.files import write_file


def interleave(rivals: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each rival, taken in turns after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(repeats + 1):
        for name, run in rivals.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


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
    write_file(path, (json.dumps(content, indent=1) + "\n").encode())
