"""A work queue's rules that need more than a few jobs: fairness, back-off, bounds, many runs, and memory."""

from __future__ import annotations

import tracemalloc
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rayqueue.errors import InvalidInputError, TopicKindError, UnknownFormatError
from rayqueue.partition import PartitionSettings, configure_command, pass_time_command
from rayqueue.partition.commands import decode
from rayqueue.partition.jobs import facts, frontier, moving
from rayqueue.partition.jobs.commands import (
    Request,
    Settle,
    change_command,
    end_workers_command,
    lease_command,
    settle_command,
)
from rayqueue.partition.jobs.leases import REMEMBERED_RUNS
from rayqueue.partition.jobs.queue import EVENTS_PER_ENTRY, Grant
from rayqueue.partition.tables import JOB_INDEX, JOBS
from rayqueue.protocol.jobs import JOB_HEADER, JobOptions, encode_options
from rayqueue.records import RecordBatch
from tests.unit.log.store_disks import LmdbTestDisk
from tests.unit.partition.jobs_memory import DiskLog, ack_in_random_order, allocated_bytes, delay
from tests.unit.partition.partition_log import Log


def queue(**settings: Any) -> Log:
    return Log(PartitionSettings(queue=True, **settings))


def put(log: Log, count: int = 1, *, key: bytes | None = None, lane: int = 0, **options: Any) -> None:
    headers: Any = [[(JOB_HEADER, encode_options(JobOptions(**options)))]] * count if options else None
    keys = None if key is None else [key] * count
    log.apply(RecordBatch.encode([b"v"] * count, keys, headers, timestamps=1, lane=lane))


def lease(log: Log, attempt: int, max_jobs: int = 1, *, now_ms: int = 1_000, lease_ms: int = 0) -> Grant | None:
    (grant,) = log.apply(lease_command(now_ms, [Request("w", attempt, max_jobs, 1, lease_ms)]))
    return grant  # type: ignore[no-any-return]


def ids(grant: Grant | None) -> list[int]:
    return [] if grant is None else [part.first + at for part in grant.parts for at in range(part.count)]


def settle(log: Log, kind: str, token: int, *jobs: int, now_ms: int = 1_000) -> Any:
    told = Settle("w", kind, token, tuple([(job, 1) for job in jobs]), -1, 0, "", "", None)
    return log.apply(settle_command(now_ms, [told]))


def test_a_tenant_with_many_jobs_does_not_starve_one_with_few() -> None:
    log = queue(fair_by_key=True)
    put(log, 2_000, key=b"many")
    put(log, 10, key=b"few")
    got = [ids(lease(log, attempt))[0] for attempt in range(1, 41)]
    assert {job for job in got[:20] if job >= 2_000} == set(range(2_000, 2_010))
    put(log, 3, key=b"late")
    assert len([job for attempt in range(41, 47) for job in ids(lease(log, attempt)) if job >= 2_010]) == 3


def test_priorities_hold_across_the_whole_backlog_and_for_retries() -> None:
    log = queue(lanes=3, retry_backoff_ms=0)
    put(log, 5, lane=0)
    put(log, 2, lane=2)
    put(log, 2, lane=1)
    first = lease(log, 1, 3)
    assert ids(first) == [5, 6, 7]
    assert first is not None
    settle(log, "nack", first.token, 6)
    assert ids(lease(log, 2, 4)) == [6, 8, 0, 1]


def test_back_off_doubles_up_to_its_bound_and_is_the_same_on_every_replica() -> None:
    delays: list[int] = []
    log = queue(retry_backoff_ms=100, retry_backoff_max_ms=1_000, max_deliveries=None)
    put(log)
    now_ms = 1_000
    for attempt in range(1, 9):
        grant = lease(log, attempt, now_ms=now_ms)
        assert grant is not None
        settle(log, "nack", grant.token, 0, now_ms=now_ms)
        jobs: Any = log.partition.jobs
        delays.append(jobs.rows.get(0).due_ms - now_ms)
        now_ms += delays[-1]
    for delay_ms, plain_ms in zip(delays, (100, 200, 400, 800, 1_000, 1_000, 1_000, 1_000), strict=True):
        assert 0.75 * plain_ms <= delay_ms <= 1.25 * plain_ms
    assert len(set(delays[4:])) > 1  # they do not come back all at once
    assert log.twin_from_checkpoint(log.checkpoint()).partition.checkpoint() == log.partition.checkpoint()


def _finish(log: Log, job_id: int, now_ms: int, token: int, value: bytes = b"r" * 60_000) -> None:
    told = Settle("w", "ack", token, ((job_id, 1),), -1, 0, "", "", value)
    log.apply(settle_command(now_ms, [told]))


