"""How the coordinator's group grows with its cluster: one replica on one node, three on three or more. Pure.

Looks at one picture, says the next step, and is asked again once that is done.
In this order, so that the group can decide at every moment:

1. Every new replica gets its place, written down in the group's own log.
2. Its data is made there, which is also written down (``ReplicasMade``).
3. It joins as a learner and catches up. Learners count in no majority.
4. Only when all of them are there are they made voters, one after the other.

A group of two is worse than one of one: either of them stops it. So the step
to two voters is taken only when the third is ready to follow at once.

The group never shrinks here, and a learner whose broker is away is waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rayqueue.cluster.placement import AliveBroker
from rayqueue.ids import NodeId
from rayqueue.raft.members import Members

ENOUGH_FOR_MANY = 3


class Place(NamedTuple):
    """Write down that this replica is to be on this broker."""

    node: NodeId
    broker: str


class AddLearner(NamedTuple):
    node: NodeId


class Promote(NamedTuple):
    """Make it a voter, if all ``ready`` really answer."""

    node: NodeId
    ready: tuple[NodeId, ...]


Step = Place | AddLearner | Promote


def coordinators_for(brokers: int, wanted: int) -> int:
    """How many replicas the coordinator should have on so many brokers: one if they are fewer than three."""
    return min(wanted, brokers) if brokers >= ENOUGH_FOR_MANY else 1


def next_step(
    wanted: int,
    coordinators: Mapping[NodeId, str],
    members: Members,
    unmade: Collection[NodeId],
    alive: Sequence[AliveBroker],
) -> Step | None:
    """``coordinators`` are those that have a place, by broker; ``members`` as the leader knows them."""
    here = {each.broker for each in alive}
    target = coordinators_for(len(here | set(coordinators.values())), wanted)
    if len(coordinators) < target:
        return _place(coordinators, alive)
    for node in sorted(coordinators):
        if node not in members.everyone and node not in unmade and coordinators[node] in here:
            return AddLearner(node)
    ready = tuple(sorted(node for node in members.learners if coordinators.get(node) in here))
    if ready and members.everyone == coordinators.keys() and len(ready) == len(members.learners):
        return Promote(ready[0], ready)
    return None


def _place(coordinators: Mapping[NodeId, str], alive: Sequence[AliveBroker]) -> Place | None:
    """On another host, as far as there is one."""
    taken = set(coordinators.values())
    hosts = [each.host for each in alive if each.broker in taken]
    free = sorted((hosts.count(each.host), each.broker) for each in alive if each.broker not in taken)
    if not free:
        return None
    number = max((int(node[1:]) for node in coordinators if node[1:].isdigit()), default=0) + 1
    return Place(NodeId(f"c{number}"), free[0][1])
