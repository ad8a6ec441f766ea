"""Parts of producers' tests: virtual time, and a leader that does what a script says.

Behind the script stands the real partition: admission, dedupe and order are
not imitated. Only the way there and back is, with everything that can happen
on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any

from rayqueue.client.producer.accumulator import Accumulator
from rayqueue.client.producer.batch import COMPRESSIONS
from rayqueue.client.producer.sender import Sender
from rayqueue.config import ClientSettings, ProducerSettings
from rayqueue.errors import (
    DiskFullError,
    InvalidInputError,
    LeadershipLostError,
    NotLeaderError,
    OutcomeUnknownError,
    QueueFullError,
    RayQueueError,
    ReplicaClosedError,
)
from rayqueue.net.interfaces import same_topic
from rayqueue.partition import Admission, Appended, commit_command
from rayqueue.partition.settings import PartitionSettings
from rayqueue.protocol.data import Appended as WireAppended
from rayqueue.protocol.frames import Kind
from rayqueue.protocol.topics import PartitionInfo, TopicInfo, TopicPartition, TopicSettings
from rayqueue.records import RecordBatch
from tests.unit.partition.partition_log import Log


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only while everybody waits for it, and then at once."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits, and nobody for the clock"
        if timeout > 0:
            self._loop.now_s += timeout
        return super().select(0)


# What may happen to one attempt at an append.
OK = "ok"
SLOW = "slow"  # written, answered later than those after it
NOT_LEADER = "not leader"
FULL = "full"
DISK_FULL = "disk full"
INVALID = "invalid"
LOST = "lost"  # the leader is deposed; nothing was written
LOST_WRITTEN = "lost, written"  # the same, but a majority had it
BROKEN = "broken"  # the connection breaks before it arrives
BROKEN_WRITTEN = "broken, written"  # after it was written
LATE = "late"  # the connection breaks, and it arrives later all the same, with those behind it
SILENT = "silent"  # no answer, ever, nor to those behind it
SILENT_WRITTEN = "silent, written"
ACTIONS = (
    *(OK, SLOW, NOT_LEADER, FULL, DISK_FULL, INVALID, LOST, LOST_WRITTEN),
    *(BROKEN, BROKEN_WRITTEN, LATE, SILENT, SILENT_WRITTEN),
)

LATENCY_S = 0.002


class ScriptedPartition:
    """A partition, its leader, and the script of what happens to each attempt. After its end all goes well."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        script: Iterable[str] = (),
        *,
        lanes: int = 1,
        producers: int = 1024,
        **bounds: int | None,
    ) -> None:
        self.loop = loop
        self.script: Iterator[str] = iter(script)
        self.log = Log(PartitionSettings(lanes=lanes, max_producers=producers, **bounds))  # type: ignore[arg-type]
        self.admission = Admission(self.log.partition)
        self.records: list[bytes | None] = []
        self.lanes: list[int] = []
        self.attempts = 0
        self.channels: list[ScriptedChannel] = []
        self.leaderless: RayQueueError | None = None
        self._timer: asyncio.TimerHandle | None = None

    # the route

    trouble = ""

    async def leader(self) -> ScriptedChannel:
        await asyncio.sleep(LATENCY_S)
        if self.leaderless is not None:
            raise self.leaderless
        if not self.channels or self.channels[-1].closed or self.channels[-1].doubted:
            self.channels.append(ScriptedChannel(self))
        return self.channels[-1]

    def failed(self, error: RayQueueError) -> None:
        if self.channels and self.channels[-1].silent:
            self.channels[-1].doubted = True

    # the leader

    def write(self, batch: bytes) -> WireAppended:
        """As a leader does it whose majority is always there."""
        known = self.admission.admit(batch)
        answer = self.log.apply(batch) if known is None else known
        if isinstance(answer, RayQueueError):
            raise answer
        assert isinstance(answer, Appended)
        if not answer.duplicate:
            decoded = RecordBatch.decode(batch)
            assert answer.base_offset == len(self.records)
            self.records += decoded.values()
            self.lanes += [decoded.header.lane] * len(decoded)
            most = self.log.settings.max_backlog_records
            assert most is None or self.log.partition.backlog().records <= most
        self.tick()
        return WireAppended(*answer)

    def consume(self, records: int) -> None:
        """A group commits so many more, or all."""
        known = self.log.partition.position("g")
        to = min(self.log.partition.next_offset, records + (known.offsets[0] if known is not None else 0))
        self.log.apply(commit_command("g", 1, dict.fromkeys(range(self.log.settings.lanes), to)))
        self.tick()

    def tick(self) -> None:
        """Grant room to those who wait, now and whenever somebody's time is up."""
        now_s, line = self.loop.time(), self.admission.line
        self.admission.advance(now_s)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if line.next_deadline_s < float("inf"):
            self._timer = self.loop.call_later(max(0.001, line.next_deadline_s - now_s), self.tick)

    def write_quietly(self, batch: bytes) -> None:
        with contextlib.suppress(RayQueueError):
            self.write(batch)

    def lose_everything(self) -> None:
        """Another replica leads, which has nothing of it."""
        self.log = Log(self.log.settings)
        self.admission = Admission(self.log.partition)
        self.records.clear()
        self.lanes.clear()


