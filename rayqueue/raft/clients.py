"""Clients at the same port as the peers: how one is told from the other, and who takes it over.

A connection that begins with ``hello.MAGIC`` is a client's. ``Guest`` is the
replica's side of its handshake. Once a client has proven that it holds the
replica's token, its connection leaves the transport and belongs to a
``ClientPort``, which shares the transport's selector and thread and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from rayqueue.errors import HandshakeError, IncompatibleVersionError
from rayqueue.ids import ReplicaId
from rayqueue.net.streams import Stream
from rayqueue.protocol import hello
from rayqueue.protocol.versions import Versions, agree
from rayqueue.raft.transport import Transport


class Guest:
    """The replica's side of a client's handshake. Does no I/O; ``nonce`` is fresh for every connection."""

    def __init__(self, token: bytes, nonce: bytes, binding: bytes, speaks: Versions = hello.SPEAKS) -> None:
        self.unread = b""
        """Bytes that came after the handshake's last message."""
        self.proven = False
        self.version = 0
        """Of all that follows the handshake."""
        self._key = hello.key_of(token, binding)
        self._nonce = nonce
        self._speaks = speaks
        self._hellos = b"", hello.hello(nonce, speaks)
        self._refusal: IncompatibleVersionError | None = None

    def receive(self, data: bytes) -> bytes:
        """Take received bytes, return bytes to send. ``HandshakeError``: hang up."""
        self.unread += data
        reply = b""
        if not self._hellos[0]:
            if len(self.unread) < hello.HELLO_BYTES:
                return reply
            reply = self._answer(self._take(hello.HELLO_BYTES))
        if self.unread and self._refusal is not None:
            raise self._refusal  # it goes on, though there is no version in common
        if not self.proven and len(self.unread) >= hello.MAC_BYTES:
            hello.check_proof(self._take(hello.MAC_BYTES), self._key, b"client", *self._hellos)
            self.proven = True
            reply += hello.proof(self._key, b"replica", *self._hellos)
        return reply

    def _answer(self, message: bytes) -> bytes:
        theirs, nonce = hello.read_hello(message)
        if nonce == self._nonce:
            raise HandshakeError("the client returned our own nonce")
        self._hellos = message, self._hellos[1]
        try:
            self.version = agree(self._speaks, theirs, us="this replica", them="the client")
        except IncompatibleVersionError as error:
            self._refusal = error  # it is answered all the same: that is how it learns why
        return self._hellos[1]

    def _take(self, size_bytes: int) -> bytes:
        taken, self.unread = self.unread[:size_bytes], self.unread[size_bytes:]
        return taken


class ClientPort(Protocol):
    """The server of clients. Called by the transport's ``poll``, so on the engine's thread."""

    token: bytes
    """What clients prove that they hold."""
    stirred: bool
    """A client said something, or is gone: ``poll`` must return."""

    def attach(self, selector: Any) -> None:
        """Here sockets are watched. What is registered with a ``data`` comes back by ``on_ready``."""

    def admit(self, stream: Stream, unread: bytes) -> None:
        """A client that has proven itself, and what it has said since."""

    def on_ready(self, client: Any, mask: int) -> None:
        """The selector reports something for what was registered with this ``data``."""

    @property
    def half_read(self) -> bool:
        """True if there are bytes to be taken that no selector will report."""

    def read_rest(self) -> None:
        """Take some of them."""

    def close(self) -> None:
        """The transport ends."""


class ClientTransport(Transport, Protocol):
    """A transport that lets clients in."""

    versions: dict[ReplicaId, int]
    """Of the protocol, as each peer spoke it when it was last connected."""

    @property
    def connected(self) -> Collection[ReplicaId]:
        """The peers with which a connection stands."""

    def serve_clients(self, port: ClientPort) -> None:
        """Hand clients over to ``port``. Until then they are strangers."""
