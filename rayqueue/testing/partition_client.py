"""A client of one partition: the connections and routes that producers and consumers use, one step at a time.

For tests that must see every answer, or ask one replica in particular. Batches that
are appended one after the other go the way that a bridge's go (``rayqueue.bridge.append``),
over the writer that producers have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from random import Random
from typing import Any, TypeVar

from rayqueue.bridge.append import Appends
from rayqueue.client.io import IoThread
from rayqueue.config import MIB, Settings
from rayqueue.errors import OutcomeUnknownError, TransportError
from rayqueue.ids import Offset, ReplicaId
from rayqueue.net.backoff import Retry
from rayqueue.net.channel import Channel
from rayqueue.net.directory import Directory
from rayqueue.net.replicas import Replicas
from rayqueue.net.requests import request
from rayqueue.net.route import GroupRoute
from rayqueue.partition import Appended, Fetched
from rayqueue.protocol import data
from rayqueue.protocol.calls import Call
from rayqueue.protocol.data import ANY_LANE, READ_FOLLOWER, Cursor, FetchAnswer, FetchRequest
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import BatchHeader
from rayqueue.testing.load import LoadReport, drive

CALL_TIMEOUT_S = 15.0
_PROGRESS_TIMEOUT_S = 30.0
_READ_BYTES = 4 * MIB

_T = TypeVar("_T")


class PartitionClient:
    """Methods block, and may be called by any thread but the one of the connections.

    With ``via`` a method asks this very replica, once. Without, it asks whoever leads, and again if the error says
    that this may help; a batch without a producer id is not repeated if it may have been written.
    """

    def __init__(
        self, group_id: str, replica_ids: Iterable[ReplicaId], directory: Directory, settings: Settings
    ) -> None:
        self._group_id = group_id
        self._directory = directory
        self._settings = settings
        self._rng = Random()  # noqa: S311  # jitter
        self._io = IoThread.shared()
        self._connect(replica_ids)

    def _connect(self, replica_ids: Iterable[ReplicaId]) -> None:
        replica_ids = tuple(replica_ids)
        self._route = GroupRoute(self._group_id, replica_ids, self._directory, self._settings)
        self._replicas = Replicas(self._group_id, replica_ids, self._directory, self._settings)

    def set_replicas(self, replica_ids: Iterable[ReplicaId]) -> None:
        """The group consists of others now. Who is told that the old route is closed finds the new one."""
        old = self._route, self._replicas
        self._connect(replica_ids)
        self._hang_up(*old)

    def close(self) -> None:
        self._hang_up(self._route, self._replicas)

    def _hang_up(self, route: GroupRoute, replicas: Replicas) -> None:
        self._io.loop.call_soon_threadsafe(route.close)
        self._io.loop.call_soon_threadsafe(replicas.close)

    # -- writing --------------------------------------------------------------------------

    def append(self, batch: bytes, *, via: ReplicaId | None = None, timeout_s: float = CALL_TIMEOUT_S) -> Appended:
        """Append a batch; returns once a majority has it on disk."""

        def send(channel: Channel) -> Awaitable[data.Appended]:
            return channel.append(batch)

        idempotent = BatchHeader.parse(batch).producer_id != 0
        work = self._led(send, timeout_s, idempotent=idempotent) if via is None else self._at(via, send)
        return _at_offset(self._run(work, timeout_s))

    def append_each(
        self, batches: Iterable[bytes], *, in_flight: int = 1, timeout_s: float = _PROGRESS_TIMEOUT_S
    ) -> Iterator[Appended]:
        """Append numbered batches by whoever leads, as producers and bridges do (``rayqueue.net.writer``), at most
        ``in_flight`` unanswered at a time; answers come in order. ``timeout_s`` bounds the time without any progress.
        """
        appends = self._io.call(self._appends(timeout_s))
        sent = answered = 0
        try:
            for batch in batches:
                self._io.call(appends.put(batch))
                sent += 1
                if sent - answered == in_flight:
                    yield _at_offset(self._io.call(appends.answer(answered)))
                    answered += 1
            while answered < sent:
                yield _at_offset(self._io.call(appends.answer(answered)))
                answered += 1
        finally:
            self._io.loop.call_soon_threadsafe(appends.close)

    async def _appends(self, timeout_s: float) -> Appends:
        place = TopicPartition(self._group_id, 0)
        return Appends(place, self._way, self._settings.client, patience_ms=round(timeout_s * 1000))

    def load(self, batch: bytes, count: int, in_flight: int, *, timeout_s: float = 600.0) -> LoadReport:
        """Append the batch so many times by whoever leads now, and measure (``rayqueue.testing.load``)."""

        async def work() -> LoadReport:
            return await drive(await self._route.leader(), batch, count, in_flight)

        return self._run(work(), timeout_s)

    # -- reading --------------------------------------------------------------------------

    def fetch(
        self,
        offset: int,
        max_bytes: int = MIB,
        *,
        via: ReplicaId | None = None,
        max_wait_ms: int = 0,
        lane: int = ANY_LANE,
    ) -> FetchAnswer:
        """Batches from ``offset`` on; waits for the first one if it is told to. A follower may have fewer."""
        flags = 0 if via is None else READ_FOLLOWER
        request = FetchRequest((Cursor(lane, offset),), max_bytes, max_wait_ms, flags)
        return self._ask(via, lambda channel: channel.fetch(request), max_wait_ms / 1000 + CALL_TIMEOUT_S)

    def read_log(self, offset: int = 0, *, via: ReplicaId | None = None) -> list[Fetched]:
        """Everything from ``offset`` to the high watermark."""
        found: list[Fetched] = []
        end = offset + 1
        while offset < end:
            answer = self.fetch(offset, _READ_BYTES, via=via, max_wait_ms=1000)
            end = answer.high_watermark
            found += [Fetched(Offset(base), count, bytes(payload)) for base, count, payload in answer.batches]
            if answer.batches:
                offset = found[-1].base_offset + found[-1].count
        return found

    def call(self, call: Call, *, via: ReplicaId | None = None, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Any of ``rayqueue.protocol.calls`` that a partition answers. All of them may be repeated."""
        return self._ask(via, lambda channel: channel.call(call), timeout_s)

    # -- the way there --------------------------------------------------------------------

    def _ask(self, via: ReplicaId | None, ask: Callable[[Channel], Awaitable[_T]], timeout_s: float) -> _T:
        return self._run(self._led(ask, timeout_s) if via is None else self._at(via, ask), timeout_s)

    def _run(self, work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        async def in_time() -> _T:
            try:
                return await asyncio.wait_for(work, timeout_s)
            except asyncio.TimeoutError:
                raise OutcomeUnknownError(f"no answer of {self._group_id} within {timeout_s} s") from None

        return self._io.call(in_time())

    async def _at(self, replica_id: ReplicaId, ask: Callable[[Channel], Awaitable[_T]]) -> _T:
        return await ask(await self._replicas.channel(replica_id))

    async def _led(self, ask: Callable[[Channel], Awaitable[_T]], timeout_s: float, *, idempotent: bool = True) -> _T:
        async def attempt(route: GroupRoute) -> _T:
            return await ask(await route.leader())

        now_s = asyncio.get_running_loop().time()
        retry = Retry(self._settings.client, self._rng, now_s, idempotent=idempotent, within_s=timeout_s)
        return await request(self._way, attempt, retry)

    async def _way(self) -> GroupRoute:
        return self._route


def _at_offset(answer: data.Appended) -> Appended:
    if answer.base_offset is None:
        raise TransportError("a majority has the batch, and its offset is not told")
    return Appended(Offset(answer.base_offset), answer.count, answer.duplicate)
