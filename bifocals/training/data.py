"""Text for fitting and measuring: read, tokenised once, packed into blocks of equal length.

A source is a text file, a folder of them, a .jsonl file with the field "text" (any of these may be .gz), a name known
to the `datasets` package as ``name``, ``name:config`` or ``name:config:split``, or one of two corpora that every Python
carries: ``pydoc`` (its language reference) and ``stdlib`` (the source of its standard library).

A fifth of every source is held out, always the same: a fifth of its documents, chosen by the hash of their text, or,
of a source with few documents, the last fifth of each. ``source@held-out`` and ``source@fitting`` name the two parts.
"""

import gzip
import hashlib
import io
import json
import logging
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from bifocals.files import cache_folder, write_file

logger = logging.getLogger(__name__)

Part = Literal["all", "fitting", "held-out"]
HELD_OUT = 5  # one in so many
FEW = 20  # with fewer documents than this, each is cut in two
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")


class DataError(ValueError):
    """Text that cannot be found or used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Packed tokens, and the source that each block comes from."""

    tokens: Tensor  # (block, length)
    domains: Tensor  # (block,), index into names
    names: tuple[str, ...]

    def of(self, domain: int) -> Tensor:
        """The blocks of one source."""
        return self.tokens[self.domains == domain]


def load_blocks(
    sources: Sequence[str], tokenizer: Any, length: int, *, part: Part = "all", limit: int | None = None
) -> Blocks:
    """Blocks of ``length`` tokens from every source; at most ``limit`` of each, spread evenly over it.

    Without ``part``, a source may name its own; another than ``part`` is an error, or text that was trained on would
    pass for text held out.
    """
    if not sources:
        raise DataError("Expected at least one source of text, got none. Built-in: pydoc, stdlib.")
    if tokenizer is None:
        raise DataError("This model has no tokenizer: expected one that turns text into its tokens.")
    of = "" if part == "all" else f" in its {part} part"
    found = [_pack(source, load_tokens(source, tokenizer, part), length, limit, of) for source in sources]
    domains = [torch.full((len(blocks),), index) for index, blocks in enumerate(found)]
    return Blocks(torch.cat(found), torch.cat(domains), tuple(sources))


def load_tokens(source: str, tokenizer: Any, part: Part = "all") -> "np.ndarray[Any, Any]":
    """All tokens of one source, documents ended by the tokenizer's end of text; from the cache if they are there."""
    documents = load_documents(source, part)
    path = cache_folder() / "tokens" / f"{_key(documents, tokenizer)}.npy"
    kept = _read_tokens(path, len(tokenizer))
    if kept is not None:
        return kept
    ids: list[int] = []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in documents:
        ids += tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"] + end
    tokens = np.array(ids, dtype=np.int32)
    buffer = io.BytesIO()
    np.save(buffer, tokens, allow_pickle=False)
    try:
        write_file(path, buffer.getvalue())
    except OSError as reason:
        logger.info("Did not keep the tokens of %s: %s.", source, reason)
    return tokens


def _read_tokens(path: Path, vocabulary: int) -> "np.ndarray[Any, Any] | None":
    """None if they were never kept, or if the file is damaged."""
    try:
        tokens = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (ValueError, OSError, EOFError):
        tokens = np.empty(0)
    if tokens.dtype == np.int32 and tokens.ndim == 1 and len(tokens) and 0 <= tokens.min() <= tokens.max() < vocabulary:
        return tokens
    logger.info("%s is damaged and is made again.", path)
    return None


def load_documents(source: str, part: Part = "all") -> list[str]:
    """The texts of a source, or of one part of it."""
    name, part = _split_name(source, part)
    return _split(read_documents(name), part)


def read_documents(name: str) -> list[str]:
    """The texts of a source, in an order that does not change."""
    if name in BUILT_IN:
        documents = BUILT_IN[name]()
    elif Path(name).is_dir():
        files = sorted(path for path in Path(name).rglob("*") if path.is_file() and _suffix(path) in TEXT_SUFFIXES)
        if not files:
            raise DataError(f"{name}: expected a folder with files that end in {', '.join(TEXT_SUFFIXES)}, got none.")
        documents = [text for path in files for text in _read_file(path)]
    elif Path(name).exists():
        documents = _read_file(Path(name))
    elif name.startswith((".", "/")) or _suffix(Path(name)) in TEXT_SUFFIXES:
        raise DataError(
            f"No text at {name!r}: expected a file, a folder, {' or '.join(BUILT_IN)}, or a dataset's name."
        )
    else:
        documents = _read_dataset(name)
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise DataError(f"{name}: expected text, got nothing but blanks.")
    return documents


