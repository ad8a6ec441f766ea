"""Transactions in a partition: what is open, how it ends, and what readers of committed records see of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayqueue.errors import (
    InvalidInputError,
    OffsetOutOfRangeError,
    ProducerFencedError,
    StaleGenerationError,
    TooManyTransactionsError,
    TopicKindError,
    TransactionPendingError,
    TransactionTooLargeError,
    UnknownFormatError,
)
from rayqueue.ids import Offset
from rayqueue.partition import (
    Admission,
    CommittedRead,
    Ended,
    PartitionSettings,
    Staged,
    commit_command,
    read_committed,
    reader,
    trim_command,
)
from rayqueue.partition.commands import decode, pass_time_command
from rayqueue.partition.jobs.commands import Request, change_command, end_workers_command, lease_command
from rayqueue.partition.transactions.commands import (
    end_transaction_command,
    stage_acks_command,
    stage_offsets_command,
)
from rayqueue.partition.transactions.runs import open_runs
from rayqueue.protocol.calls import Position
from rayqueue.protocol.data import ANY_LANE, Cursor
from rayqueue.protocol.jobs import JOB_HEADER, JobOptions, Settled, encode_options
from rayqueue.records import RecordBatch
from rayqueue.replica.tail import Tail
from tests.unit.partition.partition_log import Log, appended, batch

NOW_MS = 1_700_000_000_000


def sent(log: Log, producer_id: int, epoch: int, count: int = 1, *, lane: int = 0, sequence: int | None = None) -> Any:
    known = log.partition.producers.get(producer_id)
    if sequence is None:
        sequence = known.next_sequence if known is not None and known.epoch == epoch else 0
    return log.apply(
        batch(count, producer_id=producer_id, epoch=epoch, sequence=sequence, lane=lane, transactional=True)
    )


def commit(log: Log, producer_id: int, epoch: int) -> Any:
    return log.apply(end_transaction_command(producer_id, epoch, commit=True))


def abort(log: Log, producer_id: int, epoch: int) -> Any:
    return log.apply(end_transaction_command(producer_id, epoch, commit=False))


def visible(log: Log, lane: int = ANY_LANE, start: int = 0, max_bytes: int = 1 << 20) -> tuple[list[int], int]:
    """The offsets that a reader of committed records gets, and where it is to continue."""
    with log.snapshot() as snapshot:
        read = read_committed(snapshot, [Cursor(lane, start)], max_bytes)
    offsets = [at for each in read.found for at in range(each.base_offset, each.base_offset + each.count)]
    return offsets, read.cursors[0].offset


# -- batches ---------------------------------------------------------------------------


def test_nothing_is_seen_before_the_marker_and_all_of_it_after() -> None:
    log = Log()
    assert sent(log, 7, 0, 2) == appended(0, 2)
    log.apply(batch())
    assert visible(log) == ([], 0)
    assert log.partition.stable_offset == 0
    assert commit(log, 7, 0) == Ended(True)
    assert visible(log) == ([0, 1, 2], 3)
    assert log.partition.stable_offset == 3


def test_what_was_aborted_is_passed_over_and_positions_go_past_it() -> None:
    log = Log()
    log.apply(batch())
    sent(log, 7, 0, 2)
    assert abort(log, 7, 0) == Ended(True)
    assert visible(log) == ([0], 3)
    assert visible(log, start=2) == ([], 3)
    log.apply(batch())
    assert visible(log, start=1) == ([3], 4)


def test_the_first_marker_counts_and_a_late_batch_is_refused() -> None:
    log = Log()
    sent(log, 7, 0)
    assert commit(log, 7, 0) == Ended(True)
    assert abort(log, 7, 0) == Ended(False)
    assert visible(log) == ([0], 1)
    assert isinstance(sent(log, 7, 0, sequence=1), ProducerFencedError)
    assert isinstance(sent(log, 7, 0, sequence=0), ProducerFencedError)
    assert not len(log.partition.transactions)


def test_a_marker_that_comes_before_its_batches_ends_them_too() -> None:
    log = Log()
    assert abort(log, 7, 3) == Ended(False)
    assert isinstance(sent(log, 7, 3), ProducerFencedError)
    assert sent(log, 7, 4) == appended(0, 1)


def test_the_next_transaction_may_begin_before_the_marker_of_the_one_before() -> None:
    log = Log()
    sent(log, 7, 0)
    sent(log, 7, 1)
    abort(log, 7, 0)
    assert visible(log) == ([], 1)
    commit(log, 7, 1)
    assert visible(log) == ([1], 2)


def test_an_open_transaction_holds_up_its_own_lane_only() -> None:
    log = Log(PartitionSettings(lanes=3))
    sent(log, 7, 0, lane=1)
    log.apply(batch(lane=1))
    log.apply(batch(lane=2))
    assert visible(log, 1) == ([], 0)
    assert visible(log, 2) == ([2], 3)
    assert visible(log) == ([], 0)
    with log.snapshot() as snapshot:
        read = read_committed(snapshot, [Cursor(1, 0), Cursor(2, 0), Cursor(0, 0)], 1 << 20)
    assert [each.base_offset for each in read.found] == [2]
    assert read.cursors == [Cursor(2, 3), Cursor(1, 0), Cursor(0, 3)]


def test_neighbours_are_one_run() -> None:
    log = Log()
    for _ in range(5):
        sent(log, 7, 0, 2)
    log.apply(batch())
    sent(log, 7, 0)
    assert [(run.start, run.end) for run in open_runs(log.store)] == [(0, 10), (11, 12)]


def test_no_trim_passes_an_open_transaction_and_those_of_aborted_ones_are_forgotten() -> None:
    log = Log()
    log.apply(batch(3))
    sent(log, 7, 0)
    log.apply(trim_command(4))
    assert log.partition.start_offset == 3
    abort(log, 7, 0)
    log.apply(batch())
    assert log.partition.is_aborted(3)
    log.apply(trim_command(4))
    log.apply(batch())
    assert log.partition.start_offset == 4
    assert not log.partition.is_aborted(3)


def test_lag_says_what_waits_behind_open_transactions() -> None:
    log = Log()
    log.apply(batch(2))
    sent(log, 7, 0, 3)
    log.apply(commit_command("g", 0, {0: 1}))
    lag = log.partition.lag("g")
    assert (lag.records, lag.unstable) == (4, 3)
    commit(log, 7, 0)
    assert log.partition.lag("g").unstable == 0


# -- bounds ------------------------------------------------------------------------------


def test_bounds() -> None:
    log = Log(PartitionSettings(max_transactions=1, max_transaction_runs=2))
    sent(log, 7, 0)
    assert isinstance(sent(log, 8, 0), TooManyTransactionsError)
    with pytest.raises(TooManyTransactionsError):
        Admission(log.partition).admit(batch(producer_id=8, transactional=True))
    log.apply(batch())
    sent(log, 7, 0)
    sent(log, 7, 0)
    log.apply(batch())
    assert isinstance(sent(log, 7, 0), TransactionTooLargeError)
    abort(log, 7, 0)
    assert visible(log) == ([1, 4], 5)
    assert sent(log, 8, 0) == appended(5, 1)


def test_batches_that_no_coordinator_could_end_are_refused() -> None:
    log = Log()
    admission = Admission(log.partition)
    for fields in ({"epoch": 2**31}, {"producer_id": 2**63}):
        with pytest.raises(InvalidInputError):
            admission.admit(batch(**{"producer_id": 7, "transactional": True} | fields))
    with pytest.raises(InvalidInputError, match="which producer"):
        admission.admit(batch(transactional=True))
    assert isinstance(sent(log, 7, 2**31), InvalidInputError)


def test_a_queue_has_no_positions() -> None:
    log = Log(PartitionSettings(queue=True))
    assert isinstance(log.apply(stage_offsets_command(7, 0, "g", 0, {0: 0})), TopicKindError)


@pytest.mark.parametrize(
    "entry", [bytes((tag,)) + body for tag in (0x30, 0x31, 0x32) for body in (b"", b"\x90", b"\x93\x00\x00\x01", b"x")]
)
def test_entries_that_cannot_be_read(entry: bytes) -> None:
    with pytest.raises(UnknownFormatError):
        decode(entry)


# -- positions -----------------------------------------------------------------------------


def test_positions_count_once_committed_and_never_if_aborted() -> None:
    log = Log()
    log.apply(batch(5))
    assert log.apply(stage_offsets_command(7, 0, "g", 2, {0: 3}, b"m")) == Staged()
    assert log.partition.position("g") == Position(2, {})
    commit(log, 7, 0)
    assert log.partition.position("g") == Position(2, {0: 3}, b"m")
    log.apply(stage_offsets_command(7, 1, "g", 2, {0: 5}))
    abort(log, 7, 1)
    assert log.partition.position("g") == Position(2, {0: 3}, b"m")


def test_a_newer_generation_waits_and_an_older_one_is_fenced() -> None:
    log = Log()
    log.apply(batch(5))
    log.apply(stage_offsets_command(7, 0, "g", 2, {0: 3}))
    assert isinstance(log.apply(commit_command("g", 3, {})), TransactionPendingError)
    assert isinstance(log.apply(stage_offsets_command(8, 0, "g", 3, {0: 4})), TransactionPendingError)
    assert isinstance(log.apply(stage_offsets_command(8, 0, "g", 1, {0: 4})), StaleGenerationError)
    assert log.apply(commit_command("other", 3, {})).generation == 3
    commit(log, 7, 0)
    claimed = log.apply(commit_command("g", 3, {}))
    assert (claimed.generation, claimed.offsets) == (3, {0: 3})
    assert isinstance(log.apply(stage_offsets_command(8, 0, "g", 2, {0: 4})), StaleGenerationError)


def test_a_late_stage_of_a_transaction_that_has_ended_is_refused() -> None:
    log = Log()
    log.apply(batch(5))
    log.apply(stage_offsets_command(7, 0, "g", 2, {0: 3}))
    commit(log, 7, 0)
    assert isinstance(log.apply(stage_offsets_command(7, 0, "g", 2, {0: 4})), ProducerFencedError)
    assert log.apply(commit_command("g", 3, {})).offsets == {0: 3}


def test_what_cannot_be_committed_cannot_be_staged() -> None:
    log = Log()
    assert isinstance(log.apply(stage_offsets_command(7, 0, "g", 0, {0: 1})), OffsetOutOfRangeError)
    assert isinstance(log.apply(stage_offsets_command(7, 0, "g", 0, {1: 0})), InvalidInputError)
    assert not len(log.partition.transactions)


# -- jobs ------------------------------------------------------------------------------------


def queue(count: int) -> tuple[Log, int]:
    """A queue with so many jobs, all leased for a second, and the lease's token."""
    log = Log(PartitionSettings(queue=True, retry_backoff_ms=100, retry_backoff_max_ms=100))
    log.apply(batch(count))
    (grant,) = log.apply(lease_command(NOW_MS, [Request("w", 1, count, 1, 1_000)]))
    return log, grant.token


