"""Handlers: each route's work, in terms of ``rayqueue.gateway.operations``."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from rayqueue import __version__
from rayqueue.config import descriptions
from rayqueue.errors import InvalidInputError, NotLeaderError
from rayqueue.gateway.operations import Columns, Operations, Tailed, TailPlaces
from rayqueue.gateway.principals import Caller
from rayqueue.gateway.queues import Queues
from rayqueue.gateway.rest import models as m
from rayqueue.gateway.sessions import Place, Session
from rayqueue.gateway.values import columns_of, from_base64, shown, utf8
from rayqueue.gateway.written import Written, as_json
from rayqueue.protocol.topics import TopicInfo
from rayqueue.records import Record

_ENCODE = msgspec.json.encode
_PLACES = re.compile(r"[0-9]{1,15}/([0-9]{1,9}:[0-9]{1,15}(,[0-9]{1,9}:[0-9]{1,15}){0,9999})?")


@dataclass(frozen=True, slots=True)
class Call:
    """One request, read and let in."""

    caller: Caller
    params: Any
    body: Any
    raw: bytes
    """The body as it came, unpacked."""
    headers: dict[str, str]
    operations: Operations
    queues: Queues
    gateway: Any
    """``rayqueue.gateway.server.Gateway``."""
    max_json_depth: int


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is more than a model."""

    body: bytes
    headers: dict[str, str]
    status: int | None = None


@dataclass(frozen=True, slots=True)
class Handed:
    """An answer that hands something out, and what is to be done if its caller is gone before it."""

    answer: Any
    not_taken: Callable[[], None]


