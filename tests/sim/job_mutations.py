"""Each rule of work queues, switched off: the simulator must notice every time.

As in ``mutations``, one method is replaced while a schedule runs; ``faults`` and
``settings`` narrow what happens to what the rule is for.
"""

from __future__ import annotations

from msgspec.structs import replace

from rayqueue.partition import PartitionSettings
from rayqueue.partition.jobs import leases
from rayqueue.partition.jobs.commands import Settle
from rayqueue.partition.jobs.leases import Lease, Leases
from rayqueue.partition.jobs.queue import JobQueue, Moved
from rayqueue.partition.jobs.rows import JobRow, Note, State
from rayqueue.partition.jobs.runs import Part
from rayqueue.protocol.jobs import Settled
from rayqueue.replica.jobs import Jobs, QueueTime
from tests.sim.frame import Mutation
from tests.sim.invariants import Invariant
from tests.sim.job_world import JobWorld


class JobMutation(Mutation):
    make = JobWorld


def _answer_first(jobs: Jobs) -> None:
    """Settlements are answered before they are committed."""
    settles, jobs._settles = jobs._settles, []
    for reply, several in settles:
        reply(tuple([Settled() for _ in several]))
    jobs._settles = [(lambda _: None, several) for _, several in settles]
    _propose_settles(jobs)


_propose_settles = Jobs._propose_settles


def _any_token(queue: JobQueue, lease: Lease | None, job_id: int, told: Settle, note: Note) -> bool:
    """A job that waits is settled by whoever names it."""
    row = queue.rows.get(job_id)
    if row is not None and row.state in (State.READY, State.DELAYED):
        told = replace(told, token=row.token)
    return _settle_other(queue, lease, job_id, told, note)


def _steal(queue: JobQueue, lease: Lease | None, job_id: int, told: Settle, note: Note) -> bool:
    """Whoever had the job once may acknowledge it, though another one has it now."""
    row = queue.rows.get(job_id)
    if row is not None and row.state == State.LEASED and row.token != told.token and told.kind == "ack":
        lease = queue.leases.get(row.token)
    return _settle_other(queue, lease, job_id, told, note)


_settle_other = JobQueue._settle_other


def _uncounted(queue: JobQueue, row: JobRow, token: int) -> Part:
    """A delivery is not counted where it is made."""
    row.deliveries -= 1
    return _hand_out(queue, row, token)


_hand_out = JobQueue._hand_out


def _retry_for_ever(queue: JobQueue, row: JobRow, note: Note, delay_ms: int, told: Settle | None = None) -> None:
    settings, queue.settings = queue.settings, replace(queue.settings, max_deliveries=None)
    _retry(queue, row, note, delay_ms, told)
    queue.settings = settings


_retry = JobQueue._retry


def _own_clock(time: QueueTime, log_ms: int) -> None:
    """A new leader begins with its own time, and not where the log's has come to."""
    _begin(time, 0)


_begin = QueueTime.begin


def _gone_unnoticed(jobs: Jobs, client: int) -> None:
    jobs._waiting.take_client(client)
    for worker in jobs._workers.pop(client, ()):
        jobs._client_of.pop(worker, None)


def _withdraw_those_that_wait(jobs: Jobs, worker: str, attempt: int | None) -> int:
    """A request that is just being given jobs is withdrawn too, and gets them all the same."""
    proposed, jobs._proposed = jobs._proposed, {}
    found = _withdraw(jobs, worker, attempt)
    jobs._proposed = proposed
    given = [each for each in proposed if each.call.worker == worker and attempt in (None, each.call.attempt)]
    return found + len(given)


_withdraw = Jobs._withdraw


def _lead_as_if_all_lived(jobs: Jobs) -> None:
    """A new leader thinks no more of nodes that it was told of before."""
    jobs._gone_nodes = {}
    _lead(jobs)


_lead = Jobs.lead


def _without_texts(queue: JobQueue, index: int, at: int, place: int, told: Moved) -> None:
    """What was told of a job's failures stays behind when it is moved."""
    row = queue.rows.get(told.id)
    if row is not None:
        row.notes = tuple([replace(note, index=0) for note in row.notes])
    _move(queue, index, at, place, replace(told, texts=()))


_move = JobQueue._move


_LOST_ANSWERS = ("app_cut", "app_reset", "kill", "partition", "transfer")
_LATE = ("app_pause", "app_cut", "app_slow", "app_reset")

_QUEUE = PartitionSettings(queue=True, lease_ms=1_500, max_lease_ms=4_000, max_deliveries=3)
_LONG = PartitionSettings(queue=True, lease_ms=900_000, max_lease_ms=900_000, max_deliveries=None)

