"""From settings to a running replica.

The one place where the settings of a process are handed to the parts. Making
a replica's data and finding it again are two different calls: a replica whose
disk was lost must not quietly begin anew under its old id, for it may have
voted and acknowledged (``StoreMissingError`` says so).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rayqueue.config import Settings
from rayqueue.ids import GroupId, NodeId
from rayqueue.log.lmdb_store import LmdbOptions, LmdbStore
from rayqueue.log.store import Schema
from rayqueue.partition import PartitionSettings
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol.seals import Seals
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.members import Members
from rayqueue.raft.tcp import TcpTransport, TlsContexts, tls_contexts
from rayqueue.replica.partition import PartitionReplica
from rayqueue.replica.replica import Deliver
from rayqueue.replica.secret import secret_of


def create_replica(path: Path, group_id: GroupId, node_id: NodeId, members: Members | None, settings: Settings) -> None:
    """Make a replica's data: one of a new group's first ``members``, or with None one that will be added to a group.

    It is there completely or not at all, whenever the process dies.
    """
    prepare = None if members is None else lambda store: RaftEngine.bootstrap(store, members)
    LmdbStore.create(path, group_id, node_id, _lmdb_options(settings), prepare=prepare).close()


def start_replica(
    path: Path,
    group_id: GroupId,
    node_id: NodeId,
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    partition: PartitionSettings | None = None,
    deliver: Deliver | None = None,
    on_fatal: Callable[[BaseException], None],
) -> PartitionReplica:
    """Run the replica whose data is at ``path``. It listens on a free port of ``host``; see its status for which."""
    store, transport = open_replica(path, group_id, node_id, settings, PARTITION, host=host)
    return PartitionReplica(
        store,
        transport,
        seals=Seals(secret_of(settings)),
        raft=settings.raft,
        log=settings.log,
        calls=settings.calls,
        partition=partition,
        group_retention_ms=settings.cluster.group_retention_ms,
        deliver=deliver,
        on_fatal=on_fatal,
    )


def open_replica(
    path: Path, group_id: GroupId, node_id: NodeId, settings: Settings, schema: Schema, *, host: str = "127.0.0.1"
) -> tuple[LmdbStore, TcpTransport]:
    """What a ``Replica`` of any kind runs on: its data at ``path``, with the tables of its state machine, and a free
    port of ``host``. They are its own."""
    secret = secret_of(settings)
    store = LmdbStore.open(path, group_id, node_id, _lmdb_options(settings), schema)
    try:
        transport = TcpTransport(
            node_id,
            group_id,
            secret,
            host,
            settings=settings.transport,
            tls=_tls(settings),
        )
    except BaseException:
        store.close()
        raise
    return store, transport


def _lmdb_options(settings: Settings) -> LmdbOptions:
    log = settings.log
    return LmdbOptions(
        cache_bytes=log.cache_bytes,
        map_bytes=log.map_initial_bytes,
        map_step_bytes=log.map_growth_bytes,
        reserve_bytes=log.reserve_bytes,
    )


def _tls(settings: Settings) -> TlsContexts | None:
    transport = settings.transport
    if transport.tls_cert_path is None or transport.tls_key_path is None:
        return None
    return tls_contexts(transport.tls_cert_path, transport.tls_key_path, transport.tls_ca_path)
