"""A partition of which nothing was left goes on empty, at a given offset, and so do the copies that are made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayqueue.config import Settings
from rayqueue.errors import OffsetOutOfRangeError
from rayqueue.ids import Index, Offset, ReplicaId, Term
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.store import LogStore
from rayqueue.partition import Partition, PartitionSettings
from rayqueue.partition.reader import read_lanes
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol.data import Cursor
from rayqueue.raft.recovery import replica_set_of
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.start import create_anew, start_replica
from rayqueue.testing import wait_for
from tests.unit.log.store_disks import GROUP, SMALL, entry
from tests.unit.net.client_net import batch

BEGINS = 20_000_000
NODE = ReplicaId("r1.1")


def opened(path: Path, partition: PartitionSettings) -> LmdbStore:
    settings = Settings(data_dir=path.parent, transport={"secret": "only for this test"})
    create_anew(path, GROUP, NODE, partition, 3, Offset(BEGINS), settings)
    return LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)


@pytest.mark.parametrize("settings", [PartitionSettings(), PartitionSettings(lanes=3), PartitionSettings(queue=True)])
def test_it_is_empty_and_goes_on_at_its_offset_before_and_after_a_restart(
    tmp_path: Path, settings: PartitionSettings
) -> None:
    path = tmp_path / "r1.1"
    store: LogStore = opened(path, settings)
    assert replica_set_of(store) == ReplicaSet(frozenset({NODE}), epoch=3)
    partition = Partition(store, PartitionSettings())
    assert partition.settings == settings
    assert (partition.start_offset, partition.next_offset, partition.size_bytes) == (BEGINS, BEGINS, 0)
    assert sum(partition.lags().values()) == partition.backlog().records == 0
    payload = batch(b"a", b"b")
    store.append([entry(store.last_index + 1, 1, payload)])
    partition.apply(Index(store.last_index), payload)
    store.set_applied(store.last_index)
    store.sync()
    assert partition.locate(BEGINS + 1) == store.last_index
    store.close()
    store = LmdbStore.open(path, GROUP, NODE, SMALL, schema=PARTITION)
    again = Partition(store, PartitionSettings())
    assert (again.start_offset, again.next_offset) == (BEGINS, BEGINS + 2)
    # Copies are made from its checkpoint.
    checkpoint = store.checkpoint
    assert checkpoint is not None
    assert (checkpoint.index, checkpoint.term) == (Index(1), Term(1))
    copy = LmdbStore.create(tmp_path / "copy", GROUP, ReplicaId("r2.2"), SMALL, schema=PARTITION)
    fresh = Partition(copy, PartitionSettings())
    copy.install(checkpoint)
    fresh.restore(checkpoint.state)
    assert (fresh.start_offset, fresh.next_offset, fresh.settings) == (BEGINS, BEGINS, settings)
    assert replica_set_of(copy).epoch == 3
    store.close()
    copy.close()


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_reader_of_before_learns_that_it_has_missed_something(tmp_path: Path, lanes: int) -> None:
    store = opened(tmp_path / "r1.1", PartitionSettings(lanes=lanes))
    with store.snapshot() as snapshot:
        for lane in range(lanes):
            with pytest.raises(OffsetOutOfRangeError):
                read_lanes(snapshot, [Cursor(lane, Offset(30))], 1000)
    store.close()


def test_it_leads_alone_in_its_epoch(tmp_path: Path) -> None:
    path = tmp_path / "r1.1"
    opened(path, PartitionSettings()).close()
    settings = Settings(data_dir=tmp_path, transport={"secret": "only for this test"})
    replica = start_replica(path, GROUP, NODE, settings, epoch=3, on_fatal=print)
    try:
        wait_for(lambda: replica.status.role == "leader", "it to lead", 20)
        assert (replica.status.epoch, replica.status.voters) == (3, (NODE,))
        assert (replica.status.start_offset, replica.status.high_watermark) == (BEGINS, BEGINS)
    finally:
        replica.close()
