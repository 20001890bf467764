"""Where files go and how they are written: all or nothing, whatever stops the machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def cache_folder() -> Path:
    """What can be made again is kept here."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bifocals"


def write_file(path: Path, data: bytes) -> None:
    """Write aside, have it on disk, then rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    flush_folder(path.parent)


def leftovers(path: Path) -> list[Path]:
    """What writing ``path`` left aside where it was killed."""
    return sorted(path.parent.glob(f".{path.name}.*"))


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it gets its name when the block ends well, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", ignore_cleanup_errors=True) as aside:
        filled = Path(aside) / path.name
        filled.mkdir()
        yield filled
        flush_folder(filled)
        os.replace(filled, path)
        flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Have renames on disk, where the system offers it."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
