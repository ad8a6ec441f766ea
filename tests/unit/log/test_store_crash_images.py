"""Power loss in the middle of a sync: the disk has any part of its writes, torn anywhere, but not the last one.

LMDB never writes over a page that the last synced state uses, and writes the
meta page, which makes a transaction count, only after everything else is on
disk. So whatever subset of the other sectors a power loss leaves behind, the
store that is found is the one before the sync, whole.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.store import Entry, HardState
from rayqueue.partition.tables import OFFSETS, PARTITION
from rayqueue.records.checksum import entry_crc
from tests.unit.log.store_disks import SMALL

GROUP, NODE = GroupId("g"), ReplicaId("n")
SECTOR = 512
META_BYTES = 2 * 4096
ROUNDS = 12
IMAGES_PER_ROUND = 10


def _write_something(store: LmdbStore, rng: Random) -> None:
    entries = []
    for index in range(store.last_index + 1, store.last_index + 1 + rng.randint(1, 4)):
        payload = rng.randbytes(rng.choice((30, 3_000, 50_000)))
        entries.append(Entry(Index(index), Term(1), payload, entry_crc(index, 1, payload)))
    store.append(entries)
    if store.last_index > 8 and rng.random() < 0.3:
        store.truncate_from(Index(store.last_index - 2))
    for _ in range(rng.randint(1, 40)):
        store.put(OFFSETS, rng.randint(0, 300).to_bytes(8, "big"), rng.randbytes(20))
    store.delete(OFFSETS, rng.randint(0, 300).to_bytes(8, "big"))
    store.set_hard(HardState(Term(1), NODE, Index(rng.randint(0, store.last_index))))


def _content(store: LmdbStore) -> tuple[object, ...]:
    entries = [store.entry(Index(index)) for index in range(1, store.last_index + 1)]
    return store.hard, store.applied, entries, [list(store.scan(table)) for table in PARTITION.tables]


def _found_in(image: bytes, directory: Path) -> tuple[object, ...]:
    (directory / "data.mdb").write_bytes(image)
    store = LmdbStore.open(directory, GROUP, NODE, SMALL, schema=PARTITION)
    try:
        return _content(store)
    finally:
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_any_part_of_an_unfinished_sync_leaves_the_state_before_it(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    LmdbStore.create(tmp_path / "copy", GROUP, NODE, SMALL, schema=PARTITION).close()
    store = LmdbStore.create(tmp_path / "store", GROUP, NODE, SMALL, schema=PARTITION)
    data = tmp_path / "store" / "data.mdb"
    torn = 0
    for _ in range(ROUNDS):
        _write_something(store, rng)
        store.sync()
        before, content = data.read_bytes(), _content(store)
        _write_something(store, rng)
        store.sync()
        after = data.read_bytes()
        padded = before.ljust(len(after), b"\0")
        changed = [
            at for at in range(META_BYTES, len(after), SECTOR) if padded[at : at + SECTOR] != after[at : at + SECTOR]
        ]
        for _ in range(IMAGES_PER_ROUND):
            image = bytearray(padded)
            for at in rng.sample(changed, rng.randint(0, len(changed))):
                image[at : at + SECTOR] = after[at : at + SECTOR]
            torn += bytes(image) != padded
            assert _found_in(bytes(image), tmp_path / "copy") == content
        assert _found_in(after, tmp_path / "copy") == _content(store)
    store.close()
    assert torn > ROUNDS
