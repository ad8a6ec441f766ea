"""One connection to one replica, for many requests at a time.

Belongs to the loop of ``rayqueue.client.io``: every method is called there. A
request is written at once and in the order of the calls; its answer is a
future, and answers come in any order. Once the connection is gone, everything
that was not answered fails with ``OutcomeUnknownError``: the replica may have
carried it out.

It does not reconnect and does not know who leads: ``rayqueue.client.router`` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rayqueue.actors.endpoint import Endpoint
from rayqueue.config import Settings
from rayqueue.protocol.calls import Call
from rayqueue.protocol.data import Appended, FetchAnswer, FetchRequest
from rayqueue.protocol.frames import Kind


class Channel(asyncio.BufferedProtocol):
    """Made by ``open`` only."""

    endpoint: Endpoint
    closed: bool

    @classmethod
    async def open(cls, endpoint: Endpoint, settings: Settings) -> Channel:
        """Connect and prove both sides. ``TransportError`` if that fails: ask the actor for its endpoint again."""
        raise NotImplementedError

    @property
    def queued_bytes(self) -> int:
        """Written and not yet taken by the kernel."""
        raise NotImplementedError

    def append(self, batch: bytes, kind: Kind = Kind.APPEND) -> asyncio.Future[Appended]:
        """``APPEND_UNACKED``: the future is done at once, with no offset."""
        raise NotImplementedError

    def fetch(self, request: FetchRequest) -> asyncio.Future[FetchAnswer]:
        """The payloads of the batches stay valid for as long as they are held."""
        raise NotImplementedError

    def call(self, call: Call, *, may_take_ms: int = 0) -> asyncio.Future[Any]:
        """``may_take_ms``: how long the replica may wait for something before there is reason for doubt."""
        raise NotImplementedError

    def add_closed_callback(self, callback: Callable[[Channel], None]) -> None:
        """Called once, when the connection is gone; at once if it is."""
        raise NotImplementedError

    def close(self) -> None:
        """Hang up. What was not answered fails with ``OutcomeUnknownError``."""
        raise NotImplementedError
