"""Topics, brokers, where each replica is, and the numbers that are handed out once.

Owns these rows of the META table, and writes each change through to it:

    c                      counters and the cluster's id
    b<broker>              a broker
    t<name>                a topic
    u<group id>\\0<node>    a replica whose data was not made yet
    k<node>                a replica of the coordinator that was added after the cluster was made
    e<group>               the generation up to which partitions have still to forget a group that expired
    d<group id>\\0<node>    a replica of a deleted topic that was not removed yet
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from rayqueue.cluster.commands import AlterTopic, CreateTopic, PlaceCoordinator, PutBroker
from rayqueue.cluster.placement import Placement, partition_group_id, replica_id
from rayqueue.cluster.tables import META
from rayqueue.errors import InvalidInputError, RayQueueError, TopicExistsError, TopicRecreatedError, UnknownTopicError
from rayqueue.log.store import LogStore
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicInfo

_COUNTERS = b"c"
_BROKER = b"b"
_TOPIC = b"t"
_UNMADE = b"u"
_DOOMED = b"d"
_COORDINATOR = b"k"
_EXPIRED = b"e"
_CLOCK_STEP_MS = 1_000


class BrokerRow(msgspec.Struct, frozen=True, array_like=True):
    """A node that has, or may have, replicas. It may be away just now."""

    broker: str
    host: str
    ray_node: str
    memory_bytes: int = 0
    """Of its host; 0 if it has not said so yet."""
    directory: str = ""
    """Of its replicas, below the node's data directory; "" is that one itself."""


class PlacedReplica(msgspec.Struct, frozen=True, array_like=True):
    group_id: str
    node: str
    broker: str
    topic: str
    partition: int

    @property
    def key(self) -> ReplicaKey:
        return ReplicaKey(self.group_id, self.node)


class ReplicaKey(NamedTuple):
    group_id: str
    node: str

    def row_key(self, kind: bytes) -> bytes:
        return kind + self.group_id.encode() + b"\0" + self.node.encode()


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


class _TopicRow(msgspec.Struct, frozen=True, array_like=True):
    info: TopicInfo
    attempt: str


_encode = msgspec.msgpack.Encoder().encode


class Catalog:
    def __init__(self, store: LogStore) -> None:
        self._store = store
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
        row = BrokerRow(command.broker, command.host, command.ray_node, command.memory_bytes, command.directory)
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

    def alter_topic(self, command: AlterTopic) -> TopicInfo | RayQueueError:
        info = self.topics.get(command.name)
        if info is None:
            return unknown_topic(command.name)
        if command.topic_id not in (0, info.topic_id):
            return recreated_topic(info, command.topic_id)
        try:
            settings = info.settings.changed(command.changes)
            _check_placement(command.placement, settings.partitions - len(info.partitions), settings.replication)
        except InvalidInputError as error:
            return error
        if settings == info.settings:
            return info
        new = _partitions(info.name, info.topic_id, len(info.partitions), command.placement)
        info = TopicInfo(info.name, info.topic_id, settings, info.partitions + new, info.version + 1)
        self._put_topic(info, self._attempts[info.name])
        self._place(info, new)
        return info

    def delete_topic(self, name: str, topic_id: int) -> bool:
        info = self.topics.get(name)
        if info is None or topic_id not in (0, info.topic_id):
            return False
        del self.topics[name], self._attempts[name]
        self._store.delete(META, _TOPIC + name.encode())
        for replica in _replicas(info, info.partitions):
            self._unplace(replica)
            self.doomed[replica.key] = replica
            self._store.put(META, replica.key.row_key(_DOOMED), _encode(replica))
            if self.unmade.pop(replica.key, None) is not None:
                self._store.delete(META, replica.key.row_key(_UNMADE))
        self._bump_version()
        return True

    def place_coordinator(self, command: PlaceCoordinator) -> None:
        if command.node in self.coordinators or command.broker in self.coordinators.values():
            return
        replica = PlacedReplica(command.group_id, command.node, command.broker, "", 0)
        self.coordinators[replica.node] = replica.broker
        self._store.put(META, _COORDINATOR + replica.node.encode(), _encode(replica))
        self.unmade[replica.key] = replica
        self._store.put(META, replica.key.row_key(_UNMADE), _encode(replica))

    def replicas_made(self, replicas: Iterable[tuple[str, str]]) -> None:
        self._strike(self.unmade, _UNMADE, replicas)

    def replicas_removed(self, replicas: Iterable[tuple[str, str]]) -> None:
        self._strike(self.doomed, _DOOMED, replicas)

    def _strike(self, table: dict[ReplicaKey, PlacedReplica], kind: bytes, replicas: Iterable[tuple[str, str]]) -> None:
        for group_id, node in replicas:
            key = ReplicaKey(group_id, node)
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

    def _place(self, info: TopicInfo, partitions: Iterable[PartitionInfo]) -> None:
        for replica in self._index(info, partitions):
            self.unmade[replica.key] = replica
            self._store.put(META, replica.key.row_key(_UNMADE), _encode(replica))

    def _index(self, info: TopicInfo, partitions: Iterable[PartitionInfo]) -> list[PlacedReplica]:
        placed = _replicas(info, partitions)
        for replica in placed:
            self._placed.setdefault(replica.broker, {})[replica.key] = replica
            if replica.node == replica_id(0):
                self._leaders[replica.broker] = self._leaders.get(replica.broker, 0) + 1
        return placed

    def _unplace(self, replica: PlacedReplica) -> None:
        del self._placed[replica.broker][replica.key]
        if replica.node == replica_id(0):
            self._leaders[replica.broker] -= 1

    def load(self) -> None:
        """Become what the table says."""
        self.topics: dict[str, TopicInfo] = {}
        self.brokers: dict[str, BrokerRow] = {}
        self.unmade: dict[ReplicaKey, PlacedReplica] = {}
        self.doomed: dict[ReplicaKey, PlacedReplica] = {}
        self.coordinators: dict[str, str] = {}
        """Those that were added, by their brokers."""
        self.expired: dict[str, int] = {}
        """Groups that partitions have still to forget, and up to which generation."""
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
            self.coordinators[added.node] = added.broker
        for kind, table in ((_UNMADE, self.unmade), (_DOOMED, self.doomed)):
            for row in self._rows(kind):
                replica = msgspec.msgpack.decode(row, type=PlacedReplica)
                table[replica.key] = replica

    def _rows(self, kind: bytes) -> Iterable[bytes]:
        return (row for _, row in self._store.scan(META, kind, bytes([kind[0] + 1])))


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
        PlacedReplica(partition.group_id, replica.node, replica.broker, info.name, partition.number)
        for partition in partitions
        for replica in partition.replicas
    ]
