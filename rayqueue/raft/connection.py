"""One connection, from the first packet to the last.

Owns the order of things on a connection: connected, secured (TLS), greeted
(the handshake), then frames. Until it is greeted it holds a few hundred bytes
and parses nothing but the handshake. Does not decide who is welcome and knows
no other connection: ``rayqueue.raft.tcp`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum

from rayqueue.net.streams import Stream
from rayqueue.protocol.hello import MAGIC as CLIENT_MAGIC
from rayqueue.raft.clients import Guest
from rayqueue.raft.handshake import MAX_HANDSHAKE_BYTES, Acceptor, Dialer
from rayqueue.raft.messages import Message
from rayqueue.raft.peers import Address, Peer
from rayqueue.raft.wire import FrameReader


class Stage(IntEnum):
    CONNECTING = 0
    SECURING = 1
    GREETING = 2
    GREETED = 3
    """The other side has proven itself. An acceptor now says whether it is welcome."""
    STANDING = 4
    CLOSED = 5


class Connection:
    """``begin`` makes the handshake's side once the stream is secure, since it is bound to the TLS session.

    ``begin_guest`` makes the one that is used instead if the caller turns out to be a client.
    """

    __slots__ = (
        "_begin",
        "_begin_guest",
        "_first_bytes",
        "address",
        "broken",
        "deadline",
        "fd",
        "interest",
        "peer",
        "reader",
        "side",
        "stage",
        "stream",
        "version",
    )

    def __init__(
        self,
        stream: Stream,
        begin: Callable[[Stream], Dialer | Acceptor],
        *,
        deadline: float,
        peer: Peer[Connection] | None = None,
        address: Address | None = None,
        begin_guest: Callable[[Stream], Guest] | None = None,
    ) -> None:
        self.stream = stream
        self.fd = stream.fileno()
        self.stage = Stage.SECURING if peer is None else Stage.CONNECTING
        self.deadline = deadline
        """When an unfinished handshake is given up."""
        self.peer = peer
        """Whom we dialed; for an accepted connection, who has proven to be there."""
        self.address = address
        """Where we dialed."""
        self.side: Dialer | Acceptor | Guest | None = None
        self.interest = 0
        """What the selector watches for."""
        self.broken: OSError | None = None
        """A write failed. What was received before is still to be read."""
        self._begin = begin
        self._begin_guest = begin_guest
        self._first_bytes = b""
        self.reader: FrameReader | None = None
        """Frames under way; only while STANDING."""
        self.version = 0
        """Of the protocol that both speak, once it is STANDING."""

    @property
    def closed(self) -> bool:
        return self.stage is Stage.CLOSED

    def greet(self, scratch: memoryview) -> None:
        """Go on with whatever comes before GREETED. Call when the socket is ready."""
        if self.stage is Stage.CONNECTING:
            self.stream.connected()
            self.stage = Stage.SECURING
        if self.stage is Stage.SECURING:
            if not self.stream.secure():
                return
            self.side = self._begin(self.stream)
            self.stage = Stage.GREETING
            if isinstance(self.side, Dialer):
                self.say(self.side.hello)
        self.stream.flush()
        while self.stage is Stage.GREETING and self.side is not None:
            count = self.stream.read_into(scratch[:MAX_HANDSHAKE_BYTES])
            if count is None:
                return
            if count == 0:
                # No fault: it may have noticed that our dial and its own crossed.
                raise ConnectionAbortedError("the other side hung up during the handshake")
            data = bytes(scratch[:count])
            if self._begin_guest is not None:
                data = self._first_bytes = self._first_bytes + data
                if len(data) < len(CLIENT_MAGIC) and CLIENT_MAGIC.startswith(data):
                    continue  # it can still be either
                if data.startswith(CLIENT_MAGIC):
                    self.side = self._begin_guest(self.stream)
                self._begin_guest = None
            self.say(self.side.receive(data))
            if _is_proven(self.side):
                self.stage = Stage.GREETED

    def say(self, data: bytes) -> None:
        if data:
            self.stream.write([data], len(data))

    def stand(self, reader: FrameReader) -> Iterator[Message]:
        """From now on frames are exchanged. Gives the messages that came along with the handshake's last bytes."""
        unread = b"" if self.side is None else self.side.unread
        self.version = self.side.version if isinstance(self.side, Dialer | Acceptor) else 0
        self.side = None
        self.stage = Stage.STANDING
        self.reader = reader
        reader.space()[: len(unread)] = unread
        return reader.messages(len(unread))

    def hand_over(self) -> Stream:
        """The stream, which is somebody else's from now on."""
        self.stage = Stage.CLOSED
        return self.stream

    def close(self) -> None:
        self.stage = Stage.CLOSED
        self.stream.close()


def _is_proven(side: Dialer | Acceptor | Guest) -> bool:
    match side:
        case Dialer():
            return side.done
        case Acceptor():
            return side.claim is not None
        case Guest():
            return side.proven
