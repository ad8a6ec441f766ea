"""A leader that refuses when too much waits: bounds on the backlog, and on one record."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rayqueue.errors import InvalidInputError, OversizedRecordError, QueueFullError, SequenceGapError
from rayqueue.partition import (
    Admission,
    Backlog,
    PartitionSettings,
    commit_command,
    configure_command,
    delete_group_command,
    trim_command,
)
from rayqueue.records import BatchHeader, Compression, RecordBatch, validate
from tests.unit.partition_log import Log, appended, batch


class Leader(Log):
    """Proposals wait until they are applied, as in an engine."""

    def __init__(self, settings: PartitionSettings) -> None:
        super().__init__(settings)
        self.queue: deque[bytes] = deque()
        self.admission = Admission(self.partition, next_index=lambda: len(self.payloads) + len(self.queue) + 1)

    def propose(self, payload: bytes) -> Any:
        known = self.admission.admit(payload)
        if known is None:
            self.queue.append(payload)
        return known

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


def test_what_is_larger_than_the_bound_gets_in_alone() -> None:
    leader = Leader(PartitionSettings(max_backlog_bytes=1, max_backlog_records=1))
    leader.propose(batch(9))
    assert full(leader, batch(1))["backlog"] == len(batch(9))
    leader.apply_all()
    full(leader, batch(1))
    leader.apply(commit_command("g", 1, {0: 8}))
    full(leader, batch(9))
    leader.apply(commit_command("g", 1, {0: 9}))
    leader.propose(batch(9))


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
        if records and (records + count > self.most_records or size + len(payload) > self.most_bytes):
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


TestFullAgainstModel = FullAgainstModel.TestCase
TestFullAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -- one record -----------------------------------------------------------------------

texts = st.binary(max_size=40)
headers = st.none() | st.dictionaries(st.text(max_size=5), texts, max_size=3)


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