def _kept(log: Log, count: int) -> list[int]:
    jobs = log.partition.jobs
    assert jobs is not None
    return [job_id for job_id in range(count) if jobs.results.get(job_id) is not None]


@pytest.mark.parametrize(("most_bytes", "kept"), [(1_048_576, range(7, 24)), (None, range(24))])
def test_results_beyond_their_bound_go_by_their_end(most_bytes: int | None, kept: range) -> None:
    log = queue(max_results_bytes=most_bytes, result_ttl_ms=50_000, max_deliveries=None)
    put(log, 24, want_result=True)
    grant = lease(log, 1, 24)
    assert grant is not None
    order = [*range(1, 8), 0, *range(8, 24)]  # the oldest job is done later than some others
    for at, job_id in enumerate(order):
        _finish(log, job_id, 2_000 + at, grant.token)
    expected = sorted(order[-17:]) if most_bytes else list(kept)
    assert _kept(log, 24) == expected
    jobs = log.partition.jobs
    assert jobs is not None
    assert jobs.results.evicted == 24 - len(expected)
    twin = log.twin_from_checkpoint(log.checkpoint())
    put(log, 1, want_result=True)
    more = lease(log, 2, 1, now_ms=3_000)
    assert more is not None
    _finish(log, ids(more)[0], 3_000, more.token)
    twin.catch_up()
    assert _kept(twin, 30) == _kept(log, 30)
    assert twin.partition.checkpoint() == log.partition.checkpoint()
    log.apply(pass_time_command(100_000))
    assert _kept(log, 30) == []
    assert jobs.counts.result_bytes == 0


def test_without_a_setting_results_go_as_in_releases_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "MAX_RESULTS_BYTES", 200_000)
    log = queue()
    put(log, 4, want_result=True)
    grant = lease(log, 1, 4)
    assert grant is not None
    for job_id in (1, 2, 0, 3):
        _finish(log, job_id, 2_000, grant.token)
    assert _kept(log, 4) == [1, 2, 3]


def test_results_that_a_release_before_has_kept_go_by_their_end_too() -> None:
    log = queue(max_results_bytes=1_048_576)
    put(log, 19, want_result=True)
    grant = lease(log, 1, 19)
    assert grant is not None
    for at, job_id in enumerate((3, 2, 1, 0, *range(4, 17))):
        _finish(log, job_id, 2_000 + at, grant.token)
    jobs = log.partition.jobs
    assert jobs is not None
    for key, _ in list(log.store.scan(JOB_INDEX, b"E", b"F")):  # it had no such order
        log.store.delete(JOB_INDEX, key)
    jobs.results._ends._from = b"E"
    jobs.results.load()
    for job_id in (17, 18):
        _finish(log, job_id, 3_000, grant.token)
    assert set(range(19)) - set(_kept(log, 19)) == {3, 2}


def test_what_is_due_at_once_is_dealt_with_a_bounded_part_at_a_time() -> None:
    log = queue(lease_ms=10, max_leased=100_000)
    count = EVENTS_PER_ENTRY + 5
    put(log, count)
    for attempt in range(count):
        lease(log, attempt)
    jobs: Any = log.partition.jobs
    log.apply(pass_time_command(2_000))
    assert (jobs.counts.leased, jobs.counts.ready) == (5, EVENTS_PER_ENTRY)
    log.crash()
    log.apply(pass_time_command(2_000))
    jobs = log.partition.jobs
    assert (jobs.counts.leased, jobs.counts.ready) == (0, count)


def test_what_is_remembered_of_a_lease_is_bounded() -> None:
    log = queue()
    put(log, 1_000)
    grant = lease(log, 1, 1_000)
    assert grant is not None
    settle(log, "ack", grant.token, *range(0, 1_000, 2))
    log.apply(end_workers_command(1_000, ["w"]))
    jobs: Any = log.partition.jobs
    assert len(jobs.leases.get(grant.token).done) == REMEMBERED_RUNS
    assert settle(log, "ack", grant.token, 998)[0].lost == ()
    assert settle(log, "ack", grant.token, 0)[0].lost == ((0, 1),)


