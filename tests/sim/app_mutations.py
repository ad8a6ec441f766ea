"""Each rule of the clients, switched off: the simulator must notice every time, from the application's side.

As in ``mutations``, one method is replaced while a schedule runs; ``manners`` narrows
how consumers read, and ``zombies`` makes many of them (``AppWorld``).
"""

from __future__ import annotations

from typing import Any

from rayqueue.client.consumer.assigned import AssignedPartition, Plan
from rayqueue.client.consumer.commits import Commits
from rayqueue.client.consumer.lane import Chunk, Lane
from rayqueue.client.consumer.poll import Polling, _still_read
from rayqueue.client.consumer.subscription import ChangeKind, Subscription
from rayqueue.errors import NotLeaderError, RayQueueError, StaleGenerationError
from rayqueue.net.write_queue import WriteQueue
from rayqueue.net.write_window import WriteWindow
from rayqueue.partition import Admission
from rayqueue.protocol.calls import Position
from rayqueue.protocol.data import FetchAnswer
from tests.sim.app_world import AppWorld
from tests.sim.apps import Manners
from tests.sim.frame import Mutation
from tests.sim.invariants import Invariant


class AppMutation(Mutation):
    make = AppWorld


def _any_epoch(assigned: AssignedPartition, plan: Plan, answer: FetchAnswer) -> list[Lane]:
    """An answer to a fetch of before a seek is taken like any other."""
    return _received(assigned, plan._replace(epoch=assigned.epoch), answer)


_received = AssignedPartition.received


def _whole_batch(lane: Lane, base: int, count: int, payload: memoryview | bytes) -> int:
    """A batch is handed out whole, also what of it came before."""
    if base + count <= lane.cursor:
        return 0
    lane.chunks.append(Chunk(base, base, base + count, payload))
    lane.cursor = base + count
    return len(payload)


async def _hand_out_first(polling: Polling, taken: Any, held: Any) -> Any:
    """The commit goes on while the application works already."""
    polling._sub.ack_handed()
    polling._io.run(polling._core.commit_due())
    return taken


async def _hand_out_what_was_lost(polling: Polling, taken: Any, held: Any) -> Any:
    """A partition that was lost and given back in the meantime counts as kept."""
    await _commit_first(polling, taken, held)
    return _still_read(taken, polling._sub.assigned)


_commit_first = Polling._commit_first


async def _take_refusal_for_success(commits: Commits, *arguments: Any, **options: Any) -> None:
    commits.on_stale = lambda assigned, error: None
    try:
        await _commit(commits, *arguments, **options)
    except StaleGenerationError:
        return


_commit = Commits.commit


def _forfeit_what_is_due(
    subscription: Subscription, kind: ChangeKind, partitions: Any, *, deleted: bool = False
) -> None:
    """What was handed out last is not due yet, so a commit of it does not hear that its partition was lost."""
    partitions = tuple(partitions)
    forfeited = subscription.forfeited | {each.partition for each in partitions if each.due() is not None}
    _announce(subscription, kind, partitions, deleted=deleted)
    if kind is ChangeKind.LOST and not deleted:
        subscription.forfeited = forfeited


_announce = Subscription.announce


async def _read_unclaimed(commits: Commits, assigned: AssignedPartition, **_: Any) -> Position:
    """Begin at the group's position without fencing off whoever read the partition before."""
    found = await commits.position(assigned.partition, assigned.topic_id)
    return found or Position(0, {})


def _end_in_memory(assigned: AssignedPartition) -> int:
    """What was fetched is still handed out when the partition is let go."""
    assigned._new_epoch()
    return 0


def _number_again(queue: WriteQueue) -> None:
    """What may be written is taken for not written, and numbered again."""
    for batch in queue.window:
        batch.maybe_written = False
    queue.hold([batch for batch in queue.window if not batch.settled])
    queue._put_back(())
    _tidy(queue)


_tidy = WriteQueue.tidy


def _too_late_is_failed(window: WriteWindow, *, unsure: bool) -> RayQueueError:
    return NotLeaderError("not acknowledged in time", leader=None)


def _same_epoch(queue: WriteQueue) -> None:
    """Numbers begin at 0 again, in the epoch that had them."""
    queue._epoch -= 1
    _begin_epoch(queue)


_begin_epoch = WriteQueue.begin_epoch


def _applied_only(admission: Admission) -> tuple[int, int]:
    backlog = admission._partition.backlog()
    return backlog.records, backlog.size_bytes


_mutation = AppMutation.of

_ZOMBIES = ("app_pause", "app_cut", "app_reset")

