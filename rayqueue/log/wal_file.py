"""The write-ahead file on a disk: made once, written in place, every write durable when it returns."""

from __future__ import annotations

import os
from pathlib import Path

from rayqueue.errors import DamagedLogError, DiskFullError, StorageError
from rayqueue.log.lmdb_room import FULL_ERRNOS
from rayqueue.log.private import opener
from rayqueue.log.wal import SECTOR_BYTES, blank_sector

WAL_FILE = "WAL"


class DiskFile:
    """A ``WalFile`` in a store's directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / WAL_FILE
        try:
            # O_DSYNC: the write returns when the bytes are on the disk.
            self._fd = os.open(self._path, os.O_RDWR | os.O_DSYNC | os.O_CLOEXEC)
        except FileNotFoundError:
            raise DamagedLogError(f"{self._path} is missing", path=str(self._path)) from None
        self._size_bytes = os.fstat(self._fd).st_size

    @staticmethod
    def create(directory: Path, size_bytes: int, salt: int = 0) -> int:
        """Sectors that hold nothing, really written: a file with holes would need its metadata synced later. Returns
        its size."""
        size_bytes = max(1, size_bytes // SECTOR_BYTES) * SECTOR_BYTES
        try:
            with open(directory / WAL_FILE, "wb", opener=opener) as file:
                file.write(blank_sector(salt) * (size_bytes // SECTOR_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as failure:
            if failure.errno in FULL_ERRNOS:
                raise DiskFullError(f"no space for a new store at {directory}", path=str(directory)) from failure
            raise
        return size_bytes

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read(self) -> bytes:
        found = os.pread(self._fd, self._size_bytes, 0)
        if len(found) != self._size_bytes:
            raise DamagedLogError(f"{self._path} ends after {len(found)} bytes", path=str(self._path))
        return found

    def write(self, at: int, sectors: bytes) -> None:
        try:
            written = os.pwrite(self._fd, sectors, at)
        except OSError as failure:
            # A file system that never overwrites in place may be full here as well.
            if failure.errno in FULL_ERRNOS:
                raise DiskFullError(f"no space to write {self._path}", path=str(self._path)) from failure
            raise StorageError(f"{self._path} cannot be written: {failure}", cause=str(failure)) from failure
        if written != len(sectors):
            raise StorageError(f"{self._path} took {written} bytes of {len(sectors)}", cause="short write")

    def close(self) -> None:
        os.close(self._fd)
