"""The base's weights shared out over the processes (FSDP): each keeps a part of every layer, and gathers it to run it.

What is not in a layer (embeddings, head) and the lens, which is small, stay whole in every process; Trainer averages
their gradients. While layers are shared out, all processes have to run the model together.

Run by our tests on CPU, by gloo; on accelerators never. Trainer's own way to FSDP, accelerate's, is not offered on CPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from bifocals.lens import Lens
from bifocals.training.processes import expect_several_processes


@contextmanager
def sharded(lens: Lens) -> Iterator[None]:
    """Every layer that the lens sits on, for the length of the block; afterwards whole again in every process."""
    expect_several_processes()
    if torch.cuda.is_available():
        lens.model.to(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))  # type: ignore[arg-type]
    layers = _layers(lens)
    kinds = [type(layer) for layer in layers]
    plain = [(module, _state(module)) for layer in layers for module in layer.modules()]
    mesh = init_device_mesh(lens.model.device.type, (distributed.get_world_size(),))
    for layer in layers:
        # Back in parts after every forward, or an optimizer made after one would get the gathered weights.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=set(lens.parameters()))
    yield
    for layer, kind in zip(layers, kinds):
        _make_whole(layer)
        layer.__class__ = kind
    for module, before in plain:
        for name in vars(module).keys() - before.keys():
            del module.__dict__[name]
        module.__dict__.update({name: value for name, value in before.items() if name.endswith("hooks")})


def is_sharded(lens: Lens) -> bool:
    return any(isinstance(layer, FSDPModule) for layer in _layers(lens))


def _layers(lens: Lens) -> list[nn.Module]:
    """The modules right around attention."""
    attention = {id(module) for module in lens.modules()}
    names = [name for name, module in lens.model.named_modules() if id(module) in attention]
    return [lens.model.get_submodule(name.rpartition(".")[0]) for name in names]


def _state(module: nn.Module) -> dict[str, Any]:
    """As it is now: FSDP adds hooks and attributes of its own, and does not take them away again."""
    return {name: value.copy() if name.endswith("hooks") else value for name, value in vars(module).items()}


def _make_whole(layer: nn.Module) -> None:
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                module._parameters[name] = nn.Parameter(parameter.full_tensor(), parameter.requires_grad)


def as_whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All parts together; every process has to ask for it."""
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}


def like(target: Tensor, whole: Tensor) -> Tensor:
    """``whole``, shared out as ``target`` is; numbers about a tensor stay as they are."""
    if not isinstance(target, DTensor) or whole.shape != target.shape:
        return whole
    return distribute_tensor(whole.to(target.device), target.device_mesh, target.placements)