_LOST_ANSWERS = ("app_cut", "app_reset", "kill", "partition", "pause")

APP_MUTATIONS = (
    _mutation(
        "unsure_numbered_again",
        "a batch that may be written gets another number",
        Invariant.ONCE,
        WriteQueue,
        "tidy",
        _number_again,
        *_LOST_ANSWERS,
    ),
    _mutation(
        "unknown_is_failed",
        "what was not acknowledged in time is reported as not written",
        Invariant.TRUE_OUTCOME,
        WriteWindow,
        "_too_late",
        _too_late_is_failed,
        *_LOST_ANSWERS,
    ),
    _mutation(
        "no_new_epoch",
        "numbers begin again in the same epoch",
        Invariant.ACKNOWLEDGED,
        WriteQueue,
        "begin_epoch",
        _same_epoch,
        *_LOST_ANSWERS,
    ),
    _mutation(
        "commit_what_is_fetched",
        "what waits in memory is committed as if it was handed out",
        Invariant.NONE_SKIPPED,
        Lane,
        "committable",
        property(lambda lane: lane.cursor),
        manners=Manners(),
    ),
    _mutation(
        "commit_what_is_handed",
        "what was handed out is committed before the application is through with it",
        Invariant.NONE_SKIPPED,
        Lane,
        "committable",
        property(lambda lane: lane.position),
        manners=Manners(by_record=True),
    ),
    _mutation(
        "answers_of_before_a_seek",
        "what was fetched before a seek is handed out after it",
        Invariant.IN_ORDER,
        AssignedPartition,
        "received",
        _any_epoch,
        "app_slow",
        manners=Manners(seeks=True),
        # Where it is handed out at the wrong place, a record may also be left out; and where there is one lane only,
        # the client may notice by itself that the answer does not fit.
        also=(Invariant.NONE_SKIPPED, Invariant.SOUND_CLIENT),
    ),
    _mutation(
        "whole_batches",
        "a batch that begins before the position is handed out from its beginning",
        Invariant.AT_MOST_ONCE,
        Lane,
        "received",
        _whole_batch,
        "app_leave",
        manners=Manners("at_most_once"),
    ),
    _mutation(
        "hand_out_first",
        "at most once, and handed out before the commit",
        Invariant.AT_MOST_ONCE,
        Polling,
        "_commit_first",
        _hand_out_first,
        *("app_kill", "app_cut", "app_slow"),
        manners=Manners("at_most_once"),
    ),
    _mutation(
        "given_back",
        "at most once, and a partition that was lost and given back during the commit counts as kept",
        Invariant.AT_MOST_ONCE,
        Polling,
        "_commit_first",
        _hand_out_what_was_lost,
        *_ZOMBIES,
        manners=Manners("at_most_once"),
        zombies=True,
        size=1,
    ),
    _mutation(
        "refusals_unheard",
        "a commit that a newer generation fenced off is taken for done",
        Invariant.COMMITTED,
        Commits,
        "commit",
        _take_refusal_for_success,
        *_ZOMBIES,
        manners=Manners(auto_commit=False),
        zombies=True,
        size=1,
    ),
    _mutation(
        "lost_at_work",
        "a commit of what is being worked on seems to succeed though the partition was lost",
        Invariant.COMMITTED,
        Subscription,
        "announce",
        _forfeit_what_is_due,
        *_ZOMBIES,
        manners=Manners(auto_commit=False, slow=True),
        zombies=True,
        size=1,
    ),
    _mutation(
        "no_claim",
        "a new owner does not fence off the old one",
        Invariant.FENCED,
        Commits,
        "claim",
        _read_unclaimed,
        *_ZOMBIES,
        manners=Manners(auto_commit=False),
        zombies=True,
        size=1,
    ),
    _mutation(
        "after_it_is_told",
        "records are handed out after the partition was let go",
        Invariant.ASSIGNED,
        AssignedPartition,
        "end",
        _end_in_memory,
        "app_leave",
        manners=Manners(listened=True),
    ),
    _mutation(
        "bound_of_what_is_applied",
        "a bound does not count what is proposed already",
        Invariant.BOUNDED,
        Admission,
        "_present",
        _applied_only,
        bound=6,
    ),
    _mutation(
        "bound_at_once",
        "a new leader judges by a bound before it has applied what it found",
        Invariant.BOUNDED,
        Admission,
        "_check_settled",
        lambda admission: None,
        "pause",
        "transfer",
        "kill",
        size=3,
        manners=Manners(),
        bound=6,
    ),
)
