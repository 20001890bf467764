"""The other processes of a run, where torchrun started several."""

import atexit
import os
import sys

import torch
import torch.distributed as distributed
from torch import Tensor, nn


def is_first_process() -> bool:
    """Known before the processes have met."""
    return int(os.environ.get("RANK", "0")) == 0


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_processes() -> None:
    """Meet the others, if there are any and nobody has yet."""
    if world_size() > 1 and not distributed.is_initialized():
        # Counts and sums are added up on the CPU, whatever the model is on.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def end_process(code: int) -> None:
    """Leave the others and end, without taking Python down; where nobody has met, return.

    Threads of gloo outlive the group as long as torch's caches of shared out tensors hold it. One that lets go of a
    tensor while Python is taken down aborts the process, and torchrun takes a run that is done for one that failed.
    """
    if not _have_met():
        return
    distributed.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def expect_several_processes() -> None:
    if not _have_met():
        raise ValueError("shard: expected several processes, got one. Start them: torchrun -m bifocals ...")


def wait_for_all() -> None:
    if distributed.is_initialized():
        distributed.barrier()


def processes_met() -> int:
    """How many have met; 1 where nobody has joined."""
    return distributed.get_world_size() if _have_met() else 1


def process_number() -> int:
    """Of this one among those that have met."""
    return distributed.get_rank() if _have_met() else 0


def sum_over_processes(tensor: Tensor) -> None:
    """In place."""
    if processes_met() > 1:
        distributed.all_reduce(tensor)


def most_of_processes(count: int) -> int:
    """The largest count that a process has."""
    counts = torch.zeros(processes_met(), dtype=torch.long)
    counts[process_number()] = count
    sum_over_processes(counts)
    return int(counts.max())


def sum_gradients(parameters: list[nn.Parameter]) -> None:
    """Over all processes, in one message: waiting costs most."""
    if processes_met() > 1:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(together)
        for gradient, summed in zip(gradients, together.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(summed.view_as(gradient))


def _have_met() -> bool:
    return distributed.is_available() and distributed.is_initialized()
