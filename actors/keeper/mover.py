"""The mover: carries out the moves of ``rayqueue.cluster.moves`` on the partitions' Raft groups.

Part of the keeper, and acts where the keeper does. It begins a move for what is
lost, on a broker that has been away for too long, to be more or fewer, to be
elsewhere, and takes the next step of each move that is under way. It remembers
nothing but how long brokers have been away and how fast moves are: what is done
is in the coordinator's metadata and in each partition's own membership, so a
new leader's mover goes on where this one stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayqueue.actors.keeper.hands import Hands
from rayqueue.actors.keeper.plan import ReplicaKey
from rayqueue.actors.keeper.scout import Scout
from rayqueue.actors.ray_calls import FAILURES
from rayqueue.cluster import moves
from rayqueue.cluster.commands import BeginMove, CancelMove, DropPlanned, FinishMove
from rayqueue.cluster.disks import spare_bytes
from rayqueue.cluster.moves import Move, Need, Reason
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.repairs import Absences, found_of, needs_of, stuck
from rayqueue.cluster.seen import Pace
from rayqueue.cluster.sites import room
from rayqueue.config import ClusterSettings
from rayqueue.errors import ChangeInProgressError, LearnerBehindError, NotInSyncError, RayQueueError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.requests import in_time
from rayqueue.protocol.topics import PartitionInfo
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.status import Status

if TYPE_CHECKING:
    from rayqueue.replica.coordinator_service import ClusterView

_log = logging.getLogger(__name__)

_STATUS_S = 5.0
_CHANGE_S = 30.0
_PACE_S = 10.0
"""The time over which a move's pace is measured."""
_URGENT = (Reason.LOST, Reason.AWAY)


