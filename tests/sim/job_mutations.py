"""Each rule of work queues, switched off: the simulator must notice every time.

As in ``mutations``, one method is replaced while a schedule runs; ``faults`` and
``settings`` narrow what happens to what the rule is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from rayqueue.partition import PartitionSettings
from rayqueue.partition.jobs import leases
from rayqueue.partition.jobs.commands import ChangeJobs, Request, Settle
from rayqueue.partition.jobs.facts import Dedupes
from rayqueue.partition.jobs.frontier import Frontier
from rayqueue.partition.jobs.index import FairReady, Timer
from rayqueue.partition.jobs.leases import Lease, Leases
from rayqueue.partition.jobs.queue import Grant, JobQueue, Moved
from rayqueue.partition.jobs.rows import JobRow, Note, State
from rayqueue.partition.jobs.runs import Part
from rayqueue.protocol.jobs import JobOptions, LeaseJobs, Settled
from rayqueue.replica.jobs import Jobs, QueueTime, Reply
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


def _gave_part(jobs: Jobs, wanted: Any, token: int, parts: Sequence[Part], answer: Any) -> None:
    """An answer that was cut is given though nobody wants it by the time that the rest is given back."""
    wants, jobs._is_wanted = jobs._is_wanted, lambda wanted: True  # type: ignore[method-assign]
    before = len(jobs._settles)
    _release(jobs, wanted, token, parts, answer)
    jobs._is_wanted = wants  # type: ignore[method-assign]
    for at, (released, several) in enumerate(jobs._settles[before:], before):

        def answered(result: Any, released: Any = released) -> None:
            withdrawn, wanted.withdrawn = wanted.withdrawn, False
            released(result)
            wanted.withdrawn = withdrawn

        jobs._settles[at] = answered, several


_release = Jobs._release


def _live_for_ever(queue: JobQueue, job_id: int, time_ms: int, timer: Timer) -> None:
    if timer is not Timer.TTL:
        _due(queue, job_id, time_ms, timer)


_due = JobQueue._due


def _unforgiven(queue: JobQueue, row: JobRow) -> None:
    """A job that is redriven has none of its deliveries before it again."""
    _redrive(queue, row)
    row.forgiven = 0


_redrive = JobQueue._redrive


def _both(queue: JobQueue, row: JobRow) -> None:
    """A dead letter that is redriven, or purged, stays among the dead letters."""
    was_dead = row.state == State.DEAD
    _leave(queue, row)
    if was_dead:
        queue.dead.add(row)


_leave = JobQueue._leave


def _purge_alive(queue: JobQueue, command: ChangeJobs) -> int:
    """What is purged has to be no dead letter."""
    purged = 0
    for job_id in command.ids if command.kind == "purge" else ():
        row = queue.rows.get(job_id)
        if row is not None and row.state in (State.READY, State.DELAYED):
            queue._leave(row)
            queue._forget(row)
            purged += 1
    return _change(queue, command) + purged


_change = JobQueue.change


def _give_cancelled(
    queue: JobQueue, gathered: list[tuple[int, int | JobRow, int]], first: int, count: int, lane: int
) -> int:
    """Jobs that were cancelled are given out all the same."""
    cancelled, queue.counts.cancelled = queue.counts.cancelled, 0
    found = _add_run(queue, gathered, first, count, lane)
    queue.counts.cancelled = cancelled
    return found


_add_run = JobQueue._add_run


def _extend_for_ever(queue: JobQueue, lease: Lease | None, told: Settle) -> Settled:
    settings, queue.settings = queue.settings, replace(queue.settings, max_lease_ms=900_000)
    settled = _extend(queue, lease, told)
    queue.settings = settings
    return settled


_extend = JobQueue._extend


def _lowest_first(queue: JobQueue, wanted: int, now_ms: int) -> list[tuple[int, int | JobRow, int]]:
    """A lower lane's jobs are given out while a higher one has some."""
    fronts, highest = queue.frontiers, queue.settings.lanes - 1
    queue.frontiers = {highest - lane: front for lane, front in fronts.items()}
    gathered = _gather(queue, wanted, now_ms)
    queue.frontiers = fronts
    return [(first, each, highest - lane if isinstance(each, int) else lane) for first, each, lane in gathered]


_gather = JobQueue._gather


def _copied_ahead(queue: JobQueue, job_id: int) -> int | None:
    """A job that is moved from ahead of a frontier stays there, too."""
    return next((lane for lane, front in queue.frontiers.items() if front.count and front.first() == job_id), None)


