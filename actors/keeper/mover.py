"""The mover: carries out the moves of ``rayqueue.cluster.moves`` on the partitions' Raft groups.

Part of the keeper, and acts where the keeper does. It begins a move for what is
lost, on a broker that has been away for too long, to be more or fewer, to be
elsewhere, and takes the next step of each move that is under way. It remembers
nothing but how long brokers have been away, how fast moves are and which get nowhere: what is
done is in the coordinator's metadata and in each partition's own membership, so a
new leader's mover goes on where this one stopped. It begins nothing before the
scout has looked: until then nobody knows how large partitions are, and how
full disks.
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
from rayqueue.cluster.commands import BeginMove, CancelMove, DropPlanned, FinishMove, ReplicaFound, ReplicaLost
from rayqueue.cluster.disks import promised_bytes, reserve, spare_bytes
from rayqueue.cluster.moves import Move, Need, Reason
from rayqueue.cluster.patience import Patience, Trouble
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
        self._patience = Patience()
        self._waiting_said: set[str] = set()
        self._in_vain: set[str] = set()
        """Raft groups that need a move which could not be begun when that was last tried."""
        self._copied: dict[str, list[tuple[float, int]]] = {}
        """By Raft group: when how many bytes were copied, in the last seconds."""
        self.paces: dict[str, Pace] = {}
        """Of the moves that are under way, by Raft group."""
        self.waiting: dict[str, str] = {}
        """By Raft group: what is to be done, and what that waits for."""

    def lead_no_more(self) -> None:
        """Another coordinator leads: how long brokers were away is its to find out."""
        self._absences.forget()
        self._patience.forget()
        self._in_vain.clear()
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

    def look(self, view: ClusterView, alive: Sequence[AliveBroker], failing: Mapping[ReplicaKey, str]) -> None:
        """``failing``: replicas that could not be made when that was last tried, and why."""
        here = {each.broker for each in alive}
        hopeless = self._never_made(view, failing)
        partitions = {part.group_id: part for info in view.topics.values() for part in info.partitions}
        self.paces = {group_id: pace for group_id, pace in self.paces.items() if group_id in view.moves}
        self._copied = {group_id: seen for group_id, seen in self._copied.items() if group_id in view.moves}
        for group_id, move in view.moves.items():
            why = failing.get(_key(group_id, move.add))
            self._hands.begin(("move", group_id), self._go_on(move, partitions[group_id], view, here, why))
        for group_id, learners in self._scout.learners.items():
            if group_id in partitions and group_id not in view.moves and set(learners) - ids_of(partitions[group_id]):
                self._hands.begin(("move", group_id), self._send_away(partitions[group_id]))
        if self._scout.leaders is not None:
            self._begin_some(view, {**view.lost, **hopeless}, alive, self._scout.leaders)

    def _never_made(self, view: ClusterView, failing: Mapping[ReplicaKey, str]) -> dict[tuple[str, str], str]:
        """Replicas of new topics that could not be made for too long, and why: they are as good as lost."""
        placed = {
            (part.group_id, each.replica_id): Move(part.group_id, each.replica_id, each.broker, "", Reason.LOST)
            for info in view.topics.values()
            for part in info.partitions
            for each in part.replicas
            if _key(part.group_id, each.replica_id) in failing
        }
        self._patience.keep([*view.moves.values(), *placed.values()])
        now_s = time.monotonic()
        return {
            key: f"it cannot be made on {making.broker}: {failing[_key(*key)]}"
            for key, making in placed.items()
            if self._patience.note(now_s, making, Trouble.FAILING)
        }

    # -- what is to be begun ------------------------------------------------------------------------

    def _begin_some(
        self,
        view: ClusterView,
        lost: Mapping[tuple[str, str], str],
        alive: Sequence[AliveBroker],
        led: Collection[str],
    ) -> None:
        replaces, sizes = self._settings.replace_after_ms is not None, self._scout.sizes
        needs = needs_of(view._replace(lost=lost), alive, self.given_up, replaces=replaces, led=led)
        wanting = {need.partition.group_id for need in needs}
        self._in_vain &= wanting
        self._waiting_said &= wanting
        needs.sort(key=lambda need: need.partition.group_id in self._in_vain)  # which others must not wait for
        promised = promised_bytes(view.moves.values(), sizes, self.paces, alive)
        spare = spare_bytes(alive, self._settings, promised)
        left = room(alive, view.replica_counts, self._settings, promised)
        counts = dict(view.replica_counts)
        now_s = time.monotonic()
        # A disk that could not be looked at may be full, or dead.
        avoid = self._patience.avoided(now_s) | {each.broker for each in alive if not each.disk_bytes}
        unseen = {each.broker for each in alive} - self._scout.disks.keys()
        held_up = self._patience.held_up(now_s)
        under_way = [move for group_id, move in view.moves.items() if group_id not in held_up]
        # What is urgent does not wait for what is not.
        urgent = self._settings.moves_at_once - sum(move.reason in _URGENT for move in under_way)
        free = self._settings.moves_at_once - len(under_way)
        before = self.waiting
        self.waiting = {group_id: why for group_id, why in stuck(view, self.given_up).items() if group_id not in led}
        self.waiting |= {group_id: before[group_id] for group_id in self._in_vain & before.keys()}
        for need in needs:
            group_id = need.partition.group_id
            if (urgent if need.reason in _URGENT else free) <= 0:
                self.waiting[group_id] = f"{need.why}; waits for its turn (cluster.moves_at_once)"
                continue
            broker = ""
            if need.reason is not Reason.SHRINK:
                size_bytes = sizes.get(group_id)
                if need.reason is Reason.LOST and need.held_by in unseen:
                    self.waiting[group_id] = f"{need.why}; {need.held_by} has just come"
                    continue
                if size_bytes is None:
                    self.waiting[group_id] = f"{need.why}; how large it is is not known yet"
                    self._hands.begin(("move", group_id), self._learn_size(need.partition))
                    continue
                found = moves.choose_broker(need, alive, counts, left, spare, size_bytes, avoid)
                if found is None:
                    self._no_place(need, alive, size_bytes)
                    if (group_id, need.remove) in view.missing:
                        self._hands.begin(("move", group_id), self._begin_move(need, None, view))
                    continue
                broker = found
                counts[broker] = counts.get(broker, 0) + 1
                if broker in left:
                    left[broker] -= 1
                reserve(spare, alive, broker, size_bytes)
            urgent -= 1
            free -= 1
            self._hands.begin(("move", group_id), self._begin_move(need, broker, view))

    async def _learn_size(self, partition: PartitionInfo) -> bool:
        """The scout asks one replica of each partition, which may be the one that is lost."""
        leader = _leader(await self._statuses(partition, None))
        if leader is not None:
            self._scout.sizes[partition.group_id] = leader.size_bytes
        return leader is not None

    def _no_place(self, need: Need, alive: Sequence[AliveBroker], size_bytes: int) -> None:
        group_id = need.partition.group_id
        if need.target is not None:
            target = next((each for each in alive if each.broker == need.target), None)
            held = {replica.broker for replica in need.partition.replicas}
            if target is None or not target.stays or need.target in held:
                self._hands.begin(("drop", group_id, need.remove), self._drop(group_id, need.remove))
                return
        self.waiting[group_id] = f"{need.why}; no broker has a place for it now ({size_bytes >> 20:,} MiB)"
        if group_id not in self._waiting_said:
            self._waiting_said.add(group_id)
            mib = size_bytes >> 20
            _log.error("no broker has a place for another replica of %s (%d MiB): %s", group_id, mib, need.why)

    async def _drop(self, group_id: str, node: str) -> None:
        await self._hands.change(DropPlanned(((group_id, node),)))

    async def _begin_move(self, need: Need, broker: str | None, view: ClusterView) -> bool:
        """Only where somebody leads: a group that cannot decide cannot change either. A replica that was missing and is
        back is not replaced. No ``broker``: there is no place for a new one. False if nothing was done."""
        group_id = need.partition.group_id
        statuses = await self._statuses(need.partition, None)
        leader = _leader(statuses)
        if leader is None or not await self._is_confirmed(leader):
            self._in_vain.add(group_id)
            self.waiting[group_id] = f"{need.why}; nobody leads it"
            if group_id not in self._waiting_said:
                self._waiting_said.add(group_id)
                _log.warning("a replica of %s is to be changed, but nobody leads there: %s", group_id, need.why)
            return False
        self._waiting_said.discard(group_id)
        if (group_id, need.remove) in view.missing and is_back(need.remove, leader, statuses):
            if need.remove not in leader.in_sync:
                self._in_vain.add(group_id)
                self.waiting[group_id] = f"{need.remove} is back, and catches up"
                return False
            await self._find(group_id, need.remove)
            return True
        if broker is None:
            return False
        answer = await self._hands.change(BeginMove(group_id, need.remove, broker, need.reason, need.why))
        if isinstance(answer, Move):
            _log.warning("%s: %s", group_id, _words(answer))
        elif isinstance(answer, RayQueueError):
            raise answer
        return True

    async def _find(self, group_id: str, node: str) -> None:
        await self._hands.change(ReplicaFound(group_id, node))
        _log.warning("%s: %s runs again with all its data: it was not lost", group_id, node)

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

    async def _go_on(
        self, move: Move, partition: PartitionInfo, view: ClusterView, here: set[str], failing: str | None
    ) -> bool:
        """False if there was nothing to do but wait."""
        statuses = await self._statuses(partition, move)
        leader, new = _leader(statuses), statuses.get(move.add)
        unmade = (move.group_id, move.add) in view.unmade
        trouble = _trouble(move, leader, new, unmade=unmade, fails=failing is not None)
        hopeless = self._patience.note(time.monotonic(), move, trouble)
        if leader is None:
            return False  # elections take a moment; the next look asks again
        self._measure(move, leader, new)
        missing = (move.group_id, move.remove) in view.missing and move.add not in leader.voters
        if missing and move.remove in leader.in_sync and is_back(move.remove, leader, statuses):
            await self._find(move.group_id, move.remove)  # so the next step undoes it
            return True
        lost = {node for group_id, node in view.lost if group_id == move.group_id}
        if hopeless:
            lost.add(move.add)
        if (move.group_id, move.remove) in view.unmade:
            lost.add(move.remove)
        found = found_of(
            move,
            leader.replica_id,
            ReplicaSet.of(leader.voters, leader.learners),
            statuses.values(),
            {ReplicaId(each.replica_id): each.broker for each in partition.replicas},
            here,
            self.given_up,
            lost=lost,
            unmade=unmade,
            settled=leader.settled,
        )
        step = moves.next_step(move, found, here)
        if step is None:
            return False
        if hopeless:
            why = failing or "it does not answer, or its disk is full"
            _log.warning("%s: %s on %s is given up: %s", move.group_id, move.add, move.broker, why)
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
            case moves.Cancel(old_is_out):
                if old_is_out:
                    await self._hands.change(ReplicaLost(move.group_id, move.remove, "it is not in its group any more"))
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

    async def _is_confirmed(self, leader: Status) -> bool:
        """Whether a majority says that it leads. One that lost its majority a moment ago believes that it does."""
        try:
            handle = await self._hands.handle(_key(leader.group_id, leader.replica_id))
            await in_time(handle.confirm_leadership.remote(), _STATUS_S)
        except FAILURES:
            return False
        return True

    async def _status(self, key: ReplicaKey) -> Status | None:
        try:
            handle = await self._hands.handle(key)
            return await in_time(handle.status.remote(), _STATUS_S)
        except FAILURES:
            return None


def ids_of(partition: PartitionInfo) -> set[ReplicaId]:
    return {ReplicaId(each.replica_id) for each in partition.replicas}


def is_back(node: str, leader: Status, statuses: Mapping[str, Status]) -> bool:
    """Whether a replica that was missing runs, is sure of what it promised, and its leader knows nothing against it."""
    own = statuses.get(node)
    return (
        own is not None
        and own.damaged is None
        and own.doubted is None
        and node in leader.voters
        and node not in leader.forgetful
    )


def _trouble(move: Move, leader: Status | None, new: Status | None, *, unmade: bool, fails: bool) -> Trouble | None:
    if leader is None:
        return Trouble.LEADERLESS
    if not move.adds or move.add in leader.voters:
        return None
    if unmade:
        return Trouble.FAILING if fails else None
    return Trouble.SILENT if new is None or new.read_only else None


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