class Mover:
    """Belongs to the event loop of its keeper."""

    def __init__(self, hands: Hands, scout: Scout, settings: ClusterSettings) -> None:
        self._hands = hands
        self._scout = scout
        self._settings = settings
        self._absences = Absences(settings)
        self._waiting_said: set[str] = set()
        self._copied: dict[str, list[tuple[float, int]]] = {}
        """By Raft group: when how many bytes were copied, in the last seconds."""
        self.paces: dict[str, Pace] = {}
        """Of the moves that are under way, by Raft group."""
        self.waiting: dict[str, str] = {}
        """By Raft group: what is to be done, and what that waits for."""

    def lead_no_more(self) -> None:
        """Another coordinator leads: how long brokers were away is its to find out."""
        self._absences.forget()
        self.paces.clear()
        self.waiting.clear()

    def note_away(self, view: ClusterView, here: Collection[str]) -> None:
        """Before anything else of a look: one that is back is given up no longer."""
        brokers = {broker: row.draining for broker, row in view.brokers.items()}
        self._absences.look(time.monotonic(), brokers, here)

    @property
    def given_up(self) -> Mapping[str, str]:
        """Brokers that are not waited for any longer, and why: the same for everybody during one look."""
        return self._absences.given_up

    def look(self, view: ClusterView, alive: Sequence[AliveBroker], sizes: Mapping[str, int]) -> None:
        here = {each.broker for each in alive}
        partitions = {part.group_id: part for info in view.topics.values() for part in info.partitions}
        self.paces = {group_id: pace for group_id, pace in self.paces.items() if group_id in view.moves}
        self._copied = {group_id: seen for group_id, seen in self._copied.items() if group_id in view.moves}
        for group_id, move in view.moves.items():
            self._hands.begin(("move", group_id), self._go_on(move, partitions[group_id], view, here))
        for group_id, learners in self._scout.learners.items():
            if group_id in partitions and group_id not in view.moves and set(learners) - ids_of(partitions[group_id]):
                self._hands.begin(("move", group_id), self._send_away(partitions[group_id]))
        self._begin_some(view, alive, sizes)

    # -- what is to be begun ------------------------------------------------------------------------

    def _begin_some(self, view: ClusterView, alive: Sequence[AliveBroker], sizes: Mapping[str, int]) -> None:
        needs = needs_of(view, alive, self.given_up, replaces=self._settings.replace_after_ms is not None)
        left, spare = room(alive, view.replica_counts, self._settings), spare_bytes(alive, self._settings)
        counts = dict(view.replica_counts)
        # What is urgent does not wait for what is not.
        urgent = self._settings.moves_at_once - sum(move.reason in _URGENT for move in view.moves.values())
        free = self._settings.moves_at_once - len(view.moves)
        self.waiting = stuck(view, self.given_up)
        for need in needs:
            group_id = need.partition.group_id
            if (urgent if need.reason in _URGENT else free) <= 0:
                self.waiting[group_id] = f"{need.why}; waits for its turn (cluster.moves_at_once)"
                continue
            broker = ""
            if need.reason is not Reason.SHRINK:
                size_bytes = sizes.get(group_id, 0)
                found = moves.choose_broker(need, alive, counts, left, spare, size_bytes)
                if found is None:
                    self._no_place(need, alive)
                    continue
                broker = found
                counts[broker] = counts.get(broker, 0) + 1
                if broker in left:
                    left[broker] -= 1
                if broker in spare:
                    spare[broker] -= size_bytes
            urgent -= 1
            free -= 1
            self._hands.begin(("move", group_id), self._begin_move(need, broker))

    def _no_place(self, need: Need, alive: Sequence[AliveBroker]) -> None:
        group_id = need.partition.group_id
        if need.target is not None:
            target = next((each for each in alive if each.broker == need.target), None)
            held = {replica.broker for replica in need.partition.replicas}
            if target is None or not target.stays or need.target in held:
                self._hands.begin(("drop", group_id, need.remove), self._drop(group_id, need.remove))
                return
        self.waiting[group_id] = f"{need.why}; no broker has a place for it now"
        if group_id not in self._waiting_said:
            self._waiting_said.add(group_id)
            _log.error("no broker has a place for another replica of %s: %s", group_id, need.why)

    async def _drop(self, group_id: str, node: str) -> None:
        await self._hands.change(DropPlanned(((group_id, node),)))

    async def _begin_move(self, need: Need, broker: str) -> bool:
        """Only where somebody leads: a group that cannot decide cannot change either. False if nobody does."""
        group_id = need.partition.group_id
        if _leader(await self._statuses(need.partition, None)) is None:
            self.waiting[group_id] = f"{need.why}; nobody leads it"
            if group_id not in self._waiting_said:
                self._waiting_said.add(group_id)
                _log.warning("a replica of %s is to be changed, but nobody leads there: %s", group_id, need.why)
            return False
        self._waiting_said.discard(group_id)
        answer = await self._hands.change(BeginMove(group_id, need.remove, broker, need.reason, need.why))
        if isinstance(answer, Move):
            _log.warning("%s: %s", group_id, _words(answer))
        elif isinstance(answer, RayQueueError):
            raise answer
        return True

    async def _send_away(self, partition: PartitionInfo) -> bool:
        """Learners without a place, of a group that has no move: a request to add one came late, when its move was
        undone. While this step lasts no move of the group is begun, so that nobody gets a place meanwhile."""
        leader = _leader(await self._statuses(partition, None))
        seen = self._scout.learners.pop(partition.group_id, ())
        strangers = set() if leader is None else set(leader.learners) & set(seen) - ids_of(partition)
        if leader is None or not strangers:
            return False
        handle = await self._hands.handle(_key(partition.group_id, leader.replica_id))
        await _done(handle.remove.remote(min(strangers)))
        _log.warning("%s: %s was a learner without a place", partition.group_id, min(strangers))
        return True

    # -- what is under way ----------------------------------------------------------------------------

    async def _go_on(self, move: Move, partition: PartitionInfo, view: ClusterView, here: set[str]) -> bool:
        """False if there was nothing to do but wait."""
        statuses = await self._statuses(partition, move)
        leader = _leader(statuses)
        if leader is None:
            return False  # elections take a moment; the next look asks again
        self._measure(move, leader, statuses.get(move.add))
        found = found_of(
            move,
            leader.replica_id,
            ReplicaSet.of(leader.voters, leader.learners),
            statuses.values(),
            {ReplicaId(each.replica_id): each.broker for each in partition.replicas},
            here,
            self.given_up,
            lost={node for group_id, node in view.lost if group_id == move.group_id},
            unmade=(move.group_id, move.add) in view.unmade,
            settled=leader.settled,
        )
        step = moves.next_step(move, found, here)
        if step is None:
            return False
        handle = await self._hands.handle(_key(move.group_id, leader.replica_id))
        try:
            if isinstance(step, moves.Finish | moves.Cancel) and not await _still_so(handle, leader):
                return False
            await self._take(step, move, partition, handle)
        except (LearnerBehindError, NotInSyncError, ChangeInProgressError) as error:
            _log.debug("%s: %s", move.group_id, error)
            return False
        return True

    async def _take(self, step: moves.Step, move: Move, partition: PartitionInfo, leader: Any) -> None:
        match step:
            case moves.AddLearner(node):
                await _done(leader.add_learner.remote(node))
            case moves.Promote(node):
                await _done(leader.promote.remote(node))
            case moves.Transfer(to):
                await self._scout.transfer(partition, to, *((move.add,) if move.adds else ()))
            case moves.RemoveVoter(node) | moves.RemoveLearner(node):
                await _done(leader.remove.remote(node))
            case moves.Finish():
                await self._hands.change(FinishMove(move.group_id, move.add))
                _log.warning("%s: done: %s", move.group_id, _words(move))
            case moves.Cancel():
                await self._hands.change(CancelMove(move.group_id, move.add))
                _log.warning("%s: not done after all: %s", move.group_id, _words(move))

    def _measure(self, move: Move, leader: Status, new: Status | None) -> None:
        """By entries, for the sizes of two stores cannot be compared."""
        if not move.adds:
            return
        span = max(1, leader.last_index - leader.base_index)
        there = 0 if new is None else min(span, max(0, new.last_index - leader.base_index))
        copied_bytes, now_s = leader.size_bytes * there // span, time.monotonic()
        seen = [each for each in self._copied.get(move.group_id, ()) if now_s - each[0] <= _PACE_S]
        seen.append((now_s, copied_bytes))
        self._copied[move.group_id] = seen
        (first_s, first_bytes), elapsed_s = seen[0], now_s - seen[0][0]
        grown_bytes = max(0, copied_bytes - first_bytes)
        rate = int(grown_bytes / elapsed_s) if first_s < now_s else 0
        self.paces[move.group_id] = Pace(leader.size_bytes, copied_bytes, rate)

    async def _statuses(self, partition: PartitionInfo, move: Move | None) -> dict[str, Status]:
        """What those replicas say that answer."""
        ids = [each.replica_id for each in partition.replicas] + ([move.add] if move is not None and move.adds else [])
        said = await asyncio.gather(*(self._status(_key(partition.group_id, each)) for each in ids))
        return {node: status for node, status in zip(ids, said, strict=True) if status is not None}

    async def _status(self, key: ReplicaKey) -> Status | None:
        try:
            handle = await self._hands.handle(key)
            return await in_time(handle.status.remote(), _STATUS_S)
        except FAILURES:
            return None


