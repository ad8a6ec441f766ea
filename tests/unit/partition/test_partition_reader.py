"""Reading from snapshots: by offset, by lane, by time; and where retention would trim."""

from __future__ import annotations

import pytest

from rayqueue.errors import DamagedLogError, InvalidInputError, InvalidOffsetError, OffsetOutOfRangeError
from rayqueue.partition import (
    PartitionSettings,
    bounds,
    offset_for_time,
    read,
    read_lanes,
    retention_point,
    trim_command,
)
from rayqueue.partition.tables import OFFSETS
from rayqueue.protocol.data import ANY_LANE, Cursor
from rayqueue.records import RecordBatch
from tests.unit.partition.partition_log import Log, batch

MUCH = 1 << 20


def bases(log: Log, offset: int, max_bytes: int = MUCH, lane: int | None = None) -> list[int]:
    with log.snapshot() as snapshot:
        return [fetched.base_offset for fetched in read(snapshot, offset, max_bytes, lane=lane)]


def test_read_starts_with_the_batch_that_holds_the_offset() -> None:
    log = Log()
    payloads = [batch(3), batch(2), batch(4)]
    for payload in payloads:
        log.apply(payload)
    assert bases(log, 0) == bases(log, 2) == [0, 3, 5]
    assert bases(log, 3) == bases(log, 4) == [3, 5]
    assert bases(log, 8) == [5]
    assert bases(log, 9) == []
    with log.snapshot() as snapshot:
        assert bounds(snapshot) == (0, 9)
        assert read(snapshot, 4, MUCH) == [(3, 2, payloads[1]), (5, 4, payloads[2])]


def test_read_takes_at_least_one_batch_then_what_fits() -> None:
    log = Log()
    for _ in range(4):
        log.apply(batch())
    size = len(batch())
    assert bases(log, 0, 0) == [0]
    assert bases(log, 0, 2 * size - 1) == [0]
    assert bases(log, 0, 2 * size) == [0, 1]
    assert bases(log, 1, 100 * size) == [1, 2, 3]


def test_duplicates_and_refused_batches_are_not_seen() -> None:
    log = Log()
    for sequence in (0, 0, 5, 1):
        log.apply(batch(producer_id=7, sequence=sequence))
    assert bases(log, 0) == [0, 1]


def test_lanes_have_their_own_way_through_the_log() -> None:
    log = Log(PartitionSettings(lanes=255))
    for lane in (0, 1, 0, 2, 254, 1, 0):
        log.apply(batch(2, lane=lane))
    assert bases(log, 0) == [0, 2, 4, 6, 8, 10, 12]
    assert bases(log, 0, lane=0) == [0, 4, 12]
    assert bases(log, 1, lane=0) == [0, 4, 12]
    assert bases(log, 2, lane=0) == [4, 12]
    assert bases(log, 5, lane=1) == [10]
    assert bases(log, 0, lane=254) == [8]
    assert bases(log, 12, lane=1) == []
    assert bases(log, 0, lane=9) == []
    log.apply(trim_command(5))
    assert bases(log, 5, lane=0) == [4, 12]
    for lane in (-1, 256):
        with pytest.raises(InvalidInputError):
            bases(log, 0, lane=lane)


def test_the_highest_lane_comes_first_over_the_whole_backlog() -> None:
    log = Log(PartitionSettings(lanes=3))
    for lane in (0, 2, 1, 0, 2):
        log.apply(batch(2, lane=lane))
    size = len(batch(2))

    def found(max_bytes: int, *cursors: tuple[int, int]) -> list[int]:
        with log.snapshot() as snapshot:
            fetched = read_lanes(snapshot, [Cursor(*cursor) for cursor in cursors], max_bytes)
        return [batch.base_offset for batch in fetched]

    everything = ((0, 0), (1, 0), (2, 0))
    assert found(MUCH, *everything) == found(MUCH, *reversed(everything)) == [2, 8, 4, 0, 6]
    assert found(0, *everything) == [2]
    assert found(3 * size, *everything) == [2, 8, 4]
    assert found(MUCH, (0, 1), (1, 6), (2, 4)) == [8, 0, 6]
    assert found(MUCH, (0, 2), (1, 10), (2, 10)) == [6]
    assert found(MUCH, (0, 10), (1, 10), (2, 10)) == []
    assert found(MUCH, (ANY_LANE, 3)) == [2, 4, 6, 8]


def test_a_lane_before_the_start_is_out_of_range_only_if_it_lost_something() -> None:
    log = Log(PartitionSettings(lanes=3))
    log.apply(batch(2, lane=1))
    log.apply(batch(4))
    log.apply(batch(1, lane=2))
    log.apply(trim_command(4))  # within the second batch

    def found(lane: int, offset: int) -> list[int]:
        with log.snapshot() as snapshot:
            return [fetched.base_offset for fetched in read_lanes(snapshot, [Cursor(lane, offset)], MUCH)]

    assert found(2, 0) == [6]  # nothing was ever in lane 2 before that
    assert found(1, 2) == []
    assert found(0, 4) == [2]
    for lane, offset in ((0, 3), (0, 0), (1, 1), (ANY_LANE, 3)):
        with pytest.raises(OffsetOutOfRangeError) as caught:
            found(lane, offset)
        assert caught.value.details == {"offset": offset, "lane": lane, "start": 4, "end": 7}


