"""What consumers need of ``rayqueue.client.router``, as small interfaces."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from rayqueue.errors import ClosedError, NotLeaderError, RayQueueError, TopicRecreatedError
from rayqueue.protocol.calls import Call
from rayqueue.protocol.data import FetchAnswer, FetchRequest
from rayqueue.protocol.topics import TopicInfo, TopicPartition


class Reader(Protocol):
    """An open channel to a replica."""

    def fetch(self, request: FetchRequest) -> asyncio.Future[FetchAnswer]: ...


class Route(Protocol):
    """The way to one Raft group."""

    @property
    def leader_channel(self) -> Reader | None: ...

    async def leader(self) -> Reader: ...

    async def call(
        self, call: Call, *, timeout_ms: int | None = None, may_take_ms: int = 0, idempotent: bool = True
    ) -> Any: ...

    def failed(self, error: RayQueueError) -> None: ...


class Routes(Protocol):
    """The cluster as a client sees it."""

    @property
    def coordinator(self) -> Route: ...

    async def topic(self, name: str, *, refresh: bool = False) -> TopicInfo: ...

    async def partition(self, partition: TopicPartition, topic_id: int | None = None) -> Route: ...


_WAYS = 4
"""How often the way to a partition may change during one call."""


async def ask(
    routes: Routes,
    partition: TopicPartition,
    call: Call,
    *,
    topic_id: int | None = None,
    timeout_ms: int | None = None,
) -> Any:
    """Ask whoever leads a partition, by the new way if the way there changes meanwhile. For calls that may be repeated.

    With ``topic_id``, ``TopicRecreatedError`` if that topic is not there any more.
    """
    problem: ClosedError | None = None
    for _ in range(_WAYS):
        route = await routes.partition(partition, topic_id)
        try:
            return await route.call(call, timeout_ms=timeout_ms)
        except ClosedError as error:  # that route was; if it is the whole connection, the next one cannot be had
            problem = error
    raise NotLeaderError(f"the replicas of {partition} change all the time: {problem}", leader=None)


def same_topic(info: TopicInfo, topic_id: int | None) -> TopicInfo:
    """The same. ``TopicRecreatedError`` unless it is the topic that is meant; None means any."""
    if topic_id not in (None, info.topic_id):
        raise TopicRecreatedError(
            f"topic {info.name!r} was deleted and made again: its records and positions are others now",
            topic=info.name,
            topic_id=info.topic_id,
            expected=topic_id,
        )
    return info
