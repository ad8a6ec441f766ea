"""Topics, brokers, where each replica is, and the numbers that are handed out once.

Owns these rows of the META table, and writes each change through to it:

    c                      counters and the cluster's id
    b<broker>              a broker
    t<name>                a topic
    u<group id>\\0<replica> a replica whose data was not made yet
    k<replica>             a replica of the coordinator that was added after the cluster was made, or, without a
                           broker, one that has left
    e<group>               the generation up to which partitions have still to forget a group that expired
    d<group id>\\0<replica> a replica of a deleted topic, or one that was replaced, that was not removed yet; maybe on
                           a broker that is forgotten, which removes it should it come back
    x<group id>\\0<replica> a replica whose data is lost, and what it said of it
    v<group id>            a replica that is being replaced

Those of groups that went on without a majority are ``recoveries``'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import NamedTuple

import msgspec

from rayqueue.cluster.commands import (
    AlterTopic,
    BeginMove,
    BeginRebalance,
    CreateTopic,
    ForgetBroker,
    PlaceCoordinator,
    PutBroker,
    RecoverGroup,
    ReplicaLost,
    ResizeTopic,
    RetireCoordinator,
)
from rayqueue.cluster.moves import Move
from rayqueue.cluster.placement import Placement, partition_group_id, replica_id
from rayqueue.cluster.plans import Plans, Rebalance
from rayqueue.cluster.recoveries import Recoveries, Recovery
from rayqueue.cluster.tables import META
from rayqueue.errors import (
    ChangeInProgressError,
    InvalidInputError,
    InvariantBrokenError,
    MembershipError,
    RayQueueError,
    TopicExistsError,
    TopicRecreatedError,
    UnknownBrokerError,
    UnknownTopicError,
)
from rayqueue.ids import COORDINATOR
from rayqueue.log.store import LogStore
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicInfo

_COUNTERS = b"c"
_BROKER = b"b"
_TOPIC = b"t"
_UNMADE = b"u"
_DOOMED = b"d"
_COORDINATOR = b"k"
_EXPIRED = b"e"
_LOST = b"x"
_MOVE = b"v"
_CLOCK_STEP_MS = 1_000
MAX_LEFT_BEHIND = 10_000
"""Doomed replicas on brokers that are forgotten. The data of more than these stays, should such a broker come back."""
_FIRST_COORDINATORS = frozenset(f"c{number}" for number in range(1, 8))
"""The ids that those of a new cluster may have: ``cluster.coordinators`` is at most 7."""


class BrokerRow(msgspec.Struct, frozen=True, array_like=True):
    """A node that has, or may have, replicas. It may be away just now."""

    broker: str
    host: str
    ray_node: str
    memory_bytes: int = 0
    """Of its host; 0 if it has not said so yet."""
    directory: str = ""
    """Of its replicas, below the node's data directory; "" is that one itself."""
    draining: bool = False
    """It is to be emptied: it gets no replica, and those that it has are moved elsewhere."""


class PlacedReplica(msgspec.Struct, frozen=True, array_like=True):
    group_id: str
    replica_id: str
    broker: str
    topic: str
    partition: int

    @property
    def key(self) -> ReplicaKey:
        return ReplicaKey(self.group_id, self.replica_id)


class ReplicaKey(NamedTuple):
    group_id: str
    replica_id: str

    def row_key(self, kind: bytes) -> bytes:
        return kind + self.group_id.encode() + b"\0" + self.replica_id.encode()


class _Counters(msgspec.Struct, array_like=True):
    cluster_id: str = ""
    version: int = 0
    next_topic_id: int = 1
    next_producer_id: int = 1
    generation: int = 0
    """The largest that a deleted group had: one that is made again goes on after it."""
    now_ms: int = 0
    """The largest time that a leader has told, to within a second. It never goes back."""
    first_ms: int = 0
    """The first: what was written before counts from then on."""
    moves: int = 0
    """How many were begun: their numbers are in the ids of the new replicas, which nobody had before."""


