"""Operations: what callers of a gateway can do. No protocol is known here.

Each takes who asks first, and refuses what he may not do before anything else.
Names that RayQueue uses for itself are out of everybody's reach, but for reading
the audit. What is wrong is a ``RayQueueError``, from here or from the client.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from rayqueue.client.admin.admin import GroupDescription, TopicDescription
from rayqueue.client.admin.group_reset import GroupReset
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.delivery import RecordMetadata
from rayqueue.config import GatewaySettings
from rayqueue.errors import (
    InvalidInputError,
    OutcomeUnknownError,
    PermissionDeniedError,
    QueueFullError,
    RayQueueError,
    TopicRecreatedError,
    UnknownGroupError,
    UnknownPartitionError,
    UnknownTopicError,
)
from rayqueue.gateway.audit import TOPIC as AUDIT
from rayqueue.gateway.audit import Audit
from rayqueue.gateway.draining import Draining
from rayqueue.gateway.limits import Limits
from rayqueue.gateway.numbered import REPEATABLE_MS, NumberedWrite, Placement, check_ahead
from rayqueue.gateway.outcomes import worst
from rayqueue.gateway.principals import Caller, Verb
from rayqueue.gateway.requests import Known, Requests, request_id
from rayqueue.gateway.sessions import Place, Session, Sessions
from rayqueue.gateway.topics import TopicCache
from rayqueue.gateway.tracked import TrackedSession
from rayqueue.gateway.written import Places, Written, packed, spans_of, unpacked
from rayqueue.protocol.calls import ClusterInfo, GroupInfo
from rayqueue.protocol.topics import TopicInfo, check_name, is_internal
from rayqueue.records import Headers, Record

MAX_RECORDS = 10_000
Isolation = Literal["read_committed", "read_uncommitted"]
"""Of transactions: what is committed, or everything. None: as consumers do without it."""
_TAIL_WAIT_MS = 1000
_TAIL_RECORDS = 1000
_EVERY = "*"


@dataclass(slots=True)
class Columns:
    """Records of one publish, as columns of the same length. None in place of a column: none of them has it."""

    values: list[bytes | None]
    keys: list[bytes | None] | None = None
    headers: list[Headers] | None = None
    timestamps_ms: list[int | None] | None = None
    priorities: list[int] | None = None
    partitions: list[int | None] | None = None


class TailPlaces(NamedTuple):
    """Where the reader of a topic is: partition to the offset of the next record."""

    topic_id: int
    """Offsets of an earlier topic of the same name mean nothing in this one."""
    next: Mapping[int, int]


class Tailed(NamedTuple):
    """A step of a tail: what came, and where it goes on behind that."""

    records: list[Record]
    places: TailPlaces


class Operations:
    """Of one gateway. Belongs to its event loop."""

    def __init__(
        self,
        rq: RayQueue,
        settings: GatewaySettings,
        *,
        limits: Limits,
        sessions: Sessions,
        requests: Requests,
        audit: Audit,
        now_ms: Callable[[], int],
        again: Callable[[Caller], Caller],
        drain: Draining,
    ) -> None:
        """``again``: the same caller as he is now, for what lasts longer than one request."""
        self._rq = rq
        self._settings = settings
        self.limits = limits
        self._sessions = sessions
        self._requests = requests
        self._audit = audit
        self._now_ms = now_ms
        self.again = again
        self.drain = drain
        self._topics = TopicCache(rq)
        self._producer: Any = None

    async def start(self) -> None:
        self._producer = await self._rq.producer_async(
            on_full="raise", delivery_timeout_ms=self._settings.request_timeout_ms
        )

    async def close(self) -> None:
        """What was accepted is acknowledged, or given up."""
        if self._producer is not None:
            await self._producer.close_async(timeout_ms=self._settings.drain_timeout_ms)

    # -- topics -------------------------------------------------------------------------------------

    async def create_topic(
        self, caller: Caller, name: str, settings: Mapping[str, Any], *, if_missing: bool = False
    ) -> TopicInfo:
        _topic(caller, "create", name)
        self.check_size(settings)
        made = await self._rq.create_topic_async(name, if_missing=if_missing, **settings)
        self._audit.note(caller, "create", "topic", name)
        return made

    async def topics(self, caller: Caller) -> list[TopicInfo]:
        """Those that he may see."""
        check_some(caller, "describe", "topic")
        return [each for each in await self._rq.topics_async() if caller.may("describe", "topic", each.name)]

    async def topic(self, caller: Caller, name: str) -> TopicDescription:
        _topic(caller, "describe", name)
        found: TopicDescription = await self._rq.topic_async(name)
        return found

    async def alter_topic(self, caller: Caller, name: str, changes: Mapping[str, Any]) -> TopicInfo:
        _topic(caller, "alter", name)
        if not changes:
            raise InvalidInputError("nothing is to be changed: name a setting")
        self.check_size(changes)
        changed = await self._rq.alter_topic_async(name, **changes)
        self._audit.note(caller, "alter", "topic", name)
        return changed

    async def delete_topic(self, caller: Caller, name: str) -> None:
        _topic(caller, "delete", name)
        if not await self._rq.delete_topic_async(name):
            raise UnknownTopicError(f"there is no topic {name!r}", topic=name)
        self._audit.note(caller, "delete", "topic", name)

    def check_size(self, settings: Mapping[str, Any]) -> None:
        most = self._settings.max_topic_partitions
        if settings.get("partitions", 1) > most:
            raise InvalidInputError(f"a topic gets at most {most} partitions here (gateway.max_topic_partitions)")

    # -- publishing ---------------------------------------------------------------------------------

    async def publish(self, caller: Caller, topic: str, columns: Columns) -> Sequence[RecordMetadata]:
        """In the order given, once all are acknowledged. Concurrent calls share batches.

        After an error some may be written: those of other partitions, or all if it is an ``OutcomeUnknownError``.
        """
        _topic(caller, "publish", topic)
        return await self.write(topic, columns)

    async def write(self, topic: str, columns: Columns) -> Sequence[RecordMetadata]:
        """The same, of somebody who may."""
        count = _check_count(columns)
        if columns.timestamps_ms is not None:
            check_ahead(columns, self._now_ms())
        if columns.partitions is None and columns.priorities is None:
            return await self._send(topic, columns, range(count), None, 0)
        written: list[RecordMetadata | None] = [None] * count
        alike: dict[tuple[int | None, int], list[int]] = {}
        for row in range(count):
            partition = columns.partitions[row] if columns.partitions else None
            alike.setdefault((partition, columns.priorities[row] if columns.priorities else 0), []).append(row)
        await self._checked_places(topic, columns)
        sends = [self._send(topic, columns, rows, *place) for place, rows in alike.items()]
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise worst(outcomes)
        for rows, told in zip(alike.values(), outcomes, strict=True):
            for row, each in zip(rows, told, strict=True):  # type: ignore[arg-type]
                written[row] = each
        return [each for each in written if each is not None]

    async def lanes(self, caller: Caller, topic: str) -> int:
        """How many priorities the topic has."""
        _topic(caller, "publish", topic)
        return (await self._topics.get(topic)).settings.lanes

    async def _checked_places(self, topic: str, columns: Columns) -> None:
        """What is not there as the topic is known may have been added since."""
        try:
            _check_places(await self._topics.get(topic), columns)
        except (UnknownPartitionError, InvalidInputError):
            _check_places(await self._topics.get(topic, fresh=True), columns)

    async def _send(
        self, topic: str, columns: Columns, rows: Sequence[int], partition: int | None, priority: int
    ) -> Sequence[RecordMetadata]:
        whole = len(rows) == len(columns.values)

        def cut(column: list[Any] | None) -> list[Any] | None:
            return column if column is None or whole else [column[row] for row in rows]

        timestamps = cut(columns.timestamps_ms)
        if timestamps is not None:
            now_ms = self._now_ms()
            timestamps = [now_ms if each is None else each for each in timestamps]
        options = {"keys": cut(columns.keys), "headers": cut(columns.headers), "timestamps_ms": timestamps}
        send = partial(
            self._producer.send_many_async,
            topic,
            cut(columns.values),
            priority=priority,
            partition=partition,
            **options,
        )
        sent: Sequence[RecordMetadata]
        try:
            try:
                sent = await send()
            except TopicRecreatedError:  # the producer knew the former topic; the caller means the one there is
                sent = await send()
        except RayQueueError as error:
            if len(rows) == 1 or isinstance(error, OutcomeUnknownError) or _before_any(error):
                raise
            raise OutcomeUnknownError(f"some of these records may be written: {error}", cause=error.code) from error
        return sent

    async def publish_once(
        self,
        caller: Caller,
        topic: str,
        key: str,
        contents: bytes,
        columns: Columns,
        encode: Callable[[Written], bytes],
        *,
        kind: str = "",
    ) -> tuple[bytes, bool]:
        """Publish unless a request of this idempotency key, and this kind, has. Its answer, and whether that was
        before."""
        _topic(caller, "publish", topic)
        _check_count(columns)
        info = await self.identified(caller, topic, key, kind, self._topics.get)
        try:
            return await self._once(caller, info, key, kind, contents, columns, encode)
        except TopicRecreatedError:  # since it was looked up; the caller means the one there is
            info = await self._topics.get(topic, fresh=True)
            return await self._once(caller, info, key, kind, contents, columns, encode)

    async def identified(
        self, caller: Caller, topic: str, key: str, kind: str, look_up: Callable[..., Awaitable[TopicInfo]]
    ) -> TopicInfo:
        """The topic that a request with this key is for. Writing to one that is gone fails, so it need not be looked
        up anew for that; but an answer that was given for it must not be given again for the next of its name."""
        info = await look_up(topic)
        if self._requests.knows(request_id(caller.name, topic, info.topic_id, key, kind)):
            info = await look_up(topic, fresh=True)
        return info

    async def _once(
        self,
        caller: Caller,
        info: TopicInfo,
        key: str,
        kind: str,
        contents: bytes,
        columns: Columns,
        encode: Callable[[Written], bytes],
    ) -> tuple[bytes, bool]:
        request = request_id(caller.name, info.name, info.topic_id, key, kind)
        write = NumberedWrite(self._rq, info, columns, request, self._settings.request_timeout_ms * 3 // 4)

        def place() -> Placement:
            _check_places(info, columns)
            return write.place(self._now_ms())

        async def carry_out(known: Known) -> bytes:
            assert known.number is not None  # noqa: S101  # or it is not carried out
            work = write.carry_out(known.number, known.placement, known.at_ms)
            return packed(spans_of(await asyncio.wrap_future(self._rq.io.run(work))))

        return await self._requests.once(
            request,
            contents,
            carry_out,
            lambda kept: encode(Places(info.name, unpacked(kept))),
            repeatable_ms=REPEATABLE_MS,
            partitions=len(info.partitions),
            place=place,
        )

    # -- reading ------------------------------------------------------------------------------------

    async def peek(
        self,
        caller: Caller,
        topic: str,
        partition: int,
        *,
        offset: int | None = None,
        timestamp_ms: int | None = None,
        max_records: int = 10,
        isolation: Isolation | None = None,
    ) -> list[Record]:
        """From an offset, or a time, on, in the order of the log. Nothing is consumed, and nothing is made."""
        _topic(caller, "consume", topic)
        async with self._reading(topic, partition, isolation) as consumer:
            found: list[Record] = await consumer.peek_async(
                topic,
                partition,
                offset=offset,
                timestamp_ms=timestamp_ms,
                max_records=_count(max_records),
                max_bytes=self._settings.max_answer_bytes,
            )
            return found

    @asynccontextmanager
    async def _reading(self, topic: str, partition: int, isolation: Isolation | None) -> AsyncIterator[Any]:
        """A consumer without a group, that fetches nothing by itself."""
        check_name("topic", topic)
        consumer = await self._rq.consumer_async(
            partitions=[(topic, partition)], start="latest", prefetch_bytes=0, **isolated(isolation)
        )
        try:
            yield consumer
        finally:
            await consumer.close_async()

    async def tail(
        self,
        caller: Caller,
        topic: str,
        *,
        partition: int | None = None,
        offset: int | None = None,
        start: Literal["earliest", "latest"] = "latest",
        isolation: Isolation | None = None,
        places: TailPlaces | None = None,
    ) -> AsyncIterator[Tailed]:
        """Records as they come; none every second without any. Until it is closed. ``places``: of an earlier tail,
        which is gone on with; they count for more than ``offset``. ``TopicRecreatedError`` if they are of an earlier
        topic."""
        _topic(caller, "consume", topic)
        if offset is not None and partition is None:
            raise InvalidInputError("an offset needs the partition that it is of")
        topic_id = (await self._topics.get(topic, fresh=places is not None)).topic_id
        if places is not None and places.topic_id != topic_id:
            raise TopicRecreatedError(
                f"topic {topic!r} was deleted and made again since: read it from its beginning",
                topic_id=places.topic_id,
                now=topic_id,
            )
        with self.limits.streams.held(caller.name):
            options: dict[str, Any] = {"start": start, "on_corrupt": "skip", **isolated(isolation)}
            if partition is None:
                consumer = await self._rq.consumer_async(topic, **options)
            else:
                consumer = await self._rq.consumer_async(partitions=[(topic, partition)], **options)
            try:
                wanted = {} if offset is None or partition is None else {partition: offset}
                for number, at in {**wanted, **({} if places is None else places.next)}.items():
                    await consumer.seek_async((topic, number), at)
                while True:
                    self.drain.check()
                    batch = await consumer.poll_async(
                        max_records=_TAIL_RECORDS, timeout_ms=_TAIL_WAIT_MS, max_bytes=self._settings.max_answer_bytes
                    )
                    _topic(self.again(caller), "consume", topic)
                    next_of = {each.partition: at for each, at in consumer.positions().items()}
                    yield Tailed(batch, TailPlaces(topic_id, next_of))
            finally:
                await consumer.close_async()

    async def consume_tracked(
        self, caller: Caller, topic: str, consumer_id: str, *, max_records: int, wait_ms: int
    ) -> tuple[list[Record], Callable[[], None]]:
        """The next records of this consumer, and what to do if its caller is gone before they are handed to him. Each
        is handed out once: its position is committed before."""
        _topic(caller, "consume", topic)
        caller.check("consume", "group", check_name("consumer", consumer_id))
        session = await self._sessions.tracked(caller, topic, consumer_id, TrackedSession)
        async with session.lock:
            # Their positions are committed: what came is handed out, whatever became of his key while he waited.
            found = await session.take(_count(max_records), self.checked_wait(wait_ms))
        return found, partial(session.not_taken, found)

    # -- sessions -----------------------------------------------------------------------------------

    async def open_session(
        self,
        caller: Caller,
        group: str,
        topics: Sequence[str],
        *,
        start: Literal["earliest", "latest"] = "earliest",
        timeout_ms: int | None = None,
        isolation: Isolation | None = None,
    ) -> Session:
        caller.check("consume", "group", check_name("group", group))
        if not 0 < len(topics) <= 100:
            raise InvalidInputError("a session reads 1 to 100 topics")
        for topic in topics:
            _topic(caller, "consume", topic)
        if timeout_ms is not None and not 1000 <= timeout_ms <= 600_000:
            raise InvalidInputError("a session's timeout is from 1,000 to 600,000 ms")
        session = await self._sessions.open(
            caller, group, topics, start=start, timeout_ms=timeout_ms, **isolated(isolation)
        )
        self._audit.note(caller, "consume", "group", group)
        return session

    def session(self, caller: Caller, session_id: str) -> Session:
        """It is heard of by this. What its key may not do any more it cannot do here either."""
        session = self._sessions.find(caller, session_id)
        self.check_reader(caller, session)
        return session

    def check_reader(self, caller: Caller, session: Session) -> None:
        """He may still read what this session does. It is not heard of by this."""
        caller.check("consume", "group", session.group)
        for topic in session.topics:
            _topic(caller, "consume", topic)

    async def open_and_poll(
        self,
        caller: Caller,
        group: str,
        topics: Sequence[str],
        *,
        max_records: int,
        wait_ms: int,
        within_s: float,
        **options: Any,
    ) -> tuple[str, list[Record], int]:
        """A new session's id, its first records and their cursor, within so long: who does not hear of the session
        cannot use it, and it keeps its share of the partitions from others, so it ends if this fails."""
        _count(max_records)
        self.checked_wait(wait_ms)
        began_s = time.monotonic()
        session = await self.open_session(caller, group, topics, **options)
        try:
            left_s = within_s - (time.monotonic() - began_s)
            found, cursor = await self.poll(
                caller, session.session_id, max_records=max_records, wait_ms=wait_ms, within_s=left_s
            )
        except BaseException:
            await self._sessions.drop(session)
            raise
        return session.session_id, found, cursor

    async def poll(
        self,
        caller: Caller,
        session_id: str,
        *,
        max_records: int,
        wait_ms: int,
        cursor: int | None = None,
        within_s: float = math.inf,
    ) -> tuple[list[Record], int]:
        """The session's next records, and the cursor behind them. ``cursor``: the last one that the caller has seen.
        ``within_s``: for so long, however long it may wait."""
        session = self.session(caller, session_id)
        async with session.lock:
            found = await session.read(_count(max_records), self.checked_wait(wait_ms), cursor, within_s=within_s)
        self.check_reader(self.again(caller), session)  # he has waited; others read what he does not get
        return found

    async def ack(self, caller: Caller, session_id: str, places: Sequence[Place], *, through: int | None = None) -> int:
        """These, or all through a cursor. May come beside a poll."""
        session = self.session(caller, session_id)
        if through is not None:
            if places:
                raise InvalidInputError("name the records that are done, or a cursor, not both")
            return await session.ack_through(through)
        return await session.ack(places)

    async def close_session(self, caller: Caller, session_id: str) -> None:
        self.session(caller, session_id)
        await self._sessions.end(caller, session_id)

    # -- groups -------------------------------------------------------------------------------------

    async def groups(self, caller: Caller) -> list[GroupInfo]:
        """Those that he may see."""
        check_some(caller, "describe", "group")
        return [each for each in await self._rq.groups_async() if caller.may("describe", "group", each.group)]

    async def group(self, caller: Caller, name: str) -> GroupDescription:
        caller.check("describe", "group", check_name("group", name))
        return await self._rq.group_async(name)

    async def delete_group(self, caller: Caller, name: str) -> None:
        caller.check("delete", "group", check_name("group", name))
        if not await self._rq.delete_group_async(name):
            raise UnknownGroupError(f"there is no group {name!r}", group=name)
        self._audit.note(caller, "delete", "group", name)

    async def reset_group(
        self,
        caller: Caller,
        name: str,
        *,
        to: Literal["earliest", "latest"] | int | None,
        to_time_ms: int | None,
        by: int | None,
        topic: str | None,
        partitions: Sequence[int] | None,
        dry_run: bool,
    ) -> GroupReset:
        caller.check("alter", "group", check_name("group", name))
        reset = await self._rq.reset_group_async(
            name, to=to, to_time_ms=to_time_ms, by=by, topic=topic, partitions=partitions, dry_run=dry_run
        )
        if not dry_run:
            self._audit.note(caller, "alter", "group", name)
        return reset

    # -- the cluster --------------------------------------------------------------------------------

    async def cluster(self, caller: Caller) -> ClusterInfo:
        caller.check("describe", "cluster", "brokers")
        return await self._rq.cluster_async()

    async def ready(self) -> bool:
        """Whether the coordinator answers."""
        await self._rq.cluster_async()
        return True

    @property
    def max_answer_bytes(self) -> int:
        return self._settings.max_answer_bytes

    def checked_wait(self, wait_ms: int) -> int:
        if not 0 <= wait_ms <= self._settings.max_wait_ms:
            raise InvalidInputError(f"wait_ms is from 0 to {self._settings.max_wait_ms}, not {wait_ms}")
        return wait_ms


def isolated(isolation: Isolation | None) -> dict[str, Any]:
    """The option of a consumer."""
    return {} if isolation is None else {"isolation": isolation}


def _check_count(columns: Columns) -> int:
    count = len(columns.values)
    if not 0 < count <= MAX_RECORDS:
        raise InvalidInputError(f"1 to {MAX_RECORDS} records at a time, not {count}")
    return count


def _check_places(info: TopicInfo, columns: Columns) -> None:
    """A mistake in one record is told before any is sent."""
    partitions, lanes = len(info.partitions), info.settings.lanes
    for partition in set(columns.partitions or ()):
        if partition is not None and not 0 <= partition < partitions:
            raise UnknownPartitionError(f"{info.name} has {partitions} partitions; there is no {partition}")
    for priority in set(columns.priorities or ()):
        if not 0 <= priority < lanes:
            raise InvalidInputError(
                f"{info.name} has {lanes} lanes: a priority is from 0 to {lanes - 1}, not {priority}"
            )


def _before_any(error: RayQueueError) -> bool:
    """Whether it was raised before the first of several records was accepted. A bounded topic refuses one by one."""
    if isinstance(error, QueueFullError):
        return "topic" not in error.details
    return isinstance(error, InvalidInputError | UnknownTopicError | UnknownPartitionError)


def _count(max_records: int) -> int:
    if not 0 < max_records <= MAX_RECORDS:
        raise InvalidInputError(f"1 to {MAX_RECORDS} records at a time, not {max_records}")
    return max_records


def _topic(caller: Caller, verb: Verb, name: str) -> None:
    check_name("topic", name)
    caller.check(verb, "topic", name)
    if is_internal(name) and not (name == AUDIT and verb in ("consume", "describe")):
        raise PermissionDeniedError(f"{name} is RayQueue's own: no caller of a gateway may {verb} it")


def check_some(caller: Caller, verb: Verb, kind: Literal["topic", "group", "queue"]) -> None:
    """He may do it with some of this kind: then he is shown those."""
    if not any(grant.verb in (_EVERY, verb) and grant.kind in (_EVERY, kind) for grant in caller.grants):
        caller.check(verb, kind, _EVERY)
