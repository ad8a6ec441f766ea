"""The place of a store: how one that was copied is told from one that was only restarted.

A restored backup is a store that was intact once. Nothing inside it can say
that it is old: whatever the store wrote about itself was copied with it. What no
copy takes along is when the file system made a file. So each start puts a new,
tiny file into the directory (``HERE.<number>``) and writes down, in ``PLACE``,
which inode it has and when that last changed; a copy of the two does not fit
together, and neither does an older pair that was copied over a newer one. The
inodes of the data and of the write-ahead file are written down as well.

A mismatch is a reason to ask, no proof: somebody may have moved a stopped
replica to a new disk, or changed owners. ``rayqueue.raft.doubt`` says what
follows from it. Not seen from here: a whole file system that was taken back to
an earlier moment (a volume's or a virtual machine's snapshot).
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from rayqueue.log.lmdb_file import DATA_FILE, fsync_directory
from rayqueue.log.lmdb_room import FULL_ERRNOS
from rayqueue.log.private import opener
from rayqueue.log.wal_file import WAL_FILE

PLACE_FILE = "PLACE"
_MARKER = "HERE."
_RECORD = re.compile(rb"(\d{1,18}) (\d{1,20}) (\d{1,20}) (\d{1,20}) (\d{1,20})\n")
_SECOND_NS = 1_000_000_000


def find_copy(directory: Path) -> str | None:
    """Why the store in ``directory`` may be a copy; None if it is where it was, or was never told where it is."""
    try:
        record = (directory / PLACE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    fields = _RECORD.fullmatch(record)
    if fields is None:
        return f"{directory / PLACE_FILE} cannot be read"
    number, inode, changed_ns, *files = map(int, fields.groups())
    try:
        marker = (directory / f"{_MARKER}{number}").stat()
    except FileNotFoundError:
        return f"{directory} lacks the file of its last start: it is a copy, or a part of one"
    if marker.st_ino != inode or not _same_time(marker.st_ctime_ns, changed_ns) or _inodes(directory) != files:
        return f"{directory} is not where its replica last ran: its files were copied or restored"
    return None


def settle(directory: Path) -> None:
    """From now on the store belongs here. Durable when it returns; on a full disk all stays as it was."""
    try:
        _settle(directory)
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise


def _settle(directory: Path) -> None:
    """The old pair is valid until the new one is complete."""
    number = max((int(name) for name in _numbers(directory)), default=0) + 1
    path = directory / f"{_MARKER}{number}"
    _write(path, b"1")
    fsync_directory(directory)
    marker = path.stat()
    record = " ".join(map(str, (number, marker.st_ino, marker.st_ctime_ns, *_inodes(directory))))
    making = directory / f"{PLACE_FILE}.new"
    _write(making, record.encode() + b"\n")
    making.rename(directory / PLACE_FILE)
    fsync_directory(directory)
    for old in _numbers(directory):
        if int(old) != number:
            with suppress(FileNotFoundError):
                (directory / f"{_MARKER}{old}").unlink()


def _numbers(directory: Path) -> list[str]:
    names = (each.name.removeprefix(_MARKER) for each in directory.glob(f"{_MARKER}*"))
    return [name for name in names if name.isascii() and name.isdigit() and len(name) <= 18]


def _inodes(directory: Path) -> list[int]:
    return [(directory / name).stat().st_ino for name in (DATA_FILE, WAL_FILE)]


def _same_time(found_ns: int, written_ns: int) -> bool:
    """Some file systems keep whole seconds once the file is not in memory any more."""
    whole_seconds = found_ns % _SECOND_NS == 0 and found_ns // _SECOND_NS == written_ns // _SECOND_NS
    return found_ns == written_ns or whole_seconds


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb", opener=opener) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
