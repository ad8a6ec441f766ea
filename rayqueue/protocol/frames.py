"""Messages on a stream: a length, a kind, a request's number, and the body.

    u32  length of what follows
    u8   kind
    u32  number of the request; its answer carries the same
    ...  body

Requests of one connection are begun in the order in which they were sent.
Answers come in any order. Only ``Kind.APPEND_UNACKED`` has no answer.

The reader owns one buffer, which grows with what has come up to the largest
frame that is allowed, and hands out views into it: whoever keeps a body copies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from rayqueue.errors import TransportError
from rayqueue.protocol.receiving import ReceiveBuffer

HEAD = Struct("<IBI")
_LENGTH_BYTES = 4
_AFTER_LENGTH = HEAD.size - _LENGTH_BYTES
MAX_REQUEST = 2**32 - 1
SLACK_BYTES = 64 * 1024
"""A replica takes frames that are so much larger than the largest batch (``log.max_batch_bytes``), and hangs up on
larger ones."""


class Kind(IntEnum):
    APPEND = 1
    """A batch; answered with APPENDED once a majority has it on disk."""
    APPEND_LEADER = 2
    """A batch; answered once the leader alone has it on disk. Its offset is not known then (``data.NO_OFFSET``)."""
    APPEND_UNACKED = 3
    """A batch; never answered, whatever becomes of it."""
    FETCH = 4
    CALL = 5
    """One of ``calls.Call``; answered with ANSWER."""

    APPENDED = 129
    FETCHED = 130
    ANSWER = 131
    FAILED = 255
    """The answer to any request: ``failures``."""


class Frame(NamedTuple):
    kind: int
    request: int
    body: memoryview


def head(kind: int, request: int, body_bytes: int) -> bytes:
    """The bytes before a body of this length."""
    return HEAD.pack(_AFTER_LENGTH + body_bytes, kind, request)


class FrameReader:
    """Read from the socket into ``space()``, then take the ``frames`` that this completed.

    A view that a frame hands out is valid until the next call of ``space``.
    """

    def __init__(self, max_frame_bytes: int, buffer_bytes: int = 64 * 1024) -> None:
        self._max = max_frame_bytes
        self._buffer = ReceiveBuffer(max(buffer_bytes, HEAD.size))

    @property
    def size_bytes(self) -> int:
        """Memory that it holds."""
        return self._buffer.size_bytes

    def space(self) -> memoryview:
        """The memory for the next bytes. Never empty."""
        unread = self._buffer.unread
        if len(unread) < _LENGTH_BYTES:
            return self._buffer.space(HEAD.size)
        return self._buffer.space(_LENGTH_BYTES + min(int.from_bytes(unread[:_LENGTH_BYTES], "little"), self._max))

    def frames(self, received_bytes: int) -> Iterator[Frame]:
        """The frames that are complete now. ``TransportError`` if these bytes are no frames: hang up."""
        buffer = self._buffer
        buffer.received(received_bytes)
        while buffer.unread_bytes >= HEAD.size:
            unread = buffer.unread
            length, kind, request = HEAD.unpack_from(unread)
            if not _AFTER_LENGTH <= length <= self._max:
                raise TransportError(f"a frame of {length} bytes; the limit is {self._max}", length=length)
            stop = _LENGTH_BYTES + length
            if stop > len(unread):
                return
            buffer.take(stop)
            yield Frame(kind, request, unread[HEAD.size : stop])

    def release(self) -> None:
        """Nothing is expected soon: give memory back."""
        self._buffer.release()