class _LostRow(msgspec.Struct, frozen=True, array_like=True):
    group_id: str
    replica_id: str
    why: str
    missing: bool = False


class _TopicRow(msgspec.Struct, frozen=True, array_like=True):
    info: TopicInfo
    attempt: str


_encode = msgspec.msgpack.Encoder().encode


class Catalog:
    def __init__(self, store: LogStore) -> None:
        self._store = store
        self.recoveries = Recoveries(store)
        self.plans = Plans(store)
        self.load()

    # -- what others ask -------------------------------------------------------------------

    @property
    def cluster_id(self) -> str:
        return self._counters.cluster_id

    @property
    def version(self) -> int:
        return self._counters.version

    @property
    def deleted_generation(self) -> int:
        return self._counters.generation

    def replicas_of(self, broker: str) -> Mapping[ReplicaKey, PlacedReplica]:
        return self._placed.get(broker, {})

    def replica_counts(self) -> dict[str, int]:
        return {broker: len(placed) for broker, placed in self._placed.items()}

    def leader_counts(self) -> dict[str, int]:
        """First replicas by broker."""
        return dict(self._leaders)

    # -- changes ---------------------------------------------------------------------------

    def create_cluster(self, cluster_id: str) -> str:
        if not self._counters.cluster_id:
            self._counters.cluster_id = cluster_id
            self._write_counters()
        return self._counters.cluster_id

    def put_broker(self, command: PutBroker) -> BrokerRow:
        known = self.brokers.get(command.broker)
        draining = known is not None and known.draining
        facts = command.host, command.ray_node, command.memory_bytes, command.directory
        return self._write_broker(BrokerRow(command.broker, *facts, draining))

    def drain_broker(self, broker: str, draining: bool) -> BrokerRow | RayQueueError:
        known = self.brokers.get(broker)
        if known is None:
            return unknown_broker(broker, self.brokers)
        return self._write_broker(msgspec.structs.replace(known, draining=draining))

    def forget_broker(self, command: ForgetBroker) -> None:
        broker = command.broker
        known, doomed = self.brokers.get(broker), any(each.broker == broker for each in self.doomed.values())
        in_service = self._placed.get(broker) or broker in self.coordinators.values()
        if known is None or not known.draining or in_service or (doomed and not command.away):
            return
        del self.brokers[broker]
        self._store.delete(META, _BROKER + broker.encode())
        left_behind = sorted(key for key, replica in self.doomed.items() if replica.broker not in self.brokers)
        self._strike(self.doomed, _DOOMED, left_behind[:-MAX_LEFT_BEHIND])

    def holds(self, broker: str) -> int:
        """How many replicas are still there, the coordinator's and those that are to be deleted among them."""
        others = (*self.coordinators.values(), *(replica.broker for replica in self.doomed.values()))
        return len(self._placed.get(broker, ())) + others.count(broker)

    def _write_broker(self, row: BrokerRow) -> BrokerRow:
        if self.brokers.get(row.broker) != row:
            self.brokers[row.broker] = row
            self._store.put(META, _BROKER + row.broker.encode(), _encode(row))
        return row

    def take_producer_ids(self, count: int) -> int:
        first = self._counters.next_producer_id
        self._counters.next_producer_id += count
        self._write_counters()
        return first

    def keep_generation(self, generation: int) -> None:
        if generation > self._counters.generation:
            self._counters.generation = generation
            self._write_counters()

    @property
    def now_ms(self) -> int:
        return self._counters.now_ms

    @property
    def first_ms(self) -> int:
        return self._counters.first_ms

    def age_ms(self, stamp_ms: int) -> int:
        """How long ago that was. 0 is a stamp of before leaders told the time."""
        return self._counters.now_ms - (stamp_ms or self._counters.first_ms)

    def pass_time(self, now_ms: int) -> None:
        if now_ms >= self._counters.now_ms + _CLOCK_STEP_MS:
            self._counters.now_ms = now_ms
            self._counters.first_ms = self._counters.first_ms or now_ms
            self._write_counters()

    def note_expired(self, group: str) -> None:
        self.expired[group] = self._counters.generation
        self._store.put(META, _EXPIRED + group.encode(), _encode((group, self._counters.generation)))

    def groups_forgotten(self, groups: Iterable[str], generation: int) -> None:
        for group in groups:
            if self.expired.get(group, generation + 1) <= generation:
                del self.expired[group]
                self._store.delete(META, _EXPIRED + group.encode())

    def create_topic(self, command: CreateTopic) -> TopicInfo | RayQueueError:
        existing = self.topics.get(command.name)
        if existing is not None:
            repeated = bool(command.attempt) and self._attempts[command.name] == command.attempt
            if command.if_missing or repeated:
                return existing
            return TopicExistsError(f"there is a topic {command.name!r} already", name=command.name)
        try:
            settings = command.settings.check()
            _check_placement(command.placement, settings.partitions, settings.replication)
        except InvalidInputError as error:
            return error
        topic_id = self._counters.next_topic_id
        self._counters.next_topic_id += 1
        info = TopicInfo(command.name, topic_id, settings, _partitions(command.name, topic_id, 0, command.placement))
        self._put_topic(info, command.attempt)
        self._place(info, info.partitions)
        return info

    def alter_topic(self, command: AlterTopic | ResizeTopic) -> TopicInfo | RayQueueError:
        info = self.topics.get(command.name)
        if info is None:
            return unknown_topic(command.name)
        if command.topic_id not in (0, info.topic_id):
            return recreated_topic(info, command.topic_id)
        try:
            settings = info.settings.changed(command.changes)
            if settings.replication != info.settings.replication and not isinstance(command, ResizeTopic):
                raise InvalidInputError("replication cannot change in this way", key="replication")
            _check_placement(command.placement, settings.partitions - len(info.partitions), settings.replication)
        except InvalidInputError as error:
            return error
        if settings == info.settings:
            return info
        new = _partitions(info.name, info.topic_id, len(info.partitions), command.placement)
        first = info.dedupe_partitions if new and settings.queue else info.first_partitions
        info = TopicInfo(info.name, info.topic_id, settings, info.partitions + new, info.version + 1, first)
        self._put_topic(info, self._attempts[info.name])
        self._place(info, new)
        return info

    def delete_topic(self, name: str, topic_id: int) -> bool:
        info = self.topics.get(name)
        if info is None or topic_id not in (0, info.topic_id):
            return False
        del self.topics[name], self._attempts[name]
        self._store.delete(META, _TOPIC + name.encode())
        for partition in info.partitions:
            if partition.group_id in self.moves:
                self.cancel_move(partition.group_id, self.moves[partition.group_id].add)
        self._unindex(info, info.partitions)
        for replica in _replicas(info, info.partitions):
            self._retire(replica)
        self._bump_version()
        return True

    def place_coordinator(self, command: PlaceCoordinator) -> None:
        lost = {key.replica_id for key in self.lost if key.group_id == COORDINATOR}
        sound = {broker for replica_id, broker in self.coordinators.items() if replica_id not in lost}
        if command.replica_id in self.coordinators or command.broker in sound:
            return
        known = self.brokers.get(command.broker)
        if known is not None and known.draining:  # whoever asks for it did not know that yet
            return
        replica = PlacedReplica(command.group_id, command.replica_id, command.broker, "", 0)
        self._lost_no_more(replica.key)  # said of an id that nobody had yet
        self._put_coordinator(replica)
        self._mark(self.unmade, _UNMADE, replica)

    def retire_coordinator(self, command: RetireCoordinator) -> None:
        if self.coordinators.get(command.replica_id) == "":
            return
        self._put_coordinator(PlacedReplica(command.group_id, command.replica_id, "", "", 0))
        self._retire(PlacedReplica(command.group_id, command.replica_id, command.broker, "", 0))

    def _put_coordinator(self, replica: PlacedReplica) -> None:
        self.coordinators[replica.replica_id] = replica.broker
        self._store.put(META, _COORDINATOR + replica.replica_id.encode(), _encode(replica))

    # -- replicas that are replaced ---------------------------------------------------------

    def replica_lost(self, command: ReplicaLost) -> bool:
        key = ReplicaKey(command.group_id, command.replica_id)
        known = self._may_coordinate(key.replica_id) if key.group_id == COORDINATOR else self._find(key) is not None
        if not known or key in self.unmade:
            return False
        missing = command.missing and (key not in self.lost or key in self.missing)
        row = _LostRow(*key, command.why, missing)
        if (self.lost.get(key), key in self.missing) != (row.why, row.missing):
            self._note_lost(row)
            self._store.put(META, key.row_key(_LOST), _encode(row))
        return True

    def replica_found(self, key: ReplicaKey) -> bool:
        found = key in self.missing or (key in self.lost and self._is_only(key))
        if found:
            self._lost_no_more(key)
        return found

    def _is_only(self, key: ReplicaKey) -> bool:
        found = self.partition(key.group_id)
        return found is not None and [each.replica_id for each in found[1].replicas] == [key.replica_id]

    def _note_lost(self, row: _LostRow) -> None:
        key = ReplicaKey(row.group_id, row.replica_id)
        self.lost[key] = row.why
        (self.missing.add if row.missing else self.missing.discard)(key)

    def _lost_no_more(self, key: ReplicaKey) -> None:
        self.missing.discard(key)
        if self.lost.pop(key, None) is not None:
            self._store.delete(META, key.row_key(_LOST))

    def _may_coordinate(self, replica_id: str) -> bool:
        """The first ones are in nobody's log, so that any of their ids must be taken for one."""
        return bool(self.coordinators.get(replica_id, replica_id in _FIRST_COORDINATORS))

    def begin_move(self, command: BeginMove) -> Move | RayQueueError:
        found = self.partition(command.group_id)
        old = self._in_service(ReplicaKey(command.group_id, command.remove)) if command.remove else None
        if found is None or (command.remove and old is None) or not (command.remove or command.broker):
            return MembershipError(f"{command.group_id} has no replica {command.remove}", replica_id=command.remove)
        info, partition = found
        if command.group_id in self.moves:
            return ChangeInProgressError(f"a replica of {command.group_id} is being replaced already; retry")
        if command.broker and command.broker not in self.brokers:
            return unknown_broker(command.broker, self.brokers)
        if command.broker and self.brokers[command.broker].draining:
            return InvalidInputError(
                f"broker {command.broker} is being emptied; nothing is moved to it", broker=command.broker
            )
        if not command.broker and len(partition.replicas) == 1:
            return MembershipError(
                f"{command.remove} is the only replica of {command.group_id}", replica_id=command.remove
            )
        self._counters.moves += 1
        self._write_counters()
        kin = old.replica_id.partition(".")[0] if old is not None else f"r{len(partition.replicas) + 1}"
        add = f"{kin if command.broker else 'none'}.{self._counters.moves}"
        move = Move(command.group_id, add, command.broker, command.remove, command.reason, command.why)
        self.moves[move.group_id] = move
        self._store.put(META, _MOVE + move.group_id.encode(), _encode(move))
        if move.adds:
            self._mark(self.unmade, _UNMADE, self._place_move(move, info, partition))
        if command.remove:
            self.plans.drop(((command.group_id, command.remove),))
        return move

    def finish_move(self, group_id: str, add: str) -> None:
        move = self._take_move(group_id, add)
        if move is None:
            return
        old = self._in_service(ReplicaKey(group_id, move.remove)) if move.remove else None
        found = self.partition(group_id)
        if found is None or (move.remove and old is None):
            raise InvariantBrokenError(f"{move.remove} of {group_id} is not in service, and was being replaced")
        info, partition = found
        new = (ReplicaInfo(add, move.broker),) if move.adds else ()
        replicas: tuple[ReplicaInfo, ...] = () if move.remove else (*partition.replicas, *new)
        for each in partition.replicas if move.remove else ():
            replicas += new if each.replica_id == move.remove else (each,)
        partitions = list(info.partitions)
        partitions[partition.number] = PartitionInfo(partition.number, group_id, replicas)
        if move.adds:
            del self._placed[move.broker][ReplicaKey(group_id, add)]
        self._unindex(info, (partition,))
        if old is not None:
            self._retire(old)
        info = msgspec.structs.replace(info, partitions=tuple(partitions))
        self._put_topic(info, self._attempts[info.name])
        self._index(info, (partitions[partition.number],))

    def cancel_move(self, group_id: str, add: str) -> None:
        move = self._take_move(group_id, add)
        if move is not None and move.adds:
            self._retire(self._placed[move.broker].pop(ReplicaKey(group_id, add)))

    def recover_group(self, command: RecoverGroup) -> Recovery | RayQueueError:
        epoch = command.epoch or self.recoveries.epoch(command.group_id) + 1
        recovery = Recovery(command.group_id, epoch, command.survivor, command.abandoned, command.at_ms, command.said)
        if command.group_id == COORDINATOR:
            for replica_id, broker in command.abandoned:
                self.retire_coordinator(RetireCoordinator(COORDINATOR, replica_id, broker))
            return self.recoveries.put(msgspec.structs.replace(recovery, settled=True))
        found = self.partition(command.group_id)
        held = {} if found is None else {each.replica_id: each for each in found[1].replicas}
        expected = {replica_id for replica_id, _ in command.abandoned} | ({command.survivor} - {""})
        if found is None or held.keys() != expected:
            return MembershipError(f"the replicas of {command.group_id} are others by now; look again")
        if not command.survivor and command.broker not in self.brokers:
            return unknown_broker(command.broker, self.brokers)
        info, partition = found
        if command.group_id in self.moves:
            self.cancel_move(command.group_id, self.moves[command.group_id].add)
        left = held[command.survivor] if command.survivor else self._new_replica(partition, command.broker)
        self._unindex(info, (partition,))
        for each in partition.replicas:
            if each != left:
                self._retire(PlacedReplica(command.group_id, each.replica_id, each.broker, info.name, partition.number))
        partitions = list(info.partitions)
        partitions[partition.number] = PartitionInfo(partition.number, command.group_id, (left,))
        info = msgspec.structs.replace(info, partitions=tuple(partitions))
        self._put_topic(info, self._attempts[info.name])
        placed = self._index(info, (partitions[partition.number],))
        if not command.survivor:
            self._mark(self.unmade, _UNMADE, placed[0])
            begun = msgspec.structs.replace(recovery, survivor=left.replica_id, begins_at=command.begins_at)
            return self.recoveries.put(begun)
        return self.recoveries.put(recovery)

    def _new_replica(self, partition: PartitionInfo, broker: str) -> ReplicaInfo:
        """Under an id that nobody had."""
        self._counters.moves += 1
        self._write_counters()
        return ReplicaInfo(f"{partition.replicas[0].replica_id.partition('.')[0]}.{self._counters.moves}", broker)

    def begin_rebalance(self, command: BeginRebalance) -> Rebalance | RayQueueError:
        self._counters.moves += 1
        self._write_counters()

        def partition(group_id: str) -> PartitionInfo | None:
            found = self.partition(group_id)
            return None if found is None else found[1]

        return self.plans.begin(command, self._counters.moves, partition, self.brokers)

    def _take_move(self, group_id: str, add: str) -> Move | None:
        move = self.moves.get(group_id)
        if move is None or move.add != add:
            return None
        del self.moves[group_id]
        self._store.delete(META, _MOVE + group_id.encode())
        return move

    def partition(self, group_id: str) -> tuple[TopicInfo, PartitionInfo] | None:
        name, _, number = group_id.rpartition(".")[0].rpartition("-")
        info = self.topics.get(name)
        if info is None or not number.isdigit() or int(number) >= len(info.partitions):
            return None
        partition = info.partitions[int(number)]
        return (info, partition) if partition.group_id == group_id else None

    def _retire(self, replica: PlacedReplica) -> None:
        """It is out of service, and its data is to be deleted."""
        self.plans.drop((replica.key,))
        self._strike(self.unmade, _UNMADE, (replica.key,))
        self._lost_no_more(replica.key)
        self._mark(self.doomed, _DOOMED, replica)

    def _in_service(self, key: ReplicaKey) -> PlacedReplica | None:
        """Not so one that is still to take another's place."""
        move = self.moves.get(key.group_id)
        return None if move is not None and move.add == key.replica_id else self._find(key)

    def _find(self, key: ReplicaKey) -> PlacedReplica | None:
        return next((placed[key] for placed in self._placed.values() if key in placed), None)

    def replicas_made(self, replicas: Iterable[tuple[str, str]]) -> None:
        self._strike(self.unmade, _UNMADE, replicas)

    def replicas_removed(self, replicas: Iterable[tuple[str, str]]) -> None:
        self._strike(self.doomed, _DOOMED, replicas)

    def _mark(self, table: dict[ReplicaKey, PlacedReplica], kind: bytes, replica: PlacedReplica) -> None:
        table[replica.key] = replica
        self._store.put(META, replica.key.row_key(kind), _encode(replica))

    def _strike(self, table: dict[ReplicaKey, PlacedReplica], kind: bytes, replicas: Iterable[tuple[str, str]]) -> None:
        for key in starmap(ReplicaKey, replicas):
            if table.pop(key, None) is not None:
                self._store.delete(META, key.row_key(kind))

    # -- rows and indexes ---------------------------------------------------------------------

    def _put_topic(self, info: TopicInfo, attempt: str) -> None:
        self.topics[info.name] = info
        self._attempts[info.name] = attempt
        self._store.put(META, _TOPIC + info.name.encode(), _encode(_TopicRow(info, attempt)))
        self._bump_version()

    def _bump_version(self) -> None:
        self._counters.version += 1
        self._write_counters()

    def _write_counters(self) -> None:
        self._store.put(META, _COUNTERS, _encode(self._counters))

    def _place(self, info: TopicInfo, partitions: Sequence[PartitionInfo]) -> None:
        for replica in self._index(info, partitions):
            self._mark(self.unmade, _UNMADE, replica)

    def _index(self, info: TopicInfo, partitions: Sequence[PartitionInfo]) -> list[PlacedReplica]:
        placed = _replicas(info, partitions)
        for replica in placed:
            self._placed.setdefault(replica.broker, {})[replica.key] = replica
        for partition in partitions:
            first = partition.replicas[0].broker
            self._leaders[first] = self._leaders.get(first, 0) + 1
        return placed

    def _unindex(self, info: TopicInfo, partitions: Sequence[PartitionInfo]) -> None:
        for replica in _replicas(info, partitions):
            del self._placed[replica.broker][replica.key]
        for partition in partitions:
            self._leaders[partition.replicas[0].broker] -= 1

    def load(self) -> None:
        """Become what the table says."""
        self.topics: dict[str, TopicInfo] = {}
        self.brokers: dict[str, BrokerRow] = {}
        self.unmade: dict[ReplicaKey, PlacedReplica] = {}
        self.doomed: dict[ReplicaKey, PlacedReplica] = {}
        self.coordinators: dict[str, str] = {}
        """Those that were added, by their brokers; and "" for all that have left."""
        self.expired: dict[str, int] = {}
        """Groups that partitions have still to forget, and up to which generation."""
        self.lost: dict[ReplicaKey, str] = {}
        """Replicas whose data is lost, and what they said of it."""
        self.missing: set[ReplicaKey] = set()
        """Those of them whose data is not where it should be, and no more is known against them."""
        self.moves: dict[str, Move] = {}
        """By Raft group."""
        self._attempts: dict[str, str] = {}
        self._placed: dict[str, dict[ReplicaKey, PlacedReplica]] = {}
        self._leaders: dict[str, int] = {}
        counters = self._store.get(META, _COUNTERS)
        self._counters = _Counters() if counters is None else msgspec.msgpack.decode(counters, type=_Counters)
        for row in self._rows(_BROKER):
            broker = msgspec.msgpack.decode(row, type=BrokerRow)
            self.brokers[broker.broker] = broker
        for row in self._rows(_TOPIC):
            topic = msgspec.msgpack.decode(row, type=_TopicRow)
            self.topics[topic.info.name] = topic.info
            self._attempts[topic.info.name] = topic.attempt
            self._index(topic.info, topic.info.partitions)
        for row in self._rows(_EXPIRED):
            group, generation = msgspec.msgpack.decode(row, type=tuple[str, int])
            self.expired[group] = generation
        for row in self._rows(_COORDINATOR):
            added = msgspec.msgpack.decode(row, type=PlacedReplica)
            self.coordinators[added.replica_id] = added.broker
        for kind, table in ((_UNMADE, self.unmade), (_DOOMED, self.doomed)):
            for row in self._rows(kind):
                replica = msgspec.msgpack.decode(row, type=PlacedReplica)
                table[replica.key] = replica
        for row in self._rows(_LOST):
            self._note_lost(msgspec.msgpack.decode(row, type=_LostRow))
        self.recoveries.load()
        for row in self._rows(_MOVE):
            self._load_move(msgspec.msgpack.decode(row, type=Move))
        self.plans.load()

    def _load_move(self, move: Move) -> None:
        self.moves[move.group_id] = move
        found = self.partition(move.group_id)
        if found is None:
            raise InvariantBrokenError(f"a replica of {move.group_id} is being replaced, which is not there")
        if move.adds:
            self._place_move(move, *found)

    def _place_move(self, move: Move, info: TopicInfo, partition: PartitionInfo) -> PlacedReplica:
        new = PlacedReplica(move.group_id, move.add, move.broker, info.name, partition.number)
        self._placed.setdefault(new.broker, {})[new.key] = new
        return new

    def _rows(self, kind: bytes) -> Iterable[bytes]:
        return (row for _, row in self._store.scan(META, kind, bytes([kind[0] + 1])))


