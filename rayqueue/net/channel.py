"""One connection to one replica, for many requests at a time.

Belongs to the loop of ``rayqueue.client.io``: every method is called there. A
request is written at once and in the order of the calls; its answer is a
future, and answers come in any order. Once the connection is gone, everything
that was not answered fails with ``OutcomeUnknownError``: the replica may have
carried it out. What is asked after that fails with ``ReplicaClosedError``:
nothing was sent.

It does not reconnect and does not know who leads: ``rayqueue.client.routes`` does.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from rayqueue.config import Settings
from rayqueue.errors import (
    ConfigError,
    InvalidInputError,
    OutcomeUnknownError,
    OversizedBatchError,
    QueueFullError,
    RayQueueError,
    ReplicaClosedError,
    TransportError,
)
from rayqueue.net.endpoint import Endpoint
from rayqueue.net.requests import in_time
from rayqueue.net.streams import tls_of, tune
from rayqueue.protocol import hello
from rayqueue.protocol.calls import Call, decode_answer, encode_call
from rayqueue.protocol.data import (
    Appended,
    FetchAnswer,
    FetchRequest,
    decode_appended,
    decode_fetched,
    encode_fetch,
)
from rayqueue.protocol.failures import decode_failure
from rayqueue.protocol.frames import HEAD, MAX_REQUEST, SLACK_BYTES, Frame, FrameReader, Kind
from rayqueue.protocol.versions import agree

_AFTER_LENGTH = HEAD.size - 4
_BUFFER_BYTES = 256 * 1024
_JOIN_BYTES = 4096
_THE_CONNECTION = 0
"""A FAILED frame with this number is about the connection, not about a request."""


Dial = Callable[["Channel"], Awaitable[None]]


class _Request(NamedTuple):
    future: asyncio.Future[Any]
    call: Call | None
    due_s: float
    """When there begins to be reason for doubt."""


class Channel(asyncio.BufferedProtocol):
    """Made by ``open`` only."""

    def __init__(self, endpoint: Endpoint, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self.endpoint = endpoint
        self.closed = False
        self.why_closed = "it was closed"
        self._loop = loop
        self._time = loop.time
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(settings.transport.max_frame_bytes, _BUFFER_BYTES)
        self._pending: dict[int, _Request] = {}
        self._number = _THE_CONNECTION
        self._retired = False
        self._on_closed: list[Callable[[Channel], None]] = []
        self._most_bytes = settings.log.max_batch_bytes + SLACK_BYTES - _AFTER_LENGTH
        self._doubt_s = settings.client.doubt_ms / 1000
        self._on_overdue: Callable[[Channel], None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        # The handshake: what of the other side's message has come, and what to do when all of it is here.
        self._nonce = secrets.token_bytes(hello.NONCE_BYTES)
        self._key = b""
        self._their_hello = b""
        self.version = 0
        """Of the protocol, once it is greeted."""
        self._greeting: memoryview | None = memoryview(bytearray(hello.HELLO_BYTES))
        self._greeting_bytes = 0
        self._greeted: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def open(cls, endpoint: Endpoint, settings: Settings, dial: Dial | None = None) -> Channel:
        """Connect and prove both sides. ``TransportError`` if that fails: ask the actor for its endpoint again.
        ``ConfigError`` if one side speaks TLS and the other does not.

        ``dial`` connects the channel with a transport, instead of TCP."""
        if endpoint.tls is not None and endpoint.tls != (tls_of(settings.transport) is not None):
            raise ConfigError(
                f"{endpoint} speaks TLS, and this client does not: give it transport.tls_cert_path, tls_key_path and "
                "tls_ca_path, as the queue has them"
                if endpoint.tls
                else f"{endpoint} speaks no TLS, and this client does: leave its transport.tls_cert_path out",
                key="transport.tls_cert_path",
            )
        loop = asyncio.get_running_loop()
        channel = cls(endpoint, settings, loop)
        try:
            await in_time(channel._connect(settings, dial), settings.transport.handshake_timeout_ms / 1000)
        except (OSError, asyncio.TimeoutError) as error:
            channel._abort()
            raise TransportError(f"{endpoint} cannot be reached: {str(error) or 'it took too long'}") from None
        except BaseException:
            channel._abort()
            raise
        return channel

    async def _connect(self, settings: Settings, dial: Dial | None) -> None:
        await (self._dial(settings) if dial is None else dial(self))
        await self._greeted

    async def _dial(self, settings: Settings) -> None:
        host, port = self.endpoint.host, self.endpoint.port
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            tune(sock, settings.transport.peer_timeout_ms, settings.transport.socket_buffer_bytes)
            await self._loop.sock_connect(sock, (host, port))
            tls = tls_of(settings.transport)
            secured: dict[str, Any] = {} if tls is None else {"ssl": tls.client, "server_hostname": host}
            await self._loop.create_connection(lambda: self, sock=sock, **secured)
        except BaseException:
            sock.close()
            raise

    # -- what a client asks ---------------------------------------------------------------

    @property
    def queued_bytes(self) -> int:
        """Written and not yet taken by the kernel."""
        return 0 if self._transport is None or self.closed else self._transport.get_write_buffer_size()

    @property
    def unanswered(self) -> int:
        """Requests under way."""
        return len(self._pending)

    def append(self, batch: bytes, kind: Kind = Kind.APPEND) -> asyncio.Future[Appended]:
        """``APPEND_UNACKED``: the future is done at once, with no offset."""
        if kind == Kind.APPEND_UNACKED:
            future: asyncio.Future[Appended] = self._loop.create_future()
            refused = self._refusal(batch)
            if refused is not None:
                future.set_exception(refused)
            else:
                self._write(kind, self._next_number(), batch)
                future.set_result(Appended(None, 0, False))
            return future
        if kind not in (Kind.APPEND, Kind.APPEND_LEADER):
            raise InvalidInputError(f"{kind!r} is no way to append")
        return self._ask(kind, batch, None, 0.0)

    def fetch(self, request: FetchRequest) -> asyncio.Future[FetchAnswer]:
        """The payloads of the batches stay valid for as long as they are held."""
        return self._ask(Kind.FETCH, encode_fetch(request), None, request.max_wait_ms / 1000)

    def call(self, call: Call, *, may_take_ms: int = 0) -> asyncio.Future[Any]:
        """``may_take_ms``: how long the replica may wait for something before there is reason for doubt."""
        return self._ask(Kind.CALL, encode_call(call), call, may_take_ms / 1000)

    def add_closed_callback(self, callback: Callable[[Channel], None]) -> None:
        """Called once, when the connection is gone; at once if it is."""
        if self.closed:
            callback(self)
        else:
            self._on_closed.append(callback)

    def watch(self, on_overdue: Callable[[Channel], None]) -> None:
        """Have this called now and then while some request is not answered though ``client.doubt_ms`` is over."""
        self._on_overdue = on_overdue
        if self._pending:
            self._look_later()

    def retire(self) -> None:
        """Close it once everything is answered."""
        self._retired = True
        if not self._pending:
            self.close()

    def close(self, why: str = "it was closed") -> None:
        """Hang up. What was not answered fails with ``OutcomeUnknownError``."""
        if not self.closed:
            self.why_closed = why
            self._abort()
            self._end()

    # -- requests and answers -----------------------------------------------------------------

    def _ask(self, kind: Kind, body: bytes, call: Call | None, may_take_s: float) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        refused = self._refusal(body)
        if refused is not None:
            future.set_exception(refused)
            return future
        number = self._next_number()
        self._pending[number] = _Request(future, call, self._time() + may_take_s)
        self._write(kind, number, body)
        if self._watch is None and self._on_overdue is not None:
            self._look_later()
        return future

    def _next_number(self) -> int:
        number = self._number + 1
        if number > MAX_REQUEST:
            number = 1
        while number in self._pending:
            number += 1
        self._number = number
        return number

    def _write(self, kind: Kind, number: int, body: bytes) -> None:
        transport = self._transport
        if transport is None:
            return
        head = HEAD.pack(_AFTER_LENGTH + len(body), kind, number)
        if len(body) < _JOIN_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    def _take(self, frame: Frame) -> None:
        kind, number, body = frame
        request = self._pending.pop(number, None)
        if request is None:
            if number == _THE_CONNECTION and kind == Kind.FAILED:
                self._refused(decode_failure(body))
            return
        future = request.future
        if future.done():
            return  # whoever asked has given up
        try:
            if kind == Kind.APPENDED:
                future.set_result(decode_appended(body))
            elif kind == Kind.FETCHED:
                # The reader's buffer is used again: this copy is the only one.
                future.set_result(decode_fetched(memoryview(bytes(body))))
            elif kind == Kind.ANSWER and request.call is not None:
                future.set_result(decode_answer(request.call, body))
            elif kind == Kind.FAILED:
                future.set_exception(decode_failure(body))
            else:
                raise TransportError(f"an answer of kind {kind} does not fit its request")
        except Exception as error:  # noqa: BLE001  # whoever waits must learn it
            known = error if isinstance(error, TransportError) else TransportError(f"an unreadable answer: {error!r}")
            future.set_exception(known)
        if self._retired and not self._pending:
            self.close()

    def _refused(self, error: RayQueueError) -> None:
        """The replica hangs up, and says why. If it had no room for this connection, it has served nothing on it."""
        if isinstance(error, QueueFullError):
            pending, self._pending = self._pending, {}
            for request in pending.values():
                if not request.future.done():
                    request.future.set_exception(error)
        self.close(str(error))

    def _refusal(self, body: bytes) -> RayQueueError | None:
        """Why this is not sent. Of a frame that is too large: the replica would hang up on all who share the
        connection."""
        if self.closed:
            return self._not_sent()
        if len(body) <= self._most_bytes:
            return None
        return OversizedBatchError(
            f"a request of {len(body)} bytes; at most {self._most_bytes} are taken (log.max_batch_bytes)",
            size_bytes=len(body),
        )

    def _not_sent(self) -> RayQueueError:
        replica_id = self.endpoint.replica_id
        return ReplicaClosedError(
            f"the connection with {replica_id} is gone ({self.why_closed}); nothing was sent", replica_id=replica_id
        )

    # -- doubt ---------------------------------------------------------------------------------

    def _look_later(self) -> None:
        due_s = min((request.due_s for request in self._pending.values()), default=0.0)
        wait_s = max(self._doubt_s, due_s + self._doubt_s - self._time())
        self._watch = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        self._watch = None
        overdue = self._on_overdue
        if self.closed or not self._pending or overdue is None:
            return
        late_s = self._time() - self._doubt_s
        late = any(request.due_s <= late_s for request in self._pending.values())
        self._look_later()
        if late:
            overdue(self)

    # -- asyncio.BufferedProtocol -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        secured = transport.get_extra_info("ssl_object")
        binding = b"" if secured is None else secured.get_channel_binding("tls-unique") or b""
        self._key = hello.key_of(self.endpoint.token, binding)
        self._send(hello.hello(self._nonce))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._greeting is None:
            return self._reader.space()
        return self._greeting[self._greeting_bytes :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._greeting is None:
                for frame in self._reader.frames(nbytes):
                    self._take(frame)
            else:
                self._greeting_bytes += nbytes
                if self._greeting_bytes == len(self._greeting):
                    self._greet(bytes(self._greeting))
        except RayQueueError as error:
            if not self._greeted.done():
                self._greeted.set_exception(error)
            self.close(str(error))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed:
            self.why_closed = "the other side closed it" if exc is None else str(exc)
            self._end()

    def _greet(self, message: bytes) -> None:
        if not self._their_hello:
            theirs, nonce = hello.read_hello(message)
            if nonce == self._nonce:
                raise TransportError("the replica returned our own nonce")
            self.version = agree(hello.SPEAKS, theirs, us="this client", them=f"the replica {self.endpoint.replica_id}")
            self._their_hello = message
            self._send(hello.proof(self._key, b"client", hello.hello(self._nonce), message))
            self._greeting, self._greeting_bytes = memoryview(bytearray(hello.MAC_BYTES)), 0
        else:
            hello.check_proof(message, self._key, b"replica", hello.hello(self._nonce), self._their_hello)
            self._greeting = None
            if not self._greeted.done():
                self._greeted.set_result(None)

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        self.closed = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        replica_id = self.endpoint.replica_id
        if not self._greeted.done():
            self._greeted.set_exception(TransportError(f"{replica_id} hung up during the handshake"))
            self._greeted.exception()
        pending, self._pending = self._pending, {}
        for request in pending.values():
            if not request.future.done():
                text = f"the connection with {replica_id} is gone ({self.why_closed}); outcome unknown"
                request.future.set_exception(OutcomeUnknownError(text, replica_id=replica_id))
                request.future.exception()  # nobody needs to be reminded of those that nobody waits for
        callbacks, self._on_closed = self._on_closed, []
        for callback in callbacks:
            callback(self)
