"""Control calls between a test and the replica process that it has started, over a socket pair.

Frames as clients' (``rayqueue.protocol.frames``): a CALL is a name and its
arguments, an ANSWER its result, both as msgpack; FAILED is the error. Only who
started the process can say such things: start, close, where the peers are. What
a client may ask goes where clients go, to the replica's own port.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec

from rayqueue.errors import RayQueueError
from rayqueue.protocol.failures import decode_failure, encode_failure
from rayqueue.protocol.frames import Frame, FrameReader, Kind, head

_MAX_FRAME_BYTES = 16 * 1024 * 1024


class Control:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._reader = FrameReader(_MAX_FRAME_BYTES)
        self._frames: list[Frame] = []

    def call(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        """``OSError`` if the other end is gone."""
        self._send(Kind.CALL, number, msgspec.msgpack.encode((name, arguments)))

    def answer(self, number: int, result: Any) -> None:
        """The result, or a ``RayQueueError``."""
        if isinstance(result, RayQueueError):
            self._send(Kind.FAILED, number, encode_failure(result))
        else:
            self._send(Kind.ANSWER, number, msgspec.msgpack.encode(result))

    def receive(self) -> tuple[int, Any] | None:
        """The next frame: its number, and the call or the answer, which may be an error. None at the end."""
        while not self._frames:
            try:
                count = self._sock.recv_into(self._reader.space())
            except OSError:
                return None
            if not count:
                return None
            found = self._reader.frames(count)
            self._frames = [Frame(kind, number, memoryview(bytes(body))) for kind, number, body in found]
        kind, number, body = self._frames.pop(0)
        return number, decode_failure(body) if kind == Kind.FAILED else msgspec.msgpack.decode(body)

    def close(self) -> None:
        self._sock.close()

    def _send(self, kind: Kind, number: int, body: bytes) -> None:
        with self._sending:
            self._sock.sendall(head(kind, number, len(body)) + body)