def ids_of(partition: PartitionInfo) -> set[ReplicaId]:
    return {ReplicaId(each.replica_id) for each in partition.replicas}


def _leader(statuses: Mapping[str, Status]) -> Status | None:
    """What the replica that leads in the newest term says; None if none does."""
    leading = [status for status in statuses.values() if status.role == "leader"]
    return max(leading, key=lambda status: status.term, default=None)


def _words(move: Move) -> str:
    if not move.adds:
        return f"{move.remove} is given up: {move.why}"
    if not move.remove:
        return f"{move.add} is added on {move.broker}: {move.why}"
    return f"{move.remove} is replaced by {move.add} on {move.broker}: {move.why}"


def _key(group_id: str, node: str) -> ReplicaKey:
    return ReplicaKey(GroupId(group_id), ReplicaId(node))


async def _done(call: Awaitable[Any]) -> None:
    await in_time(call, _CHANGE_S)


async def _still_so(handle: Any, said: Status) -> bool:
    """Whether a majority has confirmed the leader, and the membership is what it said. One that was replaced without
    noticing may say what is long over; whose data is then doomed might be a voter."""
    await _done(handle.confirm_leadership.remote())
    now: Status = await in_time(handle.status.remote(), _STATUS_S)
    return now.settled and (now.voters, now.learners) == (said.voters, said.learners)
