"""Moves: replicas of partitions that are replaced, one Raft membership change after the other. Pure.

A replica's place in its group is never taken by another one under the same id:
whoever lost its disk, or may come back with an old one, has voted and
acknowledged under that id. So a replica that is lost, damaged, or on a broker
that is gone for good is replaced by a new one with an id that nobody had.

A move is written down in the coordinator's log (``BeginMove``) before anything
is done about it, and struck out by its end (``FinishMove``, ``CancelMove``).
In between everybody who leads can go on with it by looking at two things, the
note and the membership that the partition's own Raft group has. In this order,
so that the group can decide at every moment:

1. The new replica's data is made, as that of any new replica (``ReplicasMade``).
2. It joins its group as a learner, and receives the log. Learners count in no majority.
3. Once it has nearly all, it becomes a voter. The leader refuses this before (``LearnerBehindError``).
4. The old one, if it leads, hands the leadership over; then it is removed from the group.
5. The new one takes the old one's place in the metadata, and the old one's data is doomed.

A move may also have only one half: a topic that is to have more copies gets a
new replica and loses none (steps 1 to 3), one that is to have fewer loses one
and gets none (step 4). A copy that is well is never given up while another one of its
partition is away, and never one that leads: it hands over first.

A move whose new replica is lost, or its broker, before step 3 is undone, and
another place is looked for; so is one whose new replica cannot be made (``patience``).
After step 3 it is finished, if the others can decide without the old one and it does
not lead: the new replica is the one that has to be replaced then. A move for a broker
that was away is undone, too, if that broker is back before step 3: what it has is worth
more than what would be copied. So is one for a replica that was only missing, and is
found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import msgspec

from rayqueue.cluster.placement import AliveBroker, crowding
from rayqueue.ids import ReplicaId
from rayqueue.protocol.topics import PartitionInfo
from rayqueue.raft.replica_set import ReplicaSet


class Reason(str, Enum):
    """Why a replica is replaced."""

    LOST = "lost"
    """Its data is gone, damaged, or older than it should be."""
    AWAY = "away"
    """Its broker is given up (``rayqueue.cluster.repairs.Absences``)."""
    DRAIN = "drain"
    """Its broker is to be emptied."""
    ASKED = "asked"
    """An operator wants it elsewhere."""
    GROW = "grow"
    """Its topic is to have more copies."""
    SHRINK = "shrink"
    """Its topic is to have fewer."""
    BALANCE = "balance"
    """It is part of a rebalance (``rayqueue.cluster.rebalance``)."""


class Move(msgspec.Struct, frozen=True, array_like=True):
    """A row of the coordinator's table: the move that is under way in one group."""

    group_id: str
    add: str
    """The new replica. Without a ``broker`` none is made, and this only tells the move from others."""
    broker: str
    """Where the new one is; "" if there is none."""
    remove: str
    """The old one; "" if there is none."""
    reason: Reason
    why: str = ""
    """In words, for operators."""

    @property
    def adds(self) -> bool:
        return bool(self.broker)


class AddLearner(NamedTuple):
    replica_id: ReplicaId


class RemoveLearner(NamedTuple):
    """The move is undone: first in the group, then in the metadata."""

    replica_id: ReplicaId


class Promote(NamedTuple):
    replica_id: ReplicaId


class Transfer(NamedTuple):
    """The old replica leads: it cannot remove itself."""

    to: ReplicaId


class RemoveVoter(NamedTuple):
    replica_id: ReplicaId


class Finish(NamedTuple):
    pass


class Cancel(NamedTuple):
    old_is_out: bool = False
    """The old one has left the group, for a request to remove the new one came when that voted. So the old one is lost,
    too, and another move has to replace it."""


Step = AddLearner | RemoveLearner | Promote | Transfer | RemoveVoter | Finish | Cancel


class Found(NamedTuple):
    """What is known of a move's group when the next step is looked for."""

    members: ReplicaSet
    """As the group's leader knows them."""
    leader: ReplicaId
    unmade: bool
    """The new replica's data is still to be made."""
    lost: bool
    """The new replica has lost its data already, or some of it."""
    old_broker: str
    well: Collection[ReplicaId] = ()
    """Those that answer, and report no damage."""
    away: Collection[ReplicaId] = ()
    """Those whose broker is not here, or whose data is lost."""
    gone: Collection[ReplicaId] = ()
    """Those of them that are not waited for: they are to be replaced, too, once this is done."""
    settled: bool = True
    """The membership is committed. Else the group may return to the one before it."""
    found_again: bool = False
    """The old one is not lost, though the move was begun because it was."""
    strangers: Collection[ReplicaId] = ()
    """Learners that have no place: a request to add one came late, when its move had been undone."""


