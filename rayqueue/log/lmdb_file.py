"""A replica's directory, and the checks on LMDB's file before LMDB may touch it.

Owns the names in the directory, the lock that keeps a second process out, the
markers of a damaged replica, what the operating system's errors become, and the
making of a new directory such that it is there completely or not at all.

``check_data_file`` reads the two meta pages by itself. LMDB picks the one with
the higher transaction id and believes all of it, so a flipped bit there would
silently bring back an older state of the log, or lead LMDB past the end of
the file, which kills the process (SIGBUS).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from rayqueue.errors import DamagedLogError, DiskFullError, StorageError, StoreIdentityError
from rayqueue.log.lmdb_room import FULL_ERRNOS, free_bytes
from rayqueue.log.private import FILE_MODE, make_directory, opener

if TYPE_CHECKING:
    import lmdb  # whoever only wants a directory's lock or name need not load it

DATA_FILE = "data.mdb"
LOCK_FILE = "LOCK"
_LMDB_LOCK_FILE = "lock.mdb"
_LMDB_LOCK_BYTES = 64 << 10
DAMAGED_FILE = "DAMAGED"
UNREADABLE_FILE = "UNREADABLE"
"""Beside the former: whoever reads the data may be ended by it, so that it is not opened any more."""

# LMDB 0.9, 64 bit: page header (pgno, pad, flags, lower, upper), then the meta: magic, version, address,
# map size, two MDB_db of 48 bytes (free, main), last page, transaction id. The first MDB_db's pad is the page size.
_META_PAGE = Struct("=QHHHHIIQQ48s48sQQ")
_PAGE_SIZE = Struct("=I")
_MAGIC = 0xBEEFC0DE
_VERSION = 1
_P_META = 0x08
_UNWRITTEN_TAIL_BYTES = 64 << 20

_ROOM_BYTES = 4 << 20  # beside the payload: pages of the trees that a transaction copies


class Holder(NamedTuple):
    """The process that has a directory locked. ``pid`` is 0 if it has not said."""

    pid: int
    host: str

    def __str__(self) -> str:
        if not self.pid:
            return "another process or store"
        return f"process {self.pid}" + ("" if self.host == os.uname().nodename else f" on {self.host}")


def holder(directory: Path) -> Holder | None:
    """The process that has this directory locked. None, whatever the file says, if it has ended: so has the lock."""
    try:
        with (directory / LOCK_FILE).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid, _, host = file.read(300).decode(errors="replace").partition(" ")
                return Holder(int(pid) if pid.isascii() and pid.isdigit() else 0, host)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return None


class DirectoryLock:
    """Exclusive use of a directory, until released or until the process is gone."""

    def __init__(self, directory: Path) -> None:
        # Without a buffer: what does not fit on a full disk would come up again when the file is closed.
        self._file = open(directory / LOCK_FILE, "ab", buffering=0, opener=opener)  # noqa: SIM115  # held as long as the store
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            who = holder(directory) or Holder(0, "")
            raise StorageError(
                f"{directory} is in use by {who}", path=str(directory), reason="locked", pid=who.pid
            ) from None
        with suppress(OSError):  # for people; the lock itself needs no space on the disk
            self._file.truncate(0)
            self._file.write(f"{os.getpid()} {os.uname().nodename}".encode())

    def release(self) -> None:
        self._file.close()


def fsync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_empty(path: Path) -> tuple[Path, DirectoryLock]:
    """A locked directory beside ``path`` in which a new store is made; ``move_into_place`` gives it its name."""
    refuse_existing(path)
    making = half_made(path)
    make_directory(making)
    lock = DirectoryLock(making)
    for leftover in making.iterdir():  # of a process that died while it was here
        if leftover.name != LOCK_FILE:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return making, lock


def is_half_made(path: Path) -> bool:
    """Whether somebody began to make a store here and never finished: it was never used, and can be made anew.

    A store gets its name as the last step of its making, so this never holds for one that was used and is lost."""
    return half_made(path).exists() and not path.exists()


def half_made(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def move_into_place(making: Path, path: Path) -> None:
    fsync_directory(making)
    try:
        making.rename(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            refuse_existing(path)
        raise
    fsync_directory(path.parent)


def refuse_existing(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise StoreIdentityError(f"there is something at {path} already", path=str(path))


def disk_error(path: Path, error: OSError | lmdb.Error) -> StorageError:
    """What the operating system refused there, as an error that says whether it is the space."""
    code = error.errno if isinstance(error, OSError) else error.code
    if code in FULL_ERRNOS:
        return DiskFullError(f"no space at {path}: {error}", path=str(path))
    return StorageError(f"the disk refuses {path}: {error}", path=str(path), reason="disk", errno=code)


def read_damaged(path: Path) -> str | None:
    try:
        return (path / DAMAGED_FILE).read_text(errors="replace") or "no reason was written"
    except FileNotFoundError:
        return None


def write_damaged(path: Path, why: str) -> None:
    """A file of its own: the database may be past writing. On a full disk the empty file still says it."""
    try:
        with open(path / DAMAGED_FILE, "w", opener=opener) as file:
            file.write(why)
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(path)
    except OSError as error:
        raise disk_error(path / DAMAGED_FILE, error) from error


def write_unreadable(path: Path, why: str) -> None:
    """Damaged, and not to be opened: see ``refuse_unreadable``."""
    try:
        (path / UNREADABLE_FILE).touch(FILE_MODE)
    except OSError as error:
        raise disk_error(path / UNREADABLE_FILE, error) from error
    write_damaged(path, why)


def refuse_unreadable(path: Path) -> None:
    if (path / UNREADABLE_FILE).exists():
        raise DamagedLogError(read_damaged(path) or f"{path} ends whoever reads it", path=str(path))


def is_full(path: Path, code: int, needed_bytes: int) -> bool:
    """Whether a write failed because there is no room for it.

    When only a part of a write fits, LMDB reports EIO, which is also what a broken disk says. A file that is allocated
    ahead does not come to that; for the others the free space decides. The same transaction may be tried again: it
    writes every one of its pages anew, so nothing that a failed sync left in the page cache is relied upon. If the
    disk is not full, whatever failed is not tried again: the process ends, and its successor reads what the disk has.
    """
    if code != errno.EIO:
        return code in FULL_ERRNOS
    return free_bytes(path) < needed_bytes + _ROOM_BYTES


def allocate_lock(path: Path) -> None:
    """The lock file is mapped, and a page of it that the full disk has no room for would kill the process."""
    with open(path / _LMDB_LOCK_FILE, "ab", opener=opener) as file, suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, _LMDB_LOCK_BYTES)


@dataclass(frozen=True, slots=True)
class _Meta:
    page_bytes: int
    last_page: int
    txn_id: int


def check_data_file(file: Path) -> int:
    """Refuse a file that LMDB must not see, else return the number of bytes in use.

    The two meta pages take turns, so their transaction ids must be
    consecutive and each must have the parity of its page."""
    size = file.stat().st_size
    with file.open("rb") as data:
        first_bytes = data.read(_META_PAGE.size)
        page_bytes = _page_bytes(first_bytes)
        data.seek(page_bytes)
        second_bytes = data.read(_META_PAGE.size)
    first, second = _meta(0, first_bytes), _meta(1, second_bytes)
    newer, older = (first, second) if first.txn_id > second.txn_id else (second, first)
    if (first.txn_id & 1, second.txn_id & 1) != (0, 1) or newer.txn_id != older.txn_id + 1:
        raise DamagedLogError(
            f"the meta pages are of transactions {first.txn_id} and {second.txn_id}, which cannot be", path=str(file)
        )
    if first.page_bytes != second.page_bytes or newer.last_page < older.last_page:
        raise DamagedLogError("the meta pages contradict each other", path=str(file))
    used = (newer.last_page + 1) * newer.page_bytes
    if used > size + size // 8 + _UNWRITTEN_TAIL_BYTES:
        raise DamagedLogError(f"the file has {size} bytes and should have {used}", path=str(file))
    if used > size:
        # Pages allocated and freed by one transaction are never written, so a file may rightly be a little short;
        # or it was truncated. Zeros pass no checksum, but a page behind the end of the file would kill the process.
        os.truncate(file, used)
    return used


def _page_bytes(page: bytes) -> int:
    if len(page) < _META_PAGE.size:
        raise DamagedLogError("the data file is cut off inside its first page")
    size: int = _PAGE_SIZE.unpack_from(_META_PAGE.unpack(page)[9])[0]
    if not 512 <= size <= 65536 or size & (size - 1):
        raise DamagedLogError(f"a page of {size} bytes cannot be")
    return size


def _meta(number: int, page: bytes) -> _Meta:
    page_bytes = _page_bytes(page)
    pgno, _pad, flags, _low, _high, magic, version, _addr, _map, _free, _main, last_page, txn_id = _META_PAGE.unpack(
        page
    )
    if (pgno, flags & _P_META, magic, version) != (number, _P_META, _MAGIC, _VERSION):
        raise DamagedLogError(f"meta page {number} is not one of LMDB 0.9")
    return _Meta(page_bytes, last_page, txn_id)
