"""Connections of HTTP callers: how many there may be, and how long a request may take to arrive, head and body.

uvicorn bounds neither: it waits for a request's first line for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rayqueue.config import GatewaySettings
from rayqueue.errors import RateLimitedError
from rayqueue.gateway.limits import Slots


def protocol_of(settings: GatewaySettings, slots: Slots) -> type[Any]:
    """The class of connections of one gateway."""

    class Connection(HttpToolsProtocol):
        _waiting: asyncio.TimerHandle | None = None
        _source: str | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            peer = transport.get_extra_info("peername")
            source = str(peer[0]) if isinstance(peer, tuple) else "unknown"
            try:
                if len(self.connections) > settings.max_connections:
                    raise RateLimitedError("too many connections")
                slots.take(source)
            except RateLimitedError:
                transport.abort()
                return
            self._source = source
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._arrived()
            if self._source is not None:
                slots.release(self._source)
                self._source = None
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._wait()
            super().on_message_begin()

        def on_message_complete(self) -> None:
            self._arrived()
            super().on_message_complete()

        def _wait(self) -> None:
            self._arrived()
            self._waiting = self.loop.call_later(settings.slow_timeout_ms / 1000, self._too_slow)

        def _arrived(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _too_slow(self) -> None:
            if not self.transport.is_closing():
                self.transport.abort()

    return Connection