def sizes(log: Log) -> tuple[int, int, int]:
    jobs = log.partition.jobs
    assert jobs is not None
    return jobs.counts.ready, jobs.counts.leased, jobs.counts.delayed


def test_jobs_are_done_once_committed() -> None:
    log, token = queue(3)
    assert log.apply(stage_acks_command(NOW_MS, 7, 0, "w", token, [(0, 2)])) == Settled()
    assert log.apply(stage_acks_command(NOW_MS, 7, 0, "w", token, [(1, 2)])) == Settled()  # one of them again
    assert sizes(log) == (0, 3, 0)
    commit(log, 7, 0)
    assert sizes(log) == (0, 0, 0)
    assert log.partition.jobs is not None
    assert log.partition.jobs.first_place(3) == 3


def test_neither_the_lease_s_end_nor_the_worker_s_reaches_what_is_staged() -> None:
    log, token = queue(3)
    log.apply(stage_acks_command(NOW_MS, 7, 0, "w", token, [(0, 2)]))
    log.apply(pass_time_command(NOW_MS + 5_000))
    log.apply(end_workers_command(NOW_MS + 5_000, ["w"]))
    assert sizes(log) == (1, 2, 0)
    (grant,) = log.apply(lease_command(NOW_MS + 5_000, [Request("v", 1, 9, 1, 1_000)]))
    assert [part.first for part in grant.parts] == [2]
    log.crash()
    twin = log.twin_from_checkpoint(log.checkpoint())
    for each in (log, twin):
        assert sizes(each) == (0, 3, 0)
    abort(log, 7, 0)
    assert sizes(log) == (0, 1, 2)  # tried again, after the queue's back-off
    twin.catch_up()
    assert sizes(twin) == (0, 1, 2)


