"""The tail against a list of batches that forgets nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayqueue.ids import Offset
from rayqueue.partition import Fetched
from rayqueue.protocol.data import Cursor
from rayqueue.replica.tail import Tail

LIMIT_BYTES = 40
BEGIN = Offset(1000)

batches = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 2), st.integers(1, 30), st.booleans()), min_size=1, max_size=40
)


def expected(log: list[tuple[Fetched, int]], offset: int, max_bytes: int, lane: int | None) -> list[Fetched]:
    found: list[Fetched] = []
    for batch, batch_lane in log:
        if batch.base_offset + batch.count > offset and lane in (None, batch_lane):
            max_bytes -= len(batch.payload)
            if max_bytes < 0 and found:
                break
            found.append(batch)
    return found


@given(batches, st.integers(0, 120), st.sampled_from([None, 0, 1, 2, 3]))
def test_reads_what_was_appended(made: list[tuple[int, int, int, bool]], max_bytes: int, lane: int | None) -> None:
    tail = Tail(BEGIN, LIMIT_BYTES)
    log: list[tuple[Fetched, int]] = []
    end = BEGIN
    for number, (count, batch_lane, size, sync) in enumerate(made):
        batch = Fetched(end, count, bytes([number]) * size)
        log.append((batch, batch_lane))
        tail.append(batch.base_offset, batch.count, batch.payload, batch_lane)
        end = Offset(end + count)
        if sync:
            tail.synced()
    assert tail.end == end
    kept = [batch for batch, _ in log if batch.base_offset >= tail.start]
    assert kept or made[-1][3]
    for offset in range(BEGIN, end + 1):
        if offset < tail.start:
            assert tail.read(offset, max_bytes, lane) is None
        else:
            assert tail.read(offset, max_bytes, lane) == expected(log, offset, max_bytes, lane)


@given(batches, st.integers(0, 120), st.dictionaries(st.integers(0, 3), st.integers(0, 200), min_size=1))
def test_reads_by_lane(made: list[tuple[int, int, int, bool]], max_bytes: int, ahead: dict[int, int]) -> None:
    """As from a log that forgets nothing, or not at all; and it knows without reading whether there is anything."""
    tail = Tail(BEGIN, LIMIT_BYTES, {0: BEGIN})
    log: list[tuple[Fetched, int]] = []
    for number, (count, lane, size, sync) in enumerate(made):
        batch = Fetched(tail.end, count, bytes([number]) * size)
        log.append((batch, lane))
        tail.append(batch.base_offset, batch.count, batch.payload, lane)
        if sync:
            tail.synced()
    cursors = [Cursor(lane, min(BEGIN + offset, tail.end)) for lane, offset in ahead.items()]
    wanted: list[Fetched] = []
    left, fits = max_bytes, True
    for lane, offset in sorted(cursors, reverse=True):
        for batch, batch_lane in log:
            if fits and batch_lane == lane and batch.base_offset + batch.count > offset:
                left -= len(batch.payload)
                fits = left >= 0 or not wanted
                wanted += [batch] if fits else []
    assert tail.has(cursors) == bool(wanted)
    found = tail.read_lanes(cursors, max_bytes)
    if found is None:
        assert wanted[0].base_offset < tail.start
        return
    assert found == wanted[: len(found)]
    assert bool(found) == bool(wanted)
    assert len(found) == len(wanted) or wanted[len(found)].base_offset < tail.start


def test_forgets_only_after_a_sync_and_only_what_is_too_much() -> None:
    tail = Tail(Offset(0), LIMIT_BYTES)
    for number in range(20):
        tail.append(Offset(number), 1, b"12345678", 0)
    assert tail.start == 0
    tail.synced()
    assert tail.start == 15
    found = tail.read(15, 10**6, None)
    assert found is not None
    assert sum(len(batch.payload) for batch in found) == LIMIT_BYTES


def test_reset() -> None:
    tail = Tail(Offset(0), LIMIT_BYTES)
    tail.append(Offset(0), 3, b"x", 1)
    tail.reset(Offset(500))
    assert (tail.start, tail.end) == (500, 500)
    assert tail.read(499, 100, None) is None
    assert tail.read(500, 100, None) == tail.read(500, 100, 1) == []
    tail.append(Offset(500), 2, b"y", 1)
    assert tail.read(501, 100, 1) == [(500, 2, b"y")]
