"""Connections of HTTP callers: how many there may be, and how slowly one may shake hands, ask, and take its answer.

uvicorn bounds none of it: it waits for ever for a request's first line and for a
caller to take what was written, keeps a head however long it gets, and hears of
a connection over TLS only after its handshake.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rayqueue.config import GatewaySettings
from rayqueue.errors import RateLimitedError
from rayqueue.gateway.limits import Slots

MAX_HEAD_BYTES = 64 * 1024
"""Of a request beside its body: line, headers, trailers. Nobody's key is looked at before they are there."""
_FRAMING = 16
"""So many bytes of framing may come with each byte of a body: more than chunks of one byte have."""


def protocol_of(settings: GatewaySettings, slots: Slots, tls: ssl.SSLContext | None = None) -> Any:
    """What makes a connection of one gateway, in uvicorn's place."""
    slow_s = settings.slow_timeout_ms / 1000
    shaking: set[asyncio.Task[None]] = set()

    def take(connections: Any, transport: Any) -> str | None:
        """Whose place it is; None if there is none, and it is hung up on."""
        peer = transport.get_extra_info("peername")
        source = str(peer[0]) if isinstance(peer, tuple) else "unknown"
        try:
            if len(connections) + len(shaking) >= settings.max_connections:
                raise RateLimitedError("too many connections")
            slots.take(source)
        except RateLimitedError:
            transport.abort()
            return None
        return source

    class Connection(HttpToolsProtocol):
        _waiting: asyncio.TimerHandle | None = None
        _taking: asyncio.TimerHandle | None = None
        source: str | None = None
        made = False
        _untaken_bytes = 0
        _moved = False
        _beside_bytes = 0
        _body_bytes = 0
        _turned = False

        def connection_made(self, transport: Any) -> None:
            self.made = True
            if self.source is None:
                self.source = take(self.connections, transport)
            super().connection_made(transport)
            if self.source is not None:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._arrived()
            if self._taking is not None:
                self._taking.cancel()
            if self.source is not None:
                slots.release(self.source)
                self.source = None
            super().connection_lost(exc)

        # -- a request comes ----------------------------------------------------------------------

        def data_received(self, data: bytes) -> None:
            self._turned = False
            before_bytes = self._body_bytes
            super().data_received(data)
            if not self._turned:  # else some of it belongs to another request
                self._beside_bytes += len(data) - (self._body_bytes - before_bytes)
                if self._beside_bytes > MAX_HEAD_BYTES + _FRAMING * self._body_bytes:
                    self._hang_up()

        def on_message_begin(self) -> None:
            self._turn()
            self._wait()
            super().on_message_begin()

        def on_body(self, body: bytes) -> None:
            self._body_bytes += len(body)
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._turn()
            self._arrived()
            super().on_message_complete()

        def _turn(self) -> None:
            self._turned = True
            self._beside_bytes = self._body_bytes = 0

        def _wait(self) -> None:
            self._arrived()
            self._waiting = self.loop.call_later(slow_s, self._hang_up)

        def _arrived(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        # -- its answer goes ----------------------------------------------------------------------

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._moved = True  # whoever asks for the next answer has taken the one before
            self._watch()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._moved = True

        def _watch(self) -> None:
            if self._taking is None:
                self._moved = False
                self._untaken_bytes = self.transport.get_write_buffer_size()
                if self._untaken_bytes:
                    self._taking = self.loop.call_later(slow_s, self._look)

        def _look(self) -> None:
            """Who takes nothing for so long is hung up on, also if the connection is closed on our side already."""
            self._taking = None
            if not self._moved and self.transport.get_write_buffer_size() >= self._untaken_bytes:
                self.transport.abort()
            else:
                self._watch()

        def _hang_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.abort()

    class Handshake(asyncio.Protocol):
        """A connection over TLS until its handshake is through: it has its place from its first moment.

        The socket goes to another transport for that. What ``start_tls`` begins with is lost if the caller is quick:
        uvloop reads before anybody can say that it is to wait.
        """

        def __init__(self, connection: Connection, tls: ssl.SSLContext) -> None:
            self._connection = connection
            self._tls = tls

        def connection_made(self, transport: Any) -> None:
            source = self._connection.source = take(self._connection.connections, transport)
            if source is not None:
                made = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                transport.abort()  # of nothing but this transport: the socket is open still, and nothing was read
                task = asyncio.get_running_loop().create_task(self._shake(made, source))
                shaking.add(task)
                task.add_done_callback(shaking.discard)

        async def _shake(self, made: socket.socket, source: str) -> None:
            connection = self._connection
            limits: dict[str, Any] = {"ssl_handshake_timeout": slow_s}
            if sys.version_info >= (3, 11):
                limits["ssl_shutdown_timeout"] = slow_s
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection, made, ssl=self._tls, **limits
                )
            except (OSError, asyncio.TimeoutError):  # ssl.SSLError is one, too
                pass
            finally:
                if not connection.made:
                    connection.source = None
                    slots.release(source)

    def make(**options: Any) -> asyncio.Protocol:
        connection = Connection(**options)
        return connection if tls is None else Handshake(connection, tls)

    return make
