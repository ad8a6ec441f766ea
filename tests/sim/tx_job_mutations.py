"""Each rule of jobs in transactions, switched off: the simulator must notice every time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rayqueue.partition.jobs.queue import JobQueue
from rayqueue.partition.jobs.rows import JobRow, Note, State
from rayqueue.partition.jobs.staged import Runs, StagingQueue
from rayqueue.partition.jobs.states import JobStates
from rayqueue.partition.transactions.open import StagedJobs, Transactions
from rayqueue.protocol.jobs import JobOptions, Settled
from tests.sim.invariants import BrokenRule, Invariant
from tests.sim.tx_mutations import Replaced, TxMutation

Key = tuple[int, int]


def _ready_at_once(
    jobs: JobStates, job_id: int, lane: int, key: bytes | None, options: JobOptions, *, pending: bool = False
) -> None:
    _put(jobs, job_id, lane, key, options)


_put = JobStates._put


def _put_whatever_is_decided(jobs: StagingQueue, runs_put: Iterable[tuple[int, int]], *, commit: bool) -> None:
    _end_put(jobs, runs_put, commit=True)


def _put_never(jobs: StagingQueue, runs_put: Iterable[tuple[int, int]], *, commit: bool) -> None:
    """What was put waits for ever."""
    if not commit:
        _end_put(jobs, runs_put, commit=False)


_end_put = StagingQueue.end_put


def _none_lost(jobs: StagingQueue, token: int, wanted: Runs, before: Any) -> tuple[Settled, Runs]:
    """A worker is not told that somebody else has its jobs."""
    _, taken = _stage(jobs, token, wanted, before)
    return Settled(()), taken


def _lost_if_repeated(jobs: StagingQueue, token: int, wanted: Runs, before: Any) -> tuple[Settled, Runs]:
    return _stage(jobs, token, wanted, ())


def _stays_in_its_lease(jobs: StagingQueue, token: int, wanted: Runs, before: Any) -> tuple[Settled, Runs]:
    """The end of the lease reaches what is staged."""
    settled, taken = _stage(jobs, token, wanted, before)
    lease = jobs.leases.get(token)
    if lease is not None:
        lease.ids |= {first + at: jobs._row(first + at).place for first, count in taken for at in range(count)}
        jobs.leases.changed(lease)
    return settled, taken


_stage = StagingQueue.stage


def _again_though_done(jobs: StagingQueue, worker: str, token: int, staged: Runs, *, commit: bool) -> None:
    _end_staged(jobs, worker, token, staged, commit=False)


def _done_whatever_is_decided(jobs: StagingQueue, worker: str, token: int, staged: Runs, *, commit: bool) -> None:
    _end_staged(jobs, worker, token, staged, commit=True)


def _no_failure(jobs: StagingQueue, worker: str, token: int, staged: Runs, *, commit: bool) -> None:
    """An aborted transaction is no failed delivery of its jobs."""
    _end_staged(jobs, worker, token, staged, commit=commit)
    for first, count in () if commit else staged:
        for row in filter(None, map(jobs.rows.get, range(first, first + count))):
            row.deliveries -= row.state != State.DEAD
            jobs.rows.put(row)


_end_staged = StagingQueue.end_staged


def _in_memory(known: Transactions, key: Key, jobs: StagedJobs) -> None:
    """What is staged is not written down."""
    known._opened(key).jobs.append(jobs)


def _reaches_staged(queue: JobQueue, lease: Any, job_id: int, told: Any, note: Note) -> bool:
    """A settlement by the lease counts, though the job is staged."""
    row = queue.rows.get(job_id)
    if _is_staged(queue, lease, row, told.token):
        assert row is not None
        queue.counts.leased -= 1
        queue._settle_row(row, told, note)
        return True
    return _settle_other(queue, lease, job_id, told, note)


def _is_staged(queue: JobQueue, lease: Any, row: JobRow | None, token: int) -> bool:
    return (
        row is not None
        and row.state == State.LEASED
        and row.token == token
        and (lease is None or row.id not in lease.ids)
    )


_settle_other = JobQueue._settle_other


def _queued(
    name: str,
    finding: str,
    breaks: Invariant,
    replaced: Replaced,
    *also: Invariant,
    faults: Any = None,
    first_seed: int = 0,
) -> TxMutation:
    rule = BrokenRule(breaks, frozenset(also))
    some = {} if faults is None else {"faults": frozenset(faults)}
    return TxMutation(name, finding, rule, replaced, queued=True, first_seed=first_seed, **some)


TX_JOB_MUTATIONS = (
    _queued(
        "job-is-put-at-once",
        "a job is given out whose transaction is open",
        Invariant.JOBS_PUT,
        (JobStates, "_put", _ready_at_once),
    ),
    _queued(
        "aborted-put-counts",
        "a job is given out that was put in a transaction that is aborted",
        Invariant.JOBS_PUT,
        (StagingQueue, "end_put", _put_whatever_is_decided),
    ),
    _queued(
        "committed-put-waits",
        "a job that was put in a transaction is given to nobody",
        Invariant.JOBS_PUT,
        (StagingQueue, "end_put", _put_never),
    ),
    _queued(
        "lost-is-not-told",
        "a worker whose lease has ended commits its result, and whoever has the job then does it, too",
        Invariant.JOBS_DONE_ONCE,
        (StagingQueue, "stage", _none_lost),
    ),
    _queued(
        "staged-twice-is-lost",
        "a worker that repeats itself is told that it has lost its jobs",
        Invariant.JOB_ANSWERS,
        (StagingQueue, "stage", _lost_if_repeated),
    ),
    _queued(
        "lease-ends-what-is-staged",
        "a job is given out again while the transaction is open that may be done with it",
        Invariant.JOBS_DONE_ONCE,
        (StagingQueue, "stage", _stays_in_its_lease),
        Invariant.NO_SELF_STOP,  # done with twice: the second one finds no row
        first_seed=90,
    ),
    _queued(
        "committed-ack-does-not-count",
        "a job comes again though the transaction that was done with it is committed",
        Invariant.JOBS_DONE_ONCE,
        (StagingQueue, "end_staged", _again_though_done),
    ),
    _queued(
        "aborted-ack-counts",
        "a job does not come again though nobody is done with it",
        Invariant.JOBS_COME_AGAIN,
        (StagingQueue, "end_staged", _done_whatever_is_decided),
    ),
    _queued(
        "abort-is-no-failure",
        "a job that makes its worker die comes again for ever",
        Invariant.JOB_STATE,
        (StagingQueue, "end_staged", _no_failure),
    ),
    _queued(
        "staged-jobs-in-memory-only",
        "after a restart a replica does not know which jobs a transaction is done with",
        Invariant.SAME_STATE,
        (Transactions, "stage_jobs", _in_memory),
        Invariant.JOBS_COME_AGAIN,
        Invariant.JOBS_DONE_ONCE,
        faults=("kill", "transfer", "app_pause"),
    ),
    _queued(
        "staged-is-settled-beside",
        "a worker gives a job back that its open transaction is done with",
        Invariant.JOBS_DONE_ONCE,
        (JobQueue, "_settle_other", _reaches_staged),
    ),
)