JOB_MUTATIONS = (
    JobMutation.of(
        "settled_before_committed",
        "a worker is told that its acknowledgement counts before a majority has it",
        Invariant.JOB_ANSWERS,
        Jobs,
        "_propose_settles",
        _answer_first,
        *_LOST_ANSWERS,
    ),
    JobMutation.of(
        "any_token",
        "a job that waits is settled with any token",
        Invariant.JOB_STATE,
        JobQueue,
        "_settle_other",
        _any_token,
        *_LATE,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "stolen",
        "a lease that has ended acknowledges a job that another worker has",
        Invariant.JOB_STATE,
        JobQueue,
        "_settle_other",
        _steal,
        *_LATE,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "uncounted",
        "a delivery is not counted with the lease",
        Invariant.JOB_STATE,
        JobQueue,
        "_hand_out",
        _uncounted,
        *_LATE,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "tried_for_ever",
        "a job is tried more often than it may be",
        Invariant.JOB_STATE,
        JobQueue,
        "_retry",
        _retry_for_ever,
        *_LATE,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "time_stands_still",
        "nobody tells the log that something is due",
        Invariant.PROGRESS,
        Jobs,
        "_let_time_pass",
        lambda jobs, queue: None,
    ),
    JobMutation.of(
        "own_clock",
        "a new leader whose clock is behind lets the queue's time stand still",
        Invariant.PROGRESS,
        QueueTime,
        "begin",
        _own_clock,
        *("clock_jump", "transfer", "kill", "app_kill"),
        settings=_QUEUE,
    ),
    JobMutation.of(
        "gone_unnoticed",
        "the leases of a worker whose connection broke go on",
        Invariant.PROGRESS,
        Jobs,
        "client_gone",
        _gone_unnoticed,
        "app_kill",
        settings=_LONG,
    ),
    JobMutation.of(
        "withdrawal_unheard",
        "a request that was withdrawn waits on, and gets jobs",
        Invariant.JOB_ANSWERS,
        Jobs,
        "_withdraw",
        lambda jobs, worker, attempt: 1,
        "app_quits",
    ),
    JobMutation.of(
        "withdrawn_too_late",
        "a request that is just being given jobs is withdrawn, and gets them all the same",
        Invariant.JOB_ANSWERS,
        Jobs,
        "_withdraw",
        _withdraw_those_that_wait,
        *("app_quits", "app_slow", "drop", "slow"),
    ),
    JobMutation.of(
        "never_given_back",
        "what was on its way to a request that was withdrawn stays with it",
        Invariant.PROGRESS,
        Jobs,
        "_release",
        lambda jobs, wanted, token, parts, answer: wanted.reply(answer),
        *("app_quits", "app_slow", "slow"),
        settings=_LONG,
    ),
    JobMutation.of(
        "report_unheard",
        "the leases of workers on a node that Ray reports dead go on",
        Invariant.PROGRESS,
        Jobs,
        "nodes_gone",
        lambda jobs, ray_nodes: None,
        "host_gone",
        settings=_LONG,
    ),
    JobMutation.of(
        "report_forgotten",
        "a new leader ends no leases on a node that was reported dead before",
        Invariant.PROGRESS,
        Jobs,
        "lead",
        _lead_as_if_all_lived,
        *("host_gone", "transfer", "kill"),
        settings=_LONG,
    ),
    JobMutation.of(
        "nothing_remembered",
        "a repeated settlement is told that the lease is lost",
        Invariant.JOB_STATE,
        leases,
        "REMEMBERED",
        0,
        *_LOST_ANSWERS,
        also=(Invariant.JOB_ANSWERS, Invariant.JOBS_KEPT),
    ),
    JobMutation.of(
        "leased_again",
        "a repeated request gets other jobs, and the first ones are with nobody",
        Invariant.JOB_STATE,
        Leases,
        "of_attempt",
        lambda leases, worker, attempt: None,
        *_LOST_ANSWERS,
        also=(Invariant.JOBS_KEPT,),
        first_seed=70,
    ),
    JobMutation.of(
        "out_of_order",
        "several jobs of one key are given out at a time",
        Invariant.JOB_STATE,
        JobQueue,
        "_ordered",
        lambda queue, row: False,
        settings=replace(_QUEUE, ordered_by_key=True),
    ),
    JobMutation.of(
        "trimmed",
        "the log is trimmed past jobs that are not done",
        Invariant.JOB_STATE,
        JobQueue,
        "first_place",
        lambda queue, end: end,
        also=(Invariant.NO_SELF_STOP, Invariant.READABLE),
    ),
    JobMutation.of(
        "left_behind",
        "the reasons of a dead letter are trimmed",
        Invariant.JOB_ANSWERS,
        JobQueue,
        "_move",
        _without_texts,
        settings=replace(_QUEUE, max_deliveries=2),
    ),
)
