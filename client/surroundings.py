"""What a stream of batches is given by its sender, and what it needs of channels and routes, as small interfaces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from rayqueue.config import ClientSettings, ProducerSettings
from rayqueue.errors import RayQueueError
from rayqueue.protocol.calls import Call
from rayqueue.protocol.data import Appended
from rayqueue.protocol.frames import Kind
from rayqueue.protocol.topics import TopicPartition


class AppendChannel(Protocol):
    """What a stream needs of ``rayqueue.client.channel.Channel``."""

    @property
    def closed(self) -> bool: ...
    @property
    def queued_bytes(self) -> int: ...
    def append(self, batch: bytes, kind: Kind = ...) -> asyncio.Future[Appended]: ...
    def call(self, call: Call, *, may_take_ms: int = ...) -> asyncio.Future[Any]: ...


class LeaderRoute(Protocol):
    """What a stream needs of ``rayqueue.client.router.GroupRoute``."""

    async def leader(self) -> Any: ...
    def failed(self, error: RayQueueError) -> None: ...


class Surroundings(Protocol):
    """What the sender gives to each of its streams."""

    loop: asyncio.AbstractEventLoop
    settings: ProducerSettings
    client: ClientSettings
    rng: Random
    clock_s: Callable[[], float]

    async def route(self, partition: TopicPartition, topic_id: int, *, refresh: bool) -> LeaderRoute: ...
    async def producer_id(self) -> int: ...
    async def fresh_producer_id(self) -> int: ...
