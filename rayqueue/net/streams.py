"""Non-blocking bytes to and from one socket, plain or TLS; and how to open, tune and wake one.

A stream owns a socket and the queue of bytes that the kernel did not take
yet. It knows nothing of frames, peers or selectors. No call blocks. A lost
connection is an ``OSError`` (``ssl.SSLError`` is one) out of any method; the
end of the other side's bytes is ``read_into`` returning 0.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from rayqueue.config import TransportSettings

Buffer: TypeAlias = bytes | memoryview
Address: TypeAlias = tuple[str, int]

# The kernel refuses more than IOV_MAX (1024) buffers at once; far fewer already fill its socket buffer.
_GATHER = 64


@dataclass(frozen=True, slots=True)
class TlsContexts:
    """One for connections this node dials, one for those it accepts."""

    client: ssl.SSLContext
    server: ssl.SSLContext


def tls_of(settings: TransportSettings) -> TlsContexts | None:
    """As the settings say; None: without TLS."""
    if settings.tls_cert_path is None or settings.tls_key_path is None:
        return None
    return tls_contexts(settings.tls_cert_path, settings.tls_key_path, settings.tls_ca_path)


@lru_cache(maxsize=8)
def tls_contexts(cert: str | Path, key: str | Path, ca: str | Path | None = None) -> TlsContexts:
    """Contexts from PEM files. With ``ca`` both sides must show a certificate it signed; without, TLS only encrypts,
    and the handshake, which is bound to the TLS session, is what authenticates.

    Host names are not checked: replicas dial addresses, and who is there is proven by the handshake.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname = False
    for context in (client, server):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(cert, key)
        context.verify_mode = ssl.CERT_REQUIRED if ca is not None else ssl.CERT_NONE
        if ca is not None:
            context.load_verify_locations(ca)
    # Connections live long and every one is proven afresh: nothing to resume.
    server.num_tickets = 0
    return TlsContexts(client, server)


def listen(host: str, port: int) -> socket.socket:
    """A non-blocking listening socket. ``host`` may be a name here, as nothing runs yet that it could hold up."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    try:
        # A replica that comes back on a fixed port must not wait for its old connections' TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def is_numeric(host: str) -> bool:
    """True for an IP address. A name would have to be resolved, which blocks."""
    try:
        socket.inet_pton(_family(host), host)
    except OSError:
        return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def dial(address: Address) -> socket.socket:
    """Start to connect to a numeric address. The socket is writable once it is decided; see ``Stream.connected``."""
    host, port = address
    family = _family(host)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, f"cannot connect to {host}:{port}")
    except OSError:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket, peer_timeout_ms: int, socket_buffer_bytes: int) -> None:
    """Options of every connection. A dead link is noticed by the kernel after about ``peer_timeout_ms``, with bytes
    under way (user timeout) or without (keep-alive): silence is no sign of death, followers have little to say."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = 3
    interval_s = max(1, round(peer_timeout_ms / 1000 / (probes + 1)))
    for name, value in (
        ("TCP_KEEPIDLE", interval_s),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", peer_timeout_ms),
    ):
        option = getattr(socket, name, None)  # not every system has them all
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if socket_buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, socket_buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, socket_buffer_bytes)


