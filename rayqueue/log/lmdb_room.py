"""The disk space of a store's data file: allocated ahead of LMDB, with a reserve behind its map.

LMDB's file grows by being written. On a full disk that ends in the middle of a
commit, as ENOSPC, or as EIO if a part of a write fitted; and then nothing at
all can be written any more, not even what would free space. So the file is
allocated before LMDB may use it, and the map reaches no further than what is
allocated: LMDB finds that it has no room (``MapFullError``) before it writes
anything. Behind the map lies the reserve, which is opened only for what is
small or frees space.

Owns the allocation and the sizes of the map. Moves no map and writes nothing.
A file system that copies what it overwrites (btrfs, ZFS) may be full in spite
of it: then the error of the write says so.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from rayqueue.errors import StorageError

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MIN_STEP_BYTES = 256 << 10
_PAGE_BYTES = 4096
_CANNOT = frozenset({errno.EINVAL, errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP})


class Room:
    """``allocated_bytes`` of the file are on the disk, whatever happens to the rest of it."""

    def __init__(self, file: Path, *, reserve_bytes: int, step_bytes: int, max_bytes: int | None) -> None:
        self._file = file
        self._reserve_bytes = reserve_bytes
        self._step_bytes = step_bytes
        self._max_bytes = max_bytes
        self.allocated_bytes = 0

    @property
    def limit_bytes(self) -> int:
        """The largest size of the map with the reserve behind it."""
        return max(0, self.allocated_bytes - self._reserve_bytes)

    def first_map(self, used_bytes: int, wanted_bytes: int) -> int:
        """The size of a file's map at first: as wanted, or as the disk allows."""
        used_bytes = _pages(used_bytes)
        wanted_bytes = max(used_bytes, self._at_most(wanted_bytes, used_bytes))
        while wanted_bytes > used_bytes:
            if self._allocate(wanted_bytes + self._reserve_bytes):
                return wanted_bytes
            wanted_bytes = _pages(used_bytes + (wanted_bytes - used_bytes) // 2)
            if wanted_bytes - used_bytes < MIN_STEP_BYTES:
                break
        if not self._allocate(used_bytes + self._reserve_bytes):
            self._allocate(used_bytes)
        return used_bytes

    def larger_map(self, map_bytes: int, used_bytes: int) -> int | None:
        """The next size of the map, with the reserve behind it; None if the disk is full."""
        most = self._at_most(self.limit_bytes, used_bytes)
        if most > map_bytes:
            return most
        step = min(max(map_bytes // 4, 16 * MIN_STEP_BYTES), self._step_bytes)
        while step >= MIN_STEP_BYTES:
            size = self._at_most(_pages(map_bytes + step), used_bytes)
            if size <= map_bytes:
                return None
            if self._allocate(size + self._reserve_bytes):
                return size
            step //= 2
        return None

    def _at_most(self, size_bytes: int, used_bytes: int) -> int:
        return size_bytes if self._max_bytes is None else min(size_bytes, _pages(max(self._max_bytes, used_bytes)))

    def _allocate(self, size_bytes: int) -> bool:
        """False if there is no space for it."""
        if size_bytes <= self.allocated_bytes:
            return True
        handle = os.open(self._file, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Some file systems take all that is left before they say that it is not enough.
            missing = size_bytes - max(self.allocated_bytes, os.fstat(handle).st_blocks * 512)
            if missing > free_bytes(self._file.parent):
                return False
            os.posix_fallocate(handle, self.allocated_bytes, size_bytes - self.allocated_bytes)
        except OSError as error:
            if error.errno in FULL_ERRNOS:
                return False
            if error.errno not in _CANNOT:  # there a full disk is found when it is written, as well as can be
                raise StorageError(f"{self._file} cannot be allocated: {error}", path=str(self._file)) from error
        finally:
            os.close(handle)
        self.allocated_bytes = size_bytes
        return True


def free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