def next_step(move: Move, found: Found, here: Collection[str]) -> Step | None:
    """What comes next, given the brokers that are ``here``. None: wait."""
    if found.strangers:
        return RemoveLearner(min(found.strangers))
    step = _step(move, found, here)
    # Whose data is doomed by the end of the move must be out of its group for good.
    return None if isinstance(step, Finish | Cancel) and not found.settled else step


def _step(move: Move, found: Found, here: Collection[str]) -> Step | None:
    add, remove, members = ReplicaId(move.add), ReplicaId(move.remove), found.members
    if not move.adds:
        return _give_up(remove, found)
    if add not in members.voters:
        came_back = found.found_again or (move.reason is Reason.AWAY and found.old_broker in here)
        came_back &= remove in members.voters
        if found.lost or came_back or move.broker not in here:
            old_is_out = remove != "" and remove not in members.everyone
            return RemoveLearner(add) if add in members.learners else Cancel(old_is_out)
        if found.unmade:
            return None
        return Promote(add) if add in members.learners else AddLearner(add)
    if remove and remove == found.leader:
        # One that leads is of more use than one that is gone: then the move is undone after all.
        return RemoveVoter(add) if found.lost or move.broker not in here else Transfer(add)
    if remove not in members.everyone:
        return Finish()
    if _can_go(remove, found):
        return RemoveVoter(remove)
    # The old one is needed. Either the new one is of no use, or another one that is gone for good is in the way.
    if (found.lost or move.broker not in here) and add != found.leader:
        return RemoveVoter(add)
    others = sorted((members.voters & set(found.gone)) - {add, remove, found.leader})
    return RemoveVoter(others[0]) if others else None


def _can_go(remove: ReplicaId, found: Found) -> bool:
    """Without it the others can still decide. One that is not well helps nobody; one that is may be what a group with
    an even number of voters, of which one is away, hangs on."""
    rest = found.members.without(remove)
    return remove not in found.well or rest.is_majority(found.well)


def _give_up(remove: ReplicaId, found: Found) -> Step | None:
    members = found.members
    if remove not in members.everyone:
        return Finish()
    others = members.voters - {remove}
    needed = remove in found.well and not (remove in found.gone and _can_go(remove, found))
    if not others or (needed and others & set(found.away)):
        return Cancel()  # one that is away is to go first; or all others have gone meanwhile
    ready = sorted(others & set(found.well))
    if needed and len(ready) < len(others):
        return None  # one of them does not answer just now
    if remove == found.leader:
        return Transfer(ready[0]) if ready else None
    return RemoveVoter(remove)


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """A row of the coordinator's table: a move of a rebalance that was not begun yet."""

    group_id: str
    remove: str
    broker: str
    """Where the new replica is to be."""
    size_bytes: int = 0
    """Of the partition, as far as it was known."""


class Wishes(NamedTuple):
    """What there should be besides health."""

    replication: Mapping[str, int] = {}
    """Copies of each partition, by Raft group, where that is not what it has."""
    planned: Sequence[Planned] = ()
    unmade: Collection[str] = ()
    """Groups with a replica that was never made: their number stays until it is."""
    alive: Sequence[AliveBroker] = ()


class Need(NamedTuple):
    """A replica that should be replaced."""

    partition: PartitionInfo
    remove: str
    """"" if it gets one more."""
    reason: Reason
    why: str
    target: str | None = None
    """The broker that a plan names."""

    @property
    def held_by(self) -> str | None:
        """The broker of the one that goes."""
        return next((each.broker for each in self.partition.replicas if each.replica_id == self.remove), None)


