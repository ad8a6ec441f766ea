"""Connections of HTTP callers: how many there may be, and how slowly one may shake hands, ask, and take its answer.

uvicorn bounds none of it: it waits for ever for a request's first line and for a
caller to take what was written, keeps a head however long it gets, and hears of
a connection over TLS only after its handshake.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rayqueue.config import GatewaySettings
from rayqueue.errors import RateLimitedError
from rayqueue.gateway.limits import Slots

_log = logging.getLogger(__name__)

_ACCEPT_AGAIN_S = 0.5
MAX_HEAD_BYTES = 64 * 1024
"""Of a request beside its body: line, headers, trailers. Nobody's key is looked at before they are there."""
_FRAMING = 16
"""So many bytes of framing may come with each byte of a body: more than chunks of one byte have."""


def protocol_of(settings: GatewaySettings, slots: Slots) -> type[Any]:
    """The class of connections of one gateway."""
    slow_s = settings.slow_timeout_ms / 1000

    class Connection(HttpToolsProtocol):
        _waiting: asyncio.TimerHandle | None = None
        _taking: asyncio.TimerHandle | None = None
        source: str | None = None
        _untaken_bytes = 0
        _moved = False
        _beside_bytes = 0
        _body_bytes = 0
        _turned = False

        @classmethod
        def admit(cls, source: str, count: int) -> bool:
            """Whether this address gets one more place. ``count``: of all that there are."""
            try:
                if count >= settings.max_connections:
                    raise RateLimitedError("too many connections")
                slots.take(source)
            except RateLimitedError:
                return False
            return True

        def connection_made(self, transport: Any) -> None:
            if self.source is None:
                peer = transport.get_extra_info("peername")
                source = str(peer[0]) if isinstance(peer, tuple) else "unknown"
                self.source = source if self.admit(source, len(self.connections)) else None
            super().connection_made(transport)
            if self.source is None:
                transport.abort()
            else:
                self._wait()

        def left(self) -> None:
            """Its place is free."""
            if self.source is not None:
                slots.release(self.source)
                self.source = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._arrived()
            if self._taking is not None:
                self._taking.cancel()
            self.left()
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

    return Connection


class TlsServer(uvicorn.Server):
    """uvicorn's, which accepts by itself: a connection has its place before its handshake, and so long for that."""

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext, handshake_s: float) -> None:
        super().__init__(config)
        self._tls = tls
        self._handshake_s = handshake_s
        self._shaking: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                self.config.host, self.config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            listening = [
                socket.create_server(address[:2], family=family, backlog=self.config.backlog)
                for family, *_, address in dict.fromkeys(found)
            ]
        except OSError as error:
            _log.error("%s", error)
            sys.exit(1)  # as uvicorn does
        for each in listening:
            each.setblocking(False)
        self.servers = [Accepting(listening, self._accept)]  # type: ignore[list-item]  # as far as uvicorn asks it
        self.started = True

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        make: Any = self.config.http_protocol_class
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError as error:  # such as too many open files
                _log.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            connection = make(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=loop
            )
            if connection.admit(peer[0], len(self.server_state.connections) + len(self._shaking)):
                connection.source = peer[0]
                task = loop.create_task(self._shake(accepted, connection))
                self._shaking.add(task)
                task.add_done_callback(self._shaking.discard)
            else:
                accepted.close()

    async def _shake(self, accepted: socket.socket, connection: Any) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=self._handshake_s
            )
        except (OSError, asyncio.TimeoutError):  # ssl.SSLError is one, too
            if connection.transport is None:
                connection.left()
                accepted.close()


class Accepting:
    """Sockets that are listened at, as ``asyncio.Server``, as far as uvicorn knows it."""

    def __init__(self, sockets: Sequence[socket.socket], accept: Callable[[socket.socket], Any]) -> None:
        self.sockets = sockets
        self._tasks = [asyncio.ensure_future(accept(each)) for each in sockets]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for each in self.sockets:
            each.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
