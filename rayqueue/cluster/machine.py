"""The cluster: what the coordinator's log means.

``ClusterMachine`` implements ``rayqueue.raft.machine.StateMachine``. It owns
topics, brokers, placement and producer ids (``catalog``), the consumer groups
(``groups``) and the fates of transactions (``transactions``). All of it is rows
of one table; a checkpoint is these rows, with the schema's version, so a restart
reads them and replays nothing, and the log before a checkpoint is needed by
nobody.

It knows nothing of sessions, heartbeats and connections: these are the
leader's, in memory (``coordinator``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from rayqueue.cluster.catalog import BrokerRow, Catalog, PlacedReplica, ReplicaKey
from rayqueue.cluster.commands import (
    AbortTransactions,
    AlterTopic,
    AnyCommand,
    BeginMove,
    BeginRebalance,
    CancelMove,
    ChangeGroup,
    CreateCluster,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    DrainBroker,
    DropPlanned,
    EndRebalance,
    EndTransaction,
    EndWrite,
    ExpireGroups,
    ExpireTransactionalIds,
    FenceGroup,
    FinishMove,
    FinishTransactions,
    ForgetBroker,
    ForgetTransactionalId,
    GroupsForgotten,
    InitTransactions,
    JoinWrite,
    NoteEvents,
    Nothing,
    PlaceCoordinator,
    PutBroker,
    RecoverGroup,
    RecoverySettled,
    ReplicaFound,
    ReplicaLost,
    ReplicasMade,
    ReplicasRemoved,
    ResizeTopic,
    RetireCoordinator,
    TakeProducerIds,
    decode_command,
)
from rayqueue.cluster.events import Event, Events
from rayqueue.cluster.groups import Group, Groups
from rayqueue.cluster.moves import Move, Planned
from rayqueue.cluster.plans import Rebalance
from rayqueue.cluster.recoveries import Recovery
from rayqueue.cluster.tables import COORDINATOR, META
from rayqueue.cluster.transactions import Transactions
from rayqueue.cluster.writes import Writes
from rayqueue.errors import InvariantBrokenError, RayQueueError, UnknownFormatError
from rayqueue.ids import Index
from rayqueue.log.store import LogStore
from rayqueue.protocol.calls import DeletedGroup
from rayqueue.protocol.topics import PartitionInfo, TopicInfo
from rayqueue.records.checksum import crc32c

SEGMENT_BYTES = 1 << 20
"""How much log a replica of the coordinator applies between checkpoints (``RaftEngine.maintain``). No reader needs the
log, so it is never much longer than this."""

MAX_EXPIRED_AT_ONCE = 200

_ROWS: msgspec.msgpack.Decoder[list[tuple[bytes, bytes]]] = msgspec.msgpack.Decoder(list[tuple[bytes, bytes]])


class ClusterMachine:
    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._groups = Groups(store, self._catalog.topics)
        self._events = Events(store)
        self.transactions = Transactions(store, lambda: self._catalog.take_producer_ids(1))
        """Valid until the next entry is applied, as all that is asked of it."""
        self._writes = Writes(store, self.transactions, self._catalog.age_ms)
        self._applied = store.applied
        self.on_group_changed: Callable[[str], None] | None = None
        """Told the name of each group that an entry changed. It must only note it."""

    # -- what others ask; valid until the next entry is applied ------------------------------

    @property
    def cluster_id(self) -> str:
        """Empty until ``CreateCluster``."""
        return self._catalog.cluster_id

    @property
    def version(self) -> int:
        """Grows with every change of any topic."""
        return self._catalog.version

    @property
    def topics(self) -> Mapping[str, TopicInfo]:
        return self._catalog.topics

    @property
    def brokers(self) -> Mapping[str, BrokerRow]:
        """All that ever joined, also those that are away."""
        return self._catalog.brokers

    @property
    def groups(self) -> Mapping[str, Group]:
        return self._groups.known

    @property
    def deleted_generation(self) -> int:
        """The highest of all groups that were deleted."""
        return self._catalog.deleted_generation

    @property
    def unmade(self) -> Mapping[ReplicaKey, PlacedReplica]:
        """Replicas whose data was not made yet: it may be made, once. If data of another is missing it was lost."""
        return self._catalog.unmade

    @property
    def coordinators(self) -> Mapping[str, str]:
        """The coordinator's replicas that came later than the first, by their brokers; "" for all that have left."""
        return self._catalog.coordinators

    @property
    def doomed(self) -> Mapping[ReplicaKey, PlacedReplica]:
        """Replicas of deleted topics, and such as were replaced, that were not removed yet. Some may be on brokers that
        are forgotten, and are removed should these come back."""
        return self._catalog.doomed

    @property
    def lost(self) -> Mapping[ReplicaKey, str]:
        """Replicas whose data is lost, and what they said of it. They are to be replaced."""
        return self._catalog.lost

    @property
    def missing(self) -> Collection[ReplicaKey]:
        """Those of them that have only found nothing: their data may come back."""
        return self._catalog.missing

    @property
    def moves(self) -> Mapping[str, Move]:
        """Replicas that are being replaced, by Raft group."""
        return self._catalog.moves

    @property
    def recoveries(self) -> Mapping[str, Recovery]:
        """The last one of each Raft group that went on without a majority."""
        return self._catalog.recoveries.known

    @property
    def planned(self) -> Mapping[tuple[str, str], Planned]:
        """Moves of the rebalance that is under way that were not begun yet, by the replica that is to go."""
        return self._catalog.plans.planned

    @property
    def rebalance(self) -> Rebalance | None:
        """The one that is under way."""
        return self._catalog.plans.rebalance

    def partition(self, group_id: str) -> tuple[TopicInfo, PartitionInfo] | None:
        """The partition of this Raft group, and its topic; None if there is none."""
        return self._catalog.partition(group_id)

    @property
    def events(self) -> Sequence[Event]:
        """The last ones, in their order."""
        return self._events.known

    @property
    def expired(self) -> Mapping[str, int]:
        """Groups that partitions have still to forget, and up to which generation."""
        return self._catalog.expired

    def replicas(self, broker: str) -> Mapping[ReplicaKey, PlacedReplica]:
        """What a broker is to run. Its doomed ones are not among them."""
        return self._catalog.replicas_of(broker)

    def holds(self, broker: str) -> int:
        """How many replicas are still on a broker, the coordinator's and those that are to be deleted among them."""
        return self._catalog.holds(broker)

    def replica_counts(self) -> Mapping[str, int]:
        return self._catalog.replica_counts()

    def leader_counts(self) -> Mapping[str, int]:
        return self._catalog.leader_counts()

    # -- StateMachine -------------------------------------------------------------------------

    def apply(self, index: Index, payload: bytes) -> Any:
        self._applied = index
        return self._execute(decode_command(payload))

    def _execute(self, command: AnyCommand) -> Any:
        catalog = self._catalog
        match command:
            case ChangeGroup(group, changes, above, now_ms):
                catalog.pass_time(now_ms)
                least, now_ms = catalog.deleted_generation, catalog.now_ms if now_ms else 0
                answers = self._groups.change(group, changes, catalog.topics, least, above=above, now_ms=now_ms)
                self._tell(group)
                return answers
            case TakeProducerIds(count):
                return catalog.take_producer_ids(count)
            case CreateTopic():
                return self._followed(command.name, catalog.create_topic(command))
            case AlterTopic() | ResizeTopic():
                return self._followed(command.name, catalog.alter_topic(command))
            case DeleteTopic(name, topic_id):
                return self._followed(name, catalog.delete_topic(name, topic_id))
            case PlaceCoordinator():
                return catalog.place_coordinator(command)
            case RetireCoordinator():
                return catalog.retire_coordinator(command)
            case ReplicasMade(replicas):
                return catalog.replicas_made(replicas)
            case ReplicasRemoved(replicas):
                return catalog.replicas_removed(replicas)
            case ReplicaLost():
                return catalog.replica_lost(command)
            case ReplicaFound(group_id, replica_id):
                return catalog.replica_found(ReplicaKey(group_id, replica_id))
            case BeginMove():
                return catalog.begin_move(command)
            case FinishMove(group_id, add):
                return catalog.finish_move(group_id, add)
            case CancelMove(group_id, add):
                return catalog.cancel_move(group_id, add)
            case RecoverGroup():
                return catalog.recover_group(command)
            case RecoverySettled(group_id, epoch):
                return catalog.recoveries.settle(group_id, epoch)
            case BeginRebalance():
                return catalog.begin_rebalance(command)
            case EndRebalance(number):
                return catalog.plans.end(number)
            case DropPlanned(replicas):
                return catalog.plans.drop(replicas)
            case NoteEvents(events):
                return self._events.add(Event(*each) for each in events)
            case PutBroker():
                return catalog.put_broker(command)
            case DrainBroker(broker, draining):
                return catalog.drain_broker(broker, draining)
            case ForgetBroker():
                return catalog.forget_broker(command)
            case CreateCluster(cluster_id):
                return catalog.create_cluster(cluster_id)
            case DeleteGroup(group, born):
                return self._delete_group(group, born)
            case FenceGroup(group, born, now_ms):
                catalog.pass_time(now_ms)
                now_ms = catalog.now_ms if now_ms else 0
                return self._groups.fence(group, born, catalog.deleted_generation, now_ms=now_ms)
            case ExpireGroups(now_ms, retention_ms):
                return self._expire_groups(now_ms, retention_ms)
            case GroupsForgotten(groups, generation):
                return catalog.groups_forgotten(groups, generation)
            case (
                InitTransactions()
                | EndTransaction()
                | AbortTransactions()
                | FinishTransactions()
                | ExpireTransactionalIds()
                | ForgetTransactionalId()
                | JoinWrite()
                | EndWrite()
            ):
                return self._change_transactions(command)
            case Nothing():
                return None

    def _change_transactions(
        self,
        command: InitTransactions
        | EndTransaction
        | AbortTransactions
        | FinishTransactions
        | ExpireTransactionalIds
        | ForgetTransactionalId
        | JoinWrite
        | EndWrite,
    ) -> Any:
        catalog, transactions = self._catalog, self.transactions
        if isinstance(command, FinishTransactions):
            return transactions.finish(command)
        catalog.pass_time(command.now_ms)
        match command:
            case InitTransactions():
                return transactions.init(command, catalog.now_ms)
            case EndTransaction():
                return transactions.end(command, catalog.now_ms)
            case AbortTransactions():
                return transactions.abort(command, catalog.now_ms)
            case ForgetTransactionalId():
                return transactions.forget(command)
            case JoinWrite():
                return self._writes.join(command, catalog.now_ms)
            case EndWrite():
                return self._writes.end(command, catalog.now_ms)
            case ExpireTransactionalIds():
                return transactions.expire(lambda used_ms: catalog.age_ms(used_ms) > command.retention_ms)

    def _followed(self, topic: str, answer: Any) -> Any:
        for group in self._groups.follow_topic(topic, self._catalog.topics):
            self._tell(group)
        return answer

    def _delete_group(self, name: str, born: int) -> DeletedGroup | RayQueueError:
        deleted = self._groups.delete(name, born)
        if isinstance(deleted, RayQueueError):
            return deleted
        if deleted is not None:
            self._catalog.keep_generation(deleted.generation)
        return DeletedGroup(deleted is not None, self._catalog.deleted_generation)

    def _expire_groups(self, now_ms: int, retention_ms: int) -> tuple[str, ...]:
        catalog = self._catalog
        catalog.pass_time(now_ms)
        gone = self._groups.expire(lambda empty_ms: catalog.age_ms(empty_ms) > retention_ms, MAX_EXPIRED_AT_ONCE)
        for group in gone:
            catalog.keep_generation(group.generation)
        for group in gone:
            catalog.note_expired(group.name)
            self._tell(group.name)
        return tuple(group.name for group in gone)

    def has_expired(self, now_ms: int, retention_ms: int) -> bool:
        """Whether ``ExpireGroups`` of so late would delete one, or must tell the first time."""
        ahead_ms = now_ms - self._catalog.now_ms
        age_ms = self._catalog.age_ms
        return any(
            not group.members and age_ms(group.empty_ms) + ahead_ms > retention_ms
            for group in self._groups.known.values()
        )

    def empty_since_ms(self, group: Group) -> int | None:
        """When its last member left; None if it has some, or that is not known."""
        return None if group.members else group.empty_ms or self._catalog.first_ms or None

    def _tell(self, group: str) -> None:
        if self.on_group_changed is not None:
            self.on_group_changed(group)

    def first_needed(self) -> Index:
        return Index(self._applied + 1)

    def checkpoint(self) -> bytes:
        body = bytes([COORDINATOR.version]) + msgspec.msgpack.encode(list(self._store.scan(META)))
        return crc32c(body).to_bytes(4, "little") + body

    def restore(self, state: bytes) -> None:
        if crc32c(state[4:]) != int.from_bytes(state[:4], "little"):
            raise InvariantBrokenError("the checkpoint does not match its checksum")
        if state[4] > COORDINATOR.version:
            raise UnknownFormatError(
                f"the checkpoint has version {state[4]}, this release reads up to {COORDINATOR.version}",
                found=state[4],
                newest=COORDINATOR.version,
            )
        for key, row in _ROWS.decode(memoryview(state)[5:]):
            self._store.put(META, key, row)
        self._catalog.load()
        self._groups.load(self._catalog.topics)
        self._events.load()
        self.transactions.load()
        self._writes.load()
        self._applied = self._store.applied
        for group in self._groups.known:
            self._tell(group)