class ScriptedChannel:
    def __init__(self, partition: ScriptedPartition) -> None:
        self.partition = partition
        self.closed = False
        self.doubted = False
        self.silent = False
        self.queued_bytes = 0
        self.kinds: list[Kind] = []
        self._pending: list[asyncio.Future[WireAppended]] = []
        self._late = False

    def append(self, batch: bytes, kind: Kind = Kind.APPEND) -> asyncio.Future[WireAppended]:
        loop, partition = self.partition.loop, self.partition
        self.kinds.append(kind)
        future: asyncio.Future[WireAppended] = loop.create_future()
        if self.closed:
            future.set_exception(ReplicaClosedError("the connection is gone; nothing was sent"))
            return future
        if kind is Kind.APPEND_UNACKED:
            partition.write_quietly(batch)
            future.set_result(WireAppended(None, 0, False))
            return future
        partition.attempts += 1
        self._pending.append(future)
        if self._late:
            loop.call_later(0.05, partition.write_quietly, batch)
            return future
        if self.silent:
            return future
        action = next(partition.script, OK)
        if action in (LOST_WRITTEN, BROKEN_WRITTEN, SILENT_WRITTEN):
            partition.write_quietly(batch)
        if action in (OK, SLOW):
            self._answer(future, lambda: partition.write(batch), LATENCY_S * (10 if action == SLOW else 1))
        elif action in (BROKEN, BROKEN_WRITTEN):
            loop.call_later(LATENCY_S, self.break_off)
        elif action == LATE:
            self._late = True
            loop.call_later(0.05, partition.write_quietly, batch)
            loop.call_later(LATENCY_S, self.break_off)
        elif action in (SILENT, SILENT_WRITTEN):
            self.silent = True
        else:
            self._answer(future, lambda: _refuse(action), LATENCY_S)
        return future

    def call(self, call: Any, *, may_take_ms: int = 0) -> asyncio.Future[Any]:
        """``AwaitRoom``, on the way there and back as long as an append."""
        loop, partition = self.partition.loop, self.partition
        future: asyncio.Future[Any] = loop.create_future()
        self._pending.append(future)

        def settle(answer: Any) -> None:
            if future.done():
                return
            if isinstance(answer, RayQueueError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        def ask() -> None:
            if self.closed or self.silent:
                return

            def back(answer: Any) -> None:
                loop.call_later(LATENCY_S / 2, settle, answer)

            try:
                partition.admission.await_room(call, id(self), loop.time() + call.wait_ms / 1000, back)
            except RayQueueError as error:
                back(error)
            partition.tick()

        loop.call_later(LATENCY_S / 2, ask)
        return future

    def _answer(self, future: asyncio.Future[WireAppended], answer: Callable[[], WireAppended], after_s: float) -> None:
        """Carried out now, answered later."""
        result: WireAppended | RayQueueError
        try:
            result = answer()
        except RayQueueError as error:
            result = error

        def deliver() -> None:
            if future.done():
                return
            if isinstance(result, RayQueueError):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.partition.loop.call_later(after_s, deliver)

    def break_off(self) -> None:
        self.closed = True
        for future in self._pending:
            if not future.done():
                future.set_exception(OutcomeUnknownError("the connection broke"))


def _refuse(action: str) -> WireAppended:
    raise {
        NOT_LEADER: NotLeaderError("not me"),
        FULL: QueueFullError("full"),
        DISK_FULL: DiskFullError("no space"),
        INVALID: InvalidInputError("bad batch"),
        LOST: LeadershipLostError("deposed"),
        LOST_WRITTEN: LeadershipLostError("deposed"),
    }[action]


class ScriptedRoutes:
    """The cluster: one topic, ``orders``."""

    def __init__(self, partitions: list[ScriptedPartition], lanes: int = 1) -> None:
        self.partitions = partitions
        self.lanes = lanes
        self.error: RayQueueError | None = None
        self.topic_id = 1
        self.ids = 0
        self.coordinator = self

    async def call(self, call: Any) -> int:
        await asyncio.sleep(LATENCY_S)
        self.ids += call.count
        return self.ids - call.count + 1  # type: ignore[no-any-return]

    def info(self) -> TopicInfo:
        count = len(self.partitions)
        limits = self.partitions[0].log.settings
        settings = TopicSettings(
            partitions=count,
            lanes=self.lanes,
            max_backlog_records=limits.max_backlog_records,
            max_backlog_bytes=limits.max_backlog_bytes,
        )
        parts = tuple(PartitionInfo(n, f"orders-{n}.{self.topic_id}", ()) for n in range(count))
        return TopicInfo("orders", self.topic_id, settings, parts)

    async def topic(self, name: str, *, refresh: bool = False) -> TopicInfo:
        if self.error is not None:
            raise self.error
        return self.info()

    def cached_topic(self, name: str) -> TopicInfo | None:
        return self.info()

    async def partition(self, partition: TopicPartition, topic_id: int | None = None) -> ScriptedPartition:
        if self.error is not None:
            raise self.error
        same_topic(self.info(), topic_id)
        return self.partitions[partition.partition]


class Bench:
    """A sender with its accumulator, in virtual time, in front of scripted partitions."""

    def __init__(
        self,
        script: Iterable[str] = (),
        *,
        partitions: int = 1,
        lanes: int = 1,
        producers: int = 1024,
        seed: int = 0,
        max_backlog_records: int | None = None,
        max_backlog_bytes: int | None = None,
        **settings: Any,
    ) -> None:
        self.loop = VirtualLoop()
        asyncio.set_event_loop(self.loop)
        script = iter(script)
        self.partitions = [
            ScriptedPartition(
                self.loop,
                script,
                lanes=lanes,
                producers=producers,
                max_backlog_records=max_backlog_records,
                max_backlog_bytes=max_backlog_bytes,
            )
            for _ in range(partitions)
        ]
        self.partition = self.partitions[0]
        self.routes = ScriptedRoutes(self.partitions, lanes)
        self.settings = ProducerSettings(**settings)
        self.accumulator = Accumulator(
            batch_bytes=self.settings.batch_bytes,
            buffer_bytes=self.settings.buffer_bytes,
            linger_ms=self.settings.linger_ms,
            delivery_timeout_ms=self.settings.delivery_timeout_ms,
            compression=COMPRESSIONS[self.settings.compression],
            clock_s=self.loop.time,
            wake=lambda: self.loop.call_soon_threadsafe(self.sender.wake),  # type: ignore[arg-type]
        )
        self.sender = Sender(
            self.accumulator,
            self.routes,  # type: ignore[arg-type]  # what a sender needs of them
            self.settings,
            ClientSettings(),
            loop=self.loop,
            clock_s=self.loop.time,
            rng=Random(seed),
        )
        self.topic = self.accumulator.add_topic("orders", 1, partitions, lanes)

    def send(self, value: bytes, *, partition: int = 0, lane: int = 0) -> Any:
        delivery = self.accumulator.append(self.topic, partition, lane, None, value, None, 1, len(value) + 12)
        assert delivery is not None
        return delivery

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def flush(self, within_s: float) -> None:
        """Everything is resolved within this time."""

        async def resolved() -> None:
            event = asyncio.Event()
            self.accumulator.when_resolved(self.accumulator.cut_all(), event.set)
            await asyncio.wait_for(event.wait(), within_s)

        self.loop.run_until_complete(resolved())

    def close(self) -> None:
        self.sender.close()
        self.run(0.2)  # what is late arrives, what is cancelled ends
        self.loop.close()
