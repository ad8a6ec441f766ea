"""A simulated replica that serves clients: the real service and the real connections around a simulated engine.

Does for a ``Service`` what ``rayqueue.replica.replica`` does, in virtual time:
requests are read in the first half of a turn, answers leave when they are known,
and what was written on one disk only is answered after the write.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

from rayqueue.cluster.machine import ClusterMachine
from rayqueue.errors import NotLeaderError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.store import Snapshot
from rayqueue.partition import Partition
from rayqueue.protocol.calls import ReplicaStatus
from rayqueue.raft.handshake import SPEAKS
from rayqueue.raft.machine import StateMachine
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.answers import Answer, Answers, Pending
from rayqueue.replica.clients import Clients
from rayqueue.replica.coordinator_service import CoordinatorService
from rayqueue.replica.leadership import Leadership
from rayqueue.replica.partition_service import PartitionService
from rayqueue.replica.service import Service
from tests.sim.node import EngineNode

if TYPE_CHECKING:
    from tests.sim.ensemble import Ensemble

MAX_FRAME_BYTES = 1 << 20


class ServedNode(EngineNode):
    """``make_service`` opens what the log means and what clients may ask."""

    service: Service

    def __init__(self, group: Ensemble[Any], replica_id: ReplicaId, members: ReplicaSet | None) -> None:
        self.group = group
        self.port = 0
        super().__init__(group, group.group_id, replica_id, members)

    def make_service(self) -> tuple[StateMachine, Service]:
        raise NotImplementedError

    def open_machine(self) -> StateMachine:
        self._answers = Answers(lambda _: None, self._damaged)
        self._to_confirm: list[Answer] = []
        self._after_sync: list[tuple[Pending, Any]] = []
        self._to_settle: list[Callable[[], None]] = []
        self._asked = False
        calls = self.group.settings.calls
        self.clients = Clients(calls, MAX_FRAME_BYTES, damaged=self._damaged, clock=lambda: self.now_s)
        self.clients._hang_up = _raise  # type: ignore[method-assign, assignment]  # a bug is to be seen
        self.machine, self.service = self.make_service()
        self.clients.service = self.service
        return self.machine

    def started(self) -> None:
        self._leadership = Leadership(self.engine, self.service)
        self.port = self.group.internet.listen(self)
        self.group.checker.watch_commit(self)

    def killed(self) -> None:
        self.group.on_killed(self)
        self.group.internet.server_gone(self)

    @property
    def now_s(self) -> float:
        return self.group.clock.now

    def _damaged(self, why: str) -> None:
        self.engine.damaged(why)

    # -- a turn --------------------------------------------------------------------------

    def after_step(self) -> None:
        self._asked = False
        self._leadership.look(self.now_s)
        self.group.checker.after_step(self)

    def before_sync(self) -> None:
        self._answers.expire(self.now_s)
        self.service.tick(self.now_s)
        self.clients.new_turn()
        self.clients.flush()

    def tables_synced(self) -> None:
        self.service.tables_synced()

    @property
    def must_settle(self) -> bool:
        return bool(self._to_settle)

    def synced(self) -> None:
        after, self._after_sync = self._after_sync, []
        for pending, result in after:
            self._answers.give(pending, result)

    def published(self) -> None:
        settled, self._to_settle = self._to_settle, []
        for work in settled:
            work()
        self.clients.flush()

    @property
    def oldest_version(self) -> int:
        return SPEAKS.highest

    @property
    def own_deadline(self) -> float:
        return self.service.next_deadline_s

    @property
    def has_work(self) -> bool:
        return super().has_work or self._asked

    def _take_calls(self) -> bool:
        had_calls = super()._take_calls()
        self.service.gather()
        waiting, self._to_confirm = self._to_confirm, []
        if waiting:  # all questions of one turn are one question

            def answer_all(result: Any) -> None:
                for answer in waiting:
                    answer(result)

            pending = self._answers.pending(answer_all, inside=True)
            self._answers.attempt(lambda _: self.engine.confirm_leadership(self._giving(pending)), pending)
        return had_calls or bool(waiting)

    # -- for the service -----------------------------------------------------------------

    @property
    def group_id(self) -> GroupId:
        return self.disk.group_id

    def client_status(self) -> ReplicaStatus:
        engine, bounds = self.engine, self.service.bounds()
        role = "leader" if engine.is_leader else "follower"
        return ReplicaStatus(self.replica_id, role, engine.leader, engine.term, *bounds, size_bytes=0)

    def run(self, work: Callable[[], None], refused: Answer | None = None) -> None:
        self.call(work)

    def snapshot(self) -> AbstractContextManager[Snapshot]:
        return self.disk.snapshot()

    def propose(self, payload: bytes, answer: Answer) -> Pending:  # type: ignore[override]
        """In a turn, as everything here; what operators ask is a ``call``."""
        pending = self._answers.pending(answer, inside=True)
        self.engine.propose(payload, self._giving(pending))
        self._answers.wait(pending)
        self._asked = True
        return pending

    def tell_log(self, payload: bytes) -> None:
        self.engine.propose(payload, _nothing)

    def _giving(self, pending: Pending) -> Answer:
        return lambda result: self._answers.give(pending, result)

    def once_synced(self, pending: Pending, result: Any) -> None:
        self._after_sync.append((pending, result))

    def once_settled(self, work: Callable[[], None]) -> None:
        self._to_settle.append(work)

    def confirm(self, answer: Answer) -> None:
        self.check_leads()
        self._to_confirm.append(answer)
        self._asked = True

    def check_leads(self) -> None:
        if not self.engine.is_leader:
            raise self.not_leader()

    def not_leader(self) -> NotLeaderError:
        return NotLeaderError(f"{self.replica_id} does not lead", leader=self.engine.leader)


class PartitionNode(ServedNode):
    """A replica of a partition, with ``PartitionService``."""

    machine: Partition

    def make_service(self) -> tuple[Partition, PartitionService]:
        group = self.group
        machine = Partition(self.disk, group.partition_settings)
        log = group.settings.log.model_copy(update={"cache_bytes": group.disk_rng.choice((0, 500, 1_000_000))})
        settings = group.settings.model_copy(update={"log": log})
        service = PartitionService(self, machine, settings)  # type: ignore[arg-type]
        service.disk._pool = DiskThreads(self)  # type: ignore[assignment]
        return machine, service


class CoordinatorNode(ServedNode):
    """A replica of the coordinator, with ``CoordinatorService``."""

    machine: ClusterMachine
    service: CoordinatorService

    def make_service(self) -> tuple[ClusterMachine, CoordinatorService]:
        machine = ClusterMachine(self.disk)
        service = CoordinatorService(self, machine, self.group.settings, _changed)  # type: ignore[arg-type]
        service.set_brokers(self.group.brokers)
        return machine, service


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


def _nothing(_: Any) -> None: ...


def _changed() -> None: ...


def _raise(_: int, error: Exception) -> NoReturn:
    raise error
