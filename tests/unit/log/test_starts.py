"""Starts without a clean end are remembered; the operating system's errors have a type."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rayqueue.errors import DiskFullError, StorageError
from rayqueue.log import lmdb_store
from rayqueue.log.lmdb_file import DATA_FILE, LOCK_FILE
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.place import PLACE_FILE
from rayqueue.log.starts import Start, forget_starts, note_failure, note_start, read_starts, starts_path
from rayqueue.log.wal_file import WAL_FILE
from rayqueue.partition.tables import PARTITION
from tests.unit.log.store_disks import GROUP, NODE, SMALL


def test_starts_are_kept_until_one_ends_well(tmp_path: Path) -> None:
    path = tmp_path / "r1"
    assert read_starts(path) == []
    note_failure(path, "no start is known, and so none has failed")
    note_start(path, 1000)
    note_start(path, 2000)
    note_failure(path, "EIO\non the third line")
    note_start(path, 3000)
    assert read_starts(path) == [Start(1000), Start(2000, "EIO on the third line"), Start(3000)]
    for at_ms in range(100):
        note_start(path, at_ms)
    assert [each.at_ms for each in read_starts(path)] == list(range(84, 100))
    forget_starts(path)
    assert read_starts(path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\n", b"-5 x\n", b"9" * 30 + b" \n", b"soon \n"])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, content: bytes) -> None:
    starts_path(tmp_path / "r1").write_bytes(content)
    assert read_starts(tmp_path / "r1") == []


def test_a_store_that_is_closed_has_ended_well(tmp_path: Path) -> None:
    path = tmp_path / "r1"
    LmdbStore.create(path, GROUP, NODE, SMALL, schema=PARTITION).close()
    store = LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION, locked=lambda: note_start(path, 7))
    assert read_starts(path) == [Start(7)]
    store.close()
    assert read_starts(path) == []


@pytest.mark.parametrize("name", [DATA_FILE, LOCK_FILE, WAL_FILE, PLACE_FILE, "lock.mdb"])
def test_what_the_operating_system_refuses_is_a_storage_error_that_says_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / "r1"
    LmdbStore.create(path, GROUP, NODE, SMALL, schema=PARTITION).close()
    LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION).close()
    (path / name).rename(tmp_path / "aside")
    (path / name).mkdir()
    for _ in range(2):
        with pytest.raises(StorageError, match="Is a directory") as caught:
            LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)
        assert type(caught.value) is StorageError
        assert caught.value.details["reason"] == "disk"
    (path / name).rmdir()
    (tmp_path / "aside").rename(path / name)
    LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION).close()


@pytest.mark.parametrize("step", ["close_directory", "find_copy", "check_data_file", "allocate_lock", "settle"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_so_is_every_step_of_an_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int) -> None:
    path = tmp_path / "r1"
    LmdbStore.create(path, GROUP, NODE, SMALL, schema=PARTITION).close()

    def refuses(*_: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(lmdb_store, step, refuses)
    with pytest.raises(StorageError) as caught:
        LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)
    assert isinstance(caught.value, DiskFullError) == (code == errno.ENOSPC)
    assert os.strerror(code) in str(caught.value)
    if step in ("check_data_file", "allocate_lock"):
        with pytest.raises(StorageError):
            LmdbStore.create(tmp_path / "r2", GROUP, NODE, SMALL, schema=PARTITION)
    monkeypatch.undo()
    LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION).close()
