"""Adapter folders: a lens on disk, as adapter_config.json and adapter_model.safetensors.

A folder may come from anywhere, so nothing in it is trusted: sizes are bounded, every name, type and shape is checked
against the lens that the config describes before a tensor is read, and a checksum covers both files.

Saving is atomic. Both files are written aside and then renamed, tensors first; should the machine stop between the two
renames, the config that belongs to the tensors is still there under its other name, and loading finds it.
"""

import hashlib
import json
import math
import os
import re
import stat
from dataclasses import replace
from importlib.resources import files
from os import PathLike
from pathlib import Path
from reprlib import repr as brief  # a file may hold anything, of any length
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import Tensor
from transformers import PreTrainedModel

import bifocals
from bifocals.config import Config, FocalConfig, FocusConfig, as_dict, from_dict
from bifocals.families import attention_sites
from bifocals.files import flush_folder
from bifocals.layer import LayerLens, Settings
from bifocals.lens import Lens, attach, choose_sites, lens_of

FORMAT = 1
CONFIG, TENSORS, ASIDE = "adapter_config.json", "adapter_model.safetensors", ".new"
LARGEST_CONFIG = 1 << 20  # bytes
LARGEST_HEADER = 1 << 24
LARGEST_NUMBER = 1 << 20  # of groups, rounds, and the like: far beyond use, far below harm
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
FIELDS: dict[str, tuple[type, ...]] = {
    "checksum": (str,),
    "focal": (dict, type(None)),
    "focus": (dict, type(None)),
    "format": (int,),
    "layers": (list,),
    "model_type": (str,),
    "package_version": (str,),
    "shapes": (dict,),
    "weights": (str,),
}


class AdapterError(ValueError):
    """An adapter that cannot be loaded; the message says why and what to do."""


