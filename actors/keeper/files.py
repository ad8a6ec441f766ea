"""Small files that are there completely or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rayqueue.log.lmdb_file import fsync_directory
from rayqueue.log.private import make_directory


def replace(path: Path, text: str) -> None:
    _synced_copy(path, text).rename(path)
    fsync_directory(path.parent)


def write_once(path: Path, text: str) -> None:
    """Only the first of several that try at the same time succeeds; the others keep what it wrote."""
    copy = _synced_copy(path, text)
    try:
        os.link(copy, path)
    except FileExistsError:
        pass
    finally:
        copy.unlink()
    fsync_directory(path.parent)


def _synced_copy(path: Path, text: str) -> Path:
    """Beside ``path``; mkstemp makes it readable by its owner only."""
    make_directory(path.parent)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Path(name)
