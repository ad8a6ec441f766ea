"""Lanes: how many records and bytes each holds, and where a position stands in it.

Owns the LANES table. A row tells what its lane held before that batch, so the
distance from any offset to the end of a lane is one look-up. A partition with
one lane has no such rows: there the offsets themselves are the counts.

Positions are a vector, an offset per lane. ``committed_prefix`` turns vectors
into the one offset that a log can be trimmed to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from struct import Struct
from typing import NamedTuple

from rayqueue.ids import Offset
from rayqueue.log.store import LogStore
from rayqueue.partition.rows import LANES_KEY, LaneRow, Rows, end_of_lane, lane_key, pack_lane, read_lane
from rayqueue.partition.tables import LANES, META

_DUMPED = Struct("<BQQQ")


class LaneTotals(NamedTuple):
    """All that was ever appended to a lane."""

    records: int = 0
    size_bytes: int = 0
    end: Offset = Offset(0)
    """Where its last batch ends."""


class Lanes:
    """The lanes of a partition that has several."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._totals: dict[int, LaneTotals] = {}

    def append(self, lane: int, base_offset: Offset, count: int, size_bytes: int) -> None:
        records_before, bytes_before, end_before = self._totals.get(lane, _NOTHING)
        row = pack_lane(records_before, bytes_before, end_before, count, size_bytes)
        self._store.put(LANES, lane_key(lane, base_offset), row)
        end = Offset(base_offset + count)
        self._totals[lane] = LaneTotals(records_before + count, bytes_before + size_bytes, end)

    def delete(self, lane: int, base_offset: Offset) -> None:
        self._store.delete(LANES, lane_key(lane, base_offset))

    def totals(self, lane: int) -> LaneTotals:
        return self._totals.get(lane, _NOTHING)

    def ends(self) -> dict[int, Offset]:
        """The end of the last batch of each lane. A lane that never had one is not there."""
        return {lane: totals.end for lane, totals in self._totals.items()}

    def before(self, lane: int, offset: int) -> tuple[int, int]:
        """Records of the lane before this offset, and bytes of its batches that are wholly before it."""
        totals = self._totals.get(lane, _NOTHING)
        if offset >= totals.end:
            return totals.records, totals.size_bytes
        batch = _last_batch(self._store, lane, offset)
        if batch is None:
            batch = _first_batch(self._store, lane, offset)
            return (batch.records_before, batch.bytes_before) if batch else (totals.records, totals.size_bytes)
        if offset < batch.end_offset:
            return batch.records_before + offset - batch.base_offset, batch.bytes_before
        return batch.records_before + batch.count, batch.bytes_before + batch.size_bytes

    # -- the table and the checkpoint ---------------------------------------------

    def load(self, lanes: int) -> None:
        """Totals are in the last row of a lane, or, once that was trimmed, where ``write`` put them."""
        self._totals = _read_totals(self._store.get(META, LANES_KEY) or b"")
        for lane in range(lanes):
            batch = _last_batch(self._store, lane, None)
            if batch is not None and batch.end_offset > self.totals(lane).end:
                self._totals[lane] = LaneTotals(
                    batch.records_before + batch.count, batch.bytes_before + batch.size_bytes, batch.end_offset
                )

    def write(self) -> None:
        """Rows are about to go; remember what only they may tell."""
        if self._totals:
            self._store.put(META, LANES_KEY, self.dump())

    def dump(self) -> bytes:
        return b"".join(_DUMPED.pack(lane, *self._totals[lane]) for lane in sorted(self._totals))

    def restore(self, dumped: bytes) -> None:
        self._totals = _read_totals(dumped)
        self.write()


_NOTHING = LaneTotals()


def emptied(lanes: int, end: Offset) -> bytes:
    """A dump: all that the lanes had, up to this offset, is gone. A reader from before it learns that. Together lanes
    have had as many records as there are offsets."""
    return b"".join(_DUMPED.pack(lane, 0 if lane else end, 0, end) for lane in range(lanes))


def committed_prefix(
    rows: Rows, start: Offset, end: Offset, lanes: int, positions: Collection[Mapping[int, Offset]]
) -> Offset:
    """The end of the longest prefix of which all these positions are past every record.

    A lane without records after its position holds nothing back.
    """
    prefix = end
    for lane in range(lanes):
        at = max(start, min(position.get(lane, start) for position in positions))
        if at < prefix:
            first = at if lanes == 1 else _first_record(rows, lane, at)
            if first is not None and first < prefix:
                prefix = Offset(first)
    return prefix


def lost_since(rows: Rows, start: Offset, lanes: int, lane: int, offset: int) -> bool:
    """Whether something of the lane was at or after this offset, which is before the log's start, and was trimmed."""
    if lanes == 1 or lane >= lanes:
        return lane == 0
    batch = _last_batch(rows, lane, start)
    if batch is None or batch.end_offset <= start:
        batch = _first_batch(rows, lane, start)
    if batch is None:
        totals = _read_totals(rows.get(META, LANES_KEY) or b"")
        return totals.get(lane, _NOTHING).end > offset
    return batch.base_offset < start or batch.end_before > offset


def _first_record(rows: Rows, lane: int, offset: int) -> int | None:
    """The first record of the lane at or after this offset."""
    batch = _last_batch(rows, lane, offset)
    if batch is not None and offset < batch.end_offset:
        return offset
    batch = _first_batch(rows, lane, offset)
    return None if batch is None else batch.base_offset


def _last_batch(rows: Rows, lane: int, offset: int | None) -> LaneRow | None:
    """The lane's last batch that begins at or before this offset; of all, without one."""
    stop = end_of_lane(lane) if offset is None else lane_key(lane, offset + 1)
    return _one(rows.scan(LANES, bytes((lane,)), stop, reverse=True))


def _first_batch(rows: Rows, lane: int, offset: int) -> LaneRow | None:
    """The lane's first batch that begins at or after this offset."""
    return _one(rows.scan(LANES, lane_key(lane, offset), end_of_lane(lane)))


def _one(found: Iterable[tuple[bytes, bytes]]) -> LaneRow | None:
    for key, row in found:
        return read_lane(key, row)
    return None


def _read_totals(dumped: bytes) -> dict[int, LaneTotals]:
    return {
        lane: LaneTotals(records, size_bytes, Offset(end))
        for lane, records, size_bytes, end in _DUMPED.iter_unpack(dumped)
    }