@pytest.mark.parametrize("kind", [{}, {"ordered_by_key": True}, {"fair_by_key": True}])
@pytest.mark.parametrize("committed", [True, False])
def test_jobs_that_are_put_in_a_transaction_are_there_once_it_is_committed(
    committed: bool, kind: dict[str, bool]
) -> None:
    log = Log(PartitionSettings(queue=True, **kind))
    log.apply(pass_time_command(NOW_MS))

    def leased(attempt: int) -> list[int]:
        (grant,) = log.apply(lease_command(NOW_MS, [Request("w", attempt, 99, 1, 1_000)]))
        return [] if grant is None else [part.first + at for part in grant.parts for at in range(part.count)]

    log.apply(batch(2, keys=[b"a", b"b"]))
    fields: dict[str, Any] = {"producer_id": 7, "transactional": True}
    assert log.apply(batch(3, keys=[b"c", b"d", None], **fields)) == appended(2, 3)
    log.apply(batch(1, keys=[b"e"]))
    later = [[(JOB_HEADER, encode_options(JobOptions(delay_ms=50)))]]
    log.apply(batch(headers=later, sequence=3, **fields))
    assert sizes(log) == (3, 0, 4)
    assert leased(1) == [0, 1, 5]
    log.apply(pass_time_command(NOW_MS + 10 * 24 * 3_600_000))
    assert sizes(log)[2] == 4, "time alone does nothing"
    log.crash()
    twin = log.twin_from_checkpoint(log.checkpoint())
    (commit if committed else abort)(log, 7, 0)
    twin.catch_up()
    for each in (log, twin):
        assert sizes(each)[2] == 0
        assert not len(each.partition.transactions)
    again = leased(2)
    assert [each for each in again if each in (2, 3, 4, 6)] == ([2, 3, 4, 6] if committed else [])


