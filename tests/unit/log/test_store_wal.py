"""The promise of ``persist``: as durable as ``sync``, through the write-ahead file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import cast

import pytest

from rayqueue.errors import DamagedLogError, DiskFullError, StorageError
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.lmdb_file import DATA_FILE
from rayqueue.log.lmdb_store import LmdbOptions, LmdbStore
from rayqueue.log.ops import Append, Delete, Op, Put, SetApplied, SetHard, Truncate
from rayqueue.log.store import Checkpoint, HardState
from rayqueue.log.wal import SECTOR_BYTES, Wal, decode_ops, encode_ops
from rayqueue.log.wal_file import WAL_FILE, DiskFile
from rayqueue.partition.tables import LANES, META, OFFSETS, PARTITION, PRODUCERS
from tests.unit.log.store_disks import GROUP, NODE, SMALL, entry, fill

META_BYTES = 2 * 4096


def content(store: LmdbStore) -> tuple[object, ...]:
    first = store.base_index + 1
    entries = [store.entry(Index(index)) for index in range(first, store.last_index + 1)]
    return store.hard, store.applied, entries, [list(store.scan(table)) for table in PARTITION.tables]


def create(path: Path) -> LmdbStore:
    return LmdbStore.create(path, GROUP, NODE, SMALL, schema=PARTITION)


def reopen(store: LmdbStore, path: Path) -> LmdbStore:
    store.close()
    return LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)


def write_a_little(store: LmdbStore, rng: Random) -> None:
    payloads = [rng.randbytes(rng.choice((10, 300, 3000))) for _ in range(rng.randint(1, 3))]
    store.append([entry(store.last_index + 1 + number, 1, payload) for number, payload in enumerate(payloads)])
    for _ in range(rng.randint(0, 3)):
        store.put(OFFSETS, rng.randint(0, 50).to_bytes(8, "big"), rng.randbytes(20))
    store.delete(OFFSETS, rng.randint(0, 50).to_bytes(8, "big"))
    store.set_hard(HardState(Term(1), NODE, Index(rng.randint(0, store.last_index))))


# -- durability ---------------------------------------------------------------------


def test_persisted_is_there_after_a_restart_and_synced_again(tmp_path: Path) -> None:
    store = create(tmp_path / "r")
    fill(store, 3)
    store.put(META, b"a", b"1")
    store.put(META, b"a", b"2")
    store.set_hard(HardState(Term(4), NODE, Index(2)))
    store.set_applied(Index(2))
    store.persist()
    assert not store.must_sync
    assert store.dirty, "LMDB does not have it yet"
    with store.snapshot() as snapshot, pytest.raises(KeyError):
        snapshot.entry(Index(1))
    fill(store, 5)  # lost: nobody said persist
    store = reopen(store, tmp_path / "r")
    assert (store.last_index, store.applied, store.hard) == (3, 2, HardState(Term(4), NODE, Index(2)))
    assert store.get(META, b"a") == b"2"
    assert not store.dirty
    with store.snapshot() as snapshot:
        assert snapshot.entry(Index(3)) == entry(3)
    store.close()


def test_what_a_sync_took_over_is_not_replayed(tmp_path: Path) -> None:
    store = create(tmp_path / "r")
    for last in range(1, 8):
        fill(store, last)
        store.persist()
    store.put(META, b"a", b"persisted")
    store.persist()
    store.delete(META, b"a")
    store.sync()
    store = reopen(store, tmp_path / "r")
    assert store.last_index == 7
    assert store.get(META, b"a") is None
    store.close()


def test_what_was_persisted_can_be_truncated(tmp_path: Path) -> None:
    store = create(tmp_path / "r")
    fill(store, 5)
    store.persist()
    fill(store, 7)
    store.truncate_from(Index(3))
    fill(store, 4, term=2)
    assert store.must_sync
    store.persist()  # a truncation is LMDB's
    store = reopen(store, tmp_path / "r")
    assert [store.term_at(Index(index)) for index in range(1, 5)] == [1, 1, 2, 2]
    assert store.last_index == 4
    store.close()


def test_a_truncation_that_was_not_synced_never_happened(tmp_path: Path) -> None:
    store = create(tmp_path / "r")
    fill(store, 5)
    store.persist()
    store.truncate_from(Index(3))
    store = reopen(store, tmp_path / "r")
    assert store.last_index == 5
    store.close()


def test_large_writes_and_checkpoints_go_to_lmdb_at_once(tmp_path: Path) -> None:
    store = create(tmp_path / "r")
    store.append([entry(1, payload=b"x" * 100_000)])
    store.persist()
    assert not store.dirty
    store.set_applied(Index(1))
    store.save_checkpoint(Checkpoint(Index(1), Term(1), b"", b""))
    store.persist()
    assert not store.dirty
    store.close()


def test_a_full_file_is_emptied_into_lmdb(tmp_path: Path) -> None:
    store = create(tmp_path / "r")
    dirty = []
    for last in range(1, 200):
        fill(store, last)
        store.persist()
        dirty.append(store.dirty)
    assert dirty.count(False) > 3
    assert dirty.count(False) < 20
    store = reopen(store, tmp_path / "r")
    assert [store.entry(Index(index)) for index in range(1, 200)] == [entry(index) for index in range(1, 200)]
    store.close()


@pytest.mark.slow
def test_a_full_disk_loses_nothing_that_was_persisted(tmp_path: Path) -> None:
    options = LmdbOptions(cache_bytes=0, map_bytes=1 << 20, max_bytes=2 << 20, wal_bytes=16 << 10)
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, options, schema=PARTITION)

    def append_for_ever(size: int, harden: Callable[[], None]) -> None:
        while True:
            store.append([entry(store.last_index + 1, payload=b"y" * size)])
            harden()

    with pytest.raises(DiskFullError):
        append_for_ever(50_000, store.sync)
    store.truncate_from(store.last_index)
    synced = store.last_index
    with pytest.raises(DiskFullError):
        append_for_ever(3000, store.persist)
    kept = Index(store.last_index - 1)
    assert kept > synced
    assert store.must_sync
    store.close()
    store = LmdbStore.open(tmp_path / "r", GROUP, NODE, options, schema=PARTITION)
    assert store.last_index == kept
    assert store.entry(kept).payload == b"y" * 3000
    store.truncate_from(kept)
    store.close()


# -- power loss -------------------------------------------------------------------------


def found_in(directory: Path, data: bytes, wal: bytes) -> tuple[object, ...]:
    (directory / DATA_FILE).write_bytes(data)
    (directory / WAL_FILE).write_bytes(wal)
    store = LmdbStore.open(directory, GROUP, NODE, SMALL, schema=PARTITION)
    try:
        return content(store)
    finally:
        store.close()


def torn(before: bytes, after: bytes, first: int, rng: Random) -> bytes:
    """``before`` with some of the sectors that changed since."""
    image = bytearray(before.ljust(len(after), b"\0"))
    changed = [
        at
        for at in range(first, len(after), SECTOR_BYTES)
        if image[at : at + SECTOR_BYTES] != after[at : at + SECTOR_BYTES]
    ]
    for at in rng.sample(changed, rng.randint(0, len(changed))):
        image[at : at + SECTOR_BYTES] = after[at : at + SECTOR_BYTES]
    return bytes(image)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_part_of_an_unfinished_write_leaves_the_state_before_or_after_it(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    create(tmp_path / "copy").close()
    store = create(tmp_path / "r")
    files = (tmp_path / "r" / DATA_FILE, tmp_path / "r" / WAL_FILE)
    whole = 0
    for _ in range(50):
        data, wal = (file.read_bytes() for file in files)
        before = content(store)
        write_a_little(store, rng)
        if rng.random() < 0.2:
            store.sync()
        else:
            store.persist()
        after = content(store)
        new_data, new_wal = (file.read_bytes() for file in files)
        for _ in range(4):
            if store.dirty:
                found = found_in(tmp_path / "copy", data, torn(wal, new_wal, 0, rng))
                assert found in (before, after)
                whole += found == after
            else:  # the meta page is written last
                assert found_in(tmp_path / "copy", torn(data, new_data, META_BYTES, rng), wal) == before
        assert found_in(tmp_path / "copy", new_data, new_wal) == after
    assert whole > 3
    store.close()


# -- damage -----------------------------------------------------------------------------


def test_a_missing_file_is_damage(tmp_path: Path) -> None:
    create(tmp_path / "r").close()
    (tmp_path / "r" / WAL_FILE).unlink()
    with pytest.raises(DamagedLogError):
        LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)


def test_a_record_without_the_one_before_it_is_damage(tmp_path: Path) -> None:
    store = create(tmp_path / "r")
    for last in range(1, 4):
        fill(store, last)
        store.persist()
    store.close()
    file = tmp_path / "r" / WAL_FILE
    wal = bytearray(file.read_bytes())
    wal[SECTOR_BYTES : 2 * SECTOR_BYTES] = wal[-SECTOR_BYTES:]  # a write that never reached its place
    file.write_bytes(wal)
    with pytest.raises(DamagedLogError, match="not record 1"):
        LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)


def _zeroed(wal: bytearray) -> None:
    wal[:] = bytes(len(wal))


def _zeroed_at_the_end(wal: bytearray) -> None:
    """From the last record that was acknowledged: as short as a write that was lost with the power, and none."""
    wal[2 * SECTOR_BYTES :] = bytes(len(wal) - 2 * SECTOR_BYTES)


def _one_zero_sector(wal: bytearray) -> None:
    wal[-SECTOR_BYTES:] = bytes(SECTOR_BYTES)


def _cut_off(wal: bytearray) -> None:
    del wal[len(wal) // 2 :]


def _longer(wal: bytearray) -> None:
    wal += wal[-SECTOR_BYTES:]


def _noise(wal: bytearray) -> None:
    wal[:] = Random(1).randbytes(len(wal))


@pytest.mark.parametrize("damage", [_zeroed, _zeroed_at_the_end, _one_zero_sector, _cut_off, _longer, _noise])
def test_what_no_crash_leaves_behind_is_damage(tmp_path: Path, damage: Callable[[bytearray], None]) -> None:
    """Found by trying: a file of zeros was taken for a new one, and what was acknowledged last was gone."""
    store = create(tmp_path / "r")
    for last in range(1, 4):
        fill(store, last)
        store.persist()
    store.close()
    file = tmp_path / "r" / WAL_FILE
    wal = bytearray(file.read_bytes())
    damage(wal)
    file.write_bytes(wal)
    with pytest.raises(DamagedLogError):
        LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)


@pytest.mark.parametrize(("group", "node"), [(GROUP, "another"), ("another", NODE)])
def test_the_file_of_another_store_is_damage(tmp_path: Path, group: str, node: str) -> None:
    """It may say that all of it is outdated, and what was acknowledged here last would be gone."""
    store = create(tmp_path / "r")
    for last in range(1, 4):
        fill(store, last)
        store.sync()
    fill(store, 4)
    store.persist()
    store.close()
    names = GroupId(group), ReplicaId(node)
    LmdbStore.create(tmp_path / "other", *names, SMALL, schema=PARTITION).close()
    shutil.copy(tmp_path / "other" / WAL_FILE, tmp_path / "r" / WAL_FILE)
    with pytest.raises(DamagedLogError, match="checksum"):
        LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)


def test_data_older_than_the_write_ahead_file_is_damage(tmp_path: Path) -> None:
    store = create(tmp_path / "r")
    fill(store, 1)
    store.sync()
    shutil.copy(tmp_path / "r" / DATA_FILE, tmp_path / "older")
    fill(store, 2)
    store.sync()
    fill(store, 3)
    store.persist()
    store.close()
    shutil.copy(tmp_path / "older", tmp_path / "r" / DATA_FILE)
    with pytest.raises(DamagedLogError, match="newest"):
        LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)


def test_a_write_that_failed_ends_writing(tmp_path: Path) -> None:
    store = create(tmp_path / "r")
    fill(store, 1)
    file = cast("DiskFile", store._wal.file)
    os.close(file._fd)
    with pytest.raises(StorageError):
        store.persist()
    with pytest.raises(StorageError, match="writing ended"):
        store.sync()
    file._fd = os.open(tmp_path / "r" / WAL_FILE, os.O_RDONLY)
    store.close()


# -- the format ---------------------------------------------------------------------------

OPS: list[Op] = [
    Append(entry(7, 3, b"payload")),
    Put(PRODUCERS, b"key", b"value"),
    Put(META, b"k", b""),
    Delete(LANES, b"gone"),
    SetApplied(Index(6)),
    SetHard(HardState(Term(3), ReplicaId("n"), Index(6))),
]
GOLDEN_OPS = (
    "0107000000000000000300000000000000a21b9aec070000007061796c6f6164"
    "030600000000000000"
    "0203000000000000000600000000000000010001" + b"n".hex() + "04020300050000006b657976616c7565"
    "0405010000000000" + b"k".hex() + "05010400676f6e65"
)


def test_the_format_of_operations_does_not_change_by_accident() -> None:
    data = encode_ops(OPS, 1000)
    assert data is not None
    assert data.hex() == GOLDEN_OPS
    assert sorted(decode_ops(data, PARTITION.by_number), key=repr) == sorted(OPS, key=repr)


GOLDEN_SECTORS = [
    "6bf710e5090000000000000000000000000001000700e9b2942a6f6e6500",
    "cfcca5be09000000000000000100000000000200ea012f71226878787878",
    "341d72410900000000000000010000000100020072007878787878787878",
    "c3a957ec0000000000000000000000000000000000000000000000000000",
]


def test_the_format_of_sectors_does_not_change_by_accident(tmp_path: Path) -> None:
    assert DiskFile.create(tmp_path, 4096) == 4096
    wal = Wal(DiskFile(tmp_path))
    wal.restart(9)
    assert wal.write(b"one")
    assert wal.write(b"x" * 600)
    assert not wal.write(b"x" * 4096)
    wal.close()
    file = (tmp_path / WAL_FILE).read_bytes()
    heads = [file[at : at + 30].hex() for at in range(0, 4 * SECTOR_BYTES, SECTOR_BYTES)]
    assert heads == GOLDEN_SECTORS


@pytest.mark.parametrize("ops", [[Truncate(Index(4))], [Append(entry(1, payload=b"x" * 2000))]])
def test_what_is_not_for_the_write_ahead_file(ops: list[Op]) -> None:
    assert encode_ops(ops, 1000) is None


@pytest.mark.parametrize("data", [b"\x09", b"\x01\x02", b"\x04\x99\x00\x00\x00\x00\x00\x00"])
def test_a_record_that_cannot_be_read_is_damage(data: bytes) -> None:
    with pytest.raises(DamagedLogError):
        decode_ops(data, PARTITION.by_number)
