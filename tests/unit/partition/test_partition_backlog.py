"""A leader that refuses when too much waits: bounds on the backlog, and on one record."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rayqueue.errors import (
    InvalidInputError,
    NotLeaderError,
    OversizedBatchError,
    OversizedRecordError,
    QueueFullError,
    SequenceGapError,
)
from rayqueue.partition import (
    Admission,
    Backlog,
    PartitionSettings,
    commit_command,
    configure_command,
    delete_group_command,
    trim_command,
)
from rayqueue.protocol.calls import AwaitRoom, Room
from rayqueue.records import BatchHeader, Compression, RecordBatch, validate
from tests.unit.partition.partition_log import Log, appended, batch


class Leader(Log):
    """Proposals wait until they are applied, as in an engine."""

    def __init__(self, settings: PartitionSettings) -> None:
        super().__init__(settings)
        self.now_s = 0.0
        self.queue: deque[bytes] = deque()
        self.admission = Admission(self.partition, next_index=lambda: len(self.payloads) + len(self.queue) + 1)

    def propose(self, payload: bytes) -> Any:
        known = self.admission.admit(payload)
        if known is None:
            self.queue.append(payload)
        return known

    def await_room(self, producer_id: int, records: int, *, client: int = 1, wait_s: float = 10.0, **more: Any) -> Any:
        """The list that the answer is put into."""
        fields: dict[str, Any] = {"size_bytes": 10**6, "least_bytes": 1, "wait_ms": int(wait_s * 1000), **more}
        answers: list[Room] = []
        wanted = AwaitRoom(producer_id=producer_id, records=records, **fields)
        self.admission.await_room(wanted, client, self.now_s + wait_s, answers.append)
        self.admission.advance(self.now_s)
        return answers

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.admission.advance(self.now_s)

    def consume(self, to: int) -> None:
        self.apply_all()
        self.apply(commit_command("g", 1, {0: to}))
        self.admission.advance(self.now_s)

    def apply_next(self) -> Any:
        return self.apply(self.queue.popleft())

    def apply_all(self) -> None:
        while self.queue:
            self.apply_next()


def full(leader: Leader, payload: bytes) -> dict[str, Any]:
    with pytest.raises(QueueFullError) as caught:
        leader.propose(payload)
    assert caught.value.retriable
    return caught.value.details


def test_full_by_records_until_the_slowest_group_commits() -> None:
    leader = Leader(PartitionSettings(max_backlog_records=5))
    leader.propose(batch(3))
    leader.apply_all()
    leader.propose(batch(2))
    leader.apply_all()
    assert full(leader, batch(1)) == {"bound": "max_backlog_records", "limit": 5, "backlog": 5}
    leader.apply(commit_command("fast", 1, {0: 5}))
    leader.apply(commit_command("slow", 1, {0: 1}))
    assert full(leader, batch(2))["backlog"] == 4
    leader.propose(batch(1))
    assert full(leader, batch(1))["backlog"] == 5
    leader.apply(delete_group_command("slow"))
    leader.propose(batch(4))  # the one before is not applied, and counts


def test_full_by_bytes() -> None:
    size = len(batch(2))
    leader = Leader(PartitionSettings(max_backlog_bytes=2 * size + 1))
    leader.propose(batch(2))
    leader.propose(batch(2))
    assert full(leader, batch(2)) == {"bound": "max_backlog_bytes", "limit": 2 * size + 1, "backlog": 2 * size}
    leader.apply_all()
    leader.apply(commit_command("g", 1, {0: 1}))  # half a batch frees nothing
    assert full(leader, batch(2))["backlog"] == 2 * size
    leader.apply(commit_command("g", 1, {0: 2}))
    leader.propose(batch(2))


def test_nothing_passes_the_bound_not_even_into_an_empty_partition() -> None:
    leader = Leader(PartitionSettings(max_backlog_records=5))
    full(leader, batch(6))
    leader.propose(batch(5))
    full(leader, batch(1))
    leader.apply_all()
    leader.apply(commit_command("g", 1, {0: 4}))
    full(leader, batch(5))
    leader.propose(batch(4))


def test_a_record_that_is_larger_than_the_bound_is_refused_for_good() -> None:
    leader = Leader(PartitionSettings(max_backlog_bytes=len(batch(1)) - 1))
    with pytest.raises(OversizedRecordError, match="max_backlog_bytes"):
        leader.propose(batch(1))
    assert full(leader, batch(9))["bound"] == "max_backlog_bytes"  # its producer may cut it


def test_a_new_leader_takes_nothing_until_it_has_applied_what_it_found() -> None:
    """Its predecessor's batches are in its log, and count as soon as they are applied."""
    leader = Leader(PartitionSettings(max_backlog_records=4))
    leader.propose(batch(3))
    leader.admission.reset()
    with pytest.raises(NotLeaderError, match="just elected"):
        leader.propose(batch(4))
    with pytest.raises(NotLeaderError, match="just elected"):
        leader.await_room(7, 4)
    leader.apply_all()
    full(leader, batch(2))
    leader.propose(batch(1))


