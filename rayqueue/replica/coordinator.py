"""A running replica of the coordinator's group: ``rayqueue.cluster`` on the engine's thread.

Clients' calls are decoded here and handed to ``Coordinator``, which serves on
the replica that leads. What the keeper needs to know is taken as a value
(``ClusterView``), so that it can look at it in its own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rayqueue.cluster.catalog import BrokerRow, PlacedReplica
from rayqueue.cluster.commands import AnyCommand, encode_command
from rayqueue.cluster.coordinator import Coordinator
from rayqueue.cluster.machine import SEGMENT_BYTES, ClusterMachine
from rayqueue.cluster.placement import AliveBroker
from rayqueue.config import LogSettings, Settings
from rayqueue.errors import InvalidInputError, RayQueueError
from rayqueue.ids import NodeId
from rayqueue.log.store import LogStore
from rayqueue.protocol.calls import GetStatus, ReplicaStatus, decode_coordinator_call, encode_answer
from rayqueue.protocol.frames import Frame, Kind
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.topics import TopicInfo
from rayqueue.raft.clients import ClientTransport
from rayqueue.raft.members import Members
from rayqueue.replica.replica import Answer, Deliver, Replica
from rayqueue.replica.secret import secret_of


class ClusterView(NamedTuple):
    """The cluster as this replica knows it; as it is, if it leads."""

    leads: bool
    leader: NodeId | None
    cluster_id: str
    topics: Mapping[str, TopicInfo]
    brokers: Mapping[str, BrokerRow]
    unmade: frozenset[tuple[str, str]]
    """Raft group id and replica id."""
    doomed: tuple[PlacedReplica, ...]
    coordinators: Mapping[NodeId, str]
    """The coordinator's replicas that were added after the cluster was made, and their brokers."""
    members: Members
    """Of the coordinator's group."""
    expired: Mapping[str, int]
    """Groups that partitions have still to forget, and up to which generation."""


class CoordinatorReplica(Replica):
    """Methods may be called from any thread and return at once."""

    def __init__(
        self,
        store: LogStore,
        transport: ClientTransport,
        *,
        settings: Settings,
        on_change: Callable[[], None],
        deliver: Deliver | None = None,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """``on_change`` is called on the engine's thread when a ``ClusterView`` would be another one."""
        self.machine = ClusterMachine(store)
        self._on_change = on_change
        super().__init__(
            store,
            transport,
            self.machine,
            service=self._make_service(settings),
            raft=settings.raft,
            log=_log_settings(settings),
            calls=settings.calls,
            deliver=deliver,
            on_fatal=on_fatal,
        )

    def _make_service(self, settings: Settings) -> Callable[[Any], CoordinatorService]:
        def make(replica: CoordinatorReplica) -> CoordinatorService:
            self._coordinator = CoordinatorService(replica, self.machine, settings, self._on_change)
            return self._coordinator

        return make

    def view(self, answer: Answer) -> None:
        """Answers with a ``ClusterView``."""

        def take() -> None:
            machine = self.machine
            view = ClusterView(
                self._coordinator.leads,
                self.leader,
                machine.cluster_id,
                dict(machine.topics),
                dict(machine.brokers),
                frozenset((key.group_id, key.node) for key in machine.unmade),
                tuple(machine.doomed.values()),
                {NodeId(node): broker for node, broker in machine.coordinators.items()},
                self.members,
                dict(machine.expired),
            )
            self._deliver([(answer, view)])

        self.run(take, answer)

    def change(self, command: AnyCommand, answer: Answer) -> None:
        """Let the group apply it; answers what applying it answers, or ``NotLeaderError`` and others."""
        self.command(encode_command(command), answer)

    def set_brokers(self, alive: Sequence[AliveBroker]) -> None:
        """Who can take replicas from now on."""
        self.run(lambda: self._coordinator.set_brokers(alive))


class CoordinatorService:
    """Implements ``rayqueue.replica.service.Service``."""

    def __init__(
        self, replica: Replica, machine: ClusterMachine, settings: Settings, on_change: Callable[[], None]
    ) -> None:
        self._replica = replica
        self._machine = machine
        self._on_change = on_change
        self._seen: tuple[object, ...] = ()
        self._coordinator = Coordinator(
            machine,
            settings.cluster,
            Seals(secret_of(settings)),
            self._propose,
            replica.confirm,
            lambda: time.time_ns() // 1_000_000,
        )

    @property
    def leads(self) -> bool:
        return self._coordinator.leading

    @property
    def next_deadline_s(self) -> float:
        return self._coordinator.next_deadline_s

    def serve(self, client: int, frame: Frame) -> None:
        if frame.kind != Kind.CALL:
            raise InvalidInputError("a coordinator holds no records; ask a partition's replica", kind=frame.kind)
        call, request = decode_coordinator_call(frame.body), frame.request
        if isinstance(call, GetStatus):
            self._send(client, request, self._status())
            return
        self._replica.check_leads()  # says who does, which the coordinator itself does not know
        self._coordinator.handle(time.monotonic(), client, call, lambda answer: self._send(client, request, answer))

    def needs(self, client: int) -> bool:
        return self._coordinator.has_members(client)

    def client_gone(self, client: int) -> None:
        self._coordinator.disconnected(time.monotonic(), client)

    def lead(self, now_s: float) -> None:
        self._coordinator.lead(now_s, node=self._replica.node_id, term=self._replica.term)

    def unlead(self, now_s: float) -> None:
        self._coordinator.unlead()

    def tick(self, now_s: float) -> None:
        self._coordinator.tick(now_s)
        machine = self._machine
        lists = len(machine.unmade), len(machine.doomed), len(machine.expired)
        seen = (self.leads, machine.version, *lists, self._replica.members)
        if seen != self._seen:
            self._seen = seen
            self._on_change()

    def close(self) -> None:
        self._coordinator.unlead()

    def set_brokers(self, alive: Sequence[AliveBroker]) -> None:
        self._coordinator.set_brokers(time.monotonic(), alive)

    def _propose(self, payload: bytes, answer: Answer) -> None:
        self._replica.propose(payload, answer)

    def _send(self, client: int, request: int, answer: Any) -> None:
        if isinstance(answer, RayQueueError):
            self._replica.fail(client, request, answer)
        else:
            self._replica.send(client, Kind.ANSWER, request, [encode_answer(answer)])

    def _status(self) -> ReplicaStatus:
        status = self._replica.status_now()
        return ReplicaStatus(
            status.node_id,
            status.role,
            status.leader,
            status.term,
            status.start_offset,
            status.high_watermark,
            status.size_bytes,
        )


def _log_settings(settings: Settings) -> LogSettings:
    """Nobody reads this log: it is kept as short as can be."""
    log = settings.log
    return log.model_copy(
        update={
            "segment_bytes": max(SEGMENT_BYTES, log.max_batch_bytes),
            "retention_ms": None,
            "retention_bytes": None,
        }
    )
