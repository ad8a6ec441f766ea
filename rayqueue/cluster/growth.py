"""The coordinator's group and its brokers: it grows with them, shrinks with them, and what is lost is replaced. Pure.

One replica on fewer than three brokers, three (``cluster.coordinators``) on three
or more. Looks at one picture, says the next step, and is asked again once that
is done. In this order, so that the group can decide at every moment:

1. A replica that never voted and is lost, or whose broker is given up, leaves the group and its place.
2. Every new replica gets its place, written down in the group's own log.
3. Its data is made there, which is also written down (``ReplicasMade``).
4. It joins as a learner and catches up. Learners count in no majority.
5. Only when all of them are there are they made voters, one after the other.
6. Only then do those leave who are lost, given up or too many, the dead first: from the group, then from their place.

A group of two is worse than one of one: either of them stops it. So the step
to two voters is taken only when the third is ready to follow at once.

A broker that is away and not given up keeps its replica.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rayqueue.cluster.placement import AliveBroker, crowding
from rayqueue.ids import ReplicaId
from rayqueue.raft.replica_set import ReplicaSet

ENOUGH_FOR_MANY = 3


class Place(NamedTuple):
    """Write down that this replica is to be on this broker."""

    replica_id: ReplicaId
    broker: str


class AddLearner(NamedTuple):
    replica_id: ReplicaId


class Promote(NamedTuple):
    """Make it a voter, if all ``ready`` really answer."""

    replica_id: ReplicaId
    ready: tuple[ReplicaId, ...]


class Remove(NamedTuple):
    """From the group, voter or learner."""

    replica_id: ReplicaId


class Transfer(NamedTuple):
    """The one that is to leave leads, and cannot remove itself."""

    to: ReplicaId


class Retire(NamedTuple):
    """It is not in the group: write down that it has no place any more, and that its data is doomed."""

    replica_id: ReplicaId


Step = Place | AddLearner | Promote | Remove | Transfer | Retire


class Picture(NamedTuple):
    coordinators: Mapping[ReplicaId, str]
    """Those that have a place, by broker."""
    members: ReplicaSet
    """As the leader knows them."""
    leader: ReplicaId
    unmade: Collection[ReplicaId]
    alive: Sequence[AliveBroker]
    lost: Collection[ReplicaId] = ()
    """Those whose data is gone."""
    given_up: Collection[str] = ()
    """Brokers that are not waited for any longer."""
    last_number: int = 0
    """The highest that was ever in a coordinator's id."""
    settled: bool = True
    """The membership is committed. Else the group may return to the one before it."""


def coordinators_for(brokers: int, wanted: int) -> int:
    """How many replicas the coordinator should have on so many brokers: one if they are fewer than three."""
    return min(wanted, brokers) if brokers >= ENOUGH_FOR_MANY else 1


def next_step(wanted: int, picture: Picture) -> Step | None:
    places, members = picture.coordinators, picture.members
    here = {each.broker for each in picture.alive}
    target = coordinators_for(len((here | set(places.values())) - set(picture.given_up)), wanted)
    sound = _staying(target, picture)
    for replica_id in sorted(places.keys() - sound.keys() - members.voters):
        if replica_id in members.learners:
            return Remove(replica_id)
        return Retire(replica_id) if picture.settled else None
    if len(sound) < target:
        place = _place(sound, picture)
        if place is not None:
            return place
    for replica_id in sorted(sound.keys() - members.everyone):
        if replica_id not in picture.unmade and sound[replica_id] in here:
            return AddLearner(replica_id)
    ready = tuple(sorted(replica_id for replica_id in members.learners if sound.get(replica_id) in here))
    if ready and sound.keys() <= members.everyone and len(ready) == len(members.learners):
        return Promote(ready[0], ready)
    return _leave(target, sound, picture)


def _staying(target: int, picture: Picture) -> dict[ReplicaId, str]:
    """Those that are well, and no more of them than there should be: who leads and who votes stays first."""
    members = picture.members
    sound = [
        replica_id
        for replica_id, broker in picture.coordinators.items()
        if replica_id not in picture.lost and broker not in picture.given_up
    ]
    sound.sort(
        key=lambda replica_id: (
            replica_id != picture.leader,
            replica_id not in members.voters,
            replica_id not in members.learners,
            replica_id,
        )
    )
    return {replica_id: picture.coordinators[replica_id] for replica_id in sound[:target]}


def _place(sound: Mapping[ReplicaId, str], picture: Picture) -> Place | None:
    """In another rack, and on another host, as far as there is one."""
    taken = set(sound.values())
    known = {each.broker: each for each in picture.alive}
    free = sorted(
        (crowding((*taken, each.broker), known), each.broker)
        for each in picture.alive
        if each.broker not in taken and each.broker not in picture.given_up
    )
    if not free:
        return None
    numbers = (int(replica_id[1:]) for replica_id in picture.coordinators if replica_id[1:].isdigit())
    return Place(ReplicaId(f"c{max((*numbers, picture.last_number)) + 1}"), free[0][1])


def _leave(target: int, sound: Mapping[ReplicaId, str], picture: Picture) -> Step | None:
    """Those who do not stay leave once the others are as many as they can be: the dead first, for they only count
    against a majority."""
    members, leader = picture.members, picture.leader
    staying = sorted(members.voters & sound.keys())
    if len(staying) < min(target, len(sound)):
        return None
    here = {each.broker for each in picture.alive}

    def is_well(replica_id: ReplicaId) -> bool:
        return replica_id not in picture.lost and picture.coordinators.get(replica_id) in here

    for leaving in sorted(members.voters - sound.keys(), key=lambda replica_id: (is_well(replica_id), replica_id)):
        if leaving != leader:
            return Remove(leaving)
        return Transfer(staying[0]) if staying else None
    return None
