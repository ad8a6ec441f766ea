"""The Ray actor of one partition replica: a thin shell around the replica, which knows nothing of Ray.

Owns the process: what it is called, and what a restart does. Records do not
come this way: clients ask where the replica serves (``endpoint``) and speak with
it directly.

**Errors** are those of ``rayqueue.errors``. Ray raises them at the caller as a
class that is both ``RayTaskError`` and the error's own type, with its
``details``; ``rayqueue.actors.ray_calls`` takes the wrapping off again.

Restarts and peers are ``rayqueue.actors.base``'s.

It does not decide which replicas a group has, nor where they are placed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from rayqueue.actors.base import ReplicaActor, ReplicaSpec, restarted
from rayqueue.actors.keeper.herald import gone_nodes
from rayqueue.actors.ray_calls import FAILURES
from rayqueue.actors.replies import deliver
from rayqueue.errors import RayQueueError, StorageError, StoreAbandonedError
from rayqueue.ids import Offset

if TYPE_CHECKING:
    from rayqueue.partition.settings import PartitionSettings
    from rayqueue.replica.start import PartitionReplica

_log = logging.getLogger(__name__)


def _default_settings() -> PartitionSettings:
    from rayqueue.partition.settings import PartitionSettings

    return PartitionSettings()


@dataclass(frozen=True, slots=True)
class PartitionSpec(ReplicaSpec):
    """All that a partition replica's process must know. Its group is the partition, such as ``orders-3``."""

    partition: PartitionSettings = field(default_factory=_default_settings)
    begins_at: int | None = None
    """Nothing is left of the partition: this replica is made as its only one, empty, with this as its next offset."""


class PartitionActor(ReplicaActor["PartitionReplica"]):
    """One replica. ``rayqueue.actors.start`` makes the actor of it."""

    _spec: PartitionSpec

    def _run_beside(self, replica: PartitionReplica) -> None:
        from rayqueue.actors.settler import settle_transactions

        super()._run_beside(replica)
        spec = self._spec
        self._settling = self._loop.create_task(settle_transactions(replica, spec.group_id, spec.settings))
        if spec.partition.queue:
            self._learning = self._loop.create_task(self._learn_of_gone_nodes())

    def _end_tasks(self) -> None:
        self._loop.call_soon_threadsafe(self._settling.cancel)
        super()._end_tasks()

    def _attempt(self) -> PartitionReplica | RayQueueError:
        """If it was its group's only voter, the error says how far it had acknowledged: nobody else knows."""
        from rayqueue.log.waymark import read_waymark

        found = super()._attempt()
        if not isinstance(found, StorageError) or isinstance(found, StoreAbandonedError):
            return found
        mark = read_waymark(self._spec.path)
        if not mark.records:
            return found
        told = f"{found}. The records before offset {mark.records} were acknowledged"
        return type(found)(told, **(found.details | {"acknowledged": mark.records}))

    def _create(self) -> None:
        spec = self._spec
        if spec.begins_at is None:
            super()._create()
            return
        from rayqueue.replica.start import create_anew

        begins_at = Offset(spec.begins_at)
        create_anew(spec.path, spec.group_id, spec.replica_id, spec.partition, spec.epoch, begins_at, spec.settings)

    def _start(self) -> PartitionReplica:
        from rayqueue.replica.start import start_replica

        spec = self._spec
        return start_replica(
            spec.path,
            spec.group_id,
            spec.replica_id,
            spec.settings,
            host=spec.host,
            partition=spec.partition,
            epoch=spec.epoch,
            alone=spec.alone and not restarted(),
            deliver=deliver,
            on_fatal=self._die,
        )

    async def _learn_of_gone_nodes(self) -> None:
        """Catch up on the dead nodes of which a keeper told an earlier process of this replica."""
        try:
            self._tell_of_gone(await asyncio.to_thread(gone_nodes))
        except FAILURES as error:
            _log.info("which Ray nodes are dead is not known, their workers' leases end by time: %s", error)

    @ray.method(concurrency_group="control")
    async def nodes_gone(self, ray_nodes: Collection[str]) -> None:
        """Ray reports that these nodes are dead: leases of workers there end. For the keeper."""
        self._tell_of_gone(ray_nodes)

    def _tell_of_gone(self, ray_nodes: Collection[str]) -> None:
        replica, told = self._replica, [str(each) for each in ray_nodes]
        replica.run(lambda: replica.service.jobs.nodes_gone(told))

    @ray.method(concurrency_group="control")
    async def command(self, payload: bytes) -> Any:
        """Propose a command of ``rayqueue.partition.commands``; answers what applying it answers. For the keeper."""
        return await self._asked(lambda answer: self._replica.service.command(payload, answer))
