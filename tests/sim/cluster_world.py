"""One schedule of the cluster: a coordinator group, consumer groups, and everything that goes wrong, from one seed.

First the safety phase: faults of the kinds this seed has drawn, while members
come and go and topics change. Then everything heals, and order is demanded:
every partition read by one live member, evenly. Last, where the seed says so,
the healthy leader is lost, which must cost nobody his place; or a healthy
group is left alone for some time, in which nothing may happen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

from rayqueue.cluster.assignors import STRATEGIES
from rayqueue.cluster.tables import COORDINATOR
from rayqueue.config import ClusterSettings, RaftSettings
from rayqueue.errors import RayQueueError, TopicRecreatedError, UnknownTopicError
from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.memory_store import MemoryStore
from rayqueue.partition import Partition, PartitionSettings, commit_command, forget_group_command
from rayqueue.partition.tables import PARTITION
from rayqueue.protocol.calls import DeletedGroup, Position
from rayqueue.protocol.topics import TopicPartition
from rayqueue.raft.messages import InstallSnapshot
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.transport import Event, Received
from rayqueue.records import RecordBatch
from tests.sim.cluster_checker import ClusterChecker
from tests.sim.cluster_growth import SimKeeper
from tests.sim.cluster_members import Admin, Held, SimMember
from tests.sim.cluster_node import ClusterNode, Connection
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.network import Clock, Network, Weather
from tests.sim.node import new_disk, peer_back, peer_gone

WEATHERS = ("drop", "duplicate", "slow", "reorder", "client_slow")
NODE_FAULTS = (
    "partition",
    "one_way",
    "pause",
    "kill",
    "kill_in_sync",
    "power_loss",
    "disk_full",
    "transfer",
)
USER_FAULTS = (
    "member_kill",
    "member_pause",
    "member_cut",
    "member_leave",
    "slow_release",
    "wishes",
    "topics",
    "delete_topics",
    "delete_groups",
    "producer_ids",
)
FAULTS = (*WEATHERS, *NODE_FAULTS, *USER_FAULTS)
GROWTH = "growth"
"""The group begins with one replica and becomes three. Drawn beside the others."""
BROKERS_CHANGE = "brokers"
"""Brokers join, are drained, go for good and come back, and lose disks; the group follows. Drawn beside the others."""

RESTORE = "restore"
"""Disks of the group's replicas are replaced by older copies of themselves. Drawn beside the others, where it grows."""

SAFETY_S = 8.0
HEAL_S = 30.0


@dataclass(frozen=True, slots=True)
class ClusterOutcome:
    seed: int
    acked: int
    entries: int
    snapshots: int
    commits: int
    refusals: int
    moves: int


class SimPartition:
    """A partition that never fails: the real machine, one entry after the other."""

    def __init__(self) -> None:
        self._machine = Partition(MemoryStore(GroupId("p"), ReplicaId("p"), PARTITION), PartitionSettings())
        self._index = 1
        self._machine.apply(Index(1), _records())

    def commit(self, group: str, generation: int, offsets: dict[int, int]) -> Any:
        return self._apply(commit_command(group, generation, offsets))

    def position(self, group: str) -> Position | None:
        return self._machine.position(group)

    def forget(self, group: str, generation: int, seen: Position | None) -> bool:
        """As ``PartitionService`` does."""
        was = None if seen is None else (seen.generation, seen.offsets)
        return bool(self._apply(forget_group_command(group, generation, was)).existed)

    def _apply(self, command: bytes) -> Any:
        self._index += 1
        return self._machine.apply(Index(self._index), command)


@cache
def _records() -> bytes:
    return RecordBatch.encode([b""] * 1000, timestamps=1)


