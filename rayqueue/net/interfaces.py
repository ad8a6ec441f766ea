"""Small interfaces of routes, and the one way to ask a partition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from rayqueue.errors import RayQueueError, TopicRecreatedError
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

    @property
    def trouble(self) -> str:
        """Why nobody may lead, for the end of a sentence; "" if nothing is known."""

    async def leader(self) -> Reader: ...

    async def any_replica(self, prefer_host: str | None = None) -> Reader: ...

    async def call(
        self,
        call: Call,
        *,
        timeout_ms: int | None = None,
        may_take_ms: int = 0,
        idempotent: bool = True,
        way: Way | None = None,
    ) -> Any: ...

    def failed(self, error: RayQueueError) -> None: ...


Way = Callable[[], Awaitable[Any]]
"""Finds the route to a group as it is now: its replicas may be others than a moment ago."""


class Routes(Protocol):
    """The cluster as a client sees it."""

    @property
    def coordinator(self) -> Route: ...

    async def topic(self, name: str, *, refresh: bool = False) -> TopicInfo: ...

    async def partition(self, partition: TopicPartition, topic_id: int | None = None) -> Route: ...


async def ask(
    routes: Routes,
    partition: TopicPartition,
    call: Call,
    *,
    topic_id: int | None = None,
    timeout_ms: int | None = None,
    may_take_ms: int = 0,
) -> Any:
    """Ask whoever leads a partition, by the new way if the way there changes meanwhile. For calls that may be repeated.

    ``may_take_ms``: how long the partition may wait for something before it answers.
    With ``topic_id``, ``TopicRecreatedError`` if that topic is not there any more.
    """
    way = partial(routes.partition, partition, topic_id)
    return await (await way()).call(call, timeout_ms=timeout_ms, may_take_ms=may_take_ms, way=way)


def same_topic(info: TopicInfo, topic_id: int | None) -> TopicInfo:
    """The same. ``TopicRecreatedError`` unless it is the topic that is meant; None means any, and so does 0, which
    releases had that kept no id."""
    if topic_id and topic_id != info.topic_id:
        raise TopicRecreatedError(
            f"topic {info.name!r} was deleted and made again: its records and positions are others now",
            topic=info.name,
            topic_id=info.topic_id,
            expected=topic_id,
        )
    return info