def test_what_a_job_in_a_transaction_cannot_have() -> None:
    log = Log(PartitionSettings(queue=True, max_transaction_runs=5))
    admission = Admission(log.partition)
    for options in (JobOptions(ttl_ms=5), JobOptions(dedupe_id="x")):
        headers = [[(JOB_HEADER, encode_options(options))]]
        with pytest.raises(InvalidInputError, match="has no ttl_ms and no dedupe_id"):
            admission.admit(batch(headers=headers, producer_id=7, transactional=True))
    assert isinstance(sent(log, 7, 0, 6), TransactionTooLargeError)
    assert sent(log, 7, 0, 3) == appended(0, 3)
    assert isinstance(sent(log, 7, 0, 3), TransactionTooLargeError)
    assert sent(log, 7, 0, 2) == appended(3, 2)
    abort(log, 7, 0)
    assert sizes(log) == (0, 0, 0)
    assert log.partition.jobs is not None
    assert log.partition.jobs.first_place(5) == 5, "nothing of it is kept"


def test_a_job_that_is_cancelled_before_its_transaction_ends() -> None:
    log = Log(PartitionSettings(queue=True))
    sent(log, 7, 0, 2)
    assert log.apply(change_command(NOW_MS, "cancel", [0])) == 1
    commit(log, 7, 0)
    assert sizes(log) == (1, 0, 0)


def test_jobs_of_somebody_else_are_lost() -> None:
    log, token = queue(2)
    log.apply(pass_time_command(NOW_MS + 5_000))
    assert log.apply(stage_acks_command(NOW_MS + 5_000, 7, 0, "w", token, [(0, 2)])) == Settled(((0, 2),))
    assert sizes(log) == (2, 0, 0)


# -- against a model ---------------------------------------------------------------------------


@dataclass
class Batch:
    base: int
    count: int
    lane: int
    transaction: tuple[int, int] | None


class Model:
    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.ended: dict[tuple[int, int], bool] = {}

    def expected(self, lane: int) -> list[int]:
        """All of the lane up to the first open one, without what was aborted."""
        offsets: list[int] = []
        for each in self.batches:
            if lane not in (ANY_LANE, each.lane):
                continue
            fate = True if each.transaction is None else self.ended.get(each.transaction)
            if fate is None:
                break
            if fate:
                offsets += range(each.base, each.base + each.count)
        return offsets


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 3), st.integers(0, 1), st.integers(1, 3)),
        st.tuples(st.just("end"), st.integers(1, 3), st.booleans(), st.just(0)),
        st.tuples(st.sampled_from(["crash", "twin", "sync"]), st.just(0), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.sampled_from([1, 2]), st.sampled_from([1, 400, 1 << 20]), st.sampled_from([1, 2, 4_000]))