class Events:
    """An answer that goes on: server-sent events."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self.events = events


# -- health -----------------------------------------------------------------------------------------


async def health(call: Call) -> Any:
    return m.Health("draining" if call.gateway.draining else "ok", call.gateway.gateway_id, __version__)


async def ready(call: Call) -> Any:
    if call.gateway.draining:
        raise NotLeaderError("this gateway is being stopped; ask another", leader=None)
    if not call.gateway.keys.ready:
        raise NotLeaderError("this gateway has not read the keys yet; retry", leader=None)
    await call.operations.ready()
    return m.Health("ok", call.gateway.gateway_id, __version__)


# -- topics -----------------------------------------------------------------------------------------


async def create_topic(call: Call) -> Any:
    body = call.body
    info = await call.operations.create_topic(call.caller, body.name, m.given(body), if_missing=body.if_missing)
    return _topic(info)


async def list_topics(call: Call) -> Any:
    return m.TopicList([_topic(each) for each in await call.operations.topics(call.caller)])


async def describe_topic(call: Call) -> Any:
    found = await call.operations.topic(call.caller, call.params.topic)
    return m.TopicDetail(
        found.name,
        found.topic_id,
        msgspec.structs.asdict(found.settings),
        found.records,
        found.size_bytes,
        [msgspec.convert(each, m.PartitionOut, from_attributes=True) for each in found.partitions],
    )


async def alter_topic(call: Call) -> Any:
    return _topic(await call.operations.alter_topic(call.caller, call.params.topic, m.given(call.body)))


async def delete_topic(call: Call) -> Any:
    await call.operations.delete_topic(call.caller, call.params.topic)


def _topic(info: TopicInfo) -> m.TopicOut:
    return m.TopicOut(info.name, info.topic_id, len(info.partitions), msgspec.structs.asdict(info.settings))


# -- publishing -------------------------------------------------------------------------------------


async def publish(call: Call) -> Any:
    return await _publish(call, columns_of(call.body.records, call.max_json_depth))


async def publish_raw(call: Call) -> Any:
    params: m.PublishRawParams = call.params
    if params.key is not None and params.key_base64 is not None:
        raise InvalidInputError("give one of key and key_base64")
    key = from_base64(params.key_base64) if params.key_base64 is not None else None
    if params.key is not None:
        key = utf8(params.key)
    columns = Columns(
        [call.raw],
        None if key is None else [key],
        None,
        None,
        [params.priority] if params.priority else None,
        None if params.partition is None else [params.partition],
    )
    return await _publish(call, columns)


async def _publish(call: Call, columns: Columns) -> Any:
    topic = call.params.topic

    def encode(written: Written) -> bytes:
        return b'{"topic":%s,"records":%s}' % (_ENCODE(topic), as_json(written))

    key = call.headers.get("idempotency-key")
    if key is None:
        return Answer(encode(await call.operations.publish(call.caller, topic, columns)), {})
    contents = msgspec.json.encode(call.params) + b"\n" + call.raw
    answer, before = await call.operations.publish_once(call.caller, topic, key, contents, columns, encode)
    return Answer(answer, {"Idempotency-Replayed": "true" if before else "false"})


# -- reading ----------------------------------------------------------------------------------------


async def peek(call: Call) -> Any:
    params: m.PeekParams = call.params
    found = await call.operations.peek(
        call.caller,
        params.topic,
        params.partition,
        offset=params.offset,
        timestamp_ms=params.timestamp_ms,
        max_records=params.max,
        isolation=params.isolation,
    )
    return m.Records([shown(each, params.format) for each in found])


async def tail(call: Call) -> Any:
    params: m.TailParams = call.params
    batches = call.operations.tail(
        call.caller,
        params.topic,
        partition=params.partition,
        offset=params.offset,
        start=params.start,
        isolation=params.isolation,
        places=_places_of(call.headers.get("last-event-id")),
    )
    first = await anext(batches)  # what is wrong is told by the status

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(batches):  # type: ignore[type-var]
            yield _events(first, params.format)
            async for tailed in batches:
                yield _events(tailed, params.format)

    return Events(events())


def _events(tailed: Tailed, form: Any) -> bytes:
    """The id, which a browser sends when it connects again, comes before the last record of a batch, or with none: it
    says where the whole tail goes on, so that of a batch that was cut off all comes again."""
    batch, places = tailed
    at = ",".join(f"{number}:{offset}" for number, offset in sorted(places.next.items()))
    told = b"id: %d/%s\n" % (places.topic_id, at.encode())
    if not batch:
        return told + b": nothing new\n\n"
    events = [b"event: record\ndata: %s\n\n" % _one_line(_ENCODE(shown(each, form))) for each in batch]
    events[-1] = told + events[-1]
    return b"".join(events)


def _places_of(last_event_id: str | None) -> TailPlaces | None:
    """Where a tail goes on, from the id of its last event."""
    if not last_event_id:
        return None
    if not _PLACES.fullmatch(last_event_id):
        shown_id = last_event_id[:50]
        raise InvalidInputError(
            f"Last-Event-ID is the id of an event of this tail, such as 7/0:17,1:4, not {shown_id!r}"
        )
    topic_id, _, at = last_event_id.partition("/")
    pairs = (each.split(":") for each in at.split(",") if each)
    return TailPlaces(int(topic_id), {int(number): int(offset) for number, offset in pairs})


def _one_line(json: bytes) -> bytes:
    """JSON that came as it is may have line ends between its tokens; an event's data may not."""
    return json.replace(b"\r", b" ").replace(b"\n", b" ")


async def consume_tracked(call: Call) -> Any:
    params: m.TrackedParams = call.params
    found, not_taken = await call.operations.consume_tracked(
        call.caller, params.topic, params.consumer, max_records=params.max, wait_ms=params.wait_ms
    )
    return Handed(m.Records([shown(each, params.format) for each in found]), not_taken)


# -- sessions ---------------------------------------------------------------------------------------


async def open_session(call: Call) -> Any:
    body: m.OpenSession = call.body
    session = await call.operations.open_session(
        call.caller,
        call.params.group,
        body.topics,
        start=body.start,
        timeout_ms=body.timeout_ms,
        isolation=body.isolation,
    )
    return _session(call, session)


async def heartbeat(call: Call) -> Any:
    return _session(call, call.operations.session(call.caller, call.params.session))


async def read_session(call: Call) -> Any:
    params: m.SessionReadParams = call.params
    found, cursor = await call.operations.poll(
        call.caller, params.session, max_records=params.max, wait_ms=params.wait_ms, cursor=params.cursor
    )
    return m.SessionRecords([shown(each, params.format) for each in found], cursor)


async def ack(call: Call) -> Any:
    body: m.Ack = call.body
    if (body.records is None) == (body.through is None):
        raise InvalidInputError("say which records are done: one of records and through")
    places = [Place(each.topic, each.partition, each.offset, each.lane) for each in body.records or ()]
    return m.Acked(await call.operations.ack(call.caller, call.params.session, places, through=body.through))


async def close_session(call: Call) -> Any:
    await call.operations.close_session(call.caller, call.params.session)