def test_a_new_leader_of_an_empty_log_has_room() -> None:
    """The entry that begins its leadership is Raft's own, and never reaches the partition."""
    log = Log(PartitionSettings(max_backlog_records=4))
    found = [0]
    admission = Admission(log.partition, next_index=lambda: 2, applied=lambda: found[0])
    admission.reset()
    with pytest.raises(NotLeaderError, match="just elected"):
        admission.admit(batch(4))
    found[0] = 1
    assert log.partition.applied == 0
    assert admission.admit(batch(4)) is None


def test_what_was_on_its_way_counts_when_a_bound_comes() -> None:
    leader = Leader(PartitionSettings())
    leader.queue.append(configure_command(PartitionSettings(max_backlog_records=5, version=1)))
    leader.propose(batch(3))
    leader.apply_next()
    full(leader, batch(3))
    leader.propose(batch(2))


def test_a_trim_makes_room() -> None:
    leader = Leader(PartitionSettings(max_backlog_records=4))
    leader.propose(batch(4))
    leader.apply_all()
    full(leader, batch(1))
    leader.apply(trim_command(2))
    assert leader.partition.backlog() == Backlog(2, len(batch(4)))
    leader.propose(batch(2))


def test_repetitions_need_no_room() -> None:
    leader = Leader(PartitionSettings(max_backlog_records=4))
    first, second = batch(2, producer_id=7), batch(2, producer_id=7, sequence=2)
    for payload in (first, second, second, first):
        assert leader.propose(payload) is None  # repeated while they are on their way
    leader.apply_all()
    assert leader.propose(second) == appended(2, 2, duplicate=True)
    third = batch(1, producer_id=7, sequence=4)
    full(leader, third)
    with pytest.raises(SequenceGapError):
        leader.propose(batch(1, producer_id=7, sequence=5))  # what follows a refused one cannot slip in
    leader.apply(commit_command("g", 1, {0: 4}))
    leader.propose(third)
    leader.propose(batch(1, producer_id=7, sequence=5))
    leader.apply_all()
    assert leader.partition.next_offset == 6


def test_what_the_engine_refused_does_not_count() -> None:
    leader = Leader(PartitionSettings(max_backlog_records=4))
    for _ in range(20):
        assert leader.admission.admit(batch(4)) is None  # and then the engine was full
    leader.propose(batch(4))
    full(leader, batch(1))


def test_another_leadership_counts_anew() -> None:
    leader = Leader(PartitionSettings(max_backlog_records=4))
    leader.propose(batch(4))
    leader.queue.clear()
    leader.admission.reset()
    leader.propose(batch(4))


def test_bounds_may_come_and_go() -> None:
    leader = Leader(PartitionSettings())
    for _ in range(5):
        leader.propose(batch(10))
        leader.apply_all()
    leader.apply(configure_command(PartitionSettings(max_backlog_records=51, version=1)))
    leader.propose(batch(1))
    assert full(leader, batch(1))["backlog"] == 51
    leader.apply(configure_command(PartitionSettings(version=2)))
    leader.propose(batch(1))


