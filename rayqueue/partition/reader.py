"""Reading a partition from a snapshot of its store.

Functions, not a class: all they need is in the snapshot, so a read is
consistent whatever the engine's thread does meanwhile, and may run in any
thread. A snapshot sees what was synced, so its end may be a little behind the
high watermark that the engine knows.

Searches cost a logarithm of the log's length; nothing scans it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rayqueue.errors import DamagedLogError, InvalidInputError, OffsetOutOfRangeError
from rayqueue.ids import Offset
from rayqueue.log.store import Snapshot, Table
from rayqueue.partition.commands import check_offset
from rayqueue.partition.rows import (
    SETTINGS_KEY,
    BatchRow,
    base_of_lane_key,
    find_batch,
    lane_key,
    load_log,
    offset_key,
    read_batch,
)
from rayqueue.partition.settings import PartitionSettings
from rayqueue.records import RecordBatch

MAX_LANE = 255


class Bounds(NamedTuple):
    """Offsets that can be read: ``start <= offset < end``."""

    start: Offset
    end: Offset


class Fetched(NamedTuple):
    """A batch as it is in the log. Its base offset slot is empty; the base offset stands here."""

    base_offset: Offset
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    payload: bytes


def bounds(snapshot: Snapshot) -> Bounds:
    log = load_log(snapshot)
    return Bounds(max(log.start_offset, log.readable_from), log.next_offset)


def read(
    snapshot: Snapshot, offset: int, max_bytes: int, *, lane: int | None = None, high_watermark: int = 0
) -> list[Fetched]:
    """Batches from the one that holds ``offset`` on: at least one, then while they fit. [] at the end.

    With ``lane``, only that lane's. ``high_watermark`` is the engine's, if the
    caller knows it: an offset up to there is not out of range, only not in
    this snapshot yet.
    """
    check_offset(offset)
    if lane is not None and not 0 <= lane <= MAX_LANE:
        raise InvalidInputError(f"a lane is a number from 0 to {MAX_LANE}, not {lane}", lane=lane)
    start, end = bounds(snapshot)
    if not start <= offset <= max(end, high_watermark):
        raise OffsetOutOfRangeError(
            f"offset {offset} is not in the log, which has {start} to {end}", offset=offset, start=start, end=end
        )
    found: list[Fetched] = []
    if offset >= end:
        return found
    for batch in _batches(snapshot, offset, lane):
        max_bytes -= batch.size_bytes
        if max_bytes < 0 and found:
            break
        found.append(Fetched(batch.base_offset, batch.count, _payload(snapshot, batch)))
    return found


def offset_for_time(snapshot: Snapshot, timestamp: int) -> Offset:
    """The offset of the first record that is not older than ``timestamp``; the end if all are older."""
    start, end = bounds(snapshot)
    first = _first_batch(snapshot, start, end, lambda batch: batch.running_timestamp >= timestamp)
    if first is None:
        return end
    # Usually the first of these is it. Not so where what reached this timestamp first was trimmed since.
    for batch in _batches(snapshot, first.base_offset, None):
        if batch.max_timestamp < timestamp:
            continue
        stamps = RecordBatch.decode(_payload(snapshot, batch)).timestamps()
        for offset, stamp in enumerate(stamps, batch.base_offset):
            if offset >= start and stamp >= timestamp:
                return Offset(offset)
    return end


def retention_point(snapshot: Snapshot, now_ms: int, retention_ms: int | None, retention_bytes: int | None) -> Offset:
    """The offset that the log may be trimmed to: its start, or the base of a batch after it.

    By time, every batch may go once nothing up to it is younger than
    ``retention_ms``. By bytes, the newest batch always stays.
    """
    start, end = bounds(snapshot)
    point = start
    if retention_ms is not None and point < end:
        oldest = now_ms - retention_ms
        kept = _first_batch(snapshot, point, end, lambda batch: batch.running_timestamp >= oldest)
        point = end if kept is None else max(point, kept.base_offset)
    if retention_bytes is not None and point < end:
        total_bytes = load_log(snapshot).total_bytes
        kept = _first_batch(snapshot, point, end, lambda batch: total_bytes - batch.bytes_before <= retention_bytes)
        kept = kept or find_batch(snapshot, end - 1)
        if kept is not None:
            point = max(point, kept.base_offset)
    return point


def _batches(snapshot: Snapshot, offset: int, lane: int | None) -> Iterator[BatchRow]:
    """Rows from the batch that holds ``offset`` on, in order."""
    first = find_batch(snapshot, offset)
    if first is None:
        raise DamagedLogError(f"no batch holds offset {offset}", offset=offset)
    if lane is not None and _lanes(snapshot) > 1:
        for key, _ in snapshot.scan(Table.LANES, lane_key(lane, first.base_offset), _end_of_lane(lane)):
            row = snapshot.get(Table.OFFSETS, base_of_lane_key(key))
            if row is None:
                raise DamagedLogError(f"lane {lane} names a batch that is not there", lane=lane)
            yield read_batch(base_of_lane_key(key), row)
    elif not lane:
        for key, row in snapshot.scan(Table.OFFSETS, offset_key(first.base_offset)):
            yield read_batch(key, row)


def _end_of_lane(lane: int) -> bytes | None:
    return bytes((lane + 1,)) if lane < MAX_LANE else None


def _lanes(snapshot: Snapshot) -> int:
    encoded = snapshot.get(Table.META, SETTINGS_KEY)
    return 1 if encoded is None else PartitionSettings.decode(encoded).lanes


def _payload(snapshot: Snapshot, batch: BatchRow) -> bytes:
    try:
        return snapshot.entry(batch.index).payload
    except KeyError:
        raise DamagedLogError(
            f"offset {batch.base_offset} is at entry {batch.index}, which is not there", index=batch.index
        ) from None


def _first_batch(
    snapshot: Snapshot, start: Offset, end: Offset, reached: Callable[[BatchRow], bool]
) -> BatchRow | None:
    """The first batch for which ``reached`` holds. Once it holds, it must hold for all that follow."""
    first: BatchRow | None = None
    while start < end:
        batch = find_batch(snapshot, (start + end) // 2)
        if batch is None:
            raise DamagedLogError(f"no batch holds offset {(start + end) // 2}", start=start, end=end)
        if reached(batch):
            first, end = batch, batch.base_offset
        else:
            start = batch.end_offset
    return first
