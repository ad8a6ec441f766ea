"""Sessions: consumers that a gateway holds for callers that cannot hold one themselves.

Records are numbered as they are handed out: an answer's ``cursor`` is the number of
its last one. Whoever shows the cursor that he has seen gets again what was handed
out after it: an answer that is lost on its way loses no record, and what is
acknowledged by a cursor was seen.

A session is a member of a group. Its id is ``<gateway>.<random>``: it tells
which gateway has it, and cannot be guessed; it also belongs to the key that
opened it. It lives for as long as it is heard of; then it leaves its group, and
what was not acknowledged is read by others.

``rayqueue.gateway.tracked`` has sessions without an id.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from rayqueue.client.handle import RayQueue
from rayqueue.config import GatewaySettings
from rayqueue.errors import (
    InvalidInputError,
    QueueFullError,
    RateLimitedError,
    RayQueueError,
    SessionElsewhereError,
    SessionGoneError,
    StaleGenerationError,
)
from rayqueue.gateway.limits import Slots
from rayqueue.gateway.principals import Caller
from rayqueue.records import Record
from rayqueue.records.room import Room, size_of

_log = logging.getLogger(__name__)

MAX_UNACKED = 20_000
MAX_UNACKED_BYTES = 64 * 1024 * 1024
"""They are kept, to be sent again if an answer is lost."""
_JOIN_S = 10.0
_LOOK_EVERY_S = 0.5
_COMMITS = 5
"""Of one ack. Each but the last lost a partition."""


class Place(NamedTuple):
    """A record, by where it is."""

    topic: str
    partition: int
    offset: int
    lane: int = 0


class Session:
    """One consumer, used by one request at a time."""

    def __init__(
        self, session_id: str, owner: str, group: str, topics: Sequence[str], consumer: Any, max_bytes: int
    ) -> None:
        """``max_bytes``: of one answer."""
        self.session_id = session_id
        self.owner = owner
        self.group = group
        self.topics = tuple(topics)
        self.timeout_s = 0.0
        self.heard_s = 0.0
        self.unacked: dict[Place, tuple[int, Record]] = {}
        """With its number, in the order of these."""
        self._unacked_bytes = 0
        self.cursor = 0
        self._seen = True
        self.lock = asyncio.Lock()
        self.closed = False
        self._hurried = False
        self._consumer = consumer
        self._max_bytes = max_bytes
        self._joined = False

    @property
    def room(self) -> int:
        """So many more records may be handed out before some are acknowledged."""
        return MAX_UNACKED - len(self.unacked) if self._unacked_bytes < MAX_UNACKED_BYTES else 0

    async def read(
        self, max_records: int, wait_ms: int, cursor: int | None, *, within_s: float = math.inf
    ) -> tuple[list[Record], int]:
        """The next records, and the cursor behind them; those after ``cursor`` again, if that is what was seen last.

        ``within_s``: for so long, however long it may wait for its share and for the records.
        """
        if cursor is not None and cursor < self.cursor:
            again = [each for each in self.unacked.values() if each[0] > cursor][:max_records]
            if again:
                found = [record for _, record in again]
                count = Room(self._max_bytes).cut(found)
                return found[:count], again[count - 1][0]
        elif cursor is not None and cursor > self.cursor:
            raise InvalidInputError(f"this session has handed out {self.cursor} records: there is no cursor {cursor}")
        if cursor is None and self.cursor:
            self._seen = False  # he may have missed an answer, and nobody would know
        return await self.poll(max_records, wait_ms, within_s=within_s), self.cursor

    async def poll(
        self, max_records: int, wait_ms: int, *, remember: bool = True, within_s: float = math.inf
    ) -> list[Record]:
        """The next records; [] if none came in time. The first call also waits for its share of the partitions."""
        if remember and max_records > self.room:
            raise QueueFullError(
                f"{len(self.unacked)} records of this session, {self._unacked_bytes} bytes, are not acknowledged: ack "
                "some first"
            )
        over_s = time.monotonic() + within_s
        found: list[Record] = []
        if not self._joined:
            deadline_s = min(time.monotonic() + _JOIN_S, over_s)
            found = await self._next(max_records, 0)
            while not found and not self._consumer.assignment() and not self._hurried:
                if time.monotonic() >= deadline_s:
                    break
                found = await self._next(max_records, 50)
            self._joined = bool(found or self._consumer.assignment()) or deadline_s < over_s
        if not found and not self._hurried:
            wait_ms = int(min(wait_ms, max(0.0, over_s - time.monotonic()) * 1000))
            found = await self._next(max_records, wait_ms)
        if remember:
            self._unacked_bytes += size_of(found)
            for number, each in enumerate(found, self.cursor + 1):
                self.unacked[Place(each.topic, each.partition, each.offset, each.lane)] = number, each
            self.cursor += len(found)
        return list(found)

    async def _next(self, max_records: int, wait_ms: int) -> list[Record]:
        found: list[Record] = await self._consumer.poll_async(
            max_records=max_records, max_bytes=self._max_bytes, timeout_ms=wait_ms
        )
        return found

    async def ack_through(self, cursor: int) -> int:
        """All that were handed out up to this cursor are done."""
        if not self._seen:
            raise InvalidInputError(
                "a read of this session did not say which cursor was seen, so some may have been missed: name the "
                "records that are done, or give cursor= with every read after the first"
            )
        if not 0 <= cursor <= self.cursor:
            raise InvalidInputError(f"this session has handed out {self.cursor} records: there is no cursor {cursor}")
        return await self.ack([place for place, (number, _) in self.unacked.items() if number <= cursor])

    async def ack(self, places: Iterable[Place]) -> int:
        """These records are done; on the disks of a majority once this returns.

        ``InvalidInputError`` for one that was not handed out: none is acknowledged then. ``StaleGenerationError`` names
        the partitions that went to another member: their records are read there, the others are acknowledged.
        """
        wanted = list(dict.fromkeys(places))
        for place in wanted:
            if place not in self.unacked:
                raise InvalidInputError(
                    f"{place.topic}-{place.partition} offset {place.offset} lane {place.lane} was not handed out by "
                    "this session, or is acknowledged already",
                    **place._asdict(),
                )
        lost = await self.commit(wanted)
        done = [self.unacked.pop(place, None) for place in wanted]
        self._unacked_bytes -= size_of([each[1] for each in done if each is not None])
        if lost:
            names = sorted({f"{place.topic}-{place.partition}" for place in lost})
            raise StaleGenerationError(
                f"{', '.join(names)} went to another member, which reads {len(lost)} of these records again; the other "
                f"{len(wanted) - len(lost)} are acknowledged",
                partitions=names,
            )
        return len(wanted)

    async def commit(self, places: Sequence[Place]) -> list[Place]:
        """Positions behind these. Those that are not this member's any more. With an error it may be repeated."""
        lost = self._marked_done(places)
        for _ in range(_COMMITS):
            try:
                await self._consumer.commit_async()
                return lost
            except StaleGenerationError:  # one went on the way; what is due of the others is committed by the next
                lost = self._marked_done(places)
        raise StaleGenerationError("partitions of this session go to others again and again: acknowledge once more")

    def _marked_done(self, places: Iterable[Place]) -> list[Place]:
        """Those of them that are not this member's any more."""
        return [
            place
            for place in places
            if not self._consumer.ack(
                Record(place.offset, 0, None, None, lane=place.lane, topic=place.topic, partition=place.partition)
            )
        ]

    def assignment(self) -> list[tuple[str, int]]:
        return sorted((each.topic, each.partition) for each in self._consumer.assignment())

    def wakeup(self) -> None:
        self._consumer.wakeup()

    def hurry(self) -> None:
        """Nothing waits here any more."""
        self._hurried = True
        self.wakeup()

    async def close(self) -> None:
        self.closed = True
        with suppress(RayQueueError):
            await self._consumer.close_async()


