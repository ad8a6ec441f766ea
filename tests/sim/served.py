"""A simulated replica that serves clients: the real service and the real connections around a simulated engine.

The core around both is the real one, too (``tests.sim.node``): here is how clients
reach it, and that reading the disk beside the engine takes its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from rayqueue.cluster.commands import check_readable, decode_command
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.config import CallSettings
from rayqueue.errors import UpgradeUnfinishedError
from rayqueue.ids import Index, ReplicaId
from rayqueue.partition import Partition
from rayqueue.partition.commands import decode
from rayqueue.partition.transactions.commands import EndTransaction, StageAcks, StageOffsets
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.records import BATCH_TAG, BatchHeader
from rayqueue.replica.coordinator_service import CoordinatorService
from rayqueue.replica.core import ReplicaCore
from rayqueue.replica.partition_service import PartitionService
from rayqueue.replica.service import Service
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.node import EngineNode

if TYPE_CHECKING:
    from tests.sim.ensemble import Ensemble

OLD_VERSION = 2
"""Of the replicas' protocol: its replicas know no transactions."""


class ServedNode(EngineNode):
    """What the log means, and what clients may ask, is a subclass's."""

    service: Service

    def __init__(self, group: Ensemble[Any], replica_id: ReplicaId, members: ReplicaSet | None) -> None:
        self.group = group
        self.port = 0
        super().__init__(group, group.group_id, replica_id, members)

    def started(self) -> None:
        if self.life > 1:
            self.group.versions.pop(self.replica_id, None)
        self._read = self.engine.applied
        self.service = self.core.clients.service = self.core.service
        self.clients = self.core.clients
        self.clients._hang_up = _raise  # type: ignore[method-assign, assignment]  # a bug is to be seen
        self.port = self.group.internet.listen(self)
        self.group.checker.watch_commit(self)

    @property
    def versions(self) -> Mapping[ReplicaId, int]:
        return self.group.versions

    def after_step(self) -> None:
        checker, commit = self.group.checker, self.engine.applied
        checker.after_step(self)
        if self.replica_id in self.group.versions:
            for index in range(self._read + 1, commit + 1):
                entry = checker.committed[Index(index)]
                if entry.payload[0] >= 4 and self.is_news(entry.payload):
                    raise BrokenError(Invariant.UPGRADABLE, f"{self.replica_id} cannot read entry {index}")
        self._read = commit

    def is_news(self, payload: bytes) -> bool:
        """A replica of the release before could not apply this entry."""
        raise NotImplementedError

    def killed(self) -> None:
        self.group.on_killed(self)
        self.group.internet.server_gone(self)

    def busy_s(self) -> float:
        dice = self.group.busy_rng
        return 0.0 if dice is None or dice.random() < 0.9 else dice.uniform(0.001, 0.05)

    @property
    def call_settings(self) -> CallSettings:
        return self.group.settings.calls

    @property
    def now_s(self) -> float:
        return self.group.clock.now

    def run(self, work: Callable[[], None]) -> None:
        self.call(work)


class PartitionNode(ServedNode):
    """A replica of a partition, with ``PartitionService``."""

    machine: Partition

    def open_machine(self) -> Partition:
        self.machine = Partition(self.disk, self.group.partition_settings)
        return self.machine

    def is_news(self, payload: bytes) -> bool:
        if payload[0] == BATCH_TAG:
            return BatchHeader.parse(payload).transactional
        return isinstance(decode(payload), StageOffsets | StageAcks | EndTransaction)

    def make_service(self, core: ReplicaCore[Any]) -> PartitionService:
        group = self.group
        log = group.settings.log.model_copy(update={"cache_bytes": group.disk_rng.choice((0, 500, 1_000_000))})
        settings = group.settings.model_copy(update={"log": log})
        service = PartitionService(core, self.machine, settings)
        service.disk._pool = DiskThreads(self)  # type: ignore[assignment]
        return service


class CoordinatorNode(ServedNode):
    """A replica of the coordinator, with ``CoordinatorService``."""

    machine: ClusterMachine
    service: CoordinatorService

    def open_machine(self) -> ClusterMachine:
        self.machine = ClusterMachine(self.disk)
        return self.machine

    def is_news(self, payload: bytes) -> bool:
        try:
            check_readable(decode_command(payload), OLD_VERSION)
        except UpgradeUnfinishedError:
            return True
        return False

    def make_service(self, core: ReplicaCore[Any]) -> CoordinatorService:
        service = CoordinatorService(core, self.machine, self.group.settings, _changed)
        service.set_brokers(self.group.brokers)
        return service


class DiskThreads:
    """The threads that read the disk beside the engine's: each read takes its time, and dies with the replica."""

    def __init__(self, node: ServedNode) -> None:
        self._node = node
        self._life = node.life

    def submit(self, work: Callable[[], None]) -> None:
        def run() -> None:
            if self._node.alive and self._node.life == self._life:
                work()

        self._node.group.clock.after(self._node.group.disk_rng.uniform(0.0001, 0.05), run)

    def shutdown(self, **_: Any) -> None: ...


def _changed() -> None: ...


def _raise(_: int, error: Exception) -> NoReturn:
    raise error
