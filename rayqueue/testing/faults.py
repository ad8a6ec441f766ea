"""Faults for a queue that runs: which process leads a partition, and ending it.

For tests of an application that must survive them. A process is ended by its
pid and by SIGKILL, on this machine only; Ray starts it again.
"""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

import ray

from rayqueue.actors.names import actor_name
from rayqueue.client.handle import RayQueue
from rayqueue.errors import NotLeaderError, UnknownPartitionError
from rayqueue.ids import GroupId, ReplicaId

_ANSWER_S = 10.0


class Leader(NamedTuple):
    """The replica that leads a partition."""

    replica_id: str
    term: int
    pid: int


def leader_of(rq: RayQueue, topic: str, partition: int = 0) -> Leader:
    """``NotLeaderError`` if nobody leads right now."""
    infos = {info.name: info for info in rq.topics(include_internal=True)}
    places = {each.number: each for each in infos[topic].partitions} if topic in infos else {}
    if partition not in places:
        raise UnknownPartitionError(f"there is no partition {topic}-{partition}", topic=topic, partition=partition)
    described = rq.topic(topic).partitions[partition]
    for replica in described.replicas:
        if replica.role == "leader":
            name = actor_name(GroupId(places[partition].group_id), ReplicaId(replica.replica_id))
            process = ray.get(ray.get_actor(name, rq.namespace).process.remote(), timeout=_ANSWER_S)
            return Leader(replica.replica_id, described.term, process.pid)
    raise NotLeaderError(f"nobody leads {topic}-{partition} at the moment", leader=None)


def kill_leader(rq: RayQueue, topic: str, partition: int = 0) -> Leader:
    """SIGKILL to the process of the replica that leads. Returns who that was."""
    leader = leader_of(rq, topic, partition)
    os.kill(leader.pid, signal.SIGKILL)
    return leader
