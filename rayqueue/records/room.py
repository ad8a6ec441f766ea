"""Room: how many records, or jobs, go into so many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_EACH_BYTES = 128
"""A record's place and time, and what is around it on a wire."""
_HEADER_BYTES = 8


class Sized(Protocol):
    @property
    def key(self) -> Any: ...
    @property
    def value(self) -> Any: ...
    @property
    def headers(self) -> Any: ...


class Room:
    """Bytes that are left of so many. One record that is larger than all of them goes alone, or it could never go."""

    __slots__ = ("_empty", "_left_bytes")

    def __init__(self, size_bytes: int) -> None:
        self._left_bytes = size_bytes
        self._empty = True

    def fitting(self, records: Sequence[Sized]) -> tuple[int, int]:
        """How many of these there is room for, from the first on, and how many bytes they are. Takes none of it."""
        left_bytes, count, size_bytes = self._left_bytes, 0, 0
        for each in records:
            more_bytes = _size(each)
            if size_bytes + more_bytes > left_bytes and (count or not self._empty):
                break
            size_bytes += more_bytes
            count += 1
        return count, size_bytes

    def take(self, size_bytes: int) -> None:
        self._left_bytes -= size_bytes
        self._empty = False

    def cut(self, records: Sequence[Sized]) -> int:
        """How many of these it takes."""
        count, size_bytes = self.fitting(records)
        if count:
            self.take(size_bytes)
        return count


def size_of(records: Sequence[Sized]) -> int:
    """Their bytes, as they are counted here."""
    return sum(map(_size, records))


def _size(record: Sized) -> int:
    size_bytes = _EACH_BYTES + len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size_bytes += _HEADER_BYTES + len(name) + len(value)
    return size_bytes
