"""The I/O side of a producer: a writer per partition, the producer's number, the clock.

Runs in the I/O thread. It is woken by the accumulator when there is something
to send, looks at the clock while anything is unresolved, and looks up the
topics again every ``METADATA_S``, so that new partitions are used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

from rayqueue.client.producer.accumulator import Accumulator, PartitionBuffer
from rayqueue.client.producer.batch import Batch
from rayqueue.client.producer.destination import Targets
from rayqueue.config import ClientSettings, ProducerSettings
from rayqueue.errors import RayQueueError, TopicRecreatedError, UnknownTopicError
from rayqueue.net.interfaces import Routes, same_topic
from rayqueue.net.write_actions import STALL_DOUBTS, Numbering, WriteLimits
from rayqueue.net.writer import LeaderRoute, PartitionWriter
from rayqueue.protocol.calls import NewProducerIds
from rayqueue.protocol.frames import Kind
from rayqueue.protocol.topics import TopicInfo, TopicPartition
from rayqueue.protocol.transactions import Transaction

_log = logging.getLogger(__name__)

METADATA_S = 30.0
IDS_AT_ONCE = 16
"""Producer ids that a process asks for at a time."""

_KINDS = {"all": Kind.APPEND, "leader": Kind.APPEND_LEADER, "none": Kind.APPEND_UNACKED}
_TICKS_PER_TIMEOUT = 20
_TICK_MIN_S, _TICK_MAX_S = 0.005, 0.25


_spare_ids: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


async def take_producer_id(routes: Routes) -> int:
    """A number that no other producer has. Most calls ask nobody."""
    spare = _spare_ids.setdefault(routes, [])
    if not spare:
        first: int = await routes.coordinator.call(NewProducerIds(count=IDS_AT_ONCE))
        spare.extend(range(first + IDS_AT_ONCE - 1, first - 1, -1))
    return spare.pop()


def _numbering(settings: ProducerSettings, transactional: bool) -> Numbering:
    if transactional:
        return Numbering.GIVEN
    return Numbering.NONE if settings.acks == "none" else Numbering.OWN


class Sender:
    """Sends what an accumulator has. One per producer."""

    def __init__(
        self,
        accumulator: Accumulator,
        routes: Routes,
        settings: ProducerSettings,
        client: ClientSettings,
        *,
        loop: asyncio.AbstractEventLoop,
        targets: Targets | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
        transactional: bool = False,
    ) -> None:
        self._loop = loop
        self._settings = settings
        self._client = client
        self._clock_s = clock_s
        self._rng = rng or Random()  # noqa: S311  # jitter
        self._accumulator = accumulator
        self._routes = routes
        self._targets = targets
        self._limits = WriteLimits(
            max_batches=settings.in_flight_batches,
            max_bytes=settings.in_flight_bytes,
            stall_s=STALL_DOUBTS * client.doubt_ms / 1000,
            delivery_timeout_ms=settings.delivery_timeout_ms,
            numbering=_numbering(settings, transactional),
            acknowledged=settings.acks != "none",
            may_lose_tail=settings.acks == "leader",
            raises_full=settings.on_full == "raise",
        )
        self._writers: dict[PartitionBuffer, PartitionWriter[Batch]] = {}
        self._producer_id: int | None = None
        self._transaction: Transaction | None = None
        self._groups: dict[tuple[int, int], str] = {}  # Raft groups, by topic id and partition
        self._taking_id: asyncio.Task[int] | None = None
        self._tick_s = min(_TICK_MAX_S, max(_TICK_MIN_S, settings.delivery_timeout_ms / 1000 / _TICKS_PER_TIMEOUT))
        self._ticking = False
        self._looked_up_s = clock_s()
        self._look_up: asyncio.Task[None] | None = None
        self._closed = False

    def wake(self) -> None:
        """Some partitions have something to take."""
        for buffer in self._accumulator.signalled():
            writer = self._writers.get(buffer)
            if writer is None:
                writer = self._writers[buffer] = self._writer(buffer)
                if self._closed:
                    writer.close()
            writer.pump()
        if not self._ticking and not self._closed:
            self._ticking = True
            self._loop.call_later(self._tick_s, self._tick)

    def _writer(self, buffer: PartitionBuffer) -> PartitionWriter[Batch]:
        partition = TopicPartition(buffer.topic, buffer.number)
        writer = PartitionWriter(
            str(partition),
            buffer,
            self._limits,
            self._client,
            find=partial(self._route, partition, buffer.topic_id),
            identify=self._identify,
            kind=_KINDS[self._settings.acks],
            loop=self._loop,
            clock_s=self._clock_s,
            rng=self._rng,
        )
        if self._transaction is not None:
            writer.begin(self._transaction.producer_id, self._transaction.epoch)
        return writer

    # -- transactions --------------------------------------------------------------------

    def begin(self, transaction: Transaction) -> None:
        """Send from now on in this one. Nothing of the one before is left."""
        self._transaction = transaction
        for buffer in [each for each in self._writers if not self._is_current(each)]:
            self._writers.pop(buffer).close()  # of a topic that is gone
        for writer in self._writers.values():
            writer.begin(transaction.producer_id, transaction.epoch)

    def touched(self) -> dict[str, tuple[TopicPartition, int]]:
        """The partitions that may have something of the transaction: topic, number and topic id by Raft group."""
        return {
            self._groups[buffer.topic_id, buffer.number]: (TopicPartition(buffer.topic, buffer.number), buffer.topic_id)
            for buffer, writer in self._writers.items()
            if writer.numbered
        }

    def drop(self, error: RayQueueError) -> None:
        """Let go of all that is not acknowledged: it is resolved with this."""
        self.wake()  # what nobody has begun to send has a writer then, too
        for writer in self._writers.values():
            writer.abort(error)

    def _is_current(self, buffer: PartitionBuffer) -> bool:
        target = None if self._targets is None else self._targets.get(buffer.topic)
        return target is None or target.buffer.topic_id == buffer.topic_id

    def close(self) -> None:
        """Report everything that is not acknowledged yet, and stop."""
        self._closed = True
        self.wake()
        for writer in self._writers.values():
            writer.close()
        for task in (self._taking_id, self._look_up):
            if task is not None:
                task.cancel()

    def _tick(self) -> None:
        self._ticking = False
        if self._closed:
            return
        now_s = self._clock_s()
        for writer in list(self._writers.values()):
            writer.tick(now_s)
        if now_s - self._looked_up_s > METADATA_S and self._look_up is None:
            self._looked_up_s = now_s
            names = {buffer.topic for buffer in self._writers}
            self._look_up = self._loop.create_task(self._look_up_topics(names))
        # A partition that is busy with a batch which was given up already is not signalled when another one is added.
        if self._accumulator.used_bytes or any(buffer.in_flight for buffer in self._writers):
            self._ticking = True
            self._loop.call_later(self._tick_s, self._tick)

    async def _look_up_topics(self, names: Iterable[str]) -> None:
        try:
            for name in names:
                self._changed(await self._routes.topic(name, refresh=True))
        except RayQueueError as error:
            _log.info("topics were not looked up: %s", error)
        finally:
            self._look_up = None

    # -- what the writers ask for --------------------------------------------------------

    async def _route(self, partition: TopicPartition, topic_id: int, refresh: bool) -> LeaderRoute:
        """``UnknownTopicError`` or ``TopicRecreatedError`` if that topic is not there any more."""
        name = partition.topic
        try:
            if refresh:
                self._changed(await self._routes.topic(name, refresh=True))
            route = await self._routes.partition(partition, topic_id)
            info = same_topic(await self._routes.topic(name), topic_id)  # it is known by now
            self._groups[topic_id, partition.partition] = info.partitions[partition.partition].group_id
            return route
        except (TopicRecreatedError, UnknownTopicError):
            if self._targets is not None:
                self._targets.gone(name, topic_id)
            raise

    def _changed(self, info: TopicInfo) -> None:
        if self._targets is not None:
            self._targets.changed(info)

    async def _identify(self, fresh: bool) -> int:
        """The number of this producer. Its writers ask at the same time; the coordinator is asked once."""
        if fresh:
            return await take_producer_id(self._routes)
        if self._producer_id is None:
            if self._taking_id is None or self._taking_id.done():
                self._taking_id = self._loop.create_task(take_producer_id(self._routes))
            self._producer_id = await asyncio.shield(self._taking_id)
        return self._producer_id