class ClusterWorld:
    """One seed's universe. ``faults``, ``size`` and ``ending`` narrow what may happen; None lets the seed draw."""

    def __init__(
        self, seed: int, faults: frozenset[str] | None = None, size: int | None = None, ending: str | None = None
    ) -> None:
        self.seed = seed
        self.ending = ending
        self.assignor = "balanced" if seed % 3 else STRATEGIES[seed // 3 % len(STRATEGIES)]
        self.rng = Random(seed)
        self.disk_rng = Random(f"disks {seed}")
        self.clock = Clock()
        self.network = Network(self.clock, self.rng)
        timing = self.rng.choice(
            (
                {"election_timeout_min_ms": 600, "election_timeout_max_ms": 1200, "fast_election_max_ms": 100},
                {"election_timeout_min_ms": 700, "election_timeout_max_ms": 720, "fast_election_max_ms": 5},
            )
        )
        self.raft_settings = RaftSettings(
            **timing,
            heartbeat_ms=200,
            append_batch_bytes=100_000,
            window_bytes=300_000,
            max_uncommitted_bytes=600_000,
            apply_batch_bytes=2_000,
            snapshot_retry_ms=500,
        )
        self.settings = ClusterSettings(join_window_ms=self.rng.choice((0, 60)))
        drawn = {fault for fault in FAULTS if self.rng.random() < 0.4}
        self.faults = drawn if faults is None else set(faults)
        self.snapshots = 0
        self.client_slow_s = 0.0
        self._connections: list[Connection] = []
        self.checker = ClusterChecker(self)
        self.nodes: dict[ReplicaId, ClusterNode] = {}
        drawn_size = self.rng.choice((1, 3, 3, 3, 3, 3, 5))
        voters = ReplicaSet.of(f"c{number + 1}" for number in range(drawn_size if size is None else size))
        for replica_id in sorted(voters.voters):
            self.nodes[replica_id] = ClusterNode(self, replica_id, voters)
        # Dice of its own, so that schedules without it stay what they are.
        dice = Random(f"grows {seed}")
        drawn = {kind for kind, share in ((GROWTH, 0.7), (BROKERS_CHANGE, 0.5)) if dice.random() < share}
        kinds = drawn if faults is None else {GROWTH, BROKERS_CHANGE} & faults
        grows, self.brokers_change = GROWTH in kinds and len(self.nodes) == 1, BROKERS_CHANGE in kinds
        brokers = max(3 if grows else 1, len(self.nodes))
        self.keeper = SimKeeper(self, brokers) if grows or self.brokers_change else None
        self.restores = self.keeper is not None and (
            RESTORE in faults if faults is not None else Random(f"coordinator backups {seed}").random() < 0.5
        )
        self.partitions: dict[tuple[int, int], SimPartition] = {}
        self.admin = Admin(self)
        self.admin_made: dict[str, tuple[int, int]] = {}
        self.topics = ("orders", "payments", "audit")[: self.rng.choice((1, 2, 3))]
        self.members: list[SimMember] = []
        for group in ("billing", "search")[: self.rng.choice((1, 1, 2))]:
            for number in range(self.rng.choice((1, 2, 3, 4))):
                static = self.rng.random() < 0.25
                self.members.append(SimMember(self, f"{group}{number}", group, self._wish(), static))

    def _wish(self) -> tuple[str, ...]:
        if self.rng.random() < 0.6:
            return self.topics
        return tuple(topic for topic in self.topics if self.rng.random() < 0.6)

    # -- for nodes and clients ------------------------------------------------------------------

    def new_disk(self, group_id: GroupId, replica_id: ReplicaId) -> MemoryStore:
        return new_disk(self, group_id, replica_id, COORDINATOR)

    def crash_disk(self, disk: MemoryStore) -> MemoryStore:
        return disk.reopen()

    def is_spoiled(self, replica_id: ReplicaId) -> bool:
        return False

    def sync_time(self) -> float:
        return self.rng.uniform(0.0002, 0.004) if self.rng.random() < 0.95 else self.rng.uniform(0.01, 0.2)

    def client_delay(self) -> float:
        delay = self.rng.uniform(0.0002, 0.003)
        if self.client_slow_s and self.rng.random() < 0.3:
            delay += self.rng.uniform(0, self.client_slow_s)
        return delay

    def connect(self, node: ClusterNode) -> Connection:
        connection = Connection(len(self._connections) + 1, node)
        self._connections.append(connection)
        return connection

    def send(self, sender: ReplicaId, peer: ReplicaId, event: Event) -> None:
        if isinstance(event, Received) and isinstance(event.message, InstallSnapshot):
            self.snapshots += 1
        self.network.send(sender, peer, lambda: self.nodes[peer].take(event))

    def on_killed(self, node: ClusterNode) -> None:
        """The kernel closes a dead process's sockets, and most of those at the other end hear of it."""
        for other in self.nodes.values():
            if (
                other is not node
                and self.rng.random() < 0.7
                and not self.network.is_cut(node.replica_id, other.replica_id)
            ):
                self.clock.after(self.rng.uniform(0.0005, 0.01), partial(self._report_dead, node, other))
        for link in (*(member.link for member in self.members), self.admin.link):
            connection = link.connection
            if connection is not None and connection.node is node and not link.cut:
                self.clock.after(self.client_delay(), partial(link.broken, connection))

    def _report_dead(self, node: ClusterNode, other: ClusterNode) -> None:
        if not node.alive:
            other.take(peer_gone(node, True))

    def _report_back(self, node: ClusterNode, other: ClusterNode) -> None:
        if node.alive and other.alive:
            other.take(peer_back(node))
            node.take(peer_back(other))

    def restart(self, node: ClusterNode) -> None:
        if node.alive or not (self.keeper is None or self.keeper.may_run(node.replica_id)):
            return
        node.start()
        for other in self.nodes.values():
            if other is not node:
                self.clock.after(self.rng.uniform(0.001, 0.05), partial(self._report_back, node, other))

    def commit(
        self, who: SimMember, each: TopicPartition, held: Held, offset: int | None, answer: Callable[[Any], None]
    ) -> None:
        """Commit to a partition, or without an offset claim it. The way there and back may take long."""
        member, group = who.member, who.group

        def arrive() -> None:
            result: Any
            info = self.checker.reference.topics.get(each.topic)
            if info is None or each.partition >= len(info.partitions):
                result = UnknownTopicError(f"{each} is gone")
            elif not self.is_meant(held.topic_id, info.topic_id):
                result = TopicRecreatedError(f"{each} is another topic's now")
            else:
                place = (info.topic_id, each.partition)
                self.checker.arrived(member, held.topic_id, place)
                partition = self.partition(place)
                result = self.write(partition, group, held.generation, {} if offset is None else {0: offset})
                if not isinstance(result, RayQueueError):
                    if offset is None:
                        self.checker.claimed(member, group, *place, held.generation, result.offsets)
                    else:
                        self.checker.committed_offset(member, group, *place, held.generation, offset)
            self.clock.after(self.client_delay(), lambda: answer(result))

        self.clock.after(self.client_delay(), arrive)

    def partition(self, place: tuple[int, int]) -> SimPartition:
        """The partition of a topic's id and a number. What has another id is another partition, whatever its name."""
        if place not in self.partitions:
            self.partitions[place] = SimPartition()
        return self.partitions[place]

    def is_meant(self, wanted: int, found: int) -> bool:
        """Whoever asks names the topic's id, and no other topic answers."""
        return wanted == found

    def forget_group(self, group: str, deleted: DeletedGroup) -> None:
        """As ``client.admin.forget_group``: at each partition by itself, a look at the position and then the deletion,
        with time for latecomers in between."""
        for info in list(self.checker.reference.topics.values()):
            for each in info.partitions:
                place = (info.topic_id, each.number)
                self.clock.after(self.client_delay(), partial(self._forget_seen, group, deleted, place))

    def _forget_seen(self, group: str, deleted: DeletedGroup, place: tuple[int, int]) -> None:
        seen = self.partition(place).position(group)
        if seen is not None and seen.generation > deleted.generation and group in self.checker.reference.groups:
            return  # it is the position of a new life of this group

        def arrive() -> None:
            gone = self.partition(place).forget(group, deleted.generation, seen)
            if gone or seen is None:
                self.checker.forgot(group, *place, deleted.generation, gone)
            else:
                self._forget_seen(group, deleted, place)

        self.clock.after(self.client_delay(), arrive)

    def write(self, partition: SimPartition, group: str, generation: int, offsets: dict[int, int]) -> Any:
        return partition.commit(group, generation, offsets)

    # -- what goes wrong ----------------------------------------------------------------------------

    def _weather(self) -> None:
        def share(name: str, most: float) -> float:
            return self.rng.uniform(0, most) if name in self.faults else 0.0

        self.network.weather = Weather(
            drop=share("drop", 0.3),
            duplicate=share("duplicate", 0.6),
            slow=share("slow", 0.3),
            slow_s=self.rng.choice((0.05, 0.5, 2.0)),
            reorder="reorder" in self.faults,
        )
        self.client_slow_s = self.rng.choice((0.05, 0.3, 0.9)) if "client_slow" in self.faults else 0.0

    def _node_fault(self) -> None:
        kinds = [fault for fault in NODE_FAULTS if fault in self.faults]
        if not kinds:
            return
        node = self.rng.choice(list(self.nodes.values()))
        match self.rng.choice(kinds):
            case "partition":
                self._partition(one_way=False)
            case "one_way":
                self._partition(one_way=True)
            case "pause":
                node.pause(self.rng.uniform(0.05, 3))
            case "kill":
                self._kill(node, committed=None)
            case "kill_in_sync":
                busy = [node for node in self.nodes.values() if node.alive and node.syncing]
                for victim in busy[: self.rng.choice((1, 2, 5))]:
                    self._kill(victim, committed=self.rng.random() < 0.5)
                node.doom = partial(self._kill, node, committed=True)
            case "power_loss":
                for victim in self.nodes.values():
                    self._kill(victim, committed=self.rng.random() < 0.5)
            case "disk_full":
                node.disk_is_full = True
                node.reserve_is_full = self.disk_rng.random() < 0.5
                self.clock.after(self.rng.uniform(0.1, 2), lambda: setattr(node, "disk_is_full", False))
            case "transfer":
                self._transfer()

    def _partition(self, *, one_way: bool) -> None:
        side = {replica_id for replica_id in self.nodes if self.rng.random() < 0.5}
        links = {(a, b) for a in self.nodes for b in self.nodes if a in side and b not in side}
        self.network.cut(links if one_way else links | {(b, a) for a, b in links})
        self.clock.after(self.rng.uniform(0.2, 4), lambda: self.network.cut(set()))

    def _kill(self, node: ClusterNode, committed: bool | None) -> None:
        node.kill(committed=committed)
        self.clock.after(self.rng.uniform(0.01, 3), lambda: self.restart(node))

    def leader(self) -> ClusterNode | None:
        leaders = [node for node in self.nodes.values() if node.alive and node.engine.is_leader]
        return max(leaders, key=lambda node: node.engine.term) if leaders else None

    def serving(self) -> list[ClusterNode]:
        """The replicas of the group, as its leader knows them."""
        leader = self.leader()
        return [] if leader is None else [self.nodes[node] for node in sorted(leader.engine.replica_set.everyone)]

    def _transfer(self) -> None:
        leader = self.leader()
        if leader is not None:
            others = sorted(leader.engine.replica_set.voters - {leader.replica_id})
            if others:
                leader.transfer(self.rng.choice(others), lambda _: None)

    def _user_fault(self) -> None:
        kinds = [fault for fault in USER_FAULTS if fault in self.faults]
        if not kinds:
            return
        member = self.rng.choice(self.members)
        match self.rng.choice(kinds):
            case "member_kill":
                member.kill()
                self.clock.after(self.rng.uniform(0.05, 4), member.start)
            case "member_leave":
                member.leave()
                self.clock.after(self.rng.uniform(0.05, 4), member.start)
            case "member_pause":
                member.pause(self.rng.uniform(0.1, 4))
            case "member_cut":
                member.link.cut = True
                self.clock.after(self.rng.uniform(0.1, 4), lambda: setattr(member.link, "cut", False))
            case "slow_release":
                member.slow_release = not member.slow_release
            case "wishes":
                member.want(self._wish())
            case "topics":
                self._change_topic()
            case "delete_topics":
                topic = self.rng.choice(self.topics)
                self.admin_made.pop(topic, None)
                self.admin.delete(topic)
                self.clock.after(self.rng.uniform(0.05, 1), partial(self.admin.create, topic, self.rng.randint(1, 5)))
            case "delete_groups":
                self._delete_group(member.group)
            case "producer_ids":
                self.admin.take_ids(self.rng.randint(1, 5))

    def _change_topic(self) -> None:
        topic = self.rng.choice(self.topics)
        info = self.checker.reference.topics.get(topic)
        if info is not None:
            self.admin.alter(topic, len(info.partitions) + self.rng.randint(1, 3))

    def _delete_group(self, group: str) -> None:
        """All its members leave; it is deleted in the middle of their coming back."""
        for member in self.members:
            if member.group == group:
                member.leave()
                self.clock.after(self.rng.uniform(0.05, 2), member.start)
        self.clock.after(self.rng.uniform(0.02, 0.3), lambda: self.admin.delete_group(group))

    # -- the schedule ---------------------------------------------------------------------------------

    def run(self) -> ClusterOutcome:
        for topic in self.topics:
            self.admin.create(topic, self.rng.randint(1, 6))
        for member in self.members:
            self.clock.at(self.rng.uniform(0, 3), member.start)
        self.clock.run_until(self.rng.uniform(0.5, 3))
        for _ in range(self.rng.randint(0, 12)):
            self.clock.at(self.rng.uniform(self.clock.now, SAFETY_S), self._node_fault)
        for _ in range(self.rng.randint(3, 20)):
            self.clock.at(self.rng.uniform(self.clock.now, SAFETY_S), self._user_fault)
        for _ in range(3):
            self.clock.at(self.rng.uniform(self.clock.now, SAFETY_S), self._weather)
        if self.keeper is not None and self.brokers_change:
            self.keeper.draw_faults(SAFETY_S)
        if self.keeper is not None and self.restores:
            self.keeper.draw_restores(SAFETY_S)
        self.clock.run_until(SAFETY_S)
        self._heal()
        endings = {"none": lambda: None, "failover": self._failover, "quiet": self._quiet}
        drawn = self.rng.choice(sorted(endings))
        endings[self.ending or drawn]()
        self.checker.finally_agree()
        checker = self.checker
        return ClusterOutcome(
            self.seed,
            checker.acks,
            checker.last_committed,
            self.snapshots,
            checker.commits,
            checker.refusals,
            checker.moves,
        )

    def _heal(self) -> None:
        self.network.weather = Weather()
        self.client_slow_s = 0.0
        self.faults = set()
        self.network.cut(set())
        self.clock.run_until(self.clock.now + 4)  # whatever was under way, pauses and restarts, comes to its end
        self.network.cut(set())
        for node in self.nodes.values():
            node.disk_is_full = False
            self.restart(node)
        for member in self.members:
            member.slow_release = False
            member.link.cut = False
            member.start()
        self._demand_order("after healing")

    def _demand_order(self, when: str) -> None:
        if not self.clock.run_until(self.clock.now + HEAL_S, self._in_order):
            raise BrokenError(Invariant.PROGRESS, f"no order {when}: {self._describe()}")

    def _in_order(self) -> bool:
        if self.admin.pending or self.leader() is None or not (self.keeper is None or self.keeper.done):
            return False
        last = self.checker.last_committed
        if any(node.engine.applied != last or node.disk.last_index != last for node in self.serving()):
            return False
        reference = self.checker.reference
        for name in {member.group for member in self.members}:
            group = reference.groups.get(name)
            living = {member.member: member for member in self.members if member.group == name}
            if group is None or set(group.members) != set(living) or group.rebalancing:
                return False
            for member_id, member in living.items():
                reading = {
                    each: held.grant for each, held in member.held.items() if held.claimed and not held.letting_go
                }
                if reading != group.members[member_id].view() or len(reading) != len(member.held):
                    return False
        return True

    def _describe(self) -> str:
        groups = {
            name: {member: list(each.view().items()) for member, each in group.members.items()}
            for name, group in self.checker.reference.groups.items()
        }
        members = {member.member: (member.joined, sorted(member.held)) for member in self.members}
        applied = {replica_id: (node.alive, node.engine.applied) for replica_id, node in self.nodes.items()}
        keeper = "" if self.keeper is None else f", {self.keeper.describe()}"
        return f"groups {groups}, members {members}, nodes {applied}, admin waits for {self.admin.pending}{keeper}"

    def _generations(self) -> dict[str, int]:
        return {name: group.generation for name, group in self.checker.reference.groups.items()}

    def _quiet(self) -> None:
        """Nothing happens for some time, so nothing may happen to anybody."""
        before = self._generations()
        self.clock.run_until(self.clock.now + 4)
        if self._generations() != before:
            raise BrokenError(
                Invariant.UNDISTURBED, f"nothing happened, but groups went from {before} to {self._generations()}"
            )
        self._demand_order("in quiet")

    def _failover(self) -> None:
        """The leader of a healthy cluster dies, or hands over: no member may lose its place by it."""
        leader = self.leader()
        if leader is None or len(self.serving()) == 1:
            return
        before = self._generations()
        if self.rng.random() < 0.5:
            self._kill(leader, committed=None)
        else:
            self._transfer()
        self.clock.run_until(self.clock.now + 6)
        if self._generations() != before:
            raise BrokenError(Invariant.UNDISTURBED, f"a new leader took groups from {before} to {self._generations()}")
        self._demand_order("after a failover")
