"""Reading a partition from a snapshot of its store.

Functions, not a class: all they need is in the snapshot, so a read is
consistent whatever the engine's thread does meanwhile, and may run in any
thread. A snapshot sees what was synced, so its end may be a little behind the
high watermark that the engine knows.

Searches cost a logarithm of the log's length; nothing scans it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rayqueue.errors import DamagedLogError, InvalidInputError, OffsetOutOfRangeError
from rayqueue.ids import Offset
from rayqueue.log.store import Snapshot
from rayqueue.partition.commands import check_offset
from rayqueue.partition.lanes import lost_since
from rayqueue.partition.rows import (
    BatchRow,
    base_of_lane_key,
    bounds,
    end_of_lane,
    find_batch,
    first_batch,
    lane_key,
    lanes_of,
    offset_key,
    read_batch,
)
from rayqueue.partition.tables import LANES, OFFSETS
from rayqueue.partition.transactions.runs import aborted_at, aborted_from, first_open
from rayqueue.protocol.data import ANY_LANE, Cursor
from rayqueue.records import RecordBatch

MAX_LANE = 255
MAX_ABORTED_RUNS = 4_000
"""So many one read jumps over, a tenth of a second's work: whoever asks is not to be taken for one that hangs."""


class Fetched(NamedTuple):
    """A batch as it is in the log. Its base offset slot is empty; the base offset stands here."""

    base_offset: Offset
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    payload: bytes


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


def read_lanes(
    snapshot: Snapshot, cursors: Sequence[Cursor], max_bytes: int, *, high_watermark: int = 0
) -> list[Fetched]:
    """Batches of the highest lane that has any after its cursor, then of the next while they fit. [] at the end.

    At least one, if there is one. Each lane's batches come in order, from the one
    that holds its cursor on. ``ANY_LANE`` alone reads in the order of offsets.

    A cursor may be before the start of the log if its lane had nothing there: a
    lane in which little happens does not fall behind because of the others.
    """
    start, end = bounds(snapshot)
    last = max(end, high_watermark)
    found: list[Fetched] = []
    inside = [_inside(snapshot, lane, offset, start, last) for lane, offset in cursors]
    for lane, offset in sorted(inside, reverse=True):
        if offset >= end:
            continue
        for batch in _batches(snapshot, offset, None if lane == ANY_LANE else lane):
            max_bytes -= batch.size_bytes
            if max_bytes < 0 and found:
                return found
            found.append(Fetched(batch.base_offset, batch.count, _payload(snapshot, batch)))
    return found


class CommittedRead(NamedTuple):
    """The committed records that were found, and where to continue."""

    found: list[Fetched]
    cursors: list[Cursor]
    """Before these nothing is left but what was found."""
    is_cut: bool = False
    """There may be more: it has ended because there was so much to jump over."""


def read_committed(
    snapshot: Snapshot, cursors: Sequence[Cursor], max_bytes: int, *, high_watermark: int = 0
) -> CommittedRead:
    """As ``read_lanes``, without batches of transactions that are open or aborted, nor those of a lane that are behind
    an open one.

    What was aborted is jumped over, run by run, up to ``MAX_ABORTED_RUNS``. Where a lane has nothing more, it is to be
    continued at its first open batch, or at the end.
    """
    start, end = bounds(snapshot)
    last = max(end, high_watermark)
    found: list[Fetched] = []
    then: list[Cursor] = []
    inside = [_inside(snapshot, lane, offset, start, last) for lane, offset in cursors]
    runs = MAX_ABORTED_RUNS
    for lane, offset in sorted(inside, reverse=True):
        which = None if lane == ANY_LANE else lane
        unstable = first_open(snapshot, which)
        stop = end if unstable is None else min(end, unstable)
        at, max_bytes, runs = _read_stable(snapshot, found, offset, stop, which, max_bytes, runs)
        then.append(Cursor(lane, at))
    return CommittedRead(found, then, runs < 0)


def _read_stable(
    snapshot: Snapshot, found: list[Fetched], at: int, stop: int, lane: int | None, max_bytes: int, runs: int
) -> tuple[int, int, int]:
    """Add batches of a lane to those found, from there up to ``stop``. Where to continue, and what is left of
    ``max_bytes`` and of ``runs`` to jump over: less than nothing, if there is one too many."""
    while at < stop and runs >= 0 and (max_bytes >= 0 or not found):
        aborted = aborted_at(snapshot, at) or next(aborted_from(snapshot, at, stop), None)
        for batch in _batches(snapshot, at, lane):
            at = max(at, batch.base_offset)
            if at >= stop or (aborted is not None and at >= aborted.start):
                break
            max_bytes -= batch.size_bytes
            if max_bytes < 0 and found:
                return at, max_bytes, runs
            found.append(Fetched(batch.base_offset, batch.count, _payload(snapshot, batch)))
            at = batch.end_offset
        else:
            return stop, max_bytes, runs
        if aborted is not None and aborted.start <= at < aborted.end:
            at = aborted.end
            runs -= 1
    return at, max_bytes, runs


def _inside(snapshot: Snapshot, lane: int, offset: int, start: Offset, end: int) -> Cursor:
    """The cursor, or where it comes to the same. ``OffsetOutOfRangeError`` if it missed something, or past the end."""
    if start <= offset <= end:
        return Cursor(lane, offset)
    if offset < start and lane != ANY_LANE and not lost_since(snapshot, start, lanes_of(snapshot), lane, offset):
        return Cursor(lane, start)
    raise OffsetOutOfRangeError(
        f"offset {offset} is not in the log, which has {start} to {end}", offset=offset, lane=lane, start=start, end=end
    )


def offset_for_time(snapshot: Snapshot, timestamp: int) -> Offset:
    """The offset of the first record that is not older than ``timestamp``; the end if all are older."""
    start, end = bounds(snapshot)
    first = first_batch(snapshot, start, end, lambda batch: batch.running_timestamp >= timestamp)
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


def _batches(snapshot: Snapshot, offset: int, lane: int | None) -> Iterator[BatchRow]:
    """Rows from the batch that holds ``offset`` on, in order."""
    first = find_batch(snapshot, offset)
    if first is None:
        raise DamagedLogError(f"no batch holds offset {offset}", offset=offset)
    if lane is not None and lanes_of(snapshot) > 1:
        for key, _ in snapshot.scan(LANES, lane_key(lane, first.base_offset), end_of_lane(lane)):
            row = snapshot.get(OFFSETS, base_of_lane_key(key))
            if row is None:
                raise DamagedLogError(f"lane {lane} names a batch that is not there", lane=lane)
            yield read_batch(base_of_lane_key(key), row)
    elif not lane:
        for key, row in snapshot.scan(OFFSETS, offset_key(first.base_offset)):
            yield read_batch(key, row)


def _payload(snapshot: Snapshot, batch: BatchRow) -> bytes:
    try:
        return snapshot.entry(batch.index).payload
    except KeyError:
        raise DamagedLogError(
            f"offset {batch.base_offset} is at entry {batch.index}, which is not there", index=batch.index
        ) from None
