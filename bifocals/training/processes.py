"""The other processes of a run, where torchrun started several."""

import os

import torch
import torch.distributed as distributed


def is_first_process() -> bool:
    """Known before the processes have met."""
    return int(os.environ.get("RANK", "0")) == 0


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes() -> None:
    """Meet the others, if there are any and nobody has yet."""
    if world_size() > 1 and not distributed.is_initialized():
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def wait_for_all() -> None:
    if distributed.is_initialized():
        distributed.barrier()
