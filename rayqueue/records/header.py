"""The fixed header in front of every batch.

All numbers are little-endian:

    at  size  field
     0     2  magic, b"RQ". Its first byte also tells a batch from the other kinds of log entry
     2     1  version of this layout and of the Arrow schema behind it
     3     1  zero
     4     8  base offset: a slot. Zero in the log; filled in when a batch is handed out
    12     4  crc32c of everything that follows
    16     4  length of the whole batch, this header included
    20     4  count of records, at least 1
    24     8  producer id, 0 for none
    32     8  sequence of the first record; sequences count records
    40     4  epoch of the producer
    44     1  lane
    45     1  compression of what follows the header
    46     2  flags
    48     8  smallest timestamp
    56     8  largest timestamp
    64     4  length of the Arrow message once it is decompressed
    68     4  zero

The base offset stands before the checksummed region, so it can be filled in
without computing the checksum again: a batch is immutable from the producer's
memory to the consumer's.

This module reads and writes these 72 bytes. It does not look behind them.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from rayqueue.errors import CorruptBatchError, InvalidInputError, OversizedBatchError, UnknownFormatError
from rayqueue.records.checksum import crc32c

Bytes = bytes | bytearray | memoryview

MAGIC = b"RQ"
VERSION = 1
BATCH_TAG = MAGIC[0]
"""First byte of a log entry that is a batch."""

HEADER_BYTES = 72
CHECKED_FROM = 16
"""Where the checksummed region starts."""
LANE_AT = 44
"""Where the lane is, for who needs to know nothing else."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Default limit for what a batch may decompress to. Producers, brokers and consumers share it,
so that no batch is accepted by one and refused by the next."""

MIN_RECORD_BYTES = 12
"""What a record without key, value and headers takes in a message: its timestamp, and where its value ends."""

MAX_SEQUENCE = 2**63
"""Sequences stay below this, so that the next one always fits."""

TRANSACTIONAL = 1 << 0
CONTROL = 1 << 1
"""Reserved for the markers that end a transaction."""
HAS_KEYS = 1 << 2
HAS_HEADERS = 1 << 3
_KNOWN_FLAGS = TRANSACTIONAL | CONTROL | HAS_KEYS | HAS_HEADERS

_LAYOUT = Struct("<2sBBQIIIQQIBBHqqII")
_BASE_OFFSET = Struct("<Q")
_CHECKED = Struct("<IIQQIBBHqqII")


class Compression(IntEnum):
    NONE = 0
    LZ4 = 1
    """One lz4 block; fast in both directions."""
    ZSTD = 2
    """One zstd frame; smaller."""


class BatchHeader(NamedTuple):
    """The 72 bytes, field by field. ``parse`` is all that the append path needs to know of a batch."""

    magic: bytes
    version: int
    zero: int
    base_offset: int
    crc: int
    length: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    producer_id: int
    sequence: int
    epoch: int
    lane: int
    compression: int
    flags: int
    min_timestamp: int
    max_timestamp: int
    message_bytes: int
    zero_too: int

    @staticmethod
    def parse(buffer: Bytes) -> BatchHeader:
        """Read the header of bytes that are, or claim to be, a batch. Checks that they claim it, no more."""
        try:
            header = _make(_LAYOUT.unpack_from(buffer))
        except struct.error:
            raise UnknownFormatError(
                f"not a batch: {len(buffer)} bytes, a header alone has {HEADER_BYTES}", length=len(buffer)
            ) from None
        if header[0] != MAGIC:
            raise UnknownFormatError(f"not a batch: starts with {header[0]!r} instead of {MAGIC!r}")
        if header[1] != VERSION:
            raise UnknownFormatError(
                f"batch format version {header[1]} is unknown; this release knows {VERSION}", version=header[1]
            )
        return header

    @property
    def transactional(self) -> bool:
        return bool(self.flags & TRANSACTIONAL)

    @property
    def control(self) -> bool:
        return bool(self.flags & CONTROL)


_make = BatchHeader._make


def pack_header(
    *,
    parts: list[Bytes],
    count: int,
    producer_id: int,
    sequence: int,
    epoch: int,
    lane: int,
    compression: int,
    flags: int,
    min_timestamp: int,
    max_timestamp: int,
    message_bytes: int,
) -> bytes:
    """The header for a batch whose remaining bytes are ``parts``, put together."""
    length = HEADER_BYTES + sum(map(len, parts))
    try:
        checked = _CHECKED.pack(
            length,
            count,
            producer_id,
            sequence,
            epoch,
            lane,
            compression,
            flags,
            min_timestamp,
            max_timestamp,
            message_bytes,
            0,
        )
    except struct.error as error:
        raise InvalidInputError(f"a number does not fit into the batch header: {error}") from None
    crc = crc32c(checked)
    for part in parts:
        crc = crc32c(part, crc)
    return MAGIC + _PREFIX.pack(VERSION, 0, 0, crc) + checked


_PREFIX = Struct("<BBQI")


def check_header(header: BatchHeader, buffer: Bytes, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
    """Check the header against itself, against the bytes it heads, and against the checksum."""
    length = len(buffer)
    if header.length != length:
        raise CorruptBatchError(
            f"batch says it has {header.length} bytes, but there are {length}", expected=header.length, length=length
        )
    crc = crc32c(memoryview(buffer)[CHECKED_FROM:])
    if crc != header.crc:
        raise CorruptBatchError(
            f"checksum does not match: {crc:08x} instead of {header.crc:08x}", crc=crc, expected=header.crc
        )
    if header.zero or header.zero_too or header.flags & ~_KNOWN_FLAGS or header.compression > Compression.ZSTD:
        raise UnknownFormatError(
            f"batch uses a feature this release does not know: flags {header.flags:#06x}, "
            f"compression {header.compression}, reserved fields {header.zero}, {header.zero_too}"
        )
    if header.count == 0:
        raise InvalidInputError("a batch must hold at least one record")
    if header.sequence + header.count > MAX_SEQUENCE:
        raise InvalidInputError(f"sequence {header.sequence} is out of range", sequence=header.sequence)
    if header.min_timestamp > header.max_timestamp:
        raise InvalidInputError(
            f"smallest timestamp {header.min_timestamp} is after the largest {header.max_timestamp}"
        )
    if header.message_bytes > max_message_bytes:
        raise OversizedBatchError(
            f"batch unpacks to {header.message_bytes} bytes; the limit is {max_message_bytes}",
            length=header.message_bytes,
            limit=max_message_bytes,
        )
    if header.compression == Compression.NONE and header.message_bytes != length - HEADER_BYTES:
        raise CorruptBatchError(
            f"uncompressed batch says its message has {header.message_bytes} bytes, "
            f"but there are {length - HEADER_BYTES}"
        )
    if header.count * MIN_RECORD_BYTES > header.message_bytes:
        raise CorruptBatchError(
            f"a message of {header.message_bytes} bytes cannot hold {header.count} records", count=header.count
        )


def with_base_offset(batch: Bytes, base_offset: int) -> bytes:
    """A copy of the batch with its base offset filled in. The checksum stays valid."""
    return b"".join((batch[:4], _BASE_OFFSET.pack(base_offset), batch[12:]))


_PRODUCER = Struct("<QQIB")
_PRODUCER_AT = 24
_BEHIND_PRODUCER = _PRODUCER_AT + _PRODUCER.size


def with_producer(batch: Bytes, producer_id: int, sequence: int, epoch: int, lane: int | None = None) -> bytes:
    """A copy of the batch that says it is from this producer, and for this lane, with its checksum and no offset."""
    try:
        stamp = _PRODUCER.pack(producer_id, sequence, epoch, batch[_BEHIND_PRODUCER - 1] if lane is None else lane)
    except struct.error as error:
        raise InvalidInputError(f"a number does not fit into the batch header: {error}") from None
    behind = memoryview(batch)[_BEHIND_PRODUCER:]
    before = batch[CHECKED_FROM:_PRODUCER_AT]
    crc = crc32c(behind, crc32c(stamp, crc32c(before)))
    return b"".join((batch[:4], _BASE_OFFSET.pack(0), crc.to_bytes(4, "little"), before, stamp, behind))
