"""Room on disks: who should lead where some are full. Pure: looks at what a leader knows, says nothing to anybody.

A replica whose disk is full still takes what is small: votes, positions of
groups, trims. So a group whose majority is full has a leader, who refuses
records and serves everything else. Two things stand in its way, and in both
the leader makes way for another:

- It is full itself, but a majority has room: then records could be taken.
- No majority has room, and its log ends with entries that the others cannot
  store. Every small entry comes after them and would wait for ever. A replica
  that ends where the committed log does can win, for a majority has no more
  than it; as any new leader it drops what was never committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from rayqueue.ids import Index, ReplicaId
from rayqueue.raft.replica_set import ReplicaSet


@dataclass(frozen=True, slots=True)
class Picture:
    """A leader's knowledge of its group's disks."""

    me: ReplicaId
    replica_set: ReplicaSet
    full: Set[ReplicaId]
    """Replicas that have room for small entries only; the leader may be among them."""
    match: Mapping[ReplicaId, Index]
    """How far the logs of the others that can be reached are known to match."""
    commit: Index
    last_index: Index
    stuck: bool
    """Nothing was committed since the last heartbeat."""


def majority_has_room(replica_set: ReplicaSet, full: Set[ReplicaId]) -> bool:
    return replica_set.is_majority(replica_set.voters - full)


def heir(picture: Picture) -> ReplicaId | None:
    """The replica that should lead instead; None if the leader should go on."""
    replica_set, match = picture.replica_set, picture.match
    others = sorted(peer for peer in match if peer in replica_set.voters)
    if majority_has_room(replica_set, picture.full):
        if picture.me not in picture.full:
            return None
        able = [peer for peer in others if peer not in picture.full and match[peer] == picture.last_index]
    elif picture.stuck and picture.commit < picture.last_index:
        able = [peer for peer in others if match[peer] >= picture.commit and _could_win(peer, picture)]
    else:
        return None
    return min(able, key=lambda peer: match[peer], default=None)


def _could_win(peer: ReplicaId, picture: Picture) -> bool:
    match = picture.match
    return picture.replica_set.is_majority(other for other in match if match[other] <= match[peer])
