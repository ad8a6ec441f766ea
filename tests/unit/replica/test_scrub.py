"""The scrub finds damage that nobody has asked for, slowly and without end."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rayqueue.errors import DamagedLogError
from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.lmdb_file import DATA_FILE
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Checkpoint
from rayqueue.partition.tables import META, OFFSETS, PARTITION
from rayqueue.replica.scrub import Scrubber
from rayqueue.testing import wait_for
from tests.unit.log.store_disks import GROUP, NODE, SMALL, entry
from tests.unit.net.client_net import TIMEOUT_S, Cluster, batch


def filled(store: MemoryStore | LmdbStore, entries: int = 40) -> None:
    store.append([entry(index, payload=b"x" * 100) for index in range(1, entries + 1)])
    for number in range(30):
        store.put(OFFSETS, number.to_bytes(8, "big"), b"row %d" % number)
    store.put(META, b"some", b"value")
    store.sync()


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore(GroupId("g"), ReplicaId("n"), PARTITION)
    filled(store)
    return store


def whole_pass(scrubber: Scrubber, store: MemoryStore | LmdbStore, piece_bytes: int = 300) -> list[int]:
    pieces = []
    for _ in range(10_000):
        with store.snapshot() as snapshot:
            read, over = scrubber.piece(snapshot, piece_bytes)
        pieces.append(read)
        if over:
            return pieces
    raise AssertionError("a pass without end")


def test_a_pass_reads_everything_in_bounded_pieces(store: MemoryStore) -> None:
    scrubber = Scrubber(store.tables)
    pieces = whole_pass(scrubber, store)
    payloads = 40 * 100
    assert sum(pieces) > payloads
    assert max(pieces) < 300 + 200
    assert sum(whole_pass(scrubber, store)) == sum(pieces), "and the next pass again"


@pytest.mark.parametrize("piece_bytes", [1, 300, 1 << 20])
def test_every_flipped_bit_of_what_is_stored_is_found(piece_bytes: int) -> None:
    rng = Random(7)
    for index in (1, 17, 40):
        store = MemoryStore(GroupId("g"), ReplicaId("n"), PARTITION)
        filled(store)
        store.disk.rot_entry(Index(index), rng.randrange(1 << 16))
        with pytest.raises(DamagedLogError):
            whole_pass(Scrubber(store.tables), store, piece_bytes)
    for table, key in ((OFFSETS, (0).to_bytes(8, "big")), (OFFSETS, (29).to_bytes(8, "big")), (META, b"some")):
        store = MemoryStore(GroupId("g"), ReplicaId("n"), PARTITION)
        filled(store)
        store.disk.rot_row(table, key, rng.randrange(1 << 16))
        with pytest.raises(DamagedLogError):
            whole_pass(Scrubber(store.tables), store, piece_bytes)


def test_what_is_trimmed_written_and_cut_off_meanwhile_is_no_damage(store: MemoryStore) -> None:
    scrubber = Scrubber(store.tables)
    rng = Random(3)
    for step in range(200):
        with store.snapshot() as snapshot:
            scrubber.piece(snapshot, rng.choice((1, 200, 900)))
        last = store.last_index
        match rng.randrange(5):
            case 0:
                store.append([entry(last + 1, term=step + 2)])
            case 1 if last > max(store.base_index, store.applied) + 5:
                store.truncate_from(Index(last - 2))
            case 2:
                store.delete(OFFSETS, rng.randrange(40).to_bytes(8, "big"))
            case 3 if last > store.base_index + 20:
                at = Index(store.base_index + 5)
                term = store.term_at(at)
                assert term is not None
                store.set_applied(at)
                store.save_checkpoint(Checkpoint(at, term, b"{}", b""))
                store.trim_to(at, 3)
            case 4:
                store.install(Checkpoint(Index(last + 10), store.last_term, b"{}", b""))
                store.append([entry(last + 10 + each, term=step + 2) for each in range(1, 40)])
        store.sync()


def test_a_flipped_bit_in_the_file_is_found(tmp_path: Path) -> None:
    store = LmdbStore.create(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    filled(store)
    whole_pass(Scrubber(store.tables), store)
    store.close()
    file = tmp_path / "r" / DATA_FILE
    data = bytearray(file.read_bytes())
    at = data.index(b"x" * 100)
    data[at + 50] ^= 4
    file.write_bytes(data)
    store = LmdbStore.open(tmp_path / "r", GROUP, NODE, SMALL, schema=PARTITION)
    assert store.damaged is None, "nobody has looked there yet"
    with pytest.raises(DamagedLogError):
        whole_pass(Scrubber(store.tables), store)
    store.close()


@pytest.mark.slow
def test_a_running_replica_finds_what_nobody_reads_and_says_how_far_it_is(tmp_path: Path) -> None:
    log = {"cache_bytes": 0, "scrub_bytes_per_second": 10 << 20, "scrub_every_ms": 200}
    cluster = Cluster(tmp_path, 3, log=log)
    try:

        async def write() -> None:
            channel = await cluster.open()
            for number in range(5):
                await channel.append(batch(b"cold %d" % number))
            channel.close()

        cluster.run(write())
        follower = next(node for node in sorted(cluster.replicas) if node != cluster.leader)
        replica = cluster.replicas[follower]
        passes = replica.status.scrubbed.passes
        wait_for(lambda: replica.status.scrubbed.passes > passes + 1, "whole passes", TIMEOUT_S)
        assert replica.status.scrubbed.bytes > 0
        assert replica.status.scrubbed.passed_ms is not None
        assert replica.status.damaged is None
        file = tmp_path / follower / DATA_FILE
        wait_for(lambda: b"cold 3" in file.read_bytes(), "it to be in LMDB's file", TIMEOUT_S)
        data = file.read_bytes()
        with file.open("r+b") as writing:
            at = data.index(b"cold 3")
            while at >= 0:
                writing.seek(at)
                writing.write(b"c0ld 3")
                at = data.find(b"cold 3", at + 1)
        wait_for(lambda: replica.status.damaged, "the scrub to find it", TIMEOUT_S)
        assert cluster.fatal == []
    finally:
        cluster.close()