class Waker:
    """Makes a selector that watches it return. ``wake`` may be called from any thread; many wakes are one."""

    __slots__ = ("_pending", "_reader", "_writer")

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._pending = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        if self._pending:
            return
        self._pending = True
        # Full: the selector returns anyway. Closed: nobody waits.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def drain(self) -> None:
        """Take the wake back. The caller now looks for work."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)
        # Only now. Cleared first, the flag could be raised again by a wake whose byte is then swallowed above: up for
        # ever, with nothing to read.
        self._pending = False

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class Stream:
    """A plain TCP connection."""

    __slots__ = ("_queue", "_sock", "queued_bytes", "source")

    def __init__(self, sock: socket.socket, source: str = "") -> None:
        self._sock = sock
        self.source = source
        """The address it was accepted from."""
        self._queue: deque[Buffer] = deque()
        self.queued_bytes = 0
        """Bytes written to this stream that the kernel has not taken yet."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def connected(self) -> None:
        """Call when a dialed socket has become writable. Raises what ``connect`` would have raised."""
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, "cannot connect")

    def secure(self) -> bool:
        """True once bytes may be exchanged. Call again when the socket is ready."""
        return True

    def binding(self) -> bytes:
        """A name of this secured channel and no other, the same at both ends; empty if it is not secured."""
        return b""

    @property
    def wants_write(self) -> bool:
        return bool(self._queue)

    @property
    def has_more(self) -> bool:
        """True if bytes can be read although the socket may not be readable."""
        return False

    def write(self, buffers: list[Buffer], size_bytes: int) -> None:
        """Write, and queue what does not go out at once. The caller bounds ``queued_bytes``."""
        was_idle = not self._queue
        self._enqueue(buffers)
        self.queued_bytes += size_bytes
        if was_idle:
            self.flush()

    def flush(self) -> None:
        """Write as much of the queue as the kernel takes."""
        while self._queue:
            try:
                sent = self._send()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            self.queued_bytes -= sent
            self._drop(sent)

    def read_into(self, space: memoryview) -> int | None:
        """Bytes received; 0 at the end of the stream, None if there are none now. Less than asked: no more now."""
        try:
            return self._sock.recv_into(space)
        except BlockingIOError:
            return None

    def close(self) -> None:
        self._queue.clear()
        self.queued_bytes = 0
        with contextlib.suppress(OSError):
            self._sock.close()

    def _enqueue(self, buffers: list[Buffer]) -> None:
        self._queue.extend(buffers)

    def _send(self) -> int:
        queue = self._queue
        return self._sock.sendmsg(queue if len(queue) <= _GATHER else islice(queue, _GATHER))

    def _drop(self, sent: int) -> None:
        queue = self._queue
        while sent:
            first = queue[0]
            size = len(first)
            if sent < size:
                queue[0] = memoryview(first)[sent:]
                return
            sent -= size
            queue.popleft()


class TlsStream(Stream):
    """The same over TLS. There is no gathering write: a message's buffers are joined."""

    __slots__ = ("_context", "_dialed", "_secured", "_tls", "_wants_write")

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, dialed: bool, source: str = "") -> None:
        super().__init__(sock, source)
        self._context = context
        self._dialed = dialed
        self._tls: ssl.SSLSocket | None = None
        self._secured = False
        self._wants_write = False

    def secure(self) -> bool:
        if self._tls is None:
            self._tls = self._context.wrap_socket(
                self._sock, server_side=not self._dialed, do_handshake_on_connect=False
            )
            self._sock = self._tls
        if not self._secured:
            self._wants_write = False
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLWantWriteError:
                self._wants_write = True
                return False
            self._secured = True
        return True

    def binding(self) -> bytes:
        # The client's Finished message: a MAC over the whole TLS handshake under a key that only its two ends have.
        binding = self._session.get_channel_binding("tls-unique")
        if not binding:
            raise ssl.SSLError("this TLS session has no channel binding")
        return binding

    @property
    def wants_write(self) -> bool:
        return self._wants_write or bool(self._queue)

    @property
    def has_more(self) -> bool:
        return self._secured and self._session.pending() > 0

    def read_into(self, space: memoryview) -> int | None:
        received = 0
        while received < len(space):  # SSL_read gives one record of 16 KiB at a time
            try:
                count = self._session.recv_into(space[received:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return received or None
            except OSError:
                if received:
                    return received  # these bytes first; the error, or the end, comes again
                raise
            if count == 0:
                return received
            received += count
        return received

    @property
    def _session(self) -> ssl.SSLSocket:
        if self._tls is None:
            raise ssl.SSLError("the TLS session has not begun")
        return self._tls

    def _enqueue(self, buffers: list[Buffer]) -> None:
        self._queue.append(buffers[0] if len(buffers) == 1 else b"".join(buffers))

    def _send(self) -> int:
        return self._session.send(self._queue[0])