def test_jobs_that_are_handed_back_are_runs_again_and_come_first() -> None:
    log = queue(lanes=2)
    put(log, 3_000)
    first, second = lease(log, 1, 1_000), lease(log, 2, 1_000)
    assert first is not None
    assert second is not None
    settle(log, "ack", first.token, 0, 500)
    back = Settle("w", "release", second.token, ((1_000, 1_000),), -1, 0, "", "", None)
    log.apply(settle_command(1_000, [back]))
    settle(log, "release", first.token, *range(501, 1_000), *range(1, 100))
    jobs: Any = log.partition.jobs
    assert list(log.store.scan(JOBS)) == []  # no row for any of them
    assert len(list(log.store.scan(JOB_INDEX))) == 2
    assert (jobs.counts.ready, jobs.counts.leased) == (1_000 + 1_499 + 99, 400)
    assert jobs.first_place(3_000) == 1
    put(log, 1, lane=1)
    twin = log.twin_from_checkpoint(log.checkpoint())
    log.store.sync()
    log.crash()
    log.apply(change_command(1_000, "cancel", [2, 501]))
    again = lease(log, 3, 1_700)
    assert ids(again) == [3_000, 1, *range(3, 100), *range(502, 2_000), *range(2_000, 2_103)]
    assert again is not None
    assert {part.deliveries for part in again.parts} == {1}
    assert settle(log, "release", second.token, 1_000)[0].lost == ()  # said again, it is the same
    assert settle(log, "ack", second.token, 1_000)[0].lost == ((1_000, 1),)
    assert settle(log, "release", again.token, *ids(again))[0].lost == ()
    twin.catch_up()
    assert twin.partition.checkpoint() == log.partition.checkpoint()
    assert list(twin.store.scan(JOBS)) == []
    lease(log, 4, 5_000)
    twin.catch_up()
    assert twin.partition.checkpoint() == log.partition.checkpoint()


def test_a_job_that_is_handed_back_after_its_time_to_live_is_a_dead_letter() -> None:
    log = queue(max_lease_ms=60_000, lease_ms=60_000)
    put(log, ttl_ms=50)
    log.apply(pass_time_command(1_000))
    put(log, ttl_ms=50)
    grant = lease(log, 1, 2)
    assert grant is not None
    assert ids(grant) == [1]
    log.apply(pass_time_command(2_000))
    settle(log, "release", grant.token, 1, now_ms=2_000)
    jobs: Any = log.partition.jobs
    assert (jobs.counts.ready, jobs.counts.dead, jobs.counts.expired) == (0, 2, 2)
    assert jobs.rows.get(1).deliveries == 0


def _move_all(log: Log) -> int:
    """As the leader does about once per second. Where the log begins then."""
    jobs: Any = log.partition.jobs
    while moving.wasteful(jobs, log.partition.next_offset):
        planned = moving.plan_move(jobs, 500, log.partition.next_offset)
        assert planned, "something holds back the trimming that is never moved"
        with log.snapshot() as snapshot:
            batch = moving.move_batch(snapshot, planned, 1 << 20)
        assert batch is not None
        log.apply(batch)
        command = log.partition.retention_command(1_000)
        if command is not None:
            log.apply(command)
    return int(log.partition.start_offset)


def _do(log: Log, count: int, **options: Any) -> None:
    """Jobs that are put and done at once."""
    for _ in range(count // 1_000):
        put(log, 1_000, **options)
        grant = lease(log, next(_attempts), 1_000)
        assert grant is not None
        settle(log, "ack", grant.token, *ids(grant))


_attempts = count(1_000)


@pytest.mark.parametrize("waiting", ["starved", "handed back", "both"])
def test_what_is_starved_holds_back_no_trimming(waiting: str) -> None:
    log = queue(lanes=2)
    put(log, 20)  # of the lower lane
    if waiting != "starved":
        grant = lease(log, 1, 20 if waiting == "handed back" else 10)
        assert grant is not None
        settle(log, "release", grant.token, *ids(grant))
    _do(log, 10_000, lane=1)
    twin = log.twin_from_checkpoint(log.checkpoint())
    assert _move_all(log) > 9_000
    jobs: Any = log.partition.jobs
    assert (jobs.counts.ready, jobs.counts.leased) == (20, 0)
    put(log, 1)
    last = log.partition.next_offset - 1
    log.store.sync()
    log.crash()
    twin.catch_up()
    assert twin.partition.checkpoint() == log.partition.checkpoint()
    grant = lease(log, 2, 30)
    assert ids(grant) == [*range(20), last]
    assert grant is not None
    assert {part.deliveries for part in grant.parts} == {1}
    assert settle(log, "ack", grant.token, *ids(grant))[0].lost == ()


def test_what_was_cancelled_ahead_holds_back_no_trimming() -> None:
    log = queue(lanes=2)
    put(log, 20)
    log.apply(change_command(1_000, "cancel", [*range(1, 5), *range(6, 20)]))
    _do(log, 10_000, lane=1)
    assert _move_all(log) > 9_000
    grant = lease(log, 1, 5)
    assert ids(grant) == [0, 5]
    put(log, 3)
    log.apply(change_command(1_000, "cancel", [log.partition.next_offset - each for each in (1, 2, 3)]))
    jobs: Any = log.partition.jobs
    assert (jobs.counts.cancelled, jobs.counts.ready) == (0, 0)


def test_no_token_is_good_for_a_job_that_nobody_has_had() -> None:
    log = queue()
    put(log, 2, want_result=True)
    grant = lease(log, 1)
    assert grant is not None
    settle(log, "release", grant.token, 0)
    for kind in ("ack", "nack", "reject", "release"):
        assert settle(log, kind, 0, 0, 1)[0].lost == ((0, 2),)
        assert settle(log, kind, 99, 0, 1)[0].lost == ((0, 2),)
    assert settle(log, "ack", grant.token, 0)[0].lost == ((0, 1),)  # it was handed back
    assert ids(lease(log, 2, 5)) == [0, 1]


def test_more_runs_than_are_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "MAX_RUNS", 3)
    log = queue()
    for _ in range(10):
        put(log, 2)
        put(log, 1, want_result=True)
    assert ids(lease(log, 1, 7)) == list(range(7))
    twin = log.twin_from_checkpoint(log.checkpoint())
    log.crash()
    put(log, 2)
    assert ids(lease(log, 2, 100)) == list(range(7, 32))
    twin.catch_up()
    assert twin.partition.checkpoint() == log.partition.checkpoint()


