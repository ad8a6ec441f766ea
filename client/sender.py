"""The I/O side of a producer: a stream per partition, the producer's number, the clock.

Runs in the I/O thread. It is woken by the accumulator when there is something
to send, looks at the clock while anything is unresolved, and looks up the
topics again every ``METADATA_S``, so that new partitions are used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from rayqueue.client.accumulator import Accumulator, PartitionBuffer
from rayqueue.client.stream import PartitionStream
from rayqueue.client.surroundings import LeaderRoute
from rayqueue.config import ClientSettings, ProducerSettings
from rayqueue.errors import RayQueueError, TopicRecreatedError, UnknownTopicError
from rayqueue.protocol.calls import NewProducerIds
from rayqueue.protocol.topics import TopicInfo, TopicPartition

_log = logging.getLogger(__name__)

METADATA_S = 30.0
IDS_AT_ONCE = 16
"""Producer ids that a process asks for at a time."""

_TICKS_PER_TIMEOUT = 20
_TICK_MIN_S, _TICK_MAX_S = 0.005, 0.25


class TopicWatch(Protocol):
    """Told what becomes of topics."""

    def changed(self, info: TopicInfo) -> None:
        """So it is now."""

    def gone(self, name: str, topic_id: int) -> None:
        """That topic was deleted. Another one may have its name."""


class Routes(Protocol):
    """What a sender needs of ``rayqueue.client.router.ClusterRoutes``."""

    @property
    def coordinator(self) -> Any: ...
    async def topic(self, name: str, *, refresh: bool = False) -> TopicInfo: ...
    async def partition(self, partition: TopicPartition, topic_id: int | None = None) -> Any: ...


_spare_ids: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()


async def take_producer_id(routes: Routes) -> int:
    """A number that no other producer has. Most calls ask nobody."""
    spare = _spare_ids.setdefault(routes, [])
    if not spare:
        first: int = await routes.coordinator.call(NewProducerIds(count=IDS_AT_ONCE))
        spare.extend(range(first + IDS_AT_ONCE - 1, first - 1, -1))
    return spare.pop()


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
        watch: TopicWatch | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        self.loop = loop
        self.settings = settings
        self.client = client
        self.clock_s = clock_s
        self.rng = rng or Random()  # noqa: S311  # jitter
        self._accumulator = accumulator
        self._routes = routes
        self._watch = watch
        self._streams: dict[PartitionBuffer, PartitionStream] = {}
        self._producer_id: int | None = None
        self._taking_id: asyncio.Task[int] | None = None
        self._tick_s = min(_TICK_MAX_S, max(_TICK_MIN_S, settings.delivery_timeout_ms / 1000 / _TICKS_PER_TIMEOUT))
        self._ticking = False
        self._looked_up_s = clock_s()
        self._look_up: asyncio.Task[None] | None = None
        self._closed = False

    def wake(self) -> None:
        """Some partitions have something to take."""
        for buffer in self._accumulator.signalled():
            stream = self._streams.get(buffer)
            if stream is None:
                stream = self._streams[buffer] = PartitionStream(buffer, self._accumulator, self)
                if self._closed:
                    stream.close()
            stream.pump()
        if not self._ticking and not self._closed:
            self._ticking = True
            self.loop.call_later(self._tick_s, self._tick)

    def close(self) -> None:
        """Report everything that is not acknowledged yet, and stop."""
        self._closed = True
        self.wake()
        for stream in self._streams.values():
            stream.close()
        for task in (self._taking_id, self._look_up):
            if task is not None:
                task.cancel()

    def _tick(self) -> None:
        self._ticking = False
        if self._closed:
            return
        now_s = self.clock_s()
        for stream in list(self._streams.values()):
            stream.expire(now_s)
            stream.doubt(now_s)
        if now_s - self._looked_up_s > METADATA_S and self._look_up is None:
            self._looked_up_s = now_s
            names = {stream.partition.topic for stream in self._streams.values()}
            self._look_up = self.loop.create_task(self._look_up_topics(names))
        if self._accumulator.used_bytes:
            self._ticking = True
            self.loop.call_later(self._tick_s, self._tick)

    async def _look_up_topics(self, names: Iterable[str]) -> None:
        try:
            for name in names:
                self._changed(await self._routes.topic(name, refresh=True))
        except RayQueueError as error:
            _log.info("topics were not looked up: %s", error)
        finally:
            self._look_up = None

    # -- what the streams ask for --------------------------------------------------------

    async def route(self, partition: TopicPartition, topic_id: int, *, refresh: bool) -> LeaderRoute:
        """``UnknownTopicError`` or ``TopicRecreatedError`` if that topic is not there any more."""
        name = partition.topic
        try:
            if refresh:
                self._changed(await self._routes.topic(name, refresh=True))
            return await self._routes.partition(partition, topic_id)  # type: ignore[no-any-return]
        except (TopicRecreatedError, UnknownTopicError):
            if self._watch is not None:
                self._watch.gone(name, topic_id)
            raise

    def _changed(self, info: TopicInfo) -> None:
        if self._watch is not None:
            self._watch.changed(info)

    async def producer_id(self) -> int:
        """The one of this producer. Its streams ask at the same time; the coordinator is asked once."""
        if self._producer_id is None:
            if self._taking_id is None or self._taking_id.done():
                self._taking_id = self.loop.create_task(take_producer_id(self._routes))
            self._producer_id = await asyncio.shield(self._taking_id)
        return self._producer_id

    async def fresh_producer_id(self) -> int:
        return await take_producer_id(self._routes)