def test_readers_of_disk_and_tail_see_what_the_model_says(
    wanted: list[tuple[str, int, int, int]], lanes: int, max_bytes: int, runs: int
) -> None:
    with mock.patch.object(reader, "MAX_ABORTED_RUNS", runs):
        _check_against_the_model(wanted, lanes, max_bytes)


def _check_against_the_model(wanted: list[tuple[str, int, int, int]], lanes: int, max_bytes: int) -> None:
    log, model = Log(PartitionSettings(lanes=lanes)), Model()
    tail = Tail.opened(log.partition, 1_000)
    log.partition.watch(tail)
    log.apply(pass_time_command(NOW_MS))
    epochs = dict.fromkeys(range(1, 4), 0)
    begun = 0
    for what, who, which, count in wanted:
        if what == "send":
            lane = which % lanes
            answer = sent(log, who, epochs[who], count, lane=lane) if who else log.apply(batch(count, lane=lane))
            transaction = (who, epochs[who]) if who else None
            model.batches.append(Batch(answer.base_offset, count, lane, transaction))
        elif what == "end":
            log.apply(end_transaction_command(who, epochs[who], commit=bool(which)))
            model.ended[who, epochs[who]] = bool(which)
            epochs[who] += 1
        elif what == "sync":
            log.store.sync()
            tail.synced()
        else:
            if what == "crash":
                log.crash()
            else:
                begun = log.partition.next_offset
                log = log.twin_from_checkpoint(log.checkpoint())
            tail = Tail.opened(log.partition, 1_000)
            log.partition.watch(tail)
        for lane in (ANY_LANE, *range(lanes)):
            expected = [offset for offset in model.expected(lane) if offset >= begun]
            assert walked(log, None, lane, max_bytes) == expected
            assert walked(log, tail, lane, max_bytes) == expected


def walked(log: Log, tail: Tail | None, lane: int, max_bytes: int) -> list[int]:
    """All that a reader gets that begins at the start, from disk, or from memory where it has it."""
    got: list[int] = []
    at = int(log.partition.readable_from)
    for _ in range(200):
        cursors = [Cursor(lane, at)]
        read = None if tail is None else tail.read_committed(cursors, max_bytes, log.partition.transactions.first_open)
        if read is None:
            with log.snapshot() as snapshot:
                read = read_committed(snapshot, cursors, max_bytes)
        for each in read.found:
            header = RecordBatch.decode(each.payload).header
            assert header.count == each.count
            assert lane in (ANY_LANE, header.lane)
            got += [offset for offset in range(each.base_offset, each.base_offset + each.count) if offset >= at]
        then = read.cursors[0].offset
        assert then >= at
        if then == at:
            return got
        at = then
    raise AssertionError("no end")


@pytest.mark.parametrize("lanes", [1, 2])
def test_one_read_jumps_over_so_many_aborted_runs_and_says_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, lanes: int
) -> None:
    monkeypatch.setattr(reader, "MAX_ABORTED_RUNS", 10)
    log = Log(PartitionSettings(lanes=lanes))
    for epoch in range(35):
        sent(log, 7, epoch, 2)
        abort(log, 7, epoch)
    if lanes == 2:
        log.apply(batch(lane=1))
    log.apply(batch())
    end = log.partition.next_offset
    reads: list[CommittedRead] = []
    cursors = [Cursor(lane, 0) for lane in range(lanes)]
    while not reads or reads[-1].is_cut:
        with log.snapshot() as snapshot:
            reads.append(read_committed(snapshot, cursors, 1 << 20))
        cursors = sorted(reads[-1].cursors)
    assert [len(each.found) for each in reads] == [lanes - 1, 0, 0, 1], "a higher lane goes first"
    assert [each.cursors[-1].offset for each in reads] == [22, 44, 66, end]


def test_offsets_are_dense_for_whoever_reads_all() -> None:
    log = Log()
    sent(log, 7, 0)
    abort(log, 7, 0)
    log.apply(batch())
    assert log.partition.high_watermark == Offset(2)