def test_a_queue_on_lmdb_is_the_same_after_a_restart(tmp_path: Path) -> None:
    log = Log(PartitionSettings(queue=True, ordered_by_key=True, fair_by_key=True), LmdbTestDisk(tmp_path))
    for number in range(30):
        put(log, 3, key=b"k%d" % (number % 4), want_result=number % 2 == 0, delay_ms=number % 3 * 500)
    grant = lease(log, 1, 3)
    assert grant is not None
    settle(log, "nack", grant.token, *ids(grant)[:1])
    settle(log, "ack", grant.token, *ids(grant)[1:2])
    before = log.partition.checkpoint()
    log.store.sync()
    log.crash()
    assert log.partition.checkpoint() == before
    assert ids(lease(log, 1, 3)) == ids(grant)[2:]


def test_a_log_refuses_what_is_for_queues_and_a_queue_stays_one() -> None:
    log = Log()
    assert isinstance(log.apply(end_workers_command(1, ["w"])), TopicKindError)
    assert isinstance(lease_refused(log), TopicKindError)
    jobs = queue()
    put(jobs)
    assert isinstance(jobs.apply(configure_command(PartitionSettings(version=1))), InvalidInputError)
    changed = PartitionSettings(queue=True, lease_ms=5, version=1)
    jobs.apply(configure_command(changed))
    assert jobs.partition.settings == changed
    grant = lease(jobs, 1)
    assert grant is not None
    assert grant.until_ms == 1_005


def lease_refused(log: Log) -> Any:
    return log.apply(lease_command(1, [Request("w", 1, 1, 1, 0)]))


@pytest.mark.parametrize(
    "payload",
    [
        lease_command(1, [Request("w", 1, 1, 1, 0)]),
        settle_command(1, [Settle("w", "ack", 1, ((1, 1),), -1, 0, "", "", None)]),
        end_workers_command(1, ["w"]),
        change_command(1, "purge", [1]),
    ],
    ids=["lease", "settle", "end", "change"],
)
def test_a_command_with_more_than_this_release_knows_is_not_skipped(payload: bytes) -> None:
    decode(payload)
    more = bytearray(payload)
    more[1] += 1  # one field more in the array
    for wrong in (bytes(more) + b"\xc0", payload[:-1], payload + b"\x00", payload[:1]):
        with pytest.raises(UnknownFormatError):
            decode(wrong)


@pytest.mark.slow
def test_memory_stays_flat_however_many_jobs_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayqueue.partition.jobs.leases.REMEMBERED", 50)  # or it would rise until 4096 are
    tracemalloc.start()
    try:
        log = DiskLog(tmp_path / "acked")
        acked = [allocated_bytes() for _ in ack_in_random_order(log, 30_000)]
        log.store.close()
        log = DiskLog(tmp_path / "delayed")
        delayed = [allocated_bytes() for _ in delay(log, 40_000)]
        log.store.close()
    finally:
        tracemalloc.stop()
    assert acked[-1] - acked[3] < 400_000, acked  # 22 bytes for each job that has passed
    assert delayed[-1] - delayed[4] < 2_000_000, delayed


def test_deadlines_of_leases_that_have_ended_do_not_pile_up_behind_an_earlier_one() -> None:
    log = queue()
    put(log, 2_000)
    lease(log, 0, lease_ms=1_000)
    for attempt in range(1, 1_999):
        grant = lease(log, attempt, lease_ms=60_000)
        assert grant is not None
        settle(log, "ack", grant.token, *ids(grant))
    assert log.partition.jobs is not None
    leases = log.partition.jobs.leases
    assert len(leases._deadlines) < 1_100
    assert leases.next_deadline_ms() == 2_000
