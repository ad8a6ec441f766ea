"""The one way to read msgpack that somebody else wrote: a value of the expected type, or a typed error.

msgspec documents ``MsgspecError``, but it raises more: ``UnicodeDecodeError``
for text that is not UTF-8, ``RecursionError`` for arrays nested a thousand
deep. Whoever decodes bytes of others by hand forgets one of them, and a
replica that meets an exception it does not know stops. So nobody does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from rayqueue.errors import RayQueueError

_T = TypeVar("_T")


def unpack(
    decoder: msgspec.msgpack.Decoder[_T], data: bytes | memoryview, refuse: Callable[[str], RayQueueError]
) -> _T:
    """The value. ``refuse`` makes the error that is raised instead; it gets the reason."""
    try:
        return decoder.decode(data)
    except Exception as error:  # noqa: BLE001  # decoding has no effects: whatever it is, it is about these bytes
        raise refuse(str(error) or type(error).__name__) from None
