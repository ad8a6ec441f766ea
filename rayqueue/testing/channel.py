"""Calls between a test and the replica process it has started, over a socket pair.

Owns the frames and how answers and errors are written into them:

    u32 length of head, u32 length of body, head (JSON), body (bytes, back to back)

The head of a call has its ``id``, its name as ``call`` and its arguments; the
head of an answer has the ``id`` and either ``result`` or ``error``. Bytes
travel in the body, and ``sizes`` in the head says how to cut it. Answers may
come in any order.

Both ends are ours and on one machine: nothing is authenticated, but nothing is
unpickled either, so that the process depends on no state of the test.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

from rayqueue.errors import InvariantBrokenError, RayQueueError

MAX_FRAME_BYTES = 256 * 1024 * 1024

_LENGTHS = Struct("<II")


class Frame(NamedTuple):
    head: dict[str, Any]
    blobs: list[bytes]


class Channel:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def send(self, head: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """``OSError`` if the other end is gone."""
        encoded = json.dumps({**head, "sizes": [len(blob) for blob in blobs]}, default=str).encode()
        body_bytes = sum(map(len, blobs))
        if len(encoded) + body_bytes > MAX_FRAME_BYTES:
            raise InvariantBrokenError(f"a frame of {body_bytes} bytes is too large for a channel")
        frame = b"".join((_LENGTHS.pack(len(encoded), body_bytes), encoded, *blobs))
        with self._sending:
            self._sock.sendall(frame)

    def receive(self) -> Frame | None:
        """The next frame; None once the other end is gone."""
        lengths = self._read(_LENGTHS.size)
        if lengths is None:
            return None
        head_bytes, body_bytes = _LENGTHS.unpack(lengths)
        if head_bytes + body_bytes > MAX_FRAME_BYTES:
            raise InvariantBrokenError(f"a frame of {body_bytes} bytes is too large for a channel")
        encoded, body = self._read(head_bytes), self._read(body_bytes)
        if encoded is None or body is None:
            return None
        head = json.loads(encoded)
        return Frame(head, list(_cut(body, head["sizes"])))

    def close(self) -> None:
        self._sock.close()

    def _read(self, size_bytes: int) -> bytes | None:
        space = bytearray(size_bytes)
        view = memoryview(space)
        while view:
            try:
                count = self._sock.recv_into(view)
            except OSError:
                return None
            if not count:
                return None
            view = view[count:]
        return bytes(space)


def _cut(body: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    at = 0
    for size in sizes:
        yield body[at : at + size]
        at += size


# -- errors -----------------------------------------------------------------------


def pack_error(error: RayQueueError) -> dict[str, Any]:
    return {"code": error.code, "message": str(error), "details": error.details}


def unpack_error(packed: Mapping[str, Any]) -> RayQueueError:
    """The same error again, by its code."""
    for kind in _kinds(RayQueueError):
        if kind.code == packed["code"]:
            return kind(packed["message"], **packed["details"])
    return RayQueueError(packed["message"], **packed["details"])


def _kinds(kind: type[RayQueueError]) -> Iterator[type[RayQueueError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)
