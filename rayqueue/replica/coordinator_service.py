"""The service of a coordinator's replica: ``rayqueue.cluster`` on the engine's thread.

Clients' calls are decoded here and handed to ``Coordinator``, which serves on
the replica that leads. What the keeper needs to know is taken as a value
(``ClusterView``), so that it can look at it in its own time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rayqueue.cluster.catalog import BrokerRow, PlacedReplica
from rayqueue.cluster.commands import AnyCommand, check_readable, encode_command
from rayqueue.cluster.coordinator import Coordinator
from rayqueue.cluster.machine import SEGMENT_BYTES, ClusterMachine
from rayqueue.cluster.moves import Move, Planned
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.recoveries import Recovery
from rayqueue.cluster.seen import Seen
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.cluster.transactions import CommitRow
from rayqueue.config import Settings
from rayqueue.errors import InvalidInputError
from rayqueue.ids import GroupId, Index, Offset, ReplicaId
from rayqueue.protocol.calls import CoordinatorCall, GetStatus, decode_coordinator_call
from rayqueue.protocol.frames import Frame, Kind
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.topics import TopicInfo
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.answers import Answer, Deliver, call_each
from rayqueue.replica.core import ReplicaCore
from rayqueue.replica.replica import Replica
from rayqueue.replica.secret import secret_of
from rayqueue.replica.service import Service
from rayqueue.replica.start import open_replica


class ClusterView(NamedTuple):
    """The cluster as this replica knows it; as it is, if it leads."""

    leads: bool
    leader: ReplicaId | None
    cluster_id: str
    topics: Mapping[str, TopicInfo]
    brokers: Mapping[str, BrokerRow]
    unmade: frozenset[tuple[str, str]]
    """Raft group id and replica id."""
    doomed: tuple[PlacedReplica, ...]
    coordinators: Mapping[ReplicaId, str]
    """The coordinator's replicas that were added after the cluster was made, and their brokers."""
    replica_set: ReplicaSet
    """Of the coordinator's group."""
    replica_set_version: Index | None
    """None while a change of them is not committed."""
    expired: Mapping[str, int]
    """Groups that partitions have still to forget, and up to which generation."""
    lost: Mapping[tuple[str, str], str]
    """Replicas whose data is lost, by Raft group id and replica id, and what they said of it."""
    moves: Mapping[str, Move]
    """Replicas that are being replaced, by Raft group id."""
    replica_counts: Mapping[str, int]
    """By broker."""
    recoveries: Mapping[str, Recovery] = {}
    """The last one of each Raft group that went on without a majority."""
    planned: tuple[Planned, ...] = ()
    """Moves of a rebalance that were not begun yet."""
    rebalance: int | None = None
    """The number of the one that is under way."""
    readers: Mapping[tuple[str, int], Mapping[str, int]] = {}
    """By partition, how many members of groups read it on each Ray node; of topics that want to be led there."""
    commits: Mapping[tuple[int, int], CommitRow] = {}
    """Transactions that were committed, and whose participants may not all know it."""
    missing: frozenset[tuple[str, str]] = frozenset()
    """Of those that are lost, the ones that have only found nothing where their data should be."""


