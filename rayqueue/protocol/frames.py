"""Messages on a stream: a length, a kind, a request's number, and the body.

    u32  length of what follows
    u8   kind
    u32  number of the request; its answer carries the same
    ...  body

Requests of one connection are begun in the order in which they were sent.
Answers come in any order. Only ``Kind.APPEND_UNACKED`` has no answer.

The reader owns one buffer, grows it to the largest frame that is allowed and no
further, and hands out views into it: whoever keeps a body copies it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from rayqueue.errors import TransportError

HEAD = Struct("<IBI")
_LENGTH_BYTES = 4
_AFTER_LENGTH = HEAD.size - _LENGTH_BYTES
MAX_REQUEST = 2**32 - 1


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
    """What is written before a body of this length."""
    return HEAD.pack(_AFTER_LENGTH + body_bytes, kind, request)


class FrameReader:
    """Read from the socket into ``space()``, then take the ``frames`` that this completed.

    A view that a frame hands out is valid until the next call of ``space``.
    """

    def __init__(self, max_frame_bytes: int, buffer_bytes: int = 64 * 1024) -> None:
        self._max = max_frame_bytes
        self._buffer = bytearray(max(buffer_bytes, HEAD.size))
        self._view = memoryview(self._buffer)
        self._start = 0  # of what was not handed out yet
        self._end = 0

    def space(self) -> memoryview:
        """Where the next bytes go. Never empty."""
        if self._start == self._end:
            self._start = self._end = 0
        wanted = self._wanted()
        if self._start + wanted > len(self._buffer) or self._end == len(self._buffer):
            left = self._end - self._start
            if wanted > len(self._buffer):
                grown = bytearray(min(max(wanted, 2 * len(self._buffer)), self._max + _LENGTH_BYTES))
                grown[:left] = self._view[self._start : self._end]
                self._buffer, self._view = grown, memoryview(grown)
            else:
                self._buffer[:left] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, left
        return self._view[self._end :]

    def frames(self, received_bytes: int) -> Iterator[Frame]:
        """The frames that are complete now. ``TransportError`` if these bytes are no frames: hang up."""
        self._end += received_bytes
        while self._end - self._start >= HEAD.size:
            length, kind, request = HEAD.unpack_from(self._buffer, self._start)
            if not _AFTER_LENGTH <= length <= self._max:
                raise TransportError(f"a frame of {length} bytes; the limit is {self._max}", length=length)
            stop = self._start + _LENGTH_BYTES + length
            if stop > self._end:
                return
            body = self._view[self._start + HEAD.size : stop]
            self._start = stop
            yield Frame(kind, request, body)

    def _wanted(self) -> int:
        """Bytes of the frame under way, as far as is known."""
        if self._end - self._start < _LENGTH_BYTES:
            return HEAD.size
        length = int.from_bytes(self._view[self._start : self._start + _LENGTH_BYTES], "little")
        return _LENGTH_BYTES + min(length, self._max)
