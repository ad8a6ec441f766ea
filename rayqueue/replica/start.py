"""From settings to a running replica.

The one place where the settings of a process are handed to the parts. Making
a replica's data and finding it again are two different calls: a replica whose
disk was lost must not quietly begin anew under its old id, for it may have
voted and acknowledged (``StoreMissingError`` says so).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rayqueue.config import Settings
from rayqueue.errors import StoreAbandonedError
from rayqueue.ids import GroupId, Offset, ReplicaId
from rayqueue.log.lmdb_store import LmdbOptions, LmdbStore
from rayqueue.log.store import Schema
from rayqueue.net.streams import tls_of
from rayqueue.partition import Partition, PartitionSettings
from rayqueue.partition.machine import emptied_at
from rayqueue.partition.tables import PARTITION
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.recovery import begin_anew, replica_set_of, stand_alone, wire_name
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.tcp import TcpTransport
from rayqueue.replica.answers import Deliver, call_each
from rayqueue.replica.partition_service import PartitionService
from rayqueue.replica.replica import Replica
from rayqueue.replica.secret import secret_of
from rayqueue.replica.starting import look_at_starts

PartitionReplica = Replica[PartitionService]


def create_replica(
    path: Path, group_id: GroupId, replica_id: ReplicaId, replicas: ReplicaSet | None, settings: Settings
) -> None:
    """Make a replica's data: one of a new group's first ``replicas``, or with None one that will be added to a group.

    It is there completely or not at all, whenever the process dies.
    """
    prepare = None if replicas is None else lambda store: RaftEngine.bootstrap(store, replicas)
    LmdbStore.create(path, group_id, replica_id, _lmdb_options(settings), prepare=prepare).close()


def create_anew(
    path: Path,
    group_id: GroupId,
    replica_id: ReplicaId,
    partition: PartitionSettings,
    epoch: int,
    begins_at: Offset,
    settings: Settings,
) -> None:
    """Make the data of a partition that has lost all that it had: its only replica, in a new epoch, empty, with the
    offset that its next record gets."""
    state = emptied_at(begins_at, partition)

    def prepare(store: LmdbStore) -> None:
        begin_anew(store, epoch, state)
        Partition(store, partition).restore(state)
        store.sync()

    LmdbStore.create(path, group_id, replica_id, _lmdb_options(settings), PARTITION, prepare=prepare).close()


def start_replica(
    path: Path,
    group_id: GroupId,
    replica_id: ReplicaId,
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    partition: PartitionSettings | None = None,
    epoch: int = 0,
    alone: bool = False,
    deliver: Deliver = call_each,
    on_fatal: Callable[[BaseException], None],
) -> PartitionReplica:
    """Run the replica whose data is at ``path``. It listens on a free port of ``host``; see its status for which."""
    store, transport = open_replica(
        path, group_id, replica_id, settings, PARTITION, host=host, epoch=epoch, alone=alone
    )
    machine = Partition(store, partition or PartitionSettings())
    return Replica(
        store,
        transport,
        machine,
        lambda replica: PartitionService(replica, machine, settings),
        settings,
        deliver=deliver,
        on_fatal=on_fatal,
    )


def open_replica(
    path: Path,
    group_id: GroupId,
    replica_id: ReplicaId,
    settings: Settings,
    schema: Schema,
    *,
    host: str = "127.0.0.1",
    epoch: int = 0,
    alone: bool = False,
) -> tuple[LmdbStore, TcpTransport]:
    """The base of a ``Replica`` of any kind: its data at ``path``, with the tables of its state machine, and a free
    port of ``host``. They are its own.

    What ended the last processes that had the store open is looked at before (``rayqueue.replica.starting``).
    ``epoch``: the group's, as far as the caller knows. Data from before it is refused (``StoreAbandonedError``), or
    with ``alone`` becomes what the group begins anew from (``rayqueue.raft.recovery``).
    """
    secret = secret_of(settings)
    store = LmdbStore.open(
        path,
        group_id,
        replica_id,
        _lmdb_options(settings),
        schema,
        locked=lambda: look_at_starts(path, time.time_ns() // 1_000_000),
    )
    try:
        transport = TcpTransport(
            replica_id,
            wire_name(group_id, _enter_epoch(store, epoch, alone)),
            secret,
            host,
            settings=settings.transport,
            tls=tls_of(settings.transport),
        )
    except BaseException:
        store.close()
        raise
    return store, transport


def _enter_epoch(store: LmdbStore, epoch: int, alone: bool) -> int:
    """The epoch that this replica is in."""
    known = replica_set_of(store)
    if known.epoch >= epoch or not known.everyone:  # one that has not heard of its group yet is told by its leader
        return max(known.epoch, epoch)
    if not alone:
        raise StoreAbandonedError(
            f"{store.replica_id} of {store.group_id} is from epoch {known.epoch}; in epoch {epoch} the group went on "
            "without it (rayqueue recover --unsafe)",
            epoch=known.epoch,
        )
    stand_alone(store, epoch)
    return epoch


def _lmdb_options(settings: Settings) -> LmdbOptions:
    log = settings.log
    return LmdbOptions(
        cache_bytes=log.cache_bytes,
        map_bytes=log.map_initial_bytes,
        map_step_bytes=log.map_growth_bytes,
        reserve_bytes=log.reserve_bytes,
    )
