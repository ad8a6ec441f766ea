"""Follower: a small internal topic of one partition, read from its beginning and followed.

What the gateway must know in common with all others (keys, idempotent requests)
is a log of events in a topic of the queue: replicated and ordered like every
record. Each gateway applies it, in order, to what it holds in memory.

``confirmed_s`` is when the partition's leader last said that nothing is missing
here. The topic is made by whoever writes the first event; until then following
it is looking whether it is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rayqueue.client.handle import RayQueue
from rayqueue.errors import RayQueueError, UnknownTopicError
from rayqueue.records import Record

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_CONFIRM_EVERY_S = 2.0
_POLL_MS = 1000
_MAX_RECORDS = 5000


class Follower:
    """From ``start`` to ``close``, in one event loop."""

    def __init__(
        self,
        rq: RayQueue,
        topic: str,
        apply: Callable[[Record], None],
        *,
        reset: Callable[[], None],
        settings: dict[str, Any] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic = topic
        self._rq = rq
        self._apply = apply
        self._reset = reset
        self._settings = settings or {}
        self._clock_s = clock_s
        self._task: asyncio.Task[None] | None = None
        self._next = 0
        self._moved = asyncio.Condition()
        self._producer: Any = None
        self._preparing = asyncio.Lock()
        self._made = False
        self._look = asyncio.Event()
        self.confirmed_s: float | None = None

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._producer is not None:
            with suppress(RayQueueError):
                await self._producer.close_async(timeout_ms=2000)

    def fresh(self, within_s: float) -> bool:
        """Whether what is known here was all there was, not longer ago than that."""
        return self.confirmed_s is not None and self._clock_s() - self.confirmed_s <= within_s

    async def append(self, event: bytes) -> int:
        """Write an event; its offset, once it is acknowledged. Makes the topic if there is none."""
        async with self._preparing:
            await self._prepare()
        return int((await self._producer.send_async(self.topic, event)).offset)

    async def _prepare(self) -> None:
        """One at a time: a second producer would never be closed."""
        if self._producer is None:
            self._producer = await self._rq.producer_async(delivery_timeout_ms=10_000)
        if not self._made:
            await self._rq.create_topic_async(self.topic, if_missing=True, partitions=1)
            if self._settings:
                await self._rq.alter_topic_async(self.topic, **self._settings)
            self._made = True
            self._look.set()

    async def reached(self, offset: int, timeout_s: float) -> bool:
        """Wait until the event of this offset was applied here. False if it was not in time."""
        async with self._moved:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._moved.wait_for(lambda: self._next > offset), timeout_s)
            return self._next > offset

    async def caught_up(self, timeout_s: float) -> bool:
        """Wait until all that is there by now was applied here. False if it was not in time."""
        try:
            (partition,) = (await self._rq.topic_async(self.topic)).partitions
        except UnknownTopicError:
            return True
        if partition.leader is None:
            return False
        return partition.start_offset == partition.end_offset or await self.reached(partition.end_offset - 1, timeout_s)

    async def _follow(self) -> None:
        while True:
            try:
                if any(info.name == self.topic for info in await self._rq.topics_async(include_internal=True)):
                    await self._read()
                else:
                    self._begin_anew()
                    self.confirmed_s = self._clock_s()  # the coordinator says that there is no such topic
            except RayQueueError as error:
                _log.warning("%s cannot be followed at the moment: %s", self.topic, error)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._look.wait(), _LOOK_EVERY_S)
            self._look.clear()

    def _begin_anew(self) -> None:
        """Nothing is known until all of it is."""
        self.confirmed_s = None
        self._next, self._made = 0, False
        self._reset()

    async def _read(self) -> None:
        consumer = await self._rq.consumer_async(self.topic, start="earliest", on_topic_deleted="raise")
        try:
            self._begin_anew()
            confirm_at_s = 0.0
            while True:
                records = await consumer.poll_async(max_records=_MAX_RECORDS, timeout_ms=_POLL_MS)
                for record in records:
                    self._apply(record)
                if records:
                    async with self._moved:
                        self._next = records[-1].offset + 1
                        self._moved.notify_all()
                if not records or self._clock_s() >= confirm_at_s:
                    lag = await consumer.lag_async()
                    if not any(lag.values()):
                        self.confirmed_s = self._clock_s()
                        confirm_at_s = self.confirmed_s + _CONFIRM_EVERY_S
        finally:
            await consumer.close_async()