def test_the_slowest_in_bytes_may_be_another_group_than_in_records() -> None:
    log = Log(PartitionSettings(lanes=2))
    many, large = batch(10), RecordBatch.encode([b"x" * 5000], timestamps=1, lane=1)
    log.apply(many)
    log.apply(large)
    log.apply(commit_command("a", 1, {1: 11}))
    log.apply(commit_command("b", 1, {0: 11}))
    assert log.partition.backlog() == Backlog(10, len(large))
    log.apply(commit_command("b", 1, {1: 11}))
    assert log.partition.backlog() == Backlog(10, len(many))
    log.apply(commit_command("a", 1, {0: 11}))
    assert log.partition.backlog() == Backlog(0, 0)


def test_asking_costs_nothing_while_no_group_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Leader(PartitionSettings(max_backlog_records=10**6, lanes=3))
    for number in range(30):
        leader.apply(batch(2, lane=number % 3))
    for group in ("a", "b", "c"):
        leader.apply(commit_command(group, 1, {0: 10, 1: 20, 2: 30}))
    leader.propose(batch(1))

    def no_rows(*_: Any, **__: Any) -> Any:
        raise AssertionError("an append looked something up")

    monkeypatch.setattr(leader.store, "scan", no_rows)
    for _ in range(10):
        leader.propose(batch(1, lane=2))
        leader.apply_next()
    assert leader.partition.backlog().records == 60 + 10 - (4 + 6 + 10)


# -- waiting for room -----------------------------------------------------------------


def test_room_is_granted_in_the_order_of_arrival_and_kept() -> None:
    leader = Leader(PartitionSettings(max_backlog_records=10))
    leader.propose(batch(10))
    large, small = leader.await_room(1, 50), leader.await_room(2, 1)
    leader.consume(3)
    assert large == [Room(3, 10**6)]
    assert small == []
    full(leader, batch(1, producer_id=3))  # it has not waited
    full(leader, batch(1, producer_id=2))  # nor long enough
    leader.propose(batch(2, producer_id=1))
    full(leader, batch(2, producer_id=1, sequence=2))  # more than it was granted
    leader.propose(batch(1, producer_id=1, sequence=2))
    again = leader.await_room(1, 47)
    leader.consume(5)
    assert (small, again) == ([Room(1, 10**6)], [Room(1, 10**6)])


def test_a_large_producer_does_not_starve_behind_many_small_ones() -> None:
    """Twenty producers send one record at a time, as fast as they may; one has 40 to send, cut where the room ends."""
    leader = Leader(PartitionSettings(max_backlog_records=10))
    leader.propose(batch(10))
    left, sequences, served = 40, dict.fromkeys(range(1, 22), 0), []
    waiting = {number: leader.await_room(number, 1) for number in range(2, 22)}
    waiting[1] = leader.await_room(1, left)
    consumed = 0
    for _ in range(1000):
        for number, answers in list(waiting.items()):
            if not answers:
                continue
            count = answers[0].records
            leader.propose(batch(count, producer_id=number, sequence=sequences[number]))
            sequences[number] += count
            served.append((number, count))
            left -= count if number == 1 else 0
            del waiting[number]
            if number != 1 or left:
                waiting[number] = leader.await_room(number, left if number == 1 else 1)
        if not left:
            break
        leader.apply_all()
        consumed += 3
        leader.consume(consumed)
        assert leader.partition.backlog().records <= 10
    assert not left
    turns = [at for at, (number, _) in enumerate(served) if number == 1]
    assert max(later - earlier for earlier, later in pairwise(turns)) <= 21  # each of the others once


