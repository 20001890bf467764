"""The sparse path as a program of this machine's own: C, compiled when it is first asked for.

Torch's fused kernel is made for a few long calls; a pattern is many short ones, each with copies, masks and a merge
around it. Here the same pairs are computed where their vectors lie (c/focus.c), and a decoding step reads its keys
where they lie (c/step.c). Where there is no C compiler, and for what is not float32 on a CPU, torch's own operators do
it.
"""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int16
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "c"
FLAGS = ("-O3", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wall")
OF_CAPABILITY = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}
MOST_GROUPS = 64  # a bit for each

_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


def obstacle(query: Tensor, groups: int, softcap: float | None = None) -> str | None:
    """Why it cannot run; None if it can."""
    if query.device.type != "cpu":
        return f"expected tensors on a CPU, got {query.device.type}"
    if query.dtype != torch.float32:
        return f"expected float32, got {str(query.dtype).removeprefix('torch.')}"
    if softcap is not None:
        return "a softcap is not offered"
    if groups > MOST_GROUPS:
        return f"expected at most {MOST_GROUPS} groups, got {groups}"
    return missing()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def missing() -> str | None:
    """Why there is no program; None if there is one."""
    library = _library()
    return library if isinstance(library, str) else None


def forward(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key dim"],
    reads: Bool[Tensor, "batch router query group"],
    holds: Bool[Tensor, "batch key_router key group"],
    segments: Int[Tensor, "batch key"] | None,
    window: int,
    sinks: int,
    reach: int,
    is_causal: bool,
    scale: float,
) -> tuple[Float[Tensor, "batch head query dim"], Float[Tensor, "batch head query"]]:
    """Output and log-sum-exp over the pairs of the pattern. Of padding, the output is 0."""
    batch, heads, queries, dim = query.shape
    # In this layout transformers reshapes to (batch, length, head * dim) without a copy.
    out = query.new_empty(batch, queries, heads, dim).transpose(1, 2)
    lse = query.new_empty(batch, queries, heads).transpose(1, 2)
    query, key, value, reads, holds = (_with_unit_stride(each) for each in (query, key, value, reads, holds))
    segments = None if segments is None else segments.to(torch.int64).contiguous()
    # Beyond the keys it makes no difference how large a number is.
    window, sinks, reach = (min(number, key.shape[2] + 1) for number in (window, sinks, reach))
    problem = _Problem(
        *(_Vectors(each.data_ptr(), *each.stride()[:3]) for each in (query, key, value, out, lse)),
        *(_Membership(each.data_ptr(), each.shape[1], *each.stride()[:3]) for each in (reads, holds)),
        None if segments is None else segments.data_ptr(),
        *(batch, heads, key.shape[1], queries, key.shape[2], dim, reads.shape[3]),
        *(window, sinks, reach, is_causal, scale),
    )
    read_near(problem)
    read_far(problem)
    return out, lse


def read_near(problem: "_Problem") -> None:
    """What is near, and the sinks."""
    _call("focus_near", problem)


def read_far(problem: "_Problem") -> None:
    """What is far, folded into what is near."""
    _call("focus_far", problem)


def step(
    query: Float[Tensor, "batch head 1 dim"],
    key: Float[Tensor, "batch kv_head key dim"],
    value: Float[Tensor, "batch kv_head key dim"],
    reads: Bool[Tensor, "batch reader group"],
    numbers: Int16[np.ndarray, "batch router known"],
    starts: tuple[int, ...],
    window: int,
    sinks: int,
    scale: float,
) -> Float[Tensor, "batch head 1 dim"]:
    """The attention of the last token. ``numbers``: of the group of each key beyond the window, 0 if it is in none."""
    batch, heads, _, dim = query.shape
    out = query.new_empty(query.shape)
    query, key, value, reads = (_with_unit_stride(each) for each in (query, key, value, reads))
    first = np.array(starts, dtype=np.int64)
    strides = [stride // numbers.itemsize for stride in numbers.strides[:2]]
    problem = _Step(
        *(_Vectors(each.data_ptr(), *each.stride()[:3]) for each in (query, key, value, out)),
        _Membership(reads.data_ptr(), reads.shape[1], *reads.stride()[:2], 0),
        numbers.ctypes.data,
        *(numbers.shape[1], *strides),
        first.ctypes.data,
        *(batch, heads, key.shape[1], key.shape[2], dim, window, sinks, scale),
    )
    _call("focus_step", problem)
    return out


def _with_unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


class _Vectors(ctypes.Structure):
    _fields_ = [("data", _Pointer), *((name, _Int) for name in ("batch", "head", "token"))]


class _Membership(ctypes.Structure):
    _fields_ = [("data", _Pointer), *((name, _Int) for name in ("routers", "batch", "router", "token"))]


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, _Vectors) for name in ("query", "key", "value", "out", "lse")),
        *((name, _Membership) for name in ("reads", "holds")),
        ("segments", _Pointer),
        *((name, _Int) for name in ("batches", "heads", "kv_heads", "queries", "keys", "dim", "groups")),
        *((name, _Int) for name in ("window", "sinks", "reach", "is_causal")),
        ("scale", ctypes.c_float),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, _Vectors) for name in ("query", "key", "value", "out")),
        ("reads", _Membership),
        ("numbers", _Pointer),
        *((name, _Int) for name in ("routers", "of_batch", "of_router")),
        ("starts", _Pointer),
        *((name, _Int) for name in ("batches", "heads", "kv_heads", "keys", "dim", "window", "sinks")),
        ("scale", ctypes.c_float),
    ]


def _call(name: str, problem: ctypes.Structure) -> None:
    library = _library()
    assert not isinstance(library, str), library
    if getattr(library, name)(ctypes.byref(problem)):
        raise MemoryError("Focus attention: not enough memory for lists of the tokens of each group.")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | str:
    """The program, compiled if it is not there yet; or why there is none."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return "no C compiler was found (gcc, cc, or the one that CC names)"
    sources = {path.name: path.read_bytes() for path in sorted(SOURCES.iterdir())}
    command = [*shlex.split(compiler), *FLAGS, *OF_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ())]
    content = b"".join(sources.values()) + " ".join(command).encode()
    name = f"native-{hashlib.sha256(content).hexdigest()[:16]}.so"
    reasons = []
    # Beside what Python itself compiles, or where a user may write.
    caches = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    for folder in (Path(__file__).parent / "__pycache__", caches / "bifocals"):
        try:
            if not (folder / name).exists():
                _compile(command, sources, folder / name)
            return ctypes.CDLL(str(folder / name))
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(str(error))
    logger.info("No program of its own could be made for Focus attention: %s", "; ".join(reasons))
    return f"it could not be compiled: {reasons[-1]}"


def _compile(command: list[str], sources: dict[str, bytes], target: Path) -> None:
    """At once or not at all: several processes may want it at the same time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        for name, content in sources.items():
            (Path(folder) / name).write_bytes(content)
        programs = [name for name in sources if name.endswith(".c")]
        logger.info("Compiling Focus attention for this machine: %s", " ".join([*command, *programs]))
        subprocess.run(
            [*command, "-o", target.name, *programs, "-lm"],
            cwd=folder,
            check=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
        os.replace(Path(folder) / target.name, target)
