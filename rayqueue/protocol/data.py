"""Appending and fetching, in a fixed binary form: a batch is never copied into another encoding.

The body of an APPEND is the batch itself. Everything else is little-endian:

    APPENDED   u64 base offset (NO_OFFSET: not known), u32 count, u8 1 if an earlier attempt had written it

    FETCH      u32 most bytes, u32 longest wait in ms, u8 flags, u8 count of cursors; per cursor: u8 lane, u64 offset
    FETCHED    u64 high watermark, u64 start of the log, u32 count; per batch: u64 base offset, u32 count of records,
               u32 length; then the batches, back to back; with READ_COMMITTED, then u8 count; per cursor: u8 lane,
               u64 offset

A fetch names a cursor per lane that it wants, and gets batches of the highest
lane that has any, then of the next while they fit. ``ANY_LANE`` as the only
cursor reads the partition in the order of its offsets, lane or not. At least
one batch is returned however large, unless nothing comes in time. The first
batch of a lane holds its cursor, so records before the cursor may come along:
the reader skips them.

With READ_COMMITTED there are no batches of transactions that are open or were
aborted, and none of a lane past its first open transaction; the high watermark
is the last stable offset. The cursors that come with the answer say where to
continue: before them nothing is left for this reader but the batches at hand.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple

from rayqueue.errors import InvalidInputError, TransportError

NO_OFFSET = 2**64 - 1
ANY_LANE = 255
MAX_LANES = 255
"""Lanes are numbered from 0; higher ones are read first."""

READ_FOLLOWER = 1 << 0
"""The replica may answer though it does not lead. It knows what is committed a little later than the leader."""

READ_COMMITTED = 1 << 1
"""Of transactions only what is committed."""

_APPENDED = Struct("<QI?")
_FETCH = Struct("<IIBB")
_CURSOR = Struct("<BQ")
_FETCHED = Struct("<QQI")
_BATCH = Struct("<QII")


class Appended(NamedTuple):
    base_offset: int | None
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    duplicate: bool


class Cursor(NamedTuple):
    lane: int
    offset: int


class FetchRequest(NamedTuple):
    cursors: tuple[Cursor, ...]
    max_bytes: int
    max_wait_ms: int = 0
    flags: int = 0


class FetchedBatch(NamedTuple):
    base_offset: int
    count: int  # type: ignore[assignment]
    payload: memoryview


class FetchAnswer(NamedTuple):
    batches: list[FetchedBatch]
    high_watermark: int
    start_offset: int
    cursors: tuple[Cursor, ...] = ()
    """Where to continue, of a fetch with READ_COMMITTED: past what was skipped."""


def encode_appended(base_offset: int | None, count: int, duplicate: bool) -> bytes:
    return _APPENDED.pack(NO_OFFSET if base_offset is None else base_offset, count, duplicate)


def decode_appended(body: memoryview) -> Appended:
    try:
        offset, count, duplicate = _APPENDED.unpack(body)
    except struct.error as error:
        raise TransportError(f"not the answer to an append: {error}") from None
    return Appended(None if offset == NO_OFFSET else offset, count, duplicate)


def encode_fetch(request: FetchRequest) -> bytes:
    try:
        parts = [_FETCH.pack(request.max_bytes, request.max_wait_ms, request.flags, len(request.cursors))]
        parts += [_CURSOR.pack(lane, offset) for lane, offset in request.cursors]
    except struct.error as error:
        raise InvalidInputError(f"a number does not fit into a fetch: {error}") from None
    return b"".join(parts)


def decode_fetch(body: memoryview) -> FetchRequest:
    """``InvalidInputError`` unless it is a fetch that can be carried out."""
    try:
        max_bytes, max_wait_ms, flags, count = _FETCH.unpack_from(body)
        if len(body) != _FETCH.size + count * _CURSOR.size:
            raise InvalidInputError(f"a fetch of {count} cursors does not have {len(body)} bytes")
        cursors = tuple(Cursor(lane, offset) for lane, offset in _CURSOR.iter_unpack(body[_FETCH.size :]))
    except struct.error as error:
        raise InvalidInputError(f"not a fetch: {error}") from None
    lanes = [cursor.lane for cursor in cursors]
    if not cursors or len(set(lanes)) != len(lanes) or (ANY_LANE in lanes and len(lanes) > 1):
        raise InvalidInputError("a fetch names each lane once, or any lane alone")
    return FetchRequest(cursors, max_bytes, max_wait_ms, flags)


def encode_fetched(
    high_watermark: int,
    start_offset: int,
    batches: Sequence[tuple[int, int, bytes]],
    cursors: Sequence[Cursor] | None = None,
) -> list[bytes]:
    """Buffers to be written one after the other; the batches are not copied. ``cursors``: to be continued there."""
    index = b"".join([_BATCH.pack(base, count, len(payload)) for base, count, payload in batches])
    head = _FETCHED.pack(high_watermark, start_offset, len(batches))
    if cursors is None:
        return [head + index, *(payload for _, _, payload in batches)]
    tail = bytes((len(cursors),)) + b"".join([_CURSOR.pack(lane, offset) for lane, offset in cursors])
    return [head + index, *(payload for _, _, payload in batches), tail]


def decode_fetched(body: memoryview) -> FetchAnswer:
    """Views into ``body``."""
    try:
        high_watermark, start_offset, count = _FETCHED.unpack_from(body)
        index = body[_FETCHED.size : _FETCHED.size + count * _BATCH.size]
        if len(index) != count * _BATCH.size:
            raise TransportError(f"{count} batches do not fit into {len(body)} bytes")
        batches, end = _cut(body, _FETCHED.size + len(index), _BATCH.iter_unpack(index))
        cursors = _read_cursors(body[end:])
    except struct.error as error:
        raise TransportError(f"not the answer to a fetch: {error}") from None
    return FetchAnswer(batches, high_watermark, start_offset, cursors)


def _cut(body: memoryview, at: int, index: Iterable[tuple[int, int, int]]) -> tuple[list[FetchedBatch], int]:
    """The batches, and where they end."""
    batches: list[FetchedBatch] = []
    for base, count, length in index:
        batches.append(FetchedBatch(base, count, body[at : at + length]))
        at += length
    if at > len(body):
        raise TransportError(f"the batches of a fetch have {at} bytes, not {len(body)}")
    return batches, at


def _read_cursors(rest: memoryview) -> tuple[Cursor, ...]:
    if not len(rest):
        return ()
    if len(rest) != 1 + rest[0] * _CURSOR.size:
        raise TransportError(f"the answer to a fetch ends with {len(rest)} bytes that are no cursors")
    return tuple(Cursor(lane, offset) for lane, offset in _CURSOR.iter_unpack(rest[1:]))
