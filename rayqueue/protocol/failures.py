"""Errors over the wire: the class by its code, the text, and the details. The other side raises the same."""

from __future__ import annotations

from typing import Any

import msgspec

from rayqueue import errors
from rayqueue.errors import RayQueueError, TransportError
from rayqueue.protocol.unpacking import unpack


class _Failure(msgspec.Struct, frozen=True, array_like=True):
    code: str
    text: str
    details: dict[str, Any]


def _tree(cls: type[RayQueueError]) -> dict[str, type[RayQueueError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        # Ray makes subclasses of its own, with the same codes, of errors that it has carried.
        if child.__module__ == errors.__name__:
            found |= _tree(child)
    return found


_classes = _tree(RayQueueError)
_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_decoder = msgspec.msgpack.Decoder(_Failure)


def encode_failure(error: RayQueueError) -> bytes:
    return _encoder.encode(_Failure(error.code, str(error), error.details))


def decode_failure(body: memoryview | bytes) -> RayQueueError:
    """A code that this release does not know becomes the plainest error, with its text."""
    try:
        failure = unpack(_decoder, body, lambda why: TransportError(f"an error that cannot be read: {why}"))
    except TransportError as unreadable:
        return unreadable
    return _classes.get(failure.code, RayQueueError)(failure.text, **failure.details)