def needs(
    partitions: Iterable[PartitionInfo],
    lost: Mapping[tuple[str, str], str],
    away: Mapping[str, str],
    moving: Collection[str],
    draining: Collection[str] = (),
    wishes: Wishes | None = None,
    led: Collection[str] = (),
) -> list[Need]:
    """One replica per partition, those first whose partition can afford no further loss; then copies that are missing.

    ``lost``: replicas, by Raft group and id, and what became of them. ``away``: brokers that are given up, and why.
    ``moving``: groups that have a move already. ``draining``: brokers that are to be emptied, which can wait.
    ``led``: groups that somebody leads. They decide, so a majority of them is well whatever was reported: disks that
    were mounted late were lost, and are back.
    """
    wishes = wishes or Wishes()
    found: list[tuple[int, Need]] = []
    planned: dict[str, Planned] = {}
    for each in wishes.planned:
        planned.setdefault(each.group_id, each)
    known = {each.broker: each for each in wishes.alive}
    for partition in partitions:
        if partition.group_id in moving:
            continue
        ill: list[Need] = []
        leaving: list[Need] = []
        for replica in partition.replicas:
            why = lost.get((partition.group_id, replica.replica_id))
            if why is not None:
                ill.append(Need(partition, replica.replica_id, Reason.LOST, why))
            elif replica.broker in away:
                ill.append(Need(partition, replica.replica_id, Reason.AWAY, away[replica.broker]))
            elif replica.broker in draining:
                leaving.append(
                    Need(partition, replica.replica_id, Reason.DRAIN, f"broker {replica.broker} is to be emptied")
                )
        healthy = len(partition.replicas) - len(ill)
        margin = healthy - (len(partition.replicas) // 2 + 1)
        in_doubt = cannot_decide(healthy, len(partition.replicas))
        if in_doubt:
            if partition.group_id not in led:
                continue
            margin = 0  # or more: not before those of which it is known
        wanted = wishes.replication.get(partition.group_id, len(partition.replicas))
        if partition.group_id in wishes.unmade:
            wanted = len(partition.replicas)
        if wanted < len(partition.replicas) and not in_doubt:  # else the one that is given up might be the one needed
            worst = (ill + leaving)[0].remove if ill or leaving else _dispensable(partition, known)
            need = Need(partition, worst, Reason.SHRINK, f"its topic is to have {wanted} copies")
            found.append((margin if ill else _CAN_WAIT + 1, need))
        elif ill:
            found.append((margin, ill[0]))
        elif wanted > len(partition.replicas):
            found.append((_CAN_WAIT, Need(partition, "", Reason.GROW, f"its topic is to have {wanted} copies")))
        elif leaving:
            found.append((_CAN_WAIT + 2, leaving[0]))
        elif (plan := planned.get(partition.group_id)) is not None:
            found.append((_CAN_WAIT + 3, Need(partition, plan.remove, Reason.BALANCE, "rebalance", plan.broker)))
    return [need for _, need in sorted(found, key=lambda each: (each[0], each[1].partition.group_id))]


def cannot_decide(healthy: int, copies: int) -> bool:
    """Without a majority nothing can be decided. Of two, the one that is gone may have left the group already."""
    return not healthy or 2 * healthy < copies


_CAN_WAIT = 100
"""More than any margin."""


def _dispensable(partition: PartitionInfo, known: Mapping[str, AliveBroker]) -> str:
    """The copy that is missed least: one that is away, then one without which the others share least; not the first."""
    held = [replica.broker for replica in partition.replicas]

    def loss(position: int) -> tuple[bool, tuple[int, int, int], int]:
        rest = held[:position] + held[position + 1 :]
        return held[position] in known, crowding(rest, known), -position

    return partition.replicas[min(range(len(held)), key=loss)].replica_id


def choose_broker(
    need: Need,
    alive: Sequence[AliveBroker],
    counts: Mapping[str, int],
    room: Mapping[str, int],
    spare_bytes: Mapping[str, int] | None = None,
    size_bytes: int = 0,
    avoid: Collection[str] = (),
) -> str | None:
    """Where the new replica goes; None if there is no place for it now.

    A lost replica's own broker, if it is here and its disk has space: only the data is gone. Otherwise one that has no
    copy of this partition yet and has room, in a rack, then on a host without a copy if there is one, with as few
    replicas as possible. ``spare_bytes``: what may still be written to each disk; one that is not named takes any
    number. ``avoid``: brokers that could not make a replica a moment ago (``rayqueue.cluster.patience``).
    """
    here = {each.broker: each for each in alive}
    spare = spare_bytes or {}
    old = need.held_by
    takes = [
        each
        for each in alive
        if each.stays and each.broker not in avoid and spare.get(each.broker, size_bytes) >= size_bytes
    ]
    if need.reason is Reason.LOST and old in {each.broker for each in takes}:
        return old
    others = [replica.broker for replica in need.partition.replicas if replica.replica_id != need.remove]
    able = [each for each in takes if room.get(each.broker, 1) > 0]
    free = [each for each in able if each.broker not in (*others, old)]
    if need.reason is Reason.GROW and not {each.broker for each in alive if each.stays} - set(others):
        free = able  # every broker has a copy: as with new topics, several are on one
    if need.target is not None:
        free = [each for each in free if each.broker == need.target]
    best = min(
        free,
        key=lambda each: (crowding((*others, each.broker), here), counts.get(each.broker, 0), each.broker),
        default=None,
    )
    return None if best is None else best.broker
