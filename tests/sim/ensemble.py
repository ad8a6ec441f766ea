"""One Raft group of a simulated cluster: its replicas, their disks, the network between them, and who watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Generic, TypeVar

from rayqueue.cluster.placement import AliveBroker
from rayqueue.config import RaftSettings, Settings
from rayqueue.errors import OutcomeUnknownError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Schema
from rayqueue.net.endpoint import Endpoint
from rayqueue.partition import PartitionSettings
from rayqueue.raft.messages import InstallSnapshot
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.transport import Event, Received
from tests.sim.checker import LogChecker
from tests.sim.network import Clock, Network, Weather
from tests.sim.node import new_disk, peer_back, peer_gone
from tests.sim.served import OLD_VERSION, ServedNode
from tests.sim.sockets import Internet, endpoint_of

NodeT = TypeVar("NodeT", bound=ServedNode)


class Ensemble(Generic[NodeT]):
    """Replicas of one group. ``kind`` makes one of them."""

    checker: LogChecker
    partition_settings = PartitionSettings()
    brokers: Sequence[AliveBroker] = ()
    release_rng: Random | None = None
    """The dice that say which replicas begin with the release before."""
    busy_rng: Random | None = None
    """The dice of threads that are busy now and then."""

    def __init__(
        self,
        group_id: GroupId,
        schema: Schema,
        *,
        clock: Clock,
        rng: Random,
        disk_rng: Random,
        internet: Internet,
        settings: Settings,
        raft_settings: RaftSettings,
    ) -> None:
        self.group_id = group_id
        self.schema = schema
        self.clock = clock
        self.rng = rng
        self.disk_rng = disk_rng
        self.internet = internet
        self.settings = settings
        self.raft_settings = raft_settings
        self.network = Network(clock, rng)
        self.snapshots = 0
        self.nodes: dict[ReplicaId, NodeT] = {}
        self.versions: dict[ReplicaId, int] = {}
        """Of the replicas' protocol, of those that are of an older release still; the next start is their upgrade."""

    def start(self, kind: Callable[[Ensemble[NodeT], ReplicaId, ReplicaSet], NodeT], replicas: Iterable[str]) -> None:
        members = ReplicaSet.of(replicas)
        for replica_id in sorted(members.voters):
            rng = self.release_rng
            if rng is not None and rng.random() < 0.5:
                self.versions[replica_id] = OLD_VERSION
            self.nodes[replica_id] = node = kind(self, replica_id, members)
            if rng is not None:
                self.clock.after(rng.uniform(0.5, 5), partial(self.kill, node))

    # -- tests.sim.node.NodeWorld ---------------------------------------------------------

    def new_disk(self, group_id: GroupId, replica_id: ReplicaId) -> MemoryStore:
        return new_disk(self, group_id, replica_id, self.schema)

    def crash_disk(self, disk: MemoryStore) -> MemoryStore:
        return disk.reopen()

    def is_spoiled(self, replica_id: ReplicaId) -> bool:
        return False

    def sync_time(self) -> float:
        return self.rng.uniform(0.0002, 0.004) if self.rng.random() < 0.95 else self.rng.uniform(0.01, 0.2)

    def send(self, sender: ReplicaId, peer: ReplicaId, event: Event) -> None:
        if isinstance(event, Received) and isinstance(event.message, InstallSnapshot):
            self.snapshots += 1
        self.network.send(sender, peer, lambda: self.nodes[peer].take(event))

    # -- for clients ------------------------------------------------------------------------

    def endpoint(self, replica_id: ReplicaId) -> Endpoint:
        node = self.nodes[replica_id]
        if not node.alive:
            raise OutcomeUnknownError(f"{replica_id} does not run at the moment", node=replica_id)
        return endpoint_of(node, node.port, node.engine.leader, node.engine.term)

    def leader(self) -> NodeT | None:
        """Of the newest term, if it lives."""
        leading = [node for node in self.nodes.values() if node.alive and node.engine.is_leader]
        return max(leading, key=lambda node: node.engine.term, default=None)

    @property
    def settled(self) -> bool:
        """One leads, and all have applied all that it has."""
        leader = self.leader()
        return leader is not None and all(
            node.alive and node.engine.applied == node.disk.last_index == leader.disk.last_index
            for node in self.nodes.values()
        )

    # -- life and death -------------------------------------------------------------------------

    def on_killed(self, node: NodeT) -> None:
        """The kernel closes a dead process's sockets, and most peers hear of it."""
        for other in self.nodes.values():
            if (
                other is not node
                and self.rng.random() < 0.7
                and not self.network.is_cut(node.replica_id, other.replica_id)
            ):
                self.clock.after(self.rng.uniform(0.0005, 0.01), partial(self._report_dead, node, other))

    def _report_dead(self, node: NodeT, other: NodeT) -> None:
        if not node.alive:
            other.take(peer_gone(node, True))

    def _report_back(self, node: NodeT, other: NodeT) -> None:
        if node.alive and other.alive:
            other.take(peer_back(node))
            node.take(peer_back(other))

    def restart(self, node: NodeT) -> None:
        if node.alive:
            return
        node.start()
        for other in self.nodes.values():
            if other is not node:
                self.clock.after(self.rng.uniform(0.001, 0.05), partial(self._report_back, node, other))

    def kill(self, node: NodeT, *, committed: bool | None = None) -> None:
        node.kill(committed=committed)
        self.clock.after(self.rng.uniform(0.01, 3), lambda: self.restart(node))

    def divide(self, *, one_way: bool) -> None:
        side = {replica_id for replica_id in self.nodes if self.rng.random() < 0.5}
        links = {(a, b) for a in self.nodes for b in self.nodes if (a in side) != (b in side)}
        self.network.cut({(a, b) for a, b in links if a in side} if one_way else links)
        self.clock.after(self.rng.uniform(0.2, 4), lambda: self.network.cut(set()))

    def transfer(self) -> None:
        leader = self.leader()
        others = sorted(replica_id for replica_id in self.nodes if leader is None or replica_id != leader.replica_id)
        if leader is not None and others:
            leader.transfer(self.rng.choice(others), lambda _: None)

    def heal(self) -> None:
        self.network.weather = Weather()
        self.network.cut(set())
        self.versions.clear()
        for node in self.nodes.values():
            node.disk_is_full = False
            self.restart(node)

    def describe(self) -> str:
        lines = [
            f"{node.replica_id} {'alive' if node.alive else 'dead'} term={node.engine.term} "
            f"leads={node.engine.is_leader} last={node.disk.last_index} commit={node.engine.commit} "
            f"applied={node.engine.applied}"
            for node in self.nodes.values()
        ]
        return f"{self.group_id}: " + "; ".join(lines)
