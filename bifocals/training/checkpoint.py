"""Checkpoints of a run: a folder with one file of tensors and one of JSON, complete or not there at all.

Nothing in them is executed when they are read back: no pickle, and every name, shape and type is compared with what the
run itself has.
"""

import json
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from bifocals.files import new_folder, write_file
from bifocals.training.sharding import like

TENSORS, ABOUT = "state.safetensors", "state.json"
NAME = re.compile(r"checkpoint-(\d{1,12})")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why and what to do."""


def write_checkpoint(folder: Path, step: int, tensors: dict[str, Tensor], **about: dict[str, Any]) -> None:
    """Write ``checkpoint-step`` into ``folder``, then remove older ones: at every moment one of them is whole.

    Each of ``about`` becomes a JSON file of its name.
    """
    path = folder / f"checkpoint-{step}"
    if not path.exists():
        with new_folder(path) as aside:
            kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            write_file(aside / TENSORS, save(kept))
            for name, content in about.items():
                write_file(aside / f"{name}.json", json.dumps(content).encode())
    for each in _checkpoints(folder)[:-1]:
        shutil.rmtree(each, ignore_errors=True)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest one; what a killed run left unfinished beside it is removed."""
    if not folder.is_dir():
        return None
    for each in folder.glob(".checkpoint-*"):
        shutil.rmtree(each, ignore_errors=True)
    return next(iter(_checkpoints(folder)[::-1]), None)


def remove_checkpoints(folder: Path) -> None:
    """Of a run that is done. A folder that holds more than checkpoints, such as logs, stays with the rest of it."""
    if not folder.is_dir():
        return
    for each in folder.iterdir():
        if NAME.fullmatch(each.name):
            shutil.rmtree(each, ignore_errors=True)
        elif not each.is_symlink():
            remove_checkpoints(each)
    with suppress(OSError):
        folder.rmdir()


def read_checkpoint(folder: Path, expected: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of ``expected``'s names, shapes and types, and what is said about them."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        with safe_open(folder / TENSORS, framework="pt") as file:
            names = set(file.keys())
            missing, extra = sorted(expected.keys() - names), sorted(names - expected.keys())
            if missing or extra:
                raise CheckpointError(
                    f"{folder}: expected the state of this run; missing {missing[:3]}, not known {extra[:3]}. Resume "
                    "with the options and processes it was started with, or start anew in another folder."
                )
            # In one order in all processes: what is shared out is handed over in it.
            tensors = {name: file.get_tensor(name) for name in sorted(names)}
    except (OSError, ValueError, RecursionError, SafetensorError) as reason:
        if isinstance(reason, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: cannot be read ({reason}). Remove it to resume from nothing.") from reason
    for name, tensor in tensors.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise CheckpointError(
                f"{folder}: {name}: expected {tuple(wanted.shape)} of {wanted.dtype}, got {tuple(tensor.shape)} of "
                f"{tensor.dtype}. Resume with the options it was started with."
            )
    if not isinstance(about, dict):
        raise CheckpointError(f"{folder}: expected a JSON object, got {type(about).__name__}.")
    return tensors, about


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of every parameter, by its place."""
    state = optimizer.state_dict()["state"]
    return {f"optimizer.{place}.{key}": value for place, each in state.items() for key, value in each.items()}


def adamw_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the state of AdamW will be like once it has stepped."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    expected: dict[str, Tensor] = {}
    for place, parameter in enumerate(parameters):
        expected |= {f"optimizer.{place}.{key}": parameter for key in ("exp_avg", "exp_avg_sq")}
        expected[f"optimizer.{place}.step"] = torch.zeros(())
    return expected


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, place, key = name.split(".")
            state.setdefault(int(place), {})[key] = like(parameters[int(place)], tensor)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))
