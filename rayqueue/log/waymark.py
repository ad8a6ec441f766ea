"""The waymark of a store: how far it had acknowledged, in a tiny file beside its directory.

For the replica that is its group's only voter, or was. A restored backup of
its directory is noticed (``rayqueue.log.place``), but if it knows of no other
voter, there is nobody it could ask what it has forgotten. The file beside is
not part of that directory, so a copy of the one leaves the other where it was.

While the replica is alone, the file is written now and then, not synced, and
may be lost or old. When another voter joins, it names the entry that says so,
and is synced before that entry counts: no copy from before can take itself for
the whole group. Either way it says what was acknowledged at least, and all that
it names was durable in the store before.

Not seen: what was acknowledged alone after the last mark, and a restore of the
broker's whole directory, which takes the mark along.
"""

from __future__ import annotations

import os
from binascii import crc32
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rayqueue.errors import DiskFullError, StorageError
from rayqueue.log.lmdb_file import fsync_directory
from rayqueue.log.lmdb_room import FULL_ERRNOS
from rayqueue.log.private import opener

_SUFFIX = ".acked"


class Waymark(NamedTuple):
    """The last entry that is known to have been acknowledged. Compared as the ends of logs are."""

    term: int = 0
    entry: int = 0
    records: int = 0
    """The offset before which all was acknowledged."""


def waymark_path(directory: Path) -> Path:
    return directory.with_name(directory.name + _SUFFIX)


def read_waymark(directory: Path) -> Waymark:
    """Nothing, if there is none that can be read: it is no more than a reason to be careful."""
    try:
        fields = waymark_path(directory).read_bytes().split()
        term, entry, records, crc = map(int, fields)
    except (OSError, ValueError):
        return Waymark()
    mark = Waymark(term, entry, records)
    return mark if crc == crc32(_text(mark)) else Waymark()


def write_waymark(directory: Path, mark: Waymark, *, durable: bool = False) -> None:
    """One small write in place. If it cannot be written, the one before holds. ``durable``: it is on disk when this
    returns; ``StorageError`` says that it is not."""
    if not durable:
        with suppress(OSError):
            _write(waymark_path(directory), mark, durable=False)
        return
    path = waymark_path(directory)
    try:
        _write(path, mark, durable=True)
        fsync_directory(path.parent)
    except OSError as error:
        kind = DiskFullError if error.errno in FULL_ERRNOS else StorageError
        raise kind(f"{path} cannot be written: {error}", path=str(path)) from error


def _write(path: Path, mark: Waymark, *, durable: bool) -> None:
    text = _text(mark)
    descriptor = opener(str(path), os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, b"%s %10d\n" % (text, crc32(text)), 0)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(mark: Waymark) -> bytes:
    """Of one length, so that a shorter one leaves nothing of the one before."""
    return b"%20d %20d %20d" % mark
