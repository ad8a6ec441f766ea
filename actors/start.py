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

from rayqueue.actors.base import ReplicaSpec
from rayqueue.actors.coordinator_actor import CoordinatorActor, CoordinatorSpec
from rayqueue.actors.names import actor_name
from rayqueue.actors.partition_actor import PartitionActor, PartitionSpec

if TYPE_CHECKING:
    from ray.actor import ActorHandle


def start_actor(spec: PartitionSpec, *, ray_node_id: str | None = None) -> ActorHandle[PartitionActor]:
    """Start the replica's actor, on the given node of the Ray cluster or on any."""
    return _start(PartitionActor, spec, ray_node_id)


def start_coordinator(spec: CoordinatorSpec, *, ray_node_id: str) -> ActorHandle[CoordinatorActor]:
    """Start the actor of one of the coordinator's replicas. ``ValueError`` if its name is taken."""
    return _start(CoordinatorActor, spec, ray_node_id)


def _start(actor: type[Any], spec: ReplicaSpec, ray_node_id: str | None) -> ActorHandle[Any]:
    # Ray takes the concurrency groups here and nowhere else: .options() would refuse them. Each has an event loop and
    # a thread of its own: what is asked waits for nothing that the actor does by itself.
    groups = {"control": spec.settings.calls.max_controls}
    options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": groups}
    remote: Any = ray.remote(**options)(actor)
    strategy = "DEFAULT" if ray_node_id is None else NodeAffinitySchedulingStrategy(ray_node_id, soft=False)
    return remote.options(  # type: ignore[no-any-return]
        name=actor_name(spec.group_id, spec.replica_id),
        namespace=spec.settings.namespace,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy=strategy,
    ).remote(spec)
