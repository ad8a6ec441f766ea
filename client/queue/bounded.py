"""Puts into a partition with a bound, each all or nothing, with an answer at once or a wait in its line.

A producer cuts its batches where a partition has room for a part only, and
waits for as long as it was told when it was made. Here a batch goes as a whole,
and every put has its own deadline: when that has passed, nothing was written.
One at a time per handle, numbered, so that an attempt that was written though
its answer was lost is not written again.

Belongs to the I/O thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from rayqueue.config import Settings
from rayqueue.errors import OutcomeUnknownError, ProducerError, QueueFullError, RayQueueError
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


class BoundedPuts:
    """Of one handle, into one partition."""

    def __init__(self, routes: ClusterRoutes, place: TopicPartition, topic_id: int, settings: Settings) -> None:
        self._routes = routes
        self._place = place
        self._topic_id = topic_id
        self._settings = settings
        self._turn = asyncio.Lock()
        self._rng = Random()  # noqa: S311  # jitter
        self._producer_id: int | None = None
        self._sequence = 0

    async def put(self, values: Sequence[bytes], wait_s: float | None) -> None:
        """``QueueFullError`` if there was no room within ``wait_s``; None waits for ever."""
        clock_s = asyncio.get_running_loop().time
        deadline_s = clock_s() + (_FOREVER_S if wait_s is None else wait_s)
        try:
            await asyncio.wait_for(self._turn.acquire(), max(0.0, deadline_s - clock_s()) if wait_s else None)
        except asyncio.TimeoutError:
            raise QueueFullError(f"{self._place} has had no room in time", bound="max_backlog_records") from None
        try:
            await self._written(values, deadline_s)
        finally:
            self._turn.release()

    async def _written(self, values: Sequence[bytes], deadline_s: float) -> None:
        clock_s = asyncio.get_running_loop().time
        if self._producer_id is None:
            self._producer_id = await self._routes.coordinator.call(NewProducerIds())
            self._sequence = 0
        batch = self._batch(values)
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
                    await self._room(batch, len(values), deadline_s, error)
                    continue
                if isinstance(error, ProducerError) and gives_up_s is None:
                    # The partition has forgotten this producer, and nothing of this batch was written.
                    self._producer_id = await self._routes.coordinator.call(NewProducerIds())
                    self._sequence = 0
                    batch = self._batch(values)
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

    async def _room(self, batch: bytes, count: int, deadline_s: float, full: QueueFullError) -> None:
        """Wait in the line. Raises ``full`` once the time is up."""
        left_ms = round((deadline_s - asyncio.get_running_loop().time()) * 1000)
        if left_ms <= 0:
            raise full
        wait_ms = min(_ROOM_WAIT_MS, left_ms)
        call = AwaitRoom(
            producer_id=self._producer_id or 0,
            records=count,
            size_bytes=len(batch),
            least_bytes=len(batch),
            least_records=count,
            wait_ms=wait_ms,
        )
        await ask(self._routes, self._place, call, topic_id=self._topic_id, may_take_ms=wait_ms)