def test_a_grant_that_is_not_used_is_taken_back() -> None:
    leader = Leader(PartitionSettings(max_backlog_records=10))
    leader.propose(batch(10))
    paused, next_one = leader.await_room(1, 10), leader.await_room(2, 10)
    leader.consume(10)
    assert paused == [Room(10, 10**6)]
    leader.after(0.9)
    assert next_one == []
    full(leader, batch(1))
    leader.after(0.2)
    assert next_one == [Room(10, 10**6)]
    full(leader, batch(1, producer_id=1))  # it comes too late
    leader.admission.line.client_gone(1)
    leader.propose(batch(10))


def test_who_is_told_that_there_is_no_room_keeps_its_place_if_it_asks_again() -> None:
    leader = Leader(PartitionSettings(max_backlog_records=4))
    leader.propose(batch(4))
    patient, other = leader.await_room(1, 2, wait_s=1.0), leader.await_room(2, 4)
    leader.after(1.0)
    assert patient == [Room(0, 0)]
    patient = leader.await_room(1, 2, wait_s=1.0)
    leader.consume(3)
    assert (patient, other) == ([Room(2, 10**6)], [Room(1, 10**6)])
    leader.propose(batch(2, producer_id=1))
    leader.propose(batch(1, producer_id=2))
    gone = leader.await_room(3, 1, wait_s=1.0)
    leader.after(1.0)
    leader.after(1.0)
    assert gone == [Room(0, 0)]
    assert len(leader.admission.line) == 0


def test_the_first_in_the_line_waits_until_its_first_record_fits() -> None:
    size = len(batch(1))
    leader = Leader(PartitionSettings(max_backlog_bytes=3 * size))
    for _ in range(3):
        leader.propose(batch(1))
    waits = leader.await_room(1, 9, size_bytes=9 * size, least_bytes=2 * size)
    behind = leader.await_room(2, 1, size_bytes=size, least_bytes=size)
    leader.consume(1)
    assert (waits, behind) == ([], [])
    leader.consume(2)
    assert waits == [Room(9, 2 * size)]
    with pytest.raises(OversizedRecordError):
        leader.await_room(3, 1, least_bytes=3 * size + 1)


def test_what_cannot_be_cut_waits_for_all_the_room_it_needs() -> None:
    leader = Leader(PartitionSettings(max_backlog_records=4))
    leader.propose(batch(4))
    whole, small = leader.await_room(1, 3, least_records=3), leader.await_room(2, 1)
    leader.consume(2)
    assert (whole, small) == ([], [])
    leader.consume(4)
    assert (whole, small) == ([Room(3, 10**6)], [Room(1, 10**6)])
    with pytest.raises(OversizedBatchError, match="max_backlog_records"):
        leader.await_room(1, 5, least_records=5)


@pytest.mark.parametrize("wrong", [{"producer_id": 0}, {"records": 0}, {"least_bytes": -1}, {"size_bytes": 0}])
def test_a_place_in_the_line_must_make_sense(wrong: dict[str, int]) -> None:
    leader = Leader(PartitionSettings(max_backlog_records=4))
    with pytest.raises(InvalidInputError):
        leader.await_room(**{"producer_id": 1, "records": 1} | wrong)


def test_a_part_of_a_batch_that_was_written_is_known() -> None:
    """A producer cuts a batch that it was refused, though an earlier attempt has written it after all."""
    leader = Leader(PartitionSettings(max_backlog_records=9))
    leader.propose(batch(9, producer_id=7))
    for start, count in ((0, 4), (4, 5), (2, 3)):
        assert leader.propose(batch(count, producer_id=7, sequence=start)) is None  # on its way
    answers = [leader.apply_next() for _ in range(4)]
    assert [(answer.base_offset, answer.count, answer.duplicate) for answer in answers[1:]] == [
        (0, 4, True),
        (4, 5, True),
        (2, 3, True),
    ]
    assert leader.propose(batch(5, producer_id=7, sequence=4)) == appended(4, 5, duplicate=True)
    assert leader.partition.next_offset == 9


