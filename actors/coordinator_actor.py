"""The Ray actor of one of the coordinator's replicas: a thin shell around the replica.

Clients speak with the replica's thread directly (``endpoint``). Beside it runs
the keeper, which starts, restarts and removes actors until the cluster runs what
the metadata says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ray

from rayqueue.actors.base import ReplicaActor, ReplicaSpec
from rayqueue.actors.keeper.home import ClusterManifest, load_cluster
from rayqueue.actors.replies import deliver

if TYPE_CHECKING:
    from rayqueue.replica.coordinator_service import CoordinatorReplica


@dataclass(frozen=True, slots=True)
class CoordinatorSpec(ReplicaSpec):
    """All that a coordinator's process must know. Its settings are those of every replica that it starts."""

    cluster: ClusterManifest = field(default_factory=lambda: ClusterManifest("", {}, complete=False))


class CoordinatorActor(ReplicaActor["CoordinatorReplica"]):
    """One coordinator. ``rayqueue.actors.start`` makes the actor of it."""

    _spec: CoordinatorSpec

    def __init__(self, spec: CoordinatorSpec) -> None:
        from rayqueue.actors.keeper.keeper import Keeper  # it starts actors, this one's class among them

        self._keeper = Keeper(spec)
        self._keeper.runs_on(ray.get_runtime_context().get_node_id())
        super().__init__(spec)

    def _run_beside(self, replica: CoordinatorReplica) -> None:
        super()._run_beside(replica)
        self._keeping = self._loop.create_task(self._keeper.run(replica))

    def _never_made(self) -> bool:
        # No cluster is complete, and so nothing was promised, before all its first coordinators have been made.
        cluster = load_cluster(self._spec.settings.data_dir)
        return super()._never_made() or (cluster is not None and not cluster.complete)

    def _start(self) -> CoordinatorReplica:
        from rayqueue.replica.coordinator_service import start_coordinator

        spec = self._spec
        return start_coordinator(
            spec.path,
            spec.group_id,
            spec.replica_id,
            spec.settings,
            host=spec.host,
            epoch=spec.cluster.epoch,
            first_coordinators=spec.cluster.coordinators,
            on_change=self._keeper.wake,
            deliver=deliver,
            on_fatal=self._die,
        )

    @ray.method(concurrency_group="control")
    async def data_dir(self) -> str:
        """The directory in which every node of this cluster keeps its data."""
        return str(self._spec.settings.data_dir)

    def _end_tasks(self) -> None:
        """The keeper first, which would start again what ends."""
        self._loop.call_soon_threadsafe(self._keeping.cancel)
        super()._end_tasks()
