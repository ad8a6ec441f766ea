"""A queue without Ray, Raft or sockets, for tests of what is above the client's channels.

Its partitions are the real state machine behind the real admission; every
request is carried out at once. A driver can be killed before or after any
request: from then on nothing it does has an effect, until ``revive``.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

from rayqueue.client.admin import _refuse_differences
from rayqueue.client.io import IoThread
from rayqueue.client.routing import same_topic
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError, UnknownTopicError
from rayqueue.partition import Admission, Appended, PartitionSettings
from rayqueue.partition.commands import commit_command, forget_group_command, pin_command, trim_command
from rayqueue.partition.reader import offset_for_time, read, read_lanes
from rayqueue.protocol import calls
from rayqueue.protocol.data import Appended as AppendedAnswer
from rayqueue.protocol.data import FetchAnswer, FetchedBatch, FetchRequest
from rayqueue.protocol.topics import PartitionInfo, TopicInfo, TopicPartition, TopicSettings
from rayqueue.records import Record, RecordBatch
from tests.unit.partition_log import Log

_numbers = count()


class Killed(RayQueueError):  # noqa: N818  # not an error of ours
    """The driver died here."""


class MemoryQueue:
    """As much of ``RayQueue`` as the bridges use."""

    def __init__(self) -> None:
        self.settings = Settings(client={"retry_min_ms": 1, "retry_max_ms": 2})
        self.namespace = f"memory-{next(_numbers)}"
        self.io = IoThread.shared()
        self.infos: dict[str, TopicInfo] = {}
        self.partitions: dict[TopicPartition, MemoryPartition] = {}
        self.routes = MemoryRoutes(self)
        self.steps = 0
        self.kill_at: tuple[int, bool] | None = None
        """The number of the request, and whether it is carried out first."""
        self.fail_next: list[tuple[RayQueueError, bool]] = []
        """Errors for the next appends, and whether these are carried out anyway."""
        self.dead = False
        self._producer_ids = 0
        self._topic_ids = 0

    def create_topic(self, name: str, *, if_missing: bool = False, **settings: Any) -> TopicInfo:
        if if_missing and name in self.infos:
            _refuse_differences(self.infos[name], settings)
            return self.infos[name]
        self._topic_ids += 1
        made = TopicSettings(**settings)
        numbers = range(made.partitions)
        info = TopicInfo(name, self._topic_ids, made, tuple(PartitionInfo(n, f"{name}-{n}", ()) for n in numbers))
        self.infos[name] = info
        for number in numbers:
            self.partitions[TopicPartition(name, number)] = MemoryPartition(self, made)
        return info

    def delete_topic(self, name: str) -> None:
        for part in self.infos.pop(name).partitions:
            del self.partitions[TopicPartition(name, part.number)]

    def add_partition(self, name: str) -> None:
        info = self.infos[name]
        number = len(info.partitions)
        parts = (*info.partitions, PartitionInfo(number, f"{name}-{number}", ()))
        self.infos[name] = TopicInfo(name, info.topic_id, info.settings, parts)
        self.partitions[TopicPartition(name, number)] = MemoryPartition(self, info.settings)

    def records(self, topic: str) -> list[Record]:
        """All records, partition by partition."""
        found: list[Record] = []
        for number in range(len(self.infos[topic].partitions)):
            found += self.partitions[TopicPartition(topic, number)].records(topic, number)
        return found

    def ends(self, topic: str) -> list[int]:
        """Of its partitions."""
        numbers = range(len(self.infos[topic].partitions))
        return [self.partitions[TopicPartition(topic, number)].log.partition.next_offset for number in numbers]

    def append(self, topic: str, partition: int, *values: bytes, **fields: Any) -> None:
        """As another producer, whatever happens to the driver."""
        batch = RecordBatch.encode(list(values), **{"timestamps": 1_000, **fields})
        self.partitions[TopicPartition(topic, partition)].log.apply(batch)

    def new_producer_ids(self, count: int) -> int:
        first = self._producer_ids + 1
        self._producer_ids += count
        return first

    def revive(self) -> None:
        self.dead, self.kill_at, self.steps = False, None, 0

    def step(self, carry_out: Any) -> Any:
        """One request of the driver."""
        if self.dead:
            raise Killed("the driver is dead")
        self.steps += 1
        if self.kill_at is not None and self.kill_at[0] == self.steps:
            self.dead = True
            if self.kill_at[1]:
                carry_out()
            raise Killed(f"killed at request {self.steps}")
        return carry_out()


class MemoryPartition:
    def __init__(self, queue: MemoryQueue, topic: TopicSettings) -> None:
        self._queue = queue
        self.log = Log(PartitionSettings.of(topic, 1))
        self.admission = Admission(self.log.partition)
        self.channel = MemoryChannel(queue, self)

    # What a route and a channel are asked for, and a test.

    def records(self, topic: str, number: int) -> list[Record]:
        start, end = self.log.partition.start_offset, self.log.partition.next_offset
        if start == end:
            return []
        with self.log.snapshot() as snapshot:
            batches = read(snapshot, start, 2**40)
        decoded = [RecordBatch.decode(each.payload, base_offset=each.base_offset) for each in batches]
        return [record for batch in decoded for record in batch.records(topic, number) if record.offset >= start]

    def forget_producers(self) -> None:
        """As if a thousand others had written since."""
        for producer in list(self.log.partition.producers._known):
            del self.log.partition.producers._known[producer]
        self.admission.reset()

    def append(self, payload: bytes) -> AppendedAnswer:
        known = self.admission.admit(payload)
        answer = known if known is not None else self.log.apply(payload)
        if isinstance(answer, RayQueueError):
            raise answer
        assert isinstance(answer, Appended)
        return AppendedAnswer(answer.base_offset, answer.count, answer.duplicate)

    def fetch(self, request: FetchRequest) -> FetchAnswer:
        with self.log.snapshot() as snapshot:
            found = read_lanes(snapshot, request.cursors, request.max_bytes)
        batches = [FetchedBatch(each.base_offset, each.count, memoryview(each.payload)) for each in found]
        return FetchAnswer(batches, self.log.partition.next_offset, self.log.partition.start_offset)

    def call(self, call: calls.Call) -> Any:
        partition = self.log.partition
        match call:
            case calls.GetBounds():
                return calls.Bounds(partition.start_offset, partition.next_offset)
            case calls.GetPosition(group=group):
                return partition.position(group)
            case calls.GetGroups():
                return partition.positions()
            case calls.GetStatus():
                end = partition.next_offset
                return calls.ReplicaStatus("r1", "leader", "r1", 1, partition.start_offset, end, partition.total_bytes)
            case calls.FindOffset(timestamp_ms=timestamp_ms):
                with self.log.snapshot() as snapshot:
                    return offset_for_time(snapshot, timestamp_ms)
            case calls.AwaitRoom():
                rooms: list[Any] = []
                self.admission.await_room(call, 0, 0.0, rooms.append)
                self.admission.advance(0.0)
                return rooms[0]
            case calls.Commit():
                command = commit_command(call.group, call.generation, call.offsets, metadata=call.metadata)
            case calls.Pin():
                command = pin_command(call.group, call.pinned)
            case calls.ForgetGroup():
                seen = None if call.seen is None else (call.seen.generation, call.seen.offsets)
                command = forget_group_command(call.group, call.generation, seen)
            case calls.Trim():
                command = trim_command(call.before)
            case _:
                raise NotImplementedError(call)
        answer = self.log.apply(command)
        if isinstance(answer, RayQueueError):
            raise answer
        return answer


class MemoryChannel:
    closed = False

    def __init__(self, queue: MemoryQueue, partition: MemoryPartition) -> None:
        self._queue = queue
        self._partition = partition

    def append(self, payload: bytes) -> asyncio.Future[AppendedAnswer]:
        answer: asyncio.Future[AppendedAnswer] = asyncio.get_running_loop().create_future()
        try:
            if self._queue.fail_next:
                error, carried_out = self._queue.fail_next.pop(0)
                if carried_out:
                    self._partition.append(payload)
                raise error
            answer.set_result(self._queue.step(lambda: self._partition.append(payload)))
        except RayQueueError as error:
            answer.set_exception(error)
        return answer

    async def call(self, call: calls.Call, **_: Any) -> Any:
        return self._queue.step(lambda: self._partition.call(call))

    def fetch(self, request: FetchRequest) -> asyncio.Future[FetchAnswer]:
        answer: asyncio.Future[FetchAnswer] = asyncio.get_running_loop().create_future()
        try:
            answer.set_result(self._queue.step(lambda: self._partition.fetch(request)))
        except RayQueueError as error:
            answer.set_exception(error)
        return answer


class MemoryRoute:
    def __init__(self, queue: MemoryQueue, partition: MemoryPartition) -> None:
        self._queue = queue
        self._partition = partition
        self.leader_channel = partition.channel
        self.failures: list[RayQueueError] = []

    async def leader(self) -> MemoryChannel:
        return self.leader_channel

    async def any_replica(self, prefer_host: str | None = None) -> MemoryChannel:
        return self.leader_channel

    async def call(self, call: calls.Call, **_: Any) -> Any:
        return self._queue.step(lambda: self._partition.call(call))

    def failed(self, error: RayQueueError) -> None:
        self.failures.append(error)


class MemoryRoutes:
    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue
        self._routes: dict[MemoryPartition, MemoryRoute] = {}
        self.coordinator = MemoryCoordinator(queue)

    async def topic(self, name: str, *, refresh: bool = False) -> TopicInfo:
        info = self._queue.infos.get(name)
        if info is None:
            raise UnknownTopicError(f"there is no topic {name!r}")
        return info

    async def partition(self, place: TopicPartition, topic_id: int | None = None) -> MemoryRoute:
        same_topic(await self.topic(place.topic), topic_id)
        partition = self._queue.partitions[place]
        if partition not in self._routes:
            self._routes[partition] = MemoryRoute(self._queue, partition)
        return self._routes[partition]


class MemoryCoordinator:
    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue

    async def call(self, call: calls.Call, **_: Any) -> Any:
        queue = self._queue
        if isinstance(call, calls.GetTopics):
            names = call.names or ()
            return queue.step(
                lambda: calls.Topics(1, tuple(queue.infos[name] for name in names if name in queue.infos))
            )
        assert isinstance(call, calls.NewProducerIds)
        return queue.step(lambda: queue.new_producer_ids(call.count))