def save_adapter(lens: Lens, folder: str | PathLike[str]) -> None:
    """Write the lens into ``folder``: both files or, whatever happens, neither."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in lens.state_dict().items()}
    data = write_tensors(tensors)
    focus = None if lens.focus is None else replace(lens.focus, top_k=lens.top_k)
    config: dict[str, Any] = {
        "focal": None if lens.focal is None else as_dict(lens.focal),
        "focus": None if focus is None else as_dict(focus),
        "format": FORMAT,
        "layers": sorted({layer.layer for layer in lens.layers.values()}),
        "model_type": lens.model.config.model_type,
        "package_version": bifocals.__version__,
        "shapes": shapes_of(lens.model),
        "weights": fingerprint(lens.model),
    }
    config["checksum"] = _checksum(config, data)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    _write(folder / (CONFIG + ASIDE), text.encode())
    _write(folder / (TENSORS + ASIDE), data)
    os.replace(folder / (TENSORS + ASIDE), folder / TENSORS)
    os.replace(folder / (CONFIG + ASIDE), folder / CONFIG)
    flush_folder(folder)


def load(
    model: PreTrainedModel,
    source: str | PathLike[str],
    *,
    trainable: bool = False,
    allow_other_weights: bool = False,
    revision: str | None = None,
) -> Lens:
    """Fit the lens saved in a folder, shipped with the package under this name, or kept on the hub; in this order."""
    if lens_of(model) is not None:
        raise ValueError(
            f"This {type(model).__name__} has a lens already. Call bifocals.lens_of(model).detach() first."
        )
    folder, may_link = find_adapter(source, revision)
    found: list[AdapterError] = []
    for name in (CONFIG, CONFIG + ASIDE):
        if name == CONFIG or os.path.lexists(folder / name):
            try:
                configs, layers, tensors = _read_adapter(model, folder, name, may_link, allow_other_weights)
                break
            except AdapterError as error:
                found.append(error)
    else:
        raise found[0]
    lens = attach(model, *configs, layers=layers)
    lens.load_state_dict(tensors)
    return lens.requires_grad_(trainable)


def push_adapter(lens: Lens, repository: str, **options: Any) -> str:
    """Upload the two files to a repository of the hub, made if needed; returns the address of the commit."""
    from huggingface_hub import HfApi

    hub = HfApi(token=options.pop("token", None))
    hub.create_repo(repository, private=options.pop("private", None), exist_ok=True)
    with TemporaryDirectory() as folder:
        save_adapter(lens, folder)
        message = options.pop("commit_message", "Upload a bifocals lens")
        return str(hub.upload_folder(repo_id=repository, folder_path=folder, commit_message=message, **options))


def find_adapter(source: str | PathLike[str], revision: str | None = None) -> tuple[Path, bool]:
    """The folder of an adapter, and whether its files may be links, as those that the hub's own cache makes."""
    if Path(source).is_dir():
        return Path(source), False
    name = str(source)
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        shipped = Path(str(files("bifocals"))) / "lenses" / name
        if shipped.is_dir():
            return shipped, False
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name):
        raise AdapterError(f"No adapter at {name!r}: expected a folder with {CONFIG} and {TENSORS}, or a hub name.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[CONFIG, TENSORS])), True
    except Exception as reason:  # the hub's errors have no common class
        raise AdapterError(
            f"No adapter called {name!r}: it is no folder, no lens shipped with bifocals, and the hub did not give it "
            f"({type(reason).__name__}). Check the name, the connection and, for private ones, your login."
        ) from reason


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of every weight of the model's body: any change of any of them changes it."""
    return hash_of(model.base_model.state_dict())


def hash_of(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def shapes_of(model: PreTrainedModel) -> dict[str, int]:
    """The sizes that a lens's tensors depend on."""
    sites = attention_sites(model)
    return {
        "heads": sites[0].heads,
        "hidden_size": sites[0].hidden_size,
        "kv_heads": sites[0].kv_heads,
        "layers": 1 + max(site.layer for site in sites),
    }


def _expected_shapes(
    model: PreTrainedModel, focal: FocalConfig | None, focus: FocusConfig | None, layers: list[int]
) -> dict[str, tuple[int, ...]]:
    """What the tensors of the lens would be, without making any."""
    expected: dict[str, tuple[int, ...]] = {}
    try:
        with torch.device("meta"):
            for site in choose_sites(attention_sites(model), layers):
                lens = LayerLens(site, focal, focus if site.may_focus else None, Settings())
                own = lens.state_dict().items()
                expected |= {f"layers.{site.name}.{name}": tuple(tensor.shape) for name, tensor in own}
    except (ValueError, RuntimeError) as reason:
        raise AdapterError(f"{CONFIG} describes a lens that this model cannot have: {reason}") from reason
    return expected


def _read_adapter(
    model: PreTrainedModel, folder: Path, name: str, may_link: bool, allow_other_weights: bool
) -> tuple[list[Config], list[int], dict[str, Tensor]]:
    """Everything about an adapter, checked against the model; the model is not touched."""
    config = _parse(_read(folder / name, LARGEST_CONFIG, may_link))
    checksum = config.pop("checksum")
    focal, focus = _configs(config)
    _check_model(model, config)
    expected = _expected_shapes(model, focal, focus, config["layers"])
    numbers = sum(math.prod(shape) for shape in expected.values())
    data = _read(folder / TENSORS, LARGEST_HEADER + max(DTYPES.values()) * numbers, may_link)
    _check_tensors(data, expected)
    if checksum != _checksum(config, data):
        raise AdapterError(
            f"{folder}: {CONFIG} and {TENSORS} do not belong together, or were changed after they were saved (their "
            "checksum differs). Save the lens again, or fetch the folder again."
        )
    if not allow_other_weights and config["weights"] != fingerprint(model):
        raise AdapterError(
            "This adapter was fitted to other weights of the same shapes (another quantisation, precision or "
            "fine-tune). Load those, or pass allow_other_weights=True (a command: --allow-other-weights) and measure "
            "what it does."
        )
    tensors = read_tensors(data)
    broken = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise AdapterError(f"{TENSORS}: expected finite numbers, got others in {broken[0]}. Fit the lens again.")
    return [each for each in (focal, focus) if each is not None], config["layers"], tensors


def _parse(text: bytes) -> dict[str, Any]:
    """Strict JSON with exactly the fields of this format."""
    try:
        config = json.loads(text.decode(), parse_constant=_refuse_constant, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as reason:
        raise AdapterError(f"{CONFIG}: expected JSON, got {str(reason)[:80]}. Save the lens again.") from reason
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG}: expected a JSON object, got {type(config).__name__}. Save the lens again.")
    version = config.get("format")
    if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT:
        raise AdapterError(
            f"{CONFIG}: format {version} is newer than this bifocals {bifocals.__version__}, which reads format "
            f"{FORMAT}. Upgrade bifocals."
        )
    if config.keys() != FIELDS.keys():
        missing, extra = sorted(FIELDS.keys() - config.keys()), sorted(config.keys() - FIELDS.keys())
        raise AdapterError(f"{CONFIG}: missing {missing}, not known {[each[:40] for each in extra[:5]]}.")
    for name, kinds in FIELDS.items():
        if not isinstance(config[name], kinds) or isinstance(config[name], bool):
            names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise AdapterError(f"{CONFIG}: {name}: expected {names}, got {type(config[name]).__name__}.")
    if version != FORMAT:
        raise AdapterError(f"{CONFIG}: expected format {FORMAT}, got {version}.")
    if not re.fullmatch(r"\d[\w.+-]{0,40}", config["package_version"]):
        raise AdapterError(f"{CONFIG}: package_version: expected a version, got {config['package_version'][:40]!r}.")
    return config


def _configs(config: dict[str, Any]) -> tuple[FocalConfig | None, FocusConfig | None]:
    """The two configs, each option of the right type and in a sane range."""
    found: list[Any] = []
    for name, kind in (("focal", FocalConfig), ("focus", FocusConfig)):
        values = config[name]
        for option, value in (values or {}).items():
            too_large = isinstance(value, int | float) and not abs(value) <= LARGEST_NUMBER
            if too_large and not (option in ("window", "sinks") and abs(value) < 1 << 62):
                raise AdapterError(f"{CONFIG}: {name}.{option}: expected at most {LARGEST_NUMBER}, got {brief(value)}.")
        try:
            found.append(None if values is None else from_dict(kind, values))
        except (ValueError, TypeError) as reason:
            raise AdapterError(f"{CONFIG}: {name}: {reason}") from reason
    if found == [None, None]:
        raise AdapterError(f"{CONFIG}: expected focal, focus or both, got neither. Save the lens again.")
    return found[0], found[1]


def _check_model(model: PreTrainedModel, config: dict[str, Any]) -> None:
    model_type = getattr(model.config, "model_type", None)
    if config["model_type"] != model_type:
        raise AdapterError(
            f"This adapter was fitted to a {config['model_type'][:40]!r} model, got {model_type!r}. Load it into "
            "the model it was fitted to."
        )
    shapes = shapes_of(model)
    if config["shapes"] != shapes:
        raise AdapterError(f"This adapter was fitted to a model of shapes {brief(config['shapes'])}, got {shapes}.")
    layers = config["layers"]
    is_valid = bool(layers) and all(type(each) is int and 0 <= each < shapes["layers"] for each in layers)
    if not is_valid or layers != sorted(set(layers)):
        raise AdapterError(
            f"{CONFIG}: layers: expected some of 0..{shapes['layers'] - 1}, in order, got {brief(layers)}."
        )


def _check_tensors(data: bytes, expected: dict[str, tuple[int, ...]]) -> None:
    """Compare the file's header with what the lens needs, before anything is made from it."""
    if len(data) < 8 or (size := int.from_bytes(data[:8], "little")) > min(LARGEST_HEADER, len(data) - 8):
        raise AdapterError(f"{TENSORS}: expected a safetensors file, got {len(data)} bytes that are none.")
    try:
        header = json.loads(data[8 : 8 + size].decode(), object_pairs_hook=_without_repeats)
        declared = {name: each for name, each in header.items() if name != "__metadata__"}
        shapes = {name: tuple(each["shape"]) for name, each in declared.items()}
        dtypes = {each["dtype"] for each in declared.values()}
        spans = sorted((start, stop) for start, stop in (each["data_offsets"] for each in declared.values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as reason:
        raise AdapterError(f"{TENSORS}: its header is no safetensors header. Save the lens again.") from reason
    missing, extra = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing or extra:
        raise AdapterError(
            f"{TENSORS}: {len(missing)} tensors missing {missing[:2]}, {len(extra)} not known "
            f"{[name[:60] for name in extra[:2]]}. Save the lens again."
        )
    wrong = [name for name in expected if shapes[name] != expected[name]]
    if wrong:
        raise AdapterError(f"{TENSORS}: {wrong[0]}: expected {expected[wrong[0]]}, got {str(shapes[wrong[0]])[:60]}.")
    if len(dtypes) > 1 or not dtypes <= DTYPES.keys():
        raise AdapterError(
            f"{TENSORS}: expected one dtype of {sorted(DTYPES)}, got {str(sorted(map(str, dtypes)))[:60]}."
        )
    total = sum(math.prod(shape) for shape in expected.values()) * DTYPES.get(next(iter(dtypes), "F32"), 0)
    ends = [0, *(stop for _, stop in spans)]
    if len(data) - 8 - size != total or [start for start, _ in spans] != ends[:-1] or ends[-1] != total:
        raise AdapterError(f"{TENSORS}: expected {total} bytes of numbers, got {len(data) - 8 - size}. Save it again.")


def _checksum(config: dict[str, Any], data: bytes) -> str:
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    digest.update(hashlib.sha256(data).digest())
    return f"sha256:{digest.hexdigest()}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name that comes twice")
    return found


def _read(path: Path, limit: int, may_link: bool) -> bytes:
    """A regular file of bounded size; a link out of the folder, a pipe or a device is none."""
    try:
        no_link = 0 if may_link else getattr(os, "O_NOFOLLOW", 0)
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | no_link)
    except OSError as reason:
        raise AdapterError(f"Cannot read {path}: {reason.strerror}. Expected a file that lens.save wrote.") from reason
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_size > limit:
        os.close(handle)
        raise AdapterError(f"{path}: expected a file of at most {limit} bytes, got {about.st_size}, or no file.")
    with os.fdopen(handle, "rb") as file:
        return file.read()


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
