"""The tail against a list of batches that forgets nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayqueue.errors import DiskFullError
from rayqueue.ids import GroupId, Index, Offset, ReplicaId, Term
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Entry
from rayqueue.partition import Appended, Fetched, Partition, PartitionSettings
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol.data import ANY_LANE, Cursor
from rayqueue.records import RecordBatch
from rayqueue.records.checksum import entry_crc
from rayqueue.replica.tail import Tail

LIMIT_BYTES = 40
BEGIN = Offset(1000)

batches = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 2), st.integers(1, 30), st.booleans()), min_size=1, max_size=40
)


def read(tail: Tail, offset: int, max_bytes: int, lane: int = ANY_LANE) -> list[Fetched] | None:
    return tail.read_lanes((Cursor(lane, offset),), max_bytes)


def expected(log: list[Fetched], offset: int, max_bytes: int) -> list[Fetched]:
    found: list[Fetched] = []
    for batch in log:
        if batch.base_offset + batch.count > offset:
            max_bytes -= len(batch.payload)
            if max_bytes < 0 and found:
                break
            found.append(batch)
    return found


@given(batches, st.integers(0, 120))
def test_reads_what_was_appended(made: list[tuple[int, int, int, bool]], max_bytes: int) -> None:
    tail = Tail(BEGIN, LIMIT_BYTES)
    log: list[Fetched] = []
    end = BEGIN
    for number, (count, batch_lane, size, sync) in enumerate(made):
        batch = Fetched(end, count, bytes([number]) * size)
        log.append(batch)
        tail.append(batch.base_offset, batch.count, batch.payload, batch_lane)
        end = Offset(end + count)
        if sync:
            tail.synced()
    assert tail.end == end
    kept = [batch for batch in log if batch.base_offset >= tail.start]
    assert kept or made[-1][3]
    for offset in range(BEGIN, end + 1):
        if offset < tail.start:
            assert read(tail, offset, max_bytes) is None
        else:
            assert read(tail, offset, max_bytes) == expected(log, offset, max_bytes)


@given(batches, st.integers(0, 120), st.dictionaries(st.integers(0, 3), st.integers(0, 200), min_size=1))
def test_reads_by_lane(made: list[tuple[int, int, int, bool]], max_bytes: int, ahead: dict[int, int]) -> None:
    """As from a log that forgets nothing, or not at all."""
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
    found = read(tail, 15, 10**6)
    assert found is not None
    assert sum(len(batch.payload) for batch in found) == LIMIT_BYTES


def test_reset() -> None:
    tail = Tail(Offset(0), LIMIT_BYTES)
    tail.append(Offset(0), 3, b"x", 1)
    tail.reset(Offset(500))
    assert (tail.start, tail.end) == (500, 500)
    assert read(tail, 499, 100) is None
    assert read(tail, 500, 100) == read(tail, 500, 100, 1) == []
    tail.append(Offset(500), 2, b"y", 1)
    assert read(tail, 501, 100, 1) == [(500, 2, b"y")]


def test_what_a_full_disk_left_in_the_write_ahead_file_is_read_from_memory() -> None:
    """Found by the simulator: a reader was sent past it, to where the tail of the restarted replica began."""
    store = MemoryStore(GroupId("g"), ReplicaId("a"), PARTITION)
    settings = PartitionSettings(lanes=2)
    partition = Partition(store, settings)
    store.sync()
    batches: list[Fetched] = []
    for index in range(1, 7):
        payload = RecordBatch.encode([b"x"] * index, timestamps=1, lane=index % 2)
        store.append([Entry(Index(index), Term(1), payload, entry_crc(Index(index), Term(1), payload))])
        answer = partition.apply(Index(index), payload)
        store.set_applied(Index(index))
        assert isinstance(answer, Appended)
        batches.append(Fetched(answer.base_offset, answer.count, payload))
        if index == 3:
            store.sync()
        else:
            store.persist()

    def full() -> None:
        raise DiskFullError("no space")

    store.disk.before_commit = full
    again = store.reopen()
    tail = Tail.opened(Partition(again, settings), 1 << 20)
    on_disk, ahead = batches[:3], batches[3:]
    assert (tail.start, tail.end) == (ahead[0].base_offset, ahead[-1].base_offset + ahead[-1].count)
    assert read(tail, on_disk[0].base_offset, 10_000) is None, "this is on disk"
    assert read(tail, tail.start, 10_000) == ahead
    assert read(tail, tail.start, 10_000, lane=1) == [ahead[1]]
    assert read(tail, on_disk[2].base_offset, 10_000, lane=1) is None