class CoordinatorService(Service):
    def __init__(
        self,
        replica: ReplicaCore[CoordinatorService],
        machine: ClusterMachine,
        settings: Settings,
        on_change: Callable[[], None],
        first_coordinators: Mapping[ReplicaId, str] | None = None,
    ) -> None:
        """``on_change`` is called on the engine's thread when a ``ClusterView`` would be another one."""
        self.machine = machine
        self._replica = replica
        self._clients = replica.clients
        self._on_change = on_change
        self._seen: tuple[object, ...] = ()
        self._coordinator = Coordinator(
            machine,
            settings.cluster,
            Seals(secret_of(settings)),
            self._propose,
            replica.confirm,
            lambda: time.time_ns() // 1_000_000,
            self._check,
        )
        self._coordinator.first_coordinators = first_coordinators or {}

    # -- from any thread ------------------------------------------------------------------

    def view(self, answer: Answer) -> None:
        """Answers with a ``ClusterView``."""
        self._replica.look(self._view, answer)

    def change(self, command: AnyCommand, answer: Answer) -> None:
        """Let the group apply it; answers what applying it answers, or ``NotLeaderError`` and others."""
        self._check(command)
        self._replica.command(encode_command(command), answer)

    # -- for the keeper, on the engine's thread -------------------------------------------------

    @property
    def leads(self) -> bool:
        return self._coordinator.leading

    def set_brokers(self, alive: Sequence[AliveBroker]) -> None:
        """Set the brokers that can take replicas from now on."""
        self._coordinator.set_brokers(time.monotonic(), alive)

    def tell_seen(self, seen: Seen) -> None:
        """Note the keeper's observations, for whoever asks how things are."""
        self._coordinator.tell_seen(seen)

    def ask(self, call: CoordinatorCall, reply: Callable[[Any], None]) -> None:
        """A client's call, by somebody in the same process."""
        self._coordinator.handle(time.monotonic(), 0, call, reply)

    # -- Service -----------------------------------------------------------------------------

    @property
    def next_deadline_s(self) -> float:
        return self._coordinator.next_deadline_s

    def serve(self, client: int, frame: Frame) -> None:
        if frame.kind != Kind.CALL:
            raise InvalidInputError("a coordinator holds no records; ask a partition's replica", kind=frame.kind)
        call, request = decode_coordinator_call(frame.body), frame.request
        if isinstance(call, GetStatus):
            self._clients.answer(client, request, self._replica.client_status())
            return
        self._replica.check_leads()  # says who does, which the coordinator itself does not know
        self._coordinator.handle(time.monotonic(), client, call, partial(self._clients.answer, client, request))

    def needs(self, client: int) -> bool:
        return self._coordinator.has_members(client)

    def client_gone(self, client: int) -> None:
        self._coordinator.disconnected(time.monotonic(), client)

    def lead(self, now_s: float) -> None:
        self._coordinator.lead(now_s, replica_id=self._replica.replica_id, term=self._replica.engine.term)

    def lost(self, now_s: float) -> None:
        self._coordinator.unlead()

    def tick(self, now_s: float) -> None:
        self._coordinator.tick(now_s)
        machine = self.machine
        lists = len(machine.unmade), len(machine.doomed), len(machine.expired), len(machine.lost), len(machine.moves)
        unsettled = sum(not each.settled for each in machine.recoveries.values())
        plan = machine.rebalance, len(machine.planned)
        seen = (self.leads, machine.version, *lists, unsettled, plan, self._replica.engine.replica_set)
        if seen != self._seen:
            self._seen = seen
            self._on_change()

    def close(self) -> None:
        self._coordinator.unlead()

    def bounds(self) -> tuple[Offset, Offset]:
        return Offset(0), Offset(self._replica.engine.applied)

    # -- small things --------------------------------------------------------------------------

    def _check(self, command: AnyCommand) -> None:
        check_readable(command, self._replica.oldest_version)

    def _view(self) -> ClusterView:
        machine, engine = self.machine, self._replica.engine
        return ClusterView(
            self.leads,
            engine.leader,
            machine.cluster_id,
            dict(machine.topics),
            dict(machine.brokers),
            frozenset((key.group_id, key.replica_id) for key in machine.unmade),
            tuple(machine.doomed.values()),
            {ReplicaId(replica_id): broker for replica_id, broker in machine.coordinators.items()},
            engine.replica_set,
            engine.replica_set_version,
            dict(machine.expired),
            {(key.group_id, key.replica_id): why for key, why in machine.lost.items()},
            dict(machine.moves),
            dict(machine.replica_counts()),
            dict(machine.recoveries),
            tuple(machine.planned.values()),
            None if machine.rebalance is None else machine.rebalance.number,
            self._readers(),
            dict(machine.transactions.commits),
            frozenset((key.group_id, key.replica_id) for key in machine.missing),
        )

    def _readers(self) -> Mapping[tuple[str, int], Mapping[str, int]]:
        wanted = {info.name for info in self.machine.topics.values() if info.settings.prefer_leader == "consumer"}
        if not wanted:
            return {}
        return {place: at for place, at in self._coordinator.whereabouts.readers().items() if place[0] in wanted}

    def _propose(self, payload: bytes, answer: Answer) -> None:
        self._replica.propose(payload, answer)


CoordinatorReplica = Replica[CoordinatorService]


def start_coordinator(
    path: Path,
    group_id: GroupId,
    replica_id: ReplicaId,
    settings: Settings,
    *,
    host: str,
    epoch: int = 0,
    first_coordinators: Mapping[ReplicaId, str] | None = None,
    on_change: Callable[[], None],
    deliver: Deliver = call_each,
    on_fatal: Callable[[BaseException], None],
) -> CoordinatorReplica:
    """Run the replica of the coordinator whose data is at ``path``. It listens on a free port of ``host``.

    ``first_coordinators``: where the replicas are that the cluster was made with; no log says that.
    """
    store, transport = open_replica(path, group_id, replica_id, settings, COORDINATOR, host=host, epoch=epoch)
    machine = ClusterMachine(store)
    return Replica(
        store,
        transport,
        machine,
        lambda replica: CoordinatorService(replica, machine, settings, on_change, first_coordinators),
        _with_short_log(settings),
        deliver=deliver,
        on_fatal=on_fatal,
    )


def _with_short_log(settings: Settings) -> Settings:
    """Nobody reads this log: it is kept as short as can be."""
    segment_bytes = max(SEGMENT_BYTES, settings.log.max_batch_bytes)
    return settings.model_copy(update={"log": settings.log.model_copy(update={"segment_bytes": segment_bytes})})