def spread(total: int, wanted: int) -> "np.ndarray[Any, Any]":
    """``wanted`` of ``total`` indices, evenly spread.

    >>> spread(10, 5).tolist()
    [1, 3, 5, 7, 9]
    """
    wanted = min(total, wanted)
    return ((np.arange(wanted) + 0.5) * total / wanted).astype(int)


def _pack(source: str, tokens: "np.ndarray[Any, Any]", length: int, limit: int | None, of: str) -> Tensor:
    total = len(tokens) // length
    if total == 0:
        raise DataError(
            f"{source}: expected at least one block of {length} tokens{of}, got {len(tokens)}. Give more text, or use "
            "shorter blocks."
        )
    blocks = tokens[: total * length].reshape(total, length)
    if limit is not None:
        blocks = blocks[spread(total, limit)]
    return torch.from_numpy(blocks.astype(np.int64))


def _split_name(source: str, part: Part) -> tuple[str, Part]:
    name, mark, named = source.rpartition("@")
    if not mark or Path(source).exists():
        return source, part
    if named not in get_args(Part):
        raise DataError(f"{source!r}: expected one of {get_args(Part)} after '@', got {named!r}.")
    if part not in ("all", named):
        raise DataError(
            f"{source!r}: expected a source without '@', since one part of it is trained on and the other measured on. "
            f"Give {name!r}."
        )
    return name, named  # type: ignore[return-value]


def _split(documents: list[str], part: Part) -> list[str]:
    if part == "all":
        return documents
    is_held_out = part == "held-out"
    if len(documents) >= FEW:
        return [text for text in documents if (_hash(text.encode()) % HELD_OUT == 0) == is_held_out]
    cuts = [len(text) - len(text) // HELD_OUT for text in documents]
    return [text[cut:] if is_held_out else text[:cut] for text, cut in zip(documents, cuts)]


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little")


def _key(documents: list[str], tokenizer: Any) -> str:
    """Content and tokenizer: a change of either makes other tokens."""
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    for text in (type(tokenizer).__name__, described, str(tokenizer.eos_token_id), *documents):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _read_file(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError) as reason:
        raise DataError(f"Cannot read {path}: {reason}.") from reason
    except UnicodeDecodeError as reason:
        raise DataError(
            f"{path}: expected text in UTF-8, got other bytes at {reason.start}. Convert it first."
        ) from reason
    return _read_lines(path, text) if _suffix(path) == ".jsonl" else [text]


def _read_lines(path: Path, text: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                documents.append(json.loads(line)["text"])
            except (ValueError, KeyError, TypeError, RecursionError):
                documents.append(None)
            if not isinstance(documents[-1], str):
                raise DataError(f'{path}, line {number}: expected an object with a string "text", got {line[:60]!r}.')
    return documents


def _read_dataset(name: str) -> list[str]:
    if find_spec("datasets") is None:
        raise DataError(
            f"{name!r} is no file, no folder and none of {sorted(BUILT_IN)}; for the name of a dataset, install the "
            "datasets package: pip install 'bifocals[training]'"
        )
    import datasets

    path, config, split, *_ = [*name.split(":"), "", ""]
    try:
        rows = datasets.load_dataset(path, config or None, split=split or "train")
    except Exception as reason:  # the package's errors have no common class
        first = str(reason).strip().split("\n")[0][:200]
        raise DataError(
            f"{name!r} is no file, no folder, none of {sorted(BUILT_IN)}, and the datasets package did not give it "
            f"({first}). Check the spelling (name:config:split) and the connection."
        ) from reason
    if "text" not in rows.column_names:
        raise DataError(f"{name!r}: expected a column 'text', got {rows.column_names}.")
    return [str(text) for text in rows["text"]]


def _pydoc() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _stdlib() -> list[str]:
    """The modules without their tests and without what was installed since; by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = sorted(path.as_posix() for path in files if not left_out & set(path.parts))
    return [(root / path).read_text(encoding="utf-8", errors="replace") for path in kept]


BUILT_IN: dict[str, Callable[[], list[str]]] = {"pydoc": _pydoc, "stdlib": _stdlib}
