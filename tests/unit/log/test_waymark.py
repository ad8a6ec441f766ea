"""The waymark beside a store: a lower bound, whatever becomes of its file."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from rayqueue.errors import DiskFullError, StorageError
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.store import Entry
from rayqueue.log.waymark import Waymark, read_waymark, waymark_path, write_waymark
from rayqueue.records.checksum import entry_crc

GROUP, REPLICA = GroupId("g"), ReplicaId("r1")


def _append(store: LmdbStore, index: int) -> None:
    payload = b"\x07x"
    store.append([Entry(Index(index), Term(1), payload, entry_crc(Index(index), Term(1), payload))])
    store.sync()


def test_it_is_read_as_it_was_written_and_a_shorter_one_leaves_nothing_of_a_longer(tmp_path: Path) -> None:
    directory = tmp_path / "r1"
    assert read_waymark(directory) == Waymark()
    for mark in (Waymark(12, 34567, 8_901_234), Waymark(1, 2, 3)):
        write_waymark(directory, mark)
        assert read_waymark(directory) == mark
    assert waymark_path(directory).stat().st_mode & 0o777 == 0o600


def test_one_that_must_be_durable_is_on_disk_or_said_not_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_waymark(tmp_path / "r1", Waymark(1, 2, 3))
    assert synced == []
    write_waymark(tmp_path / "r1", Waymark(4, 5, 6), durable=True)
    assert synced == [False, True], "what is in it, and that it is there"
    assert read_waymark(tmp_path / "r1") == Waymark(4, 5, 6)
    write_waymark(tmp_path / "gone" / "r1", Waymark(1, 2, 3))
    with pytest.raises(StorageError, match="cannot be written"):
        write_waymark(tmp_path / "gone" / "r1", Waymark(1, 2, 3), durable=True)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError):
        write_waymark(tmp_path / "r1", Waymark(7, 8, 9), durable=True)


@pytest.mark.parametrize("content", [b"", b"1 2", b"\xff" * 70, b"1 2 3 4", b"9" * 10_000, b"-1 -1 -1 0"])
def test_what_cannot_be_read_is_no_mark(tmp_path: Path, content: bytes) -> None:
    waymark_path(tmp_path / "r1").write_bytes(content)
    assert read_waymark(tmp_path / "r1") == Waymark()


def test_a_bit_that_flipped_is_no_mark(tmp_path: Path) -> None:
    write_waymark(tmp_path / "r1", Waymark(3, 4, 5))
    path = waymark_path(tmp_path / "r1")
    whole = path.read_bytes()
    for at in range(len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_waymark(tmp_path / "r1") in (Waymark(), Waymark(3, 4, 5))


def test_a_store_that_ends_before_its_mark_is_older_wherever_it_is(tmp_path: Path) -> None:
    """Also one that looks as if it were in its place, as after a snapshot of its volume."""
    path, backup = tmp_path / "r1", tmp_path / "backup"
    store = LmdbStore.create(path, GROUP, REPLICA)
    _append(store, 1)
    store.close()
    shutil.copytree(path, backup)
    store = LmdbStore.open(path, GROUP, REPLICA)
    assert store.copied is None
    _append(store, 2)
    store.set_waymark(Waymark(1, 2, 2))
    store.set_waymark(Waymark(1, 1, 1))  # never back
    store.close()
    store = LmdbStore.open(path, GROUP, REPLICA)
    assert store.copied is None
    assert store.waymark == Waymark(1, 2, 2)
    store.close()
    shutil.rmtree(path)
    shutil.copytree(backup, path)
    assert not (path / "PLACE").exists()  # nobody had ever written down where it was
    store = LmdbStore.open(path, GROUP, REPLICA)
    assert store.copied is not None
    store.close()
