"""Starting a replica's actor: the options that make it durable, findable and free.

Detached, so that it outlives whoever starts it; named, so that its peers and
clients find it; restarted for ever; no logical CPU, for it mostly waits. Ray
repeats no call by itself (``max_task_retries=0``): whether a call may be
repeated is said by its error, and decided by the client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayqueue.actors.coordinator import CoordinatorActor, CoordinatorSpec
from rayqueue.actors.member import MemberSpec
from rayqueue.actors.names import actor_name
from rayqueue.actors.replica import ReplicaActor, ReplicaSpec
from rayqueue.config import CallSettings

if TYPE_CHECKING:
    from ray.actor import ActorHandle


def start_actor(spec: ReplicaSpec, *, ray_node_id: str | None = None) -> ActorHandle[ReplicaActor]:
    """Start the replica's actor, on the given node of the Ray cluster or on any."""
    return _start(ReplicaActor, spec, ray_node_id)


def start_coordinator(spec: CoordinatorSpec, *, ray_node_id: str) -> ActorHandle[CoordinatorActor]:
    """Start the actor of one of the coordinator's replicas. ``ValueError`` if its name is taken."""
    return _start(CoordinatorActor, spec, ray_node_id)


def _start(actor: type[Any], spec: MemberSpec, ray_node_id: str | None) -> ActorHandle[Any]:
    # Ray takes the concurrency groups here and nowhere else: .options() would refuse them.
    remote: Any = ray.remote(**_fixed(spec.settings.calls))(actor)
    strategy = "DEFAULT" if ray_node_id is None else NodeAffinitySchedulingStrategy(ray_node_id, soft=False)
    return remote.options(  # type: ignore[no-any-return]
        name=actor_name(spec.group_id, spec.node_id),
        namespace=spec.settings.namespace,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy=strategy,
    ).remote(spec)


def _fixed(calls: CallSettings) -> dict[str, Any]:
    return {"num_cpus": 0, "concurrency_groups": concurrency_groups(calls)}


def concurrency_groups(calls: CallSettings) -> dict[str, int]:
    """Each has its own event loop and thread; this many calls of it may be under way at a time."""
    return {"append": calls.max_appends, "fetch": calls.max_fetches, "control": calls.max_controls}