_SessionT = TypeVar("_SessionT", bound=Session)


class Sessions:
    """All of one gateway. Belongs to its event loop."""

    def __init__(
        self,
        rq: RayQueue,
        gateway_id: str,
        settings: GatewaySettings,
        streams: Slots,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rq = rq
        self.gateway_id = gateway_id
        self._settings = settings
        self._streams = streams
        self._clock_s = clock_s
        self._known: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Task[Session]] = {}
        self._task: asyncio.Task[None] | None = None
        self._hurried = False

    def __len__(self) -> int:
        return len(self._known)

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._expire())

    def hurry(self) -> None:
        """Polls that wait answer with what there is, and so do those of sessions that are opened now."""
        self._hurried = True
        for session in list(self._known.values()):
            session.hurry()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.hurry()
        await asyncio.gather(*(self._end(each) for each in list(self._known.values())), return_exceptions=True)

    # -- sessions that a caller opens -----------------------------------------------------------

    async def open(
        self,
        caller: Caller,
        group: str,
        topics: Sequence[str],
        *,
        start: str,
        timeout_ms: int | None,
        **options: Any,
    ) -> Session:
        session_id = f"{self.gateway_id}.{secrets.token_urlsafe(18)}"
        timeout_s = (timeout_ms or self._settings.session_timeout_ms) / 1000
        return await self._open(
            session_id,
            caller,
            group,
            topics,
            timeout_s,
            Session,
            start=start,
            ack="record",
            auto_commit=False,
            **options,
        )

    def find(self, caller: Caller, session_id: str) -> Session:
        """It is heard of by this. ``SessionGoneError``, ``SessionElsewhereError``."""
        session = self._known.get(session_id)
        if session is None or session.closed or session.owner != caller.name or "/" in session_id:
            gateway = session_id.partition(".")[0]
            if gateway != self.gateway_id and session_id.count(".") == 1:
                raise SessionElsewhereError(
                    f"this session belongs to gateway {gateway!r}, and this one is {self.gateway_id!r}: send its "
                    "requests there, or open a new session here",
                    gateway=gateway,
                )
            raise SessionGoneError(
                "there is no such session (any more): it expired, was closed, or its gateway was started anew; open a "
                "new one, and what was not acknowledged is read again"
            )
        session.heard_s = self._clock_s()
        return session

    async def end(self, caller: Caller, session_id: str) -> None:
        await self._end(self.find(caller, session_id))

    async def drop(self, session: Session) -> None:
        """Nobody knows of it."""
        await self._end(session)

    # -- consumers that are tracked by their names ---------------------------------------------

    async def tracked(self, caller: Caller, topic: str, consumer_id: str, kind: type[_SessionT]) -> _SessionT:
        """The session of this consumer, which is opened if need be. Two requests at once share one."""
        name = f"{caller.name}/{topic}/{consumer_id}"
        session = self._known.get(name)
        if session is None or session.closed:
            opening = self._opening.get(name)
            if opening is None:
                work = self._open(
                    name,
                    caller,
                    consumer_id,
                    [topic],
                    self._settings.session_timeout_ms / 1000,
                    kind,
                    start="earliest",
                    ack="record",
                    auto_commit=False,
                )
                opening = self._opening[name] = asyncio.get_running_loop().create_task(work)
                opening.add_done_callback(lambda _: self._opening.pop(name, None))
            session = await asyncio.shield(opening)
        session.heard_s = self._clock_s()
        assert isinstance(session, kind)  # noqa: S101  # no id of another kind has a slash
        return session

    # -- within ---------------------------------------------------------------------------------

    async def _open(
        self,
        session_id: str,
        caller: Caller,
        group: str,
        topics: Sequence[str],
        timeout_s: float,
        kind: type[Session],
        **options: Any,
    ) -> Session:
        if len(self._known) >= self._settings.max_sessions:
            raise RateLimitedError(
                f"this gateway holds {len(self._known)} sessions already, as many as it may", retry_after_ms=1000
            )
        self._streams.take(caller.name)
        try:
            consumer = await self._rq.consumer_async(
                *topics, group=group, client=f"gateway-{self.gateway_id}", on_corrupt="skip", **options
            )
        except BaseException:
            self._streams.release(caller.name)
            raise
        session = self._known[session_id] = kind(
            session_id, caller.name, group, topics, consumer, self._settings.max_answer_bytes
        )
        session.timeout_s = timeout_s
        if self._hurried:
            session.hurry()
        session.heard_s = self._clock_s()
        return session

    async def _end(self, session: Session) -> None:
        if self._known.pop(session.session_id, None) is not None:
            self._streams.release(session.owner)
            await session.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now_s = self._clock_s()
            # Of one that is locked a request is being answered: it is heard of.
            late = [each for each in self._known.values() if now_s - each.heard_s > each.timeout_s]
            ending = [each for each in late if not each.lock.locked()]
            for session in ending:
                _log.info("session of group %s is not heard of any more, and leaves it", session.group)
            await asyncio.gather(*map(self._end, ending), return_exceptions=True)