def _session(call: Call, session: Session) -> m.SessionOut:
    return m.SessionOut(
        session.session_id,
        session.group,
        list(session.topics),
        int(session.timeout_s * 1000),
        call.gateway.gateway_id,
        [m.Assigned(*place) for place in session.assignment()],
    )


# -- groups and the cluster --------------------------------------------------------------------------


async def list_groups(call: Call) -> Any:
    found = await call.operations.groups(call.caller)
    return m.GroupList([msgspec.convert(each, m.GroupOut, from_attributes=True) for each in found])


async def describe_group(call: Call) -> Any:
    found, oldest, trend_per_s = await call.gateway.looking.group(call.caller, call.params.group)
    told = msgspec.convert(found, m.GroupDetail, from_attributes=True)
    told.lag_trend_per_s = trend_per_s
    for each, at_ms in zip(told.partitions, oldest, strict=True):
        each.oldest_unread_ms = at_ms
    return told


async def delete_group(call: Call) -> Any:
    await call.operations.delete_group(call.caller, call.params.group)


async def reset_group(call: Call) -> Any:
    body: m.ResetGroup = call.body
    reset = await call.operations.reset_group(
        call.caller,
        call.params.group,
        to=body.to,
        to_time_ms=body.to_time_ms,
        by=body.by,
        topic=body.topic,
        partitions=body.partitions,
        dry_run=body.dry_run,
    )
    return msgspec.convert(reset, m.ResetOut, from_attributes=True)


async def cluster(call: Call) -> Any:
    return msgspec.convert(await call.operations.cluster(call.caller), m.ClusterOut, from_attributes=True)


async def overview(call: Call) -> Any:
    look = await call.gateway.looking.look(call.caller)
    return m.OverviewOut(
        look.now_ms,
        call.gateway.gateway_id,
        __version__,
        msgspec.convert(look.cluster, m.ClusterOut, from_attributes=True),
        [
            m.TopicLook(
                each.name,
                "queue" if each.settings.queue else "log",
                [msgspec.convert(part, m.PartitionOut, from_attributes=True) for part in each.partitions],
            )
            for each in look.topics
        ],
        [
            m.GroupLookOut(
                each.info.group,
                each.info.state,
                len(each.info.members),
                each.lag,
                each.trend_per_s,
                list(each.topics),
            )
            for each in look.groups
        ],
    )


async def settings(call: Call) -> Any:
    meaning = descriptions()
    return m.SettingList(
        [
            m.SettingOut(each.key, "none" if each.value is None else str(each.value), each.source, meaning[each.key])
            for each in call.gateway.looking.settings(call.caller)
        ]
    )


# -- FalconQ's five -----------------------------------------------------------------------------------


async def falcon_publish(call: Call) -> Any:
    body: m.FalconPublish = call.body
    topic = call.params.topic
    lanes = await call.operations.lanes(call.caller, topic)
    lane = lanes - 1 if body.priority == "high" else 0
    columns = Columns([utf8(body.message)], priorities=[lane] if lane else None)
    (written,) = await call.operations.publish(call.caller, topic, columns)
    return m.FalconPublished("published", topic, written.partition, written.offset or 0)


async def falcon_consume(call: Call) -> Any:
    params: m.FalconConsumeParams = call.params
    found, not_taken = await call.operations.consume_tracked(
        call.caller, params.topic, params.consumerID, max_records=params.batch, wait_ms=0
    )
    return Handed(m.FalconMessages([_falcon(each) for each in found]), not_taken)


async def falcon_peek(call: Call) -> Any:
    params: m.FalconPeekParams = call.params
    found = await call.operations.peek(call.caller, params.topic, 0, offset=params.offset, max_records=params.batch)
    return m.FalconMessages([_falcon(each) for each in found])


async def falcon_topics(call: Call) -> Any:
    return m.FalconTopics([each.name for each in await call.operations.topics(call.caller)])


async def falcon_partitions(call: Call) -> Any:
    found = await call.operations.topic(call.caller, call.params.topic)
    return m.FalconPartitions([m.FalconPartition(each.number) for each in found.partitions], found.name)


def _falcon(record: Record) -> m.FalconMessage:
    text = (record.value or b"").decode("utf-8", "replace")
    return m.FalconMessage(text, record.offset, record.partition, "high" if record.lane else "low")