def _refuse_late(queue: JobQueue, lease: Lease | None, job_id: int, told: Settle, note: Note) -> bool:
    """A late settlement does not count, though nobody else has been given the job."""
    row = queue.rows.get(job_id)
    waits = row is not None and row.state in (State.READY, State.DELAYED)
    return not waits and _settle_other(queue, lease, job_id, told, note)


def _try_again(queue: JobQueue, row: JobRow, told: Settle, note: Note) -> None:
    """A job that is rejected is tried again."""
    _settle_row(queue, row, replace(told, kind="nack") if told.kind == "reject" else told, note)


def _count_released(queue: JobQueue, row: JobRow, told: Settle, note: Note) -> None:
    """A delivery that was handed back counts."""
    row.deliveries += told.kind == "release"
    _settle_row(queue, row, told, note)


_settle_row = JobQueue._settle_row


def _without_bound(queue: JobQueue, request: Request) -> Grant | None:
    """More jobs are leased at a time than may be."""
    settings, queue.settings = queue.settings, replace(queue.settings, max_leased=1_000_000)
    grant = _lease(queue, request)
    queue.settings = settings
    return grant


_lease = JobQueue._lease


def _own_turn(ready: FairReady, lane: int, key: bytes) -> None:
    """A key's turn comes again and again before all others."""
    number, ready.next_turn = ready.next_turn, key[0]
    _give_turn(ready, lane, key)
    ready.next_turn = number + 1


_give_turn = FairReady._give_turn


def _put_unscheduled(queue: JobQueue, job_id: int, lane: int, key: Any, options: JobOptions, **more: Any) -> None:
    """A job is given out before its time."""
    _put(queue, job_id, lane, key, replace(options, deliver_at_ms=0), **more)


_put = JobQueue._put


def _finish_without(queue: JobQueue, row: JobRow, result: bytes | None) -> None:
    """What a job was acknowledged with is not kept."""
    _finish(queue, row, None)


_finish = JobQueue._finish


def _lease_some(jobs: Jobs, client: int, request: int, call: LeaseJobs, reply: Reply) -> None:
    """Who wants all of so many jobs, or none, gets some."""
    _lease_call(jobs, client, request, replace(call, least_jobs=1), reply)


_lease_call = Jobs._lease


def _as_at_first_ms(queue: JobQueue, row: JobRow) -> int:
    """A job that has failed several times waits as after the first time."""
    return _backoff_ms(queue, replace(row, forgiven=row.deliveries - 1))


_backoff_ms = JobQueue._backoff_ms

_LOST_ANSWERS = ("app_cut", "app_reset", "kill", "partition", "transfer")
_LATE = ("app_pause", "app_cut", "app_slow", "app_reset")