def test_a_partition_without_lanes_is_lane_zero() -> None:
    log = Log()
    log.apply(batch())
    assert bases(log, 0, lane=0) == [0]
    assert bases(log, 0, lane=1) == []


@pytest.mark.parametrize("offset", [-1, 2**63, "0"])
def test_what_is_no_offset(offset: int) -> None:
    with pytest.raises(InvalidOffsetError):
        bases(Log(), offset)


def test_out_of_range() -> None:
    log = Log()
    for _ in range(6):
        log.apply(batch())
    log.apply(trim_command(2))
    for offset in (0, 1, 7):
        with pytest.raises(OffsetOutOfRangeError) as caught:
            bases(log, offset)
        assert caught.value.details == {"offset": offset, "start": 2, "end": 6}
    assert bases(log, 6) == []


def test_a_snapshot_may_be_behind_the_high_watermark() -> None:
    log = Log()
    log.apply(batch(2))
    with log.snapshot() as snapshot:
        log.apply(batch(3))
        watermark = log.partition.high_watermark
        assert [fetched.base_offset for fetched in read(snapshot, 0, MUCH, high_watermark=watermark)] == [0]
        assert read(snapshot, 5, MUCH, high_watermark=watermark) == []
        with pytest.raises(OffsetOutOfRangeError):
            read(snapshot, 6, MUCH, high_watermark=watermark)


def test_a_missing_entry_or_row_is_damage() -> None:
    log = Log()
    log.apply(batch())
    log.apply(batch())
    log.store.sync()
    del log.store.disk.entries[log.partition.locate(1)]
    with log.snapshot() as snapshot, pytest.raises(DamagedLogError):
        read(snapshot, 0, MUCH)
    log.store.disk.tables[OFFSETS].remove(bytes(8))
    with log.snapshot() as snapshot, pytest.raises(DamagedLogError, match="no batch holds offset 0"):
        read(snapshot, 0, MUCH)


def timed(*stamps: list[int]) -> Log:
    log = Log()
    for times in stamps:
        log.apply(RecordBatch.encode([b"v"] * len(times), timestamps=times))
    return log


def test_seek_by_time_finds_the_first_record_that_is_not_older() -> None:
    log = timed([10, 20], [30, 25], [15], [40, 50])

    def offset(timestamp: int) -> int:
        with log.snapshot() as snapshot:
            return offset_for_time(snapshot, timestamp)

    times = [10, 20, 30, 25, 15, 40, 50]
    for timestamp in range(55):
        expected = next((at for at, time in enumerate(times) if time >= timestamp), len(times))
        assert offset(timestamp) == expected, timestamp
    # What reached 26 first is gone, so the running maximum is of no help there.
    log.apply(trim_command(3))
    assert [offset(timestamp) for timestamp in (0, 25, 26, 41, 51)] == [3, 3, 5, 6, 7]


def test_seek_by_time_in_an_empty_log() -> None:
    with Log().snapshot() as snapshot:
        assert offset_for_time(snapshot, 5) == 0


def test_retention_by_time() -> None:
    log = timed([10, 20], [30, 25], [15], [40, 50])

    def point(now_ms: int) -> int:
        with log.snapshot() as snapshot:
            return retention_point(snapshot, now_ms, 100, None)

    # The batch with 15 goes with the 30 before it, not earlier: a trim takes a prefix.
    assert [point(now) for now in (0, 120, 121, 130, 131, 150, 151)] == [0, 0, 2, 2, 5, 5, 7]
    log.apply(trim_command(3))
    assert [point(now) for now in (0, 130, 131, 151)] == [3, 3, 5, 7]


def test_retention_by_bytes() -> None:
    log = Log()
    for _ in range(5):
        log.apply(batch(2))
    size = len(batch(2))

    def point(retention_bytes: int) -> int:
        with log.snapshot() as snapshot:
            return retention_point(snapshot, 0, None, retention_bytes)

    assert point(5 * size) == 0
    assert point(5 * size - 1) == 2
    assert point(2 * size) == 6
    assert point(size) == point(1) == point(0) == 8  # the newest stays
    log.apply(trim_command(7))
    assert point(5 * size) == 7
    assert point(size) == 8


def test_retention_by_both_takes_the_later() -> None:
    log = timed([10], [20], [30], [40])
    size = len(RecordBatch.encode([b"v"], timestamps=1))
    with log.snapshot() as snapshot:
        assert retention_point(snapshot, 125, 100, 4 * size) == 2
        assert retention_point(snapshot, 125, 100, size) == 3
        assert retention_point(snapshot, 125, None, None) == 0
        assert retention_point(snapshot, 999, 100, size) == 4


def test_retention_of_an_empty_log() -> None:
    with Log().snapshot() as snapshot:
        assert retention_point(snapshot, 10**12, 1, 1) == 0
