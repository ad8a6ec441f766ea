"""Appending many batches to one partition, in order, with several on their way.

``Appends`` belongs to the I/O thread. It holds on to every batch until all
before it are acknowledged. When one fails, the others that are on their way are
waited for, and then everything from the failed one on is sent again, in order.
What that means depends on the batches:

- with a producer id and sequences, those that had been written are answered as
  duplicates: each is in the log once;
- without, some may be in the log twice. ``acknowledged`` tells where the last
  copy of each is, and these are in order.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from rayqueue.client.retry import Retry
from rayqueue.client.router import GroupRoute
from rayqueue.config import MIB, ClientSettings
from rayqueue.errors import (
    ClosedError,
    NotLeaderError,
    QueueFullError,
    RayQueueError,
    SequenceExpiredError,
    SequenceGapError,
    TransportError,
)
from rayqueue.protocol.calls import AwaitRoom, Room
from rayqueue.protocol.data import Appended
from rayqueue.records import BatchHeader
from rayqueue.records.header import HEADER_BYTES, pack_header

_T = TypeVar("_T")
Way = Callable[[], Coroutine[Any, Any, GroupRoute]]
"""Finds the route to a partition; asked again when the partition's replicas are others."""

MAX_IN_FLIGHT = 16
"""Batches: less than a partition remembers of a producer."""
MAX_IN_FLIGHT_BYTES = 8 * MIB

_ROOM_WAIT_MS = 5000


class Written(NamedTuple):
    base_offset: int | None
    """None: it was written so long ago that its offset is forgotten."""
    count: int  # type: ignore[assignment]
    duplicate: bool


class _Pending:
    __slots__ = ("answer", "payload")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.answer: asyncio.Future[Appended] | None = None


class Appends:
    def __init__(self, way: Way, settings: ClientSettings, *, refuse_forgotten: bool = False) -> None:
        """``refuse_forgotten``: a partition that expects sequence 0 of a producer that is further on has most likely
        forgotten it. Raise its ``SequenceGapError`` at once, for repeating the batch will not help then."""
        self._way = way
        self._route: GroupRoute | None = None
        self._refuse_forgotten = refuse_forgotten
        self._retry = Retry(settings, random.Random(), time.monotonic(), idempotent=True)  # noqa: S311
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._stalled = False
        self.acknowledged: list[Written] = []

    async def put(self, payload: bytes) -> None:
        """Send one more. Waits while too much is on its way; raises what an earlier one could not recover from."""
        while self._pending and (
            len(self._pending) >= MAX_IN_FLIGHT or self._pending_bytes + len(payload) > MAX_IN_FLIGHT_BYTES
        ):
            await self._settle()
        pending = _Pending(payload)
        self._pending.append(pending)
        self._pending_bytes += len(payload)
        channel = None if self._route is None else self._route.leader_channel
        if channel is None or channel.closed:
            self._stalled = True  # the next one to wait finds out who leads
        if channel is not None and not self._stalled:
            pending.answer = channel.append(payload)

    async def finish(self) -> list[Written]:
        """Wait for all. One entry per batch, in order."""
        while self._pending:
            await self._settle()
        return self.acknowledged

    async def _settle(self) -> None:
        """The first one is acknowledged, or everything is sent again."""
        first = self._pending[0]
        try:
            if first.answer is None:
                await self._send_all()
            if first.answer is None:
                raise TransportError("a batch was not sent")
            answer = await first.answer
            written = Written(answer.base_offset, answer.count, answer.duplicate)
        except SequenceExpiredError:
            written = Written(None, BatchHeader.parse(first.payload).count, True)
        except RayQueueError as error:
            await self._recover(error)
            return
        self._retry.progress(time.monotonic())
        self._pending.popleft()
        self._pending_bytes -= len(first.payload)
        self.acknowledged.append(written)

    async def _send_all(self) -> None:
        if self._route is None:
            self._route = await self._way()
        channel = await self._route.leader()
        for each in self._pending:
            each.answer = channel.append(each.payload)
        self._stalled = False

    async def _recover(self, error: RayQueueError) -> None:
        answers = [each.answer for each in self._pending if each.answer is not None]
        await asyncio.gather(*answers, return_exceptions=True)
        if self._refuse_forgotten and isinstance(error, SequenceGapError) and error.details.get("expected") == 0:
            raise error
        for each in self._pending:
            each.answer = None
        self._stalled = True
        if isinstance(error, QueueFullError) and "bound" in error.details and await self._has_room():
            return
        self._route = await pause(self._retry, self._way, self._route, error)

    async def _has_room(self) -> bool:
        """Wait in the line before a full partition, for room for the first batch as a whole: it cannot be cut."""
        payload = self._pending[0].payload
        header = BatchHeader.parse(payload)
        if self._route is None or not header.producer_id:
            return False
        call = AwaitRoom(
            producer_id=header.producer_id,
            records=header.count,
            least_records=header.count,
            size_bytes=len(payload),
            least_bytes=len(payload),
            wait_ms=_ROOM_WAIT_MS,
        )
        try:
            room: Room = await (await self._route.leader()).call(call, may_take_ms=_ROOM_WAIT_MS)
        except RayQueueError as error:
            if not error.retriable:
                raise
            return False
        return room.records > 0


async def append_once(way: Way, payload: bytes, settings: ClientSettings) -> Written:
    """One batch of an idempotent producer. ``SequenceGapError`` if the partition has forgotten it."""
    appends = Appends(way, settings, refuse_forgotten=True)
    await appends.put(payload)
    (written,) = await appends.finish()
    return written


async def persist(attempt: Callable[[GroupRoute], Coroutine[Any, Any, _T]], way: Way, settings: ClientSettings) -> _T:
    """Repeat an attempt for as long as its errors say that this may help."""
    retry = Retry(settings, random.Random(), time.monotonic(), idempotent=True)  # noqa: S311
    route: GroupRoute | None = None
    while True:
        route = await way() if route is None else route
        try:
            return await attempt(route)
        except RayQueueError as error:
            route = await pause(retry, way, route, error)


async def pause(retry: Retry, way: Way, route: GroupRoute | None, error: RayQueueError) -> GroupRoute | None:
    """Wait before the next attempt; the route that it goes by. Raises what repeating cannot help."""
    if isinstance(error, ClosedError):
        # The partition's replicas are others now; or the whole connection was closed, and then there is no way.
        route = await way()
        error = NotLeaderError(str(error), leader=None)
    wait = retry.after(error, time.monotonic())
    if route is not None and (wait.refresh or isinstance(error, TransportError)):
        route.failed(error)
    await asyncio.sleep(wait.seconds)
    return route


def signed(payload: bytes | memoryview, *, producer_id: int, epoch: int, sequence: int, lane: int) -> bytes:
    """The same records as a batch of this producer."""
    header = BatchHeader.parse(payload)
    body = memoryview(payload)[HEADER_BYTES:]
    head = pack_header(
        parts=[body],
        count=header.count,
        producer_id=producer_id,
        sequence=sequence,
        epoch=epoch,
        lane=lane,
        compression=header.compression,
        flags=header.flags,
        min_timestamp=header.min_timestamp,
        max_timestamp=header.max_timestamp,
        message_bytes=header.message_bytes,
    )
    return b"".join((head, body))
