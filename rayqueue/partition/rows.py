"""The rows of a partition's tables, as bytes.

Owns the encoding of everything the partition keeps in META, OFFSETS and LANES.
The machine writes them, the reader reads them from a snapshot.

An OFFSETS row carries running totals (bytes before it, largest timestamp up to
it). They only ever grow, so seeking by time and retention by bytes or time are
binary searches over the offsets rather than scans. A LANES row carries the
totals of its lane, so what a group has not read yet is a look-up per lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import NamedTuple, Protocol

from rayqueue.errors import DamagedLogError
from rayqueue.ids import Index, Offset
from rayqueue.log.store import Table
from rayqueue.partition.settings import PartitionSettings
from rayqueue.partition.tables import META, OFFSETS

NO_TIMESTAMP = -(2**63)
"""Before every timestamp."""

LOG_KEY = b"log"
SETTINGS_KEY = b"settings"
LANES_KEY = b"lanes"
HELD_KEY = b"held"
FLOOR_KEY = b"floor"
CLOCK_KEY = b"clock"


class Rows(Protocol):
    """Reading, as a store and a snapshot of it both allow."""

    def get(self, table: Table, key: bytes) -> bytes | None: ...

    def scan(
        self, table: Table, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]: ...


_OFFSET_KEY = Struct(">Q")
_LANE_KEY = Struct(">BQ")
_BATCH_ROW = Struct("<QQqqIIB")
_LANE_ROW = Struct("<QQQII")
_LOG_ROW = Struct("<QQQQq")

offset_key = _OFFSET_KEY.pack
lane_key = _LANE_KEY.pack
pack_batch = _BATCH_ROW.pack
"""index, bytes before, running timestamp, own timestamp, count, size, lane"""
pack_lane = _LANE_ROW.pack
"""records before, bytes before, end of the batch before, all of this lane; count, size"""


class BatchRow(NamedTuple):
    """The place of a batch, and all that a search needs to know of it."""

    base_offset: Offset
    index: Index  # type: ignore[assignment]  # hides tuple.index, as count below hides tuple.count
    bytes_before: int
    """Size of all batches ever appended before this one."""
    running_timestamp: int
    """The largest timestamp in this batch and all before it."""
    max_timestamp: int
    count: int  # type: ignore[assignment]
    size_bytes: int
    lane: int

    @property
    def end_offset(self) -> Offset:
        return Offset(self.base_offset + self.count)


def read_batch(key: bytes, row: bytes) -> BatchRow:
    return BatchRow._make(_OFFSET_KEY.unpack(key) + _BATCH_ROW.unpack(row))


class LaneRow(NamedTuple):
    """A batch, and the size of its lane before it."""

    base_offset: Offset
    records_before: int
    bytes_before: int
    end_before: Offset
    """Where the batch before it in this lane ends: nothing of this lane is between the two."""
    count: int  # type: ignore[assignment]
    size_bytes: int

    @property
    def end_offset(self) -> Offset:
        return Offset(self.base_offset + self.count)


def read_lane(key: bytes, row: bytes) -> LaneRow:
    return LaneRow._make(_LANE_KEY.unpack(key)[1:] + _LANE_ROW.unpack(row))


def end_of_lane(lane: int) -> bytes | None:
    """The bound that the keys of a lane are less than."""
    return bytes((lane + 1,)) if lane < 255 else None


def base_of_lane_key(key: bytes) -> bytes:
    """The part of a LANES key that is a key of OFFSETS."""
    return key[1:]


class LogRow(NamedTuple):
    """The log's start and end. Written when either is not to be seen from the OFFSETS rows."""

    start_offset: Offset = Offset(0)
    readable_from: Offset = Offset(0)
    """A replica that started from a checkpoint lacks what was before it, even above ``start_offset``."""
    next_offset: Offset = Offset(0)
    total_bytes: int = 0
    """Size of all batches ever appended."""
    max_timestamp: int = NO_TIMESTAMP

    def encode(self) -> bytes:
        return _LOG_ROW.pack(*self)


def load_log(rows: Rows) -> LogRow:
    """The log's start and end according to the tables."""
    row = rows.get(META, LOG_KEY)
    log = LogRow() if row is None else LogRow._make(_LOG_ROW.unpack(row))
    last = next(rows.scan(OFFSETS, reverse=True), None)
    if last is None:
        return log
    batch = read_batch(*last)
    if batch.end_offset <= log.next_offset:
        return log
    return log._replace(
        next_offset=batch.end_offset,
        total_bytes=batch.bytes_before + batch.size_bytes,
        max_timestamp=batch.running_timestamp,
    )


def find_batch(rows: Rows, offset: int) -> BatchRow | None:
    """The batch that holds this offset."""
    found = next(rows.scan(OFFSETS, stop=offset_key(offset + 1), reverse=True), None)
    if found is None:
        return None
    batch = read_batch(*found)
    return batch if offset < batch.end_offset else None


class Bounds(NamedTuple):
    """Offsets that can be read: ``start <= offset < end``."""

    start: Offset
    end: Offset


def bounds(rows: Rows) -> Bounds:
    log = load_log(rows)
    return Bounds(max(log.start_offset, log.readable_from), log.next_offset)


def lanes_of(rows: Rows) -> int:
    encoded = rows.get(META, SETTINGS_KEY)
    return 1 if encoded is None else PartitionSettings.decode(encoded).lanes


def first_batch(rows: Rows, start: Offset, end: Offset, reached: Callable[[BatchRow], bool]) -> BatchRow | None:
    """The first batch for which ``reached`` holds. Once it holds, it must hold for all that follow."""
    first: BatchRow | None = None
    while start < end:
        batch = find_batch(rows, (start + end) // 2)
        if batch is None:
            raise DamagedLogError(f"no batch holds offset {(start + end) // 2}", start=start, end=end)
        if reached(batch):
            first, end = batch, batch.base_offset
        else:
            start = batch.end_offset
    return first
