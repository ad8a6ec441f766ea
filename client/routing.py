"""What consumers need of ``rayqueue.client.router``, as small interfaces."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from rayqueue.errors import RayQueueError
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

    async def partition(self, partition: TopicPartition) -> Route: ...
