"""Puts into a partition with a bound, each all or nothing, with an answer at once or a wait in its line.

A producer cuts its batches where a partition has room for a part only, and
waits for as long as it was told when it was made. Here a batch goes as a whole, so
it is one frame at most, and every put has its own deadline: when that has passed,
nothing was written. One is written at a time per handle, numbered, so that an
attempt that was written though its answer was lost is not written again. Those
that wait for room do so one behind the other, and keep nobody from writing who
does not want to wait.

Belongs to the I/O thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

from rayqueue.client.producer.accumulator import BATCH_BYTES, RECORD_BYTES
from rayqueue.config import Settings
from rayqueue.errors import (
    OutcomeUnknownError,
    OversizedBatchError,
    OversizedRecordError,
    ProducerError,
    QueueFullError,
    RayQueueError,
)
from rayqueue.net.backoff import Backoff
from rayqueue.net.interfaces import ask
from rayqueue.net.requests import once
from rayqueue.net.route import GroupRoute
from rayqueue.protocol.calls import AwaitRoom, NewProducerIds
from rayqueue.protocol.data import Appended
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import RecordBatch

if TYPE_CHECKING:
    from rayqueue.client.routes import ClusterRoutes

_ROOM_WAIT_MS = 10_000
_FOREVER_S = 365 * 86_400.0
_BOUND = "max_backlog_records"


class BoundedPuts:
    """Of one handle, into one partition."""

    def __init__(self, routes: ClusterRoutes, place: TopicPartition, topic_id: int, settings: Settings) -> None:
        self._routes = routes
        self._place = place
        self._topic_id = topic_id
        self._settings = settings
        self._line = asyncio.Lock()
        """Of puts that wait for room, if there is none: the partition has one place for this handle."""
        self._turn = asyncio.Lock()
        """Of writing: the next number is known once the last one was written, or was not."""
        self._rng = Random()  # noqa: S311  # jitter
        self._producer_id: int | None = None
        self._sequence = 0

    async def put(self, values: Sequence[bytes], wait_s: float | None) -> None:
        """``QueueFullError`` if there was no room within ``wait_s``; None waits for ever. What does not fit into one
        batch: ``OversizedRecordError`` for a value, ``OversizedBatchError`` for several."""
        self._check(values)
        clock_s = asyncio.get_running_loop().time
        deadline_s = clock_s() + (_FOREVER_S if wait_s is None else wait_s)
        if wait_s == 0:
            await self._attempt(values, deadline_s)
            return
        async with self._held(self._line, deadline_s):
            while True:
                try:
                    await self._attempt(values, deadline_s)
                except QueueFullError as full:
                    await self._room(values, deadline_s, full)
                else:
                    return

    def _check(self, values: Sequence[bytes]) -> None:
        most_bytes = self._settings.log.max_batch_bytes - BATCH_BYTES
        largest = max(map(len, values))
        if largest > most_bytes:
            raise OversizedRecordError(
                f"an item of {largest} bytes; {self._place} takes {most_bytes} (log.max_batch_bytes)",
                size_bytes=largest,
                limit=most_bytes,
            )
        size_bytes = sum(map(len, values)) + RECORD_BYTES * len(values)
        if len(values) > 1 and size_bytes > most_bytes:
            raise OversizedBatchError(
                f"{len(values)} items of {size_bytes} bytes; {self._place} takes {most_bytes} at once, or none "
                "(log.max_batch_bytes): put them in several batches",
                size_bytes=size_bytes,
                limit=most_bytes,
            )

    @asynccontextmanager
    async def _held(self, lock: asyncio.Lock, until_s: float) -> AsyncIterator[None]:
        """``QueueFullError`` if it cannot be had until then."""
        loop = asyncio.get_running_loop()
        acquiring = loop.create_task(lock.acquire())
        try:
            if not (await asyncio.wait((acquiring,), timeout=max(0.0, until_s - loop.time())))[0]:
                raise QueueFullError(
                    f"{self._place} has had no room in time: others of this process wait before", bound=_BOUND
                )
            yield
        finally:
            if not acquiring.cancel():  # it was acquired
                lock.release()

    def _own_turn(self, deadline_s: float) -> AbstractAsyncContextManager[None]:
        """Whoever writes has it for as long as one call takes; longer if nobody leads."""
        soon_s = asyncio.get_running_loop().time() + self._settings.client.call_timeout_ms / 1000
        return self._held(self._turn, max(soon_s, deadline_s))

    async def _attempt(self, values: Sequence[bytes], deadline_s: float) -> None:
        """``QueueFullError`` if there is no room now."""
        async with self._own_turn(deadline_s):
            await self._written(values, deadline_s)

    async def _written(self, values: Sequence[bytes], deadline_s: float) -> None:
        clock_s = asyncio.get_running_loop().time
        batch = await self._numbered(values)
        backoff = Backoff(self._settings.client, self._rng)
        gives_up_s: float | None = None
        """When an attempt whose outcome is not known is given up."""
        while True:
            try:
                await self._append(batch)
            except asyncio.CancelledError:
                self._producer_id = None  # it may be written: its number is used
                raise
            except RayQueueError as error:
                if isinstance(error, QueueFullError) and "bound" in error.details and gives_up_s is None:
                    raise
                if isinstance(error, ProducerError) and gives_up_s is None:
                    # The partition has forgotten this producer, and nothing of this batch was written.
                    self._producer_id = None
                    batch = await self._numbered(values)
                elif not error.retriable:
                    self._producer_id = None
                    raise
                if isinstance(error, OutcomeUnknownError) and gives_up_s is None:
                    gives_up_s = clock_s() + self._settings.client.call_timeout_ms / 1000
                if clock_s() > (deadline_s if gives_up_s is None else gives_up_s):
                    self._producer_id = None
                    raise
                await asyncio.sleep(backoff.pause_s())
            else:
                self._sequence += len(values)
                return

    async def _numbered(self, values: Sequence[bytes]) -> bytes:
        if self._producer_id is None:
            self._producer_id = await self._routes.coordinator.call(NewProducerIds())
            self._sequence = 0
        return self._batch(values)

    def _batch(self, values: Sequence[bytes]) -> bytes:
        return RecordBatch.encode(
            list(values),
            None,
            None,
            timestamps=[int(time.time() * 1000)] * len(values),
            producer_id=self._producer_id or 0,
            sequence=self._sequence,
            epoch=0,
        )

    async def _append(self, batch: bytes) -> Appended:
        async def way() -> GroupRoute:
            return await self._routes.partition(self._place, self._topic_id)

        async def attempt(route: GroupRoute) -> Appended:
            channel = await route.leader()
            return await channel.append(batch)

        return await once(way, attempt)

    async def _room(self, values: Sequence[bytes], deadline_s: float, full: QueueFullError) -> None:
        """Wait in the line. Raises ``full`` once the time is up."""
        left_ms = round((deadline_s - asyncio.get_running_loop().time()) * 1000)
        if left_ms <= 0:
            raise full
        wait_ms = min(_ROOM_WAIT_MS, left_ms)
        async with self._own_turn(deadline_s):
            size_bytes = len(await self._numbered(values))
            producer_id = self._producer_id or 0
        call = AwaitRoom(
            producer_id=producer_id,
            records=len(values),
            size_bytes=size_bytes,
            least_bytes=size_bytes,
            least_records=len(values),
            wait_ms=wait_ms,
        )
        await ask(self._routes, self._place, call, topic_id=self._topic_id, may_take_ms=wait_ms)