def unknown_broker(broker: str, known: Iterable[str]) -> UnknownBrokerError:
    return UnknownBrokerError(f"there is no broker {broker!r}; there are {', '.join(sorted(known))}", broker=broker)


def unknown_topic(name: str) -> UnknownTopicError:
    return UnknownTopicError(f"there is no topic {name!r}", name=name)


def recreated_topic(info: TopicInfo, expected: int) -> TopicRecreatedError:
    return TopicRecreatedError(
        f"topic {info.name!r} was deleted and made again", topic=info.name, topic_id=info.topic_id, expected=expected
    )


def _check_placement(placement: Placement, partitions: int, replication: int) -> None:
    if len(placement) != partitions or any(len(brokers) != replication for brokers in placement):
        raise InvalidInputError(
            f"the topic changed meanwhile: {len(placement)} partitions were placed where {partitions} are new; retry"
        )


def _partitions(topic: str, topic_id: int, first: int, placement: Placement) -> tuple[PartitionInfo, ...]:
    return tuple(
        PartitionInfo(
            number,
            partition_group_id(topic, number, topic_id),
            tuple(ReplicaInfo(replica_id(position), broker) for position, broker in enumerate(brokers)),
        )
        for number, brokers in enumerate(placement, first)
    )


def _replicas(info: TopicInfo, partitions: Iterable[PartitionInfo]) -> list[PlacedReplica]:
    return [
        PlacedReplica(partition.group_id, replica.replica_id, replica.broker, info.name, partition.number)
        for partition in partitions
        for replica in partition.replicas
    ]