_OPERATED = ("app_operates", "app_kill")
_QUEUE = PartitionSettings(queue=True, lease_ms=1_500, max_lease_ms=4_000, max_deliveries=3)
_LONG = PartitionSettings(queue=True, lease_ms=900_000, max_lease_ms=900_000, max_deliveries=None)
_BACK_OFF = replace(_QUEUE, max_deliveries=None, retry_backoff_ms=100, retry_backoff_max_ms=1_000)

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
        lambda jobs, wanted, token, parts, answer: (jobs._proposed.pop(wanted, None), wanted.reply(answer)),
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
    JobMutation.of(
        "cut_and_given",
        "an answer that was cut is given though its request was withdrawn",
        Invariant.JOB_ANSWERS,
        Jobs,
        "_release",
        _gave_part,
        *("app_quits", "app_slow", "drop", "slow"),
    ),
    JobMutation.of(
        "acked_in_part",
        "of jobs that are to be acknowledged all or none, some are",
        Invariant.JOB_STATE,
        JobQueue,
        "_acks",
        lambda queue, token, lease, job_id: True,
        *_LATE,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "outlived",
        "a job is given out after its time to live",
        Invariant.JOB_STATE,
        JobQueue,
        "_due",
        _live_for_ever,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "put_twice",
        "a job is put though one with its dedupe_id is there",
        Invariant.JOB_STATE,
        Dedupes,
        "first",
        lambda dedupes, dedupe_id, now_ms: None,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "unforgiven",
        "a job that was redriven has not all of its deliveries before it again",
        Invariant.JOB_STATE,
        JobQueue,
        "_redrive",
        _unforgiven,
        *_OPERATED,
        settings=replace(_QUEUE, max_deliveries=2),
    ),
    JobMutation.of(
        "alive_and_dead",
        "a job that was redriven is still a dead letter",
        Invariant.JOB_STATE,
        JobQueue,
        "_leave",
        _both,
        *_OPERATED,
        settings=replace(_QUEUE, max_deliveries=2),
    ),
    JobMutation.of(
        "purged_alive",
        "a job that is no dead letter is purged",
        Invariant.JOB_STATE,
        JobQueue,
        "change",
        _purge_alive,
        *_OPERATED,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "cancelled_and_given",
        "a job that was cancelled is given out",
        Invariant.JOB_STATE,
        JobQueue,
        "_add_run",
        _give_cancelled,
        *_OPERATED,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "extended_for_ever",
        "a lease is extended beyond max_lease_ms",
        Invariant.JOB_STATE,
        JobQueue,
        "_extend",
        _extend_for_ever,
        "app_kill",
        settings=replace(_QUEUE, max_lease_ms=2_000),
    ),
    JobMutation.of(
        "lanes_upside_down",
        "a job of a lower lane is given out before one of a higher lane",
        Invariant.JOB_STATE,
        JobQueue,
        "_gather",
        _lowest_first,
        settings=replace(_QUEUE, lanes=3),
    ),
    JobMutation.of(
        "handed_back_to_nobody",
        "jobs that were handed back are given to nobody any more",
        Invariant.JOB_STATE,
        Frontier,
        "put_back",
        lambda front, start, count: None,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "moved_and_ahead",
        "a job that waits ahead of a frontier is moved, and stays there",
        Invariant.JOB_STATE,
        JobQueue,
        "_taken_ahead",
        _copied_ahead,
        settings=replace(_QUEUE, lanes=2),
    ),
    JobMutation.of(
        "late_and_refused",
        "a late acknowledgement is refused though nobody else has been given the job",
        Invariant.JOB_STATE,
        JobQueue,
        "_settle_other",
        _refuse_late,
        *_LATE,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "rejected_and_tried",
        "a job that is rejected is tried again",
        Invariant.JOB_STATE,
        JobQueue,
        "_settle_row",
        _try_again,
        settings=replace(_QUEUE, max_deliveries=None),
    ),
    JobMutation.of(
        "released_and_counted",
        "a delivery that was handed back counts",
        Invariant.JOB_STATE,
        JobQueue,
        "_settle_row",
        _count_released,
        settings=_QUEUE,
    ),
    JobMutation.of(
        "too_many_leased",
        "more jobs are leased at a time than may be",
        Invariant.JOB_STATE,
        JobQueue,
        "_lease",
        _without_bound,
        settings=replace(_QUEUE, max_leased=3),
    ),
    JobMutation.of(
        "out_of_turn",
        "one key is served again and again while others wait",
        Invariant.JOB_STATE,
        FairReady,
        "_give_turn",
        _own_turn,
        settings=replace(_QUEUE, fair_by_key=True),
    ),
    JobMutation.of(
        "too_early",
        "a job is given out before the time for which it was put",
        Invariant.JOB_STATE,
        JobQueue,
        "_put",
        _put_unscheduled,
        "app_schedules",
        settings=_QUEUE,
    ),
    JobMutation.of(
        "result_lost",
        "the result of a job is not kept",
        Invariant.JOB_STATE,
        JobQueue,
        "_finish",
        _finish_without,
        "app_tells",
        settings=_QUEUE,
    ),
    JobMutation.of(
        "leased_in_part",
        "who wants all of so many jobs, or none, gets some",
        Invariant.JOB_ANSWERS,
        Jobs,
        "_lease",
        _lease_some,
        "app_wants_all",
        settings=_QUEUE,
    ),
    JobMutation.of(
        "without_back_off",
        "a failed job is tried again at once",
        Invariant.JOB_STATE,
        JobQueue,
        "_backoff_ms",
        lambda queue, row: 0,
        "app_backs_off",
        settings=_BACK_OFF,
    ),
    JobMutation.of(
        "back_off_stands_still",
        "a job that fails again and again waits no longer each time",
        Invariant.JOB_STATE,
        JobQueue,
        "_backoff_ms",
        _as_at_first_ms,
        "app_backs_off",
        settings=_BACK_OFF,
    ),
)
