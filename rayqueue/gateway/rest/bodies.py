"""Bodies: a request's body, unpacked within bounds, and decoded. That it comes in time, ``connections`` sees to."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from rayqueue.config import GatewaySettings
from rayqueue.errors import InvalidInputError, RequestTooLargeError, UnsupportedMediaError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_GZIP = 16 + zlib.MAX_WBITS


class SlowCallerError(Exception):
    """He has gone, or was hung up on: an answer would wait for him, too."""


async def read(receive: Receive, headers: Mapping[str, str], settings: GatewaySettings) -> bytes:
    """All of it, unpacked. ``RequestTooLargeError``, ``UnsupportedMediaError``; ``SlowCallerError``."""
    most = settings.max_body_bytes
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise _too_large(most)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise UnsupportedMediaError(f"Content-Encoding {encoding!r} is not known here: gzip, or none")
    body = await _all(receive, most)
    return unpacked(body, most) if encoding == "gzip" else body


async def _all(receive: Receive, most: int) -> bytes:
    message = await receive()
    first: bytes = message.get("body", b"")
    if not message.get("more_body", False):
        if message["type"] == "http.disconnect":
            raise SlowCallerError
        if len(first) > most:
            raise _too_large(most)
        return first
    parts, size = [first], len(first)
    while message.get("more_body", False):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise SlowCallerError
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def unpacked(body: bytes, most: int) -> bytes:
    """``RequestTooLargeError`` before more than ``most`` bytes are there."""
    unpacking = zlib.decompressobj(_GZIP)
    try:
        made = unpacking.decompress(body, most + 1)
    except zlib.error as error:
        raise InvalidInputError(f"the body is not gzip: {error}") from None
    if len(made) > most or unpacking.unconsumed_tail:
        raise _too_large(most)
    if not unpacking.eof or unpacking.unused_data:
        raise InvalidInputError("the body is not one whole gzip stream")
    return made


def _too_large(most: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"a request has at most {most} bytes, unpacked; send less at a time", max_bytes=most)


def decoded(body: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """``InvalidInputError`` says where it is wrong."""
    try:
        if not body.isascii():
            body.decode()  # the decoder does not look into what is kept as it is
        return decoder.decode(body)
    except UnicodeDecodeError:
        raise InvalidInputError("the body is not UTF-8") from None
    except RecursionError:
        raise InvalidInputError("the JSON is nested too deep") from None
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"the body cannot be read: {error}") from None


def converted(given: Mapping[str, str], model: type[Any]) -> Any:
    """Parameters of path and query. One that is not known is a mistake, too."""
    known = model.__struct_fields__
    for name in given:
        if name not in known:
            raise InvalidInputError(f"there is no parameter {name!r}; there are {', '.join(known) or 'none'}")
    try:
        return msgspec.convert(given, model, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"a parameter is wrong: {error}") from None
