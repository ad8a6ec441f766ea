"""One simulated replica of the coordinator, and how clients reach it.

The machine, the engine and the service are the real ones. A ``Link`` is what a
client has: one connection at a time to one replica, in order in both
directions, which breaks when either side dies or an answer takes too long.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rayqueue.cluster.coordinator import Coordinator
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.placement import AliveBroker
from rayqueue.errors import NotLeaderError, OutcomeUnknownError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.protocol.calls import CoordinatorCall
from rayqueue.protocol.seals import Seals
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.answers import Answer
from rayqueue.replica.core import ReplicaCore
from rayqueue.replica.service import Events
from tests.sim.node import EngineNode

if TYPE_CHECKING:
    from tests.sim.cluster_world import ClusterWorld

BROKERS = tuple(AliveBroker(f"b{number}", f"host{number % 2}") for number in range(3))
CALL_TIMEOUT_S = 1.0
_SEALS = Seals(b"only for this world")


class ClusterNode(EngineNode):
    def __init__(self, world: ClusterWorld, replica_id: ReplicaId, members: ReplicaSet | None) -> None:
        self.world = world
        super().__init__(world, GroupId("coordinator"), replica_id, members)

    def open_machine(self) -> ClusterMachine:
        self.machine = ClusterMachine(self.disk)
        return self.machine

    def make_service(self, core: ReplicaCore[Any]) -> Events:
        def propose(payload: bytes, answer: Answer) -> None:
            core.propose(payload, answer)

        self.coordinator = Coordinator(self.machine, self.world.settings, _SEALS, propose, core.confirm)
        self.coordinator.set_brokers(0, BROKERS)
        return _Coordinating(self)

    def started(self) -> None:
        self.world.checker.watch_commit(self)

    def after_step(self) -> None:
        self.world.checker.after_step(self)

    def killed(self) -> None:
        self.world.on_killed(self)

    def handle(self, client: int, call: CoordinatorCall, reply: Answer) -> None:
        self.call(lambda: self.coordinator.handle(self.world.clock.now, client, call, reply))

    def disconnected(self, client: int) -> None:
        self.call(lambda: self.coordinator.disconnected(self.world.clock.now, client))


class _Coordinating(Events):
    """What ``CoordinatorService`` does for the coordinator."""

    def __init__(self, node: ClusterNode) -> None:
        self._node = node
        self._coordinator = node.coordinator

    def lead(self, now_s: float) -> None:
        self._coordinator.lead(now_s, replica_id=self._node.replica_id, term=self._node.engine.term)

    def lost(self, now_s: float) -> None:
        self._coordinator.unlead()

    @property
    def next_deadline_s(self) -> float:
        return self._coordinator.next_deadline_s

    def tick(self, now_s: float) -> None:
        self._coordinator.tick(now_s)


class Connection:
    __slots__ = ("answers_at", "calls_at", "client", "life", "node", "open")

    def __init__(self, client: int, node: ClusterNode) -> None:
        self.client = client
        self.node = node
        self.life = node.life
        self.open = True
        self.calls_at = 0.0
        self.answers_at = 0.0


class Link:
    """A client's way to the coordinator."""

    def __init__(self, world: ClusterWorld, name: str) -> None:
        self.world = world
        self.name = name
        self.cut = False
        """The network between this client and all replicas is down: nothing arrives, and nobody is told."""
        self.connection: Connection | None = None
        self.waiting: dict[int, Answer] = {}
        self.frozen = False
        """The client's process is paused: it closes nothing, and the kernel keeps its connection open."""
        self._calls = 0
        self._next = world.rng.randrange(9)

    def call(self, call: CoordinatorCall, answer: Answer) -> None:
        """``answer`` gets what the coordinator says, or ``OutcomeUnknownError``."""
        world = self.world
        connection = self._connected()
        self._calls += 1
        number = self._calls
        self.waiting[number] = answer
        if not self.cut:
            connection.calls_at = max(connection.calls_at, world.clock.now + world.client_delay())
            world.clock.at(connection.calls_at, lambda: self._arrive(connection, number, call))
        world.clock.after(CALL_TIMEOUT_S, lambda: self._timed_out(connection, number))

    def _connected(self) -> Connection:
        if self.connection is None:
            nodes = list(self.world.nodes.values())
            self._next += 1
            self.connection = self.world.connect(nodes[self._next % len(nodes)])
        return self.connection

    def _arrive(self, connection: Connection, number: int, call: CoordinatorCall) -> None:
        node = connection.node
        if not connection.open:
            return
        if node.life != connection.life or not node.alive:
            self.world.clock.after(0.001, lambda: self.broken(connection))  # nobody listens there
            return
        asked_at = self.world.clock.now

        def reply(result: Any) -> None:
            self.world.checker.answered(node, call, result, asked_at)
            if not self.cut:
                world = self.world
                connection.answers_at = max(connection.answers_at, world.clock.now + world.client_delay())
                world.clock.at(connection.answers_at, lambda: self._answered(connection, number, result))

        node.handle(connection.client, call, self.world.checker.once(call, reply))

    def _answered(self, connection: Connection, number: int, result: Any) -> None:
        if not connection.open:
            return
        answer = self.waiting.pop(number, None)
        if answer is None:
            return
        if isinstance(result, NotLeaderError):
            self.close()
        answer(result)

    def _timed_out(self, connection: Connection, number: int) -> None:
        if number not in self.waiting or not connection.open:
            return
        if self.frozen:
            self.world.clock.after(0.5, lambda: self._timed_out(connection, number))
        else:
            self.close()

    def broken(self, connection: Connection) -> None:
        """The other side is gone."""
        if connection.open:
            self.close()

    def close(self) -> None:
        """Break the connection; whoever waits learns that. The other side does too, unless the network is down."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        connection.open = False
        world = self.world
        if not self.cut:
            world.clock.after(world.client_delay(), partial(_hang_up, connection))
        waiting, self.waiting = self.waiting, {}
        for answer in waiting.values():
            answer(OutcomeUnknownError("the connection broke"))


def _hang_up(connection: Connection) -> None:
    if connection.node.alive and connection.node.life == connection.life:
        connection.node.disconnected(connection.client)
