"""A task's writer: an attempt of a task writes into the topics at once, in a transaction of its own.

A task of Spark or Ray Data may run twice, at the same time too, and may die
half way. So each attempt has its own transaction, and tells the driver which.
Only those that the driver names become visible (``publish.py``). Few rows travel
to the driver with that message instead, and are written there.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rayqueue.bridge.append import Appends
from rayqueue.bridge.rows import Cut
from rayqueue.client.handle import RayQueue
from rayqueue.errors import TransactionAbortedError
from rayqueue.net.interfaces import same_topic
from rayqueue.protocol.calls import NewProducerIds
from rayqueue.protocol.topics import TopicPartition
from rayqueue.protocol.transactions import JoinWrite, Transaction
from rayqueue.records import with_producer

INLINE_BYTES = 64 * 1024
"""A task whose batches are smaller in all sends them with its message."""


class Touched(NamedTuple):
    """A partition that has something of a task's."""

    place: TopicPartition
    topic_id: int
    group_id: str


@dataclass(frozen=True, slots=True)
class Written:
    """What a task tells its driver. Nothing of it counts yet."""

    cuts: tuple[Cut, ...] = ()
    """What is not written yet."""
    transaction: Transaction | None = None
    touched: tuple[Touched, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """What tasks write together."""

    name: str
    """All tasks join by it. Another attempt at the same batch has the same: what is left of the first goes with it."""
    topics: tuple[str, ...]
    """Where rows may go."""
    timeout_ms: int
    writer: str | None = None
    """None: it runs once."""
    batch_id: int = 0
    identity: bytes = b""
    """What the id stands for; the same id with another one is a ``BatchConflictError``."""
    staging: str = ""
    """The topic in which releases that staged rows have kept what this writer has written."""


async def joined(rq: RayQueue, write: Write) -> Transaction:
    """A transaction for a task, or for the driver, of this write."""
    call = JoinWrite(
        write=write.name,
        writer=write.writer or write.name,
        batch_id=write.batch_id,
        timeout_ms=write.timeout_ms,
        owner=f"{write.name}: {socket.gethostname()}, process {os.getpid()}"[:256],
    )
    pair: Transaction = await rq.routes.coordinator.call(call)
    return pair


async def alone(rq: RayQueue) -> Transaction:
    """A producer id for batches that count at once, without a transaction."""
    return Transaction(await rq.routes.coordinator.call(NewProducerIds()), 0)


class TaskWriter:
    """``begin`` is asked once, before the first batch goes out. Any thread but the I/O thread; ``close`` it."""

    def __init__(
        self,
        rq: RayQueue,
        begin: Callable[[], Awaitable[Transaction]],
        *,
        inline_bytes: int = -1,
        refuse_forgotten: bool = True,
    ) -> None:
        self._rq = rq
        self._begin = begin
        self._inline_bytes = inline_bytes
        self._refuse_forgotten = refuse_forgotten
        self._cuts: list[Cut] = []
        self._size_bytes = 0
        self._pair: Transaction | None = None
        self._is_over = False
        """Its batch was written before: what it would write does not count."""
        self._ways: dict[TopicPartition, Appends] = {}
        self._sequences: dict[TopicPartition, int] = {}
        self._touched: list[Touched] = []

    def add(self, cuts: Iterable[Cut]) -> None:
        for cut in cuts:
            self._cuts.append(cut)
            self._size_bytes += len(cut.payload)
            if self._size_bytes > self._inline_bytes:
                waiting, self._cuts = self._cuts, []
                self._rq.io.call(self._put(waiting))

    def finish(self) -> Written:
        """All that went out is durable."""

        async def finish() -> None:
            await asyncio.gather(*(way.finish() for way in self._ways.values()))

        if self._ways:
            self._rq.io.call(finish())
        return Written(tuple(self._cuts), self._pair, tuple(self._touched))

    def close(self) -> None:
        """What is on its way may arrive; nothing is sent again."""

        async def close() -> None:
            for way in self._ways.values():
                way.close()

        if self._ways:
            self._rq.io.call(close())

    async def _put(self, cuts: list[Cut]) -> None:
        if self._pair is None and not self._is_over:
            try:
                self._pair = await self._begin()
            except TransactionAbortedError:  # the driver is told the same, and whether that is as it should be
                self._is_over = True
        if self._pair is None:
            return
        for cut in cuts:
            place = TopicPartition(cut.topic, cut.partition)
            way = self._ways[place] if place in self._ways else await self._open(place, cut.topic_id)
            sequence = self._sequences.get(place, 0)
            self._sequences[place] = sequence + cut.count
            await way.put(with_producer(cut.payload, self._pair.producer_id, sequence, self._pair.epoch, cut.lane))

    async def _open(self, place: TopicPartition, topic_id: int) -> Appends:
        routes = self._rq.routes
        info = same_topic(await routes.topic(place.topic), topic_id)
        self._touched.append(Touched(place, topic_id, info.partitions[place.partition].group_id))
        way = partial(routes.partition, place, topic_id)
        self._ways[place] = Appends(place, way, self._rq.settings.client, refuse_forgotten=self._refuse_forgotten)
        return self._ways[place]
