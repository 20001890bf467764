"""Run independent pieces of work side by side, each on one core.

Cutting every attention call over all cores makes them wait for each other at the end of each, most of all where another
process holds one of them. Pieces that write to different places have to wait for each other only once.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import torch

SMALL = 1 << 22  # pairs: with fewer, all cores have done them together before other threads have woken up


class Piece(NamedTuple):
    size: int  # pairs of tokens
    work: Callable[[], None]


def run(pieces: Sequence[Piece], device: torch.device, *, is_awake: bool = False) -> None:
    """Run all pieces, large ones first. Accelerators get them one by one: there, calls only queue up.

    ``is_awake``: the threads have just been running, so that small work is worth sharing too.
    """
    pieces = sorted(pieces, key=lambda piece: -piece.size)
    left = sum(piece.size for piece in pieces)
    cores = torch.get_num_threads() if device.type == "cpu" and (left > SMALL or is_awake) else 1
    # A piece larger than one core's share would keep the others waiting: it gets all of them.
    alone = 0 if cores > 1 else len(pieces)
    while alone < len(pieces) and pieces[alone].size * cores > 1.5 * left:
        left -= pieces[alone].size
        alone += 1
    for piece in pieces[:alone]:
        piece.work()
    for running in [_pool(cores).submit(_plainly, piece.work) for piece in pieces[alone:]]:
        running.result()


def _plainly(work: Callable[[], None]) -> None:
    """Threads do not inherit it from their caller that autograd is not to watch."""
    with torch.inference_mode():
        work()


@lru_cache(maxsize=1)
def _pool(cores: int) -> ThreadPoolExecutor:
    is_ready = threading.Barrier(cores + 1)

    def prepare() -> None:
        torch.get_num_threads()  # a thread takes the number set last when first asked; from then on it has its own
        torch.set_num_threads(1)
        is_ready.wait()

    pool = ThreadPoolExecutor(cores, thread_name_prefix="bifocals", initializer=prepare)
    for _ in range(cores):
        pool.submit(int)  # starts a thread
    is_ready.wait()
    torch.set_num_threads(cores)  # so that new threads take this, not ours
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
