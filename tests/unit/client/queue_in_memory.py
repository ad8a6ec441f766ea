"""The queue in memory for tests of the bridges: its driver can be killed before or after any request.

From then on nothing that the driver does has an effect, until ``revive``. The
queue is ``rayqueue.testing.memory``; what is counted, and killed, are the requests
that the code under test sends to the coordinator and to partitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import Any, NamedTuple

from rayqueue.config import Settings
from rayqueue.errors import RayQueueError
from rayqueue.partition import Partition
from rayqueue.partition.reader import read, read_committed, read_lanes
from rayqueue.partition.transactions.commands import end_transaction_command
from rayqueue.protocol.calls import Call
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchAnswer, FetchedBatch, FetchRequest
from rayqueue.protocol.frames import Frame
from rayqueue.protocol.topics import TopicInfo, TopicPartition
from rayqueue.records import Record, RecordBatch
from rayqueue.testing import memory
from rayqueue.testing.memory_cluster import MemoryCluster, with_secret
from rayqueue.testing.memory_group import MemoryPartition

_numbers = count()


class Killed(RayQueueError):  # noqa: N818  # not an error of ours
    """The driver died here."""


class MemoryQueue(memory.MemoryQueue):
    def __init__(self) -> None:
        settings = with_secret(Settings(client={"retry_min_ms": 1, "retry_max_ms": 2}))
        super().__init__(settings, memory._Queue(settings, 3))
        self.namespace = f"memory-{next(_numbers)}"
        self.steps = 0
        self.kill_at: tuple[int, bool] | None = None
        """The number of the request, and whether it is carried out first."""
        self.fail_appends: list[tuple[RayQueueError, bool]] = []
        """Errors for the next appends, and whether these are carried out anyway."""
        self.dead = False
        self._driver = _DriverRoutes(self, super().routes)

    @property
    def routes(self) -> Any:
        return self._driver

    # -- what tests see and do, whatever happens to the driver ---------------------------------

    @property
    def cluster_in_memory(self) -> MemoryCluster:
        return self._queue.cluster

    @property
    def infos(self) -> Mapping[str, TopicInfo]:
        return dict(self.cluster_in_memory.machine.topics)

    @property
    def partitions(self) -> _Partitions:
        return _Partitions(self)

    def add_partition(self, name: str) -> None:
        self.alter_topic(name, partitions=len(self.infos[name].partitions) + 1)

    def records(self, topic: str) -> list[Record]:
        """All records, partition by partition."""
        found: list[Record] = []
        for number in range(len(self.infos[topic].partitions)):
            found += self.partitions[TopicPartition(topic, number)].records(topic, number)
        return found

    def committed(self, topic: str) -> list[Record]:
        """What readers of committed records see, once partitions have asked what became of open transactions."""
        found: list[Record] = []
        for number in range(len(self.infos[topic].partitions)):
            found += self.partitions[TopicPartition(topic, number)].committed(topic, number)
        return found

    def ends(self, topic: str) -> list[int]:
        """Of its partitions."""
        numbers = range(len(self.infos[topic].partitions))
        return [self.partitions[TopicPartition(topic, number)].log.partition.next_offset for number in numbers]

    def append(self, topic: str, partition: int, *values: bytes, **fields: Any) -> None:
        """As another producer."""
        batch = RecordBatch.encode(list(values), **{"timestamps": 1_000, **fields})
        self.partitions[TopicPartition(topic, partition)].log.apply(batch)

    # -- the driver's life ----------------------------------------------------------------------

    def revive(self) -> None:
        self.dead, self.kill_at, self.steps = False, None, 0

    def next_step(self) -> bool:
        """One request of the driver. Whether it is its last one; ``Killed`` if it is not even sent."""
        if self.dead:
            raise Killed("the driver is dead")
        self.steps += 1
        if self.kill_at is not None and self.kill_at[0] == self.steps:
            self.dead = True
            if not self.kill_at[1]:
                raise self.killed()
        return self.dead

    def killed(self) -> Killed:
        return Killed(f"killed at request {self.steps}")

    async def step(self, carry_out: Callable[[], Awaitable[Any]]) -> Any:
        last = self.next_step()
        answer = await carry_out()
        if last:
            raise self.killed()
        return answer


class _Partitions:
    def __init__(self, queue: MemoryQueue) -> None:
        self._queue = queue

    def __getitem__(self, place: TopicPartition) -> _Partition:
        (group,) = self._queue.cluster_in_memory.partitions(place.topic, place.partition)
        return _Partition(self._queue, place, group)


class _Log(NamedTuple):
    partition: Partition
    apply: Callable[[bytes], Any]


class _Partition:
    """One partition, as a test sees it."""

    def __init__(self, queue: MemoryQueue, place: TopicPartition, group: MemoryPartition) -> None:
        self._queue = queue
        self._place = place
        self._group = group
        self.admission = group.admission

    @property
    def log(self) -> _Log:
        return _Log(self._group.partition, lambda payload: self._queue._do(lambda _: self._group.commit(payload)))

    def records(self, topic: str, number: int) -> list[Record]:
        start, end = self._group.partition.start_offset, self._group.partition.next_offset
        if start == end:
            return []
        with self._group.store.snapshot() as snapshot:
            batches = read(snapshot, start, 2**40)
        decoded = [RecordBatch.decode(each.payload, base_offset=each.base_offset) for each in batches]
        return [record for batch in decoded for record in batch.records(topic, number) if record.offset >= start]

    def committed(self, topic: str, number: int) -> list[Record]:
        group = self._group
        fate = self._queue.cluster_in_memory.machine.transactions.fate

        def settle(_: Any) -> None:
            for key in [each.key for each in group.partition.transactions]:
                became = fate(key, group.group_id)
                if became != "open":
                    group.commit(end_transaction_command(*key, commit=became == "committed"))

        self._queue._do(settle)
        with group.store.snapshot() as snapshot:
            start = Cursor(ANY_LANE, group.partition.start_offset)
            batches = read_committed(snapshot, [start], 2**40).found
        decoded = [RecordBatch.decode(each.payload, base_offset=each.base_offset) for each in batches]
        return [record for batch in decoded for record in batch.records(topic, number)]

    def forget_producers(self) -> None:
        """As if a thousand others had written since."""

        self._queue._do(lambda _: self.forget_producers_here())

    def forget_producers_here(self) -> None:
        """In the I/O thread."""
        self._group.partition.producers._known.clear()
        self.admission.reset()

    def listen(self, heard: Callable[[Frame], None]) -> None:
        """Every request is told in the I/O thread, before it is carried out."""
        received = self._group.received

        def listening(connection: Any, frame: Frame) -> None:
            heard(frame)
            received(connection, frame)

        self._group.received = listening  # type: ignore[method-assign]

    def fetch(self, request: FetchRequest) -> FetchAnswer:
        with self._group.store.snapshot() as snapshot:
            found = read_lanes(snapshot, request.cursors, request.max_bytes)
        batches = [FetchedBatch(each.base_offset, each.count, memoryview(each.payload)) for each in found]
        return FetchAnswer(batches, self._group.partition.next_offset, self._group.partition.start_offset)

    def call(self, call: Call) -> Any:
        async def ask() -> Any:
            route = await self._queue._driver.beneath.partition(self._place)
            return await route.call(call)

        return self._queue.io.call(ask())


# -- the driver's requests ----------------------------------------------------------------------


class _Beneath:
    """Everything that is not counted is left to the real one."""

    def __init__(self, queue: MemoryQueue, beneath: Any) -> None:
        self._queue = queue
        self.beneath = beneath
        self._known: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)

    def _wrapped(self, kind: type[_Beneath], beneath: Any) -> Any:
        """Always the same for the same."""
        if beneath is None:
            return None
        if beneath not in self._known:
            self._known[beneath] = kind(self._queue, beneath)
        return self._known[beneath]


class _DriverRoutes(_Beneath):
    @property
    def coordinator(self) -> Any:
        return self._wrapped(_DriverRoute, self.beneath.coordinator)

    async def partition(self, place: TopicPartition, topic_id: int | None = None) -> Any:
        return self._wrapped(_DriverRoute, await self.beneath.partition(place, topic_id))


class _DriverRoute(_Beneath):
    @property
    def leader_channel(self) -> Any:
        return self._wrapped(_DriverChannel, self.beneath.leader_channel)

    trouble = ""

    async def leader(self) -> Any:
        return self._wrapped(_DriverChannel, await self.beneath.leader())

    async def any_replica(self, prefer_host: str | None = None) -> Any:
        return self._wrapped(_DriverChannel, await self.beneath.any_replica(prefer_host))

    async def call(self, call: Call, **options: Any) -> Any:
        return await self._queue.step(lambda: self.beneath.call(call, **options))


class _DriverChannel(_Beneath):
    def append(self, batch: bytes, *kind: Any) -> asyncio.Future[Any]:
        error: RayQueueError | None = None
        try:
            if self._queue.fail_appends:
                error, carried_out = self._queue.fail_appends.pop(0)
                if not carried_out:
                    raise error
            elif self._queue.next_step():
                error = self._queue.killed()
        except RayQueueError as refused:
            return _failed(refused)
        answer: asyncio.Future[Any] = self.beneath.append(batch, *kind)
        return answer if error is None else _failed(error)

    def fetch(self, request: FetchRequest) -> asyncio.Future[Any]:
        try:
            if self._queue.next_step():
                raise self._queue.killed()
        except Killed as killed:
            return _failed(killed)
        return self.beneath.fetch(request)  # type: ignore[no-any-return]

    def call(self, call: Call, **options: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._queue.step(lambda: self.beneath.call(call, **options)))


def _failed(error: RayQueueError) -> asyncio.Future[Any]:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    answer.set_exception(error)
    return answer