class FullAgainstModel(RuleBasedStateMachine):
    """Admission against a list of everything that was proposed."""

    @initialize(most_records=st.integers(1, 8), most_bytes=st.none() | st.integers(1, 4000))
    def begin(self, most_records: int, most_bytes: int | None) -> None:
        self.most_records = most_records
        self.most_bytes = most_bytes or 10**9
        limits = PartitionSettings(lanes=2, max_backlog_records=most_records, max_backlog_bytes=most_bytes)
        self.leader = Leader(limits)
        self.committed = [0, 0]

    def backlog(self) -> tuple[int, int]:
        """By lists, of what is applied and of what is not."""
        records = size = at = 0
        for payload in [*self.leader.payloads, *self.leader.queue]:
            if payload[0] != ord("R"):
                continue
            header = BatchHeader.parse(payload)
            left = at + header.count - max(at, self.committed[header.lane])
            records += max(0, left)
            size += len(payload) if left > 0 else 0
            at += header.count
        return records, size

    @rule(count=st.integers(1, 9), lane=st.integers(0, 1), goes=st.sampled_from([True, True, True, False]))
    def append(self, count: int, lane: int, goes: bool) -> None:
        payload = batch(count, lane=lane)
        records, size = self.backlog()
        if count == 1 and len(payload) > self.most_bytes:
            with pytest.raises(OversizedRecordError):
                self.leader.propose(payload)
        elif records + count > self.most_records or size + len(payload) > self.most_bytes:
            full(self.leader, payload)
        elif goes:
            assert self.leader.propose(payload) is None
        else:
            assert self.leader.admission.admit(payload) is None

    @rule(lane=st.integers(0, 1), data=st.data())
    def commit(self, lane: int, data: st.DataObject) -> None:
        to = data.draw(st.integers(0, self.leader.partition.next_offset))
        rewind = data.draw(st.booleans())
        self.leader.apply_all()
        self.leader.apply(commit_command("g", 1, {lane: to}, rewind=rewind))
        self.committed[lane] = to if rewind else max(to, self.committed[lane])

    @precondition(lambda self: self.leader.queue)
    @rule()
    def apply(self) -> None:
        self.leader.apply_next()


TestFullAgainstModel = pytest.mark.slow(FullAgainstModel.TestCase)
TestFullAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -- one record -----------------------------------------------------------------------

texts = st.binary(max_size=40)
headers = st.none() | st.dictionaries(st.text(max_size=5), texts, max_size=3)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.none() | texts, st.none() | texts, headers), min_size=1, max_size=50),
    st.sampled_from(Compression),
)
def test_the_largest_record_of_a_batch(rows: list[tuple[Any, Any, Any]], compression: Compression) -> None:
    keys, values, given_headers = zip(*rows, strict=True)
    payload = RecordBatch.encode(values, keys, given_headers, timestamps=1, compression=compression)
    expected = max(
        len(key or b"")
        + len(value or b"")
        + sum(len(name.encode()) + len(text) for name, text in (extra or {}).items())
        for key, value, extra in rows
    )
    validate(payload, 1 << 20, max_record_bytes=expected)
    if expected:
        with pytest.raises(OversizedRecordError) as caught:
            validate(payload, 1 << 20, max_record_bytes=expected - 1)
        assert caught.value.details["length"] == expected


@pytest.mark.parametrize("compression", Compression)
def test_a_record_may_be_too_large(compression: Compression) -> None:
    admission = Admission(Log(PartitionSettings(max_record_bytes=1000)).partition)
    values = [b"x" * 100] * 50

    def admit(value: bytes, key: bytes) -> None:
        admission.admit(
            RecordBatch.encode([*values, value], [None] * 50 + [key], timestamps=1, compression=compression)
        )

    admit(b"v" * 900, b"k" * 100)
    with pytest.raises(OversizedRecordError) as caught:
        admit(b"v" * 900, b"k" * 101)
    assert caught.value.details == {"length": 1001, "limit": 1000}
    assert isinstance(caught.value, InvalidInputError)
    assert not caught.value.retriable


def test_small_batches_are_not_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayqueue.records.columns.largest_row", None)
    admission = Admission(Log(PartitionSettings(max_record_bytes=1_000_000)).partition)
    admission.admit(batch(1000))
