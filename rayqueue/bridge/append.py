"""A bridge's batches into one partition, in order, with several on their way.

Over the same writer as a producer's (``rayqueue.net.writer``). Batches have a producer
id and sequences, so that each is in the log once, however often it is sent.

Belongs to the I/O thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from rayqueue.config import MIB, ClientSettings
from rayqueue.errors import RayQueueError
from rayqueue.net.outgoing import Outgoing
from rayqueue.net.route import GroupRoute
from rayqueue.net.write_actions import STALL_DOUBTS, Numbering, WriteLimits
from rayqueue.net.writer import PartitionWriter
from rayqueue.protocol.data import Appended
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import BatchHeader

Way = Callable[[], Awaitable[GroupRoute]]
"""Finds the route to a partition; asked again when the partition's replicas are others."""

MAX_IN_FLIGHT = 16
"""Batches: less than a partition remembers of a producer."""
MAX_IN_FLIGHT_BYTES = 8 * MIB

_TICKS_PER_TIMEOUT = 20
_TICK_MAX_S = 0.25


@dataclass(eq=False, slots=True, kw_only=True)
class _Batch(Outgoing):
    number: int


class Appends:
    """Many batches; ``close`` it, whatever became of them. It is the source of its own writer."""

    def __init__(
        self,
        place: TopicPartition,
        way: Way,
        settings: ClientSettings,
        *,
        refuse_forgotten: bool = False,
        raises_full: bool = False,
        patience_ms: int | None = None,
    ) -> None:
        """``refuse_forgotten``: a partition that has forgotten their producer raises its ``SequenceGapError`` at once.
        ``raises_full``: one that has no room raises its ``QueueFullError`` at once.

        An error is raised when nothing is acknowledged for ``patience_ms``, or ``client.call_timeout_ms``.
        """
        patience_ms = settings.call_timeout_ms if patience_ms is None else patience_ms
        loop = asyncio.get_running_loop()
        self.in_flight = 0
        self._loop = loop
        self._patience_s = patience_ms / 1000
        self._waiting: deque[_Batch] = deque()
        self._unresolved: dict[int, _Batch] = {}
        self._written: dict[int, Appended] = {}
        self._count = 0
        self._error: RayQueueError | None = None
        self.wrote_nothing = False
        """The first was refused, and so were those behind it."""
        self._news = asyncio.Event()
        self._tick_s = min(_TICK_MAX_S, self._patience_s / _TICKS_PER_TIMEOUT)
        self._ticking: asyncio.TimerHandle | None = None

        async def find(_: bool) -> GroupRoute:
            return await way()

        self._writer = PartitionWriter(
            str(place),
            self,
            WriteLimits(
                max_batches=MAX_IN_FLIGHT,
                max_bytes=MAX_IN_FLIGHT_BYTES,
                stall_s=STALL_DOUBTS * settings.doubt_ms / 1000,
                delivery_timeout_ms=patience_ms,
                numbering=Numbering.FIXED,
                raises_full=raises_full,
                refuse_forgotten=refuse_forgotten,
            ),
            settings,
            find=find,
            loop=loop,
            clock_s=loop.time,
            rng=Random(),  # noqa: S311  # jitter
        )

    async def put(self, payload: bytes) -> None:
        """Send one more. Waits while too much is on its way; raises what an earlier one could not recover from."""
        batch = _Batch(
            payload=payload,
            count=BatchHeader.parse(payload).count,
            deadline_s=self._loop.time() + self._patience_s,
            number=self._count,
        )
        self._waiting.append(batch)
        self._unresolved[batch.number] = batch
        self._count += 1
        self._writer.pump()
        if self._ticking is None:
            self._ticking = self._loop.call_later(self._tick_s, self._tick)
        while len(self._waiting) > 1:
            await self._hear()
        self._check()

    async def finish(self) -> list[Appended]:
        """Wait for all. Where each is, in order."""
        return [await self.answer(number) for number in range(self._count)]

    async def answer(self, number: int) -> Appended:
        """Wait for this one, counted from 0. Where it is."""
        while number in self._unresolved:
            await self._hear()
        if number not in self._written:
            self._check()
        return self._written[number]

    def close(self) -> None:
        """What is on its way may arrive; nothing is sent again."""
        if self._ticking is not None:
            self._ticking.cancel()
        self._writer.close()

    async def _hear(self) -> None:
        """Until something becomes of a batch."""
        self._check()
        self._news.clear()
        await self._news.wait()

    def _check(self) -> None:
        if self._error is not None:
            self.close()
            raise self._error

    def _tick(self) -> None:
        self._ticking = None
        self._writer.tick(self._loop.time())
        if self._unresolved:
            self._ticking = self._loop.call_later(self._tick_s, self._tick)

    # -- the source of its writer --------------------------------------------------------

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, now_s: float) -> _Batch | None:
        self._news.set()
        return self._waiting.popleft() if self._waiting else None

    def due_s(self) -> float | None:
        return None

    def expired(self, now_s: float) -> list[_Batch]:
        return self.drain() if self._waiting and self._waiting[0].deadline_s <= now_s else []

    def drain(self) -> list[_Batch]:
        waiting, self._waiting = self._waiting, deque()
        return list(waiting)

    def split(self, batch: _Batch, pieces: tuple[_Batch, _Batch]) -> None:
        raise NotImplementedError("batches of fixed numbers are not cut")

    def resolve(self, batch: _Batch, outcome: Appended | RayQueueError) -> None:
        del self._unresolved[batch.number]
        if isinstance(outcome, RayQueueError):
            self._error = self._error or outcome
            self.wrote_nothing = self.wrote_nothing or batch.number == 0
        else:
            self._written[batch.number] = outcome
            deadline_s = self._loop.time() + self._patience_s
            for each in self._unresolved.values():  # there is progress
                each.deadline_s = deadline_s
        self._news.set()
