"""One schedule: a group, its users, and everything that goes wrong, from one seed.

First the safety phase: faults of the kinds this seed has drawn, while
producers write. Then everything heals, and progress is demanded. Last, where
the seed says so, a replica is cut off from the healthy group and comes back,
which must disturb nobody; or one message of a long catch-up is lost, which
must not make the leader send everything again and again; or answers to a
leadership that is over arrive in the next one of the same replica; or two
candidates divide the votes, and every vote arrives twice; or a leader that
was replaced without noticing is asked whether it still leads; or that leader
has led before, and others have meanwhile answered what it said then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from rayqueue.cluster.moves import Reason
from rayqueue.config import RaftSettings
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.memory_store import MemoryDisk, MemoryStore
from rayqueue.partition import PartitionSettings, trim_command
from rayqueue.partition.tables import PARTITION
from rayqueue.raft.messages import AppendEntries, InstallSnapshot, PreVote, PreVoteReply, RequestVote, VoteReply
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.transport import Event, Received
from tests.sim.checker import Checker
from tests.sim.clients import Operator, SimProducer
from tests.sim.groups import ACTIONS, SETTINGS, SimGroup, check_groups, retain
from tests.sim.invariants import BrokenError, Invariant
from tests.sim.mover import SimMover
from tests.sim.network import Clock, Network, Weather
from tests.sim.node import SimNode, new_disk, peer_back, peer_gone
from tests.sim.readers import SimReader, flip_a_bit

FAULTS = (
    "drop",
    "duplicate",
    "slow",
    "reorder",
    "partition",
    "one_way",
    "pause",
    "kill",
    "kill_in_sync",
    "power_loss",
    "disk_full",
    "members",
    "wipe",
    "transfer",
    "trim",
    "confirm",
)
ROT = "rot"
"""Drawn apart from the others: bits flip on the disks of a minority."""
BUSY = "busy"
"""Drawn apart: threads of replicas have other things to do now and then."""
RESTORE = "restore"
"""Drawn apart, too: a replica's disk is replaced by an older copy of itself, one after the other."""

SAFETY_S = 12.0
HEAL_S = 40.0


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    acked: int
    entries: int
    snapshots: int


class World:
    """One seed's universe. ``faults``, ``size`` and ``ending`` narrow what may happen; None lets the seed draw."""

    def __init__(
        self, seed: int, faults: frozenset[str] | None = None, size: int | None = None, ending: str | None = None
    ) -> None:
        self.seed = seed
        self.ending = ending
        self.rng = Random(seed)
        self.disk_rng = Random(f"disks {seed}")
        self.clock = Clock()
        self.network = Network(self.clock, self.rng)
        # Some groups time out almost together, which makes candidates collide.
        timing = self.rng.choice(
            (
                {"election_timeout_min_ms": 1000, "election_timeout_max_ms": 2500, "fast_election_max_ms": 150},
                {"election_timeout_min_ms": 700, "election_timeout_max_ms": 720, "fast_election_max_ms": 5},
            )
        )
        self.raft_settings = RaftSettings(
            **timing,
            heartbeat_ms=200,
            append_batch_bytes=2_000,
            window_bytes=30_000,
            max_uncommitted_bytes=60_000,
            apply_batch_bytes=2_000,
            snapshot_retry_ms=500,
        )
        # Dice of their own: what groups do changes nothing in the schedules of those who have none.
        self.group_rng = Random(f"groups {seed}")
        self.groups = [
            SimGroup(self, name, self.group_rng) for name in ("a", "b")[: self.group_rng.choice((0, 0, 0, 0, 1, 2))]
        ]
        self.partition_settings = SETTINGS if self.groups else PartitionSettings()
        drawn = {fault for fault in FAULTS if self.rng.random() < 0.4}
        self.faults = drawn if faults is None else set(faults)
        busy = Random(f"busy {seed}")
        self.busy_rng = busy if BUSY in self.faults or (faults is None and busy.random() < 0.25) else None
        """The dice of threads that are busy now and then, so that a turn finds more than one thing."""
        self.checker = Checker(self)
        self.snapshots = 0
        self.spoiled: set[ReplicaId] = set()
        self.nodes: dict[ReplicaId, SimNode] = {}
        drawn_size = self.rng.choice((1, 3, 3, 3, 3, 5, 5))
        size = drawn_size if size is None else size
        members = ReplicaSet.of(f"n{number}" for number in range(size))
        for replica_id in sorted(members.voters):
            self.nodes[replica_id] = SimNode(self, replica_id, members)
        self.producers = [SimProducer(self, producer_id) for producer_id in range(1, self.rng.choice((2, 3, 4)))]
        self.operator = Operator(self)
        self.mover = SimMover(self)
        self.size = size
        # Dice of their own, again.
        self.reader_rng = Random(f"readers {seed}")
        if faults is None and self.reader_rng.random() < 0.25:
            self.faults.add(ROT)
        self.may_spoil = (size - 1) // 2
        self.scrubs = faults is None and Random(f"scrubs {seed}").random() < 0.5
        self.backup_rng = Random(f"backups {seed}")
        self.backups: dict[ReplicaId, MemoryDisk] = {}
        if faults is None and self.backup_rng.random() < 0.25:
            self.faults.add(RESTORE)
        self.readers = [SimReader(self, self.reader_rng) for _ in range(self.reader_rng.choice((0, 1, 2)))]

    # -- for the nodes --------------------------------------------------------------------

    def new_disk(self, group_id: GroupId, replica_id: ReplicaId) -> MemoryStore:
        return new_disk(self, group_id, replica_id, PARTITION)

    def crash_disk(self, disk: MemoryStore) -> MemoryStore:
        return disk.reopen()

    def is_spoiled(self, replica_id: ReplicaId) -> bool:
        return replica_id in self.spoiled

    def sync_time(self) -> float:
        return self.rng.uniform(0.0002, 0.004) if self.rng.random() < 0.95 else self.rng.uniform(0.01, 0.3)

    def send(self, sender: ReplicaId, peer: ReplicaId, event: Event) -> None:
        if isinstance(event, Received) and isinstance(event.message, InstallSnapshot):
            self.snapshots += 1
        self.network.send(sender, peer, lambda: self._deliver(peer, event))

    def _deliver(self, peer: ReplicaId, event: Event) -> None:
        node = self.nodes.get(peer)
        if node is not None:
            node.take(event)

    def on_killed(self, node: SimNode) -> None:
        """The kernel closes a dead process's sockets, and most peers hear of it."""
        for other in self.nodes.values():
            if (
                other is not node
                and self.rng.random() < 0.7
                and not self.network.is_cut(node.replica_id, other.replica_id)
            ):
                self.clock.after(self.rng.uniform(0.0005, 0.01), partial(self._report_dead, node, other))

    def _report_dead(self, node: SimNode, other: SimNode) -> None:
        if not node.alive:  # a connection that stands again hides that it was broken
            other.take(peer_gone(node, True))

    def _report_back(self, node: SimNode, other: SimNode) -> None:
        if node.alive and other.alive:
            other.take(peer_back(node))
            node.take(peer_back(other))

    def restart(self, node: SimNode) -> None:
        if node.alive or node.removed or node.broken:
            return
        node.start()
        for other in self.nodes.values():
            if other is not node:
                self.clock.after(self.rng.uniform(0.001, 0.05), partial(self._report_back, node, other))

    def add_node(self, replica_id: ReplicaId) -> SimNode:
        self.nodes[replica_id] = SimNode(self, replica_id, None)
        return self.nodes[replica_id]

    def retire(self, replica_id: ReplicaId) -> None:
        """A removed replica is switched off, sooner or later; until then it may disturb nobody."""
        node = self.nodes[replica_id]
        node.removed = True
        self.clock.after(self.rng.uniform(0, 5), node.kill)

    # -- what goes wrong ----------------------------------------------------------------------

    def _weather(self) -> None:
        def share(name: str, most: float) -> float:
            return self.rng.uniform(0, most) if name in self.faults else 0.0

        self.network.weather = Weather(
            drop=share("drop", 0.3),
            duplicate=share("duplicate", 0.6),
            slow=share("slow", 0.3),
            slow_s=self.rng.choice((0.05, 0.5, 3.0)),
            reorder="reorder" in self.faults,
        )

    def _voters(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if not node.removed]

    def _one_fault(self) -> None:
        kinds = [fault for fault in FAULTS[4:] if fault in self.faults]
        if not kinds:
            return
        node = self.rng.choice(self._voters())
        match self.rng.choice(kinds):
            case "partition":
                self._partition(one_way=False)
            case "one_way":
                self._partition(one_way=True)
            case "pause":
                node.pause(self.rng.uniform(0.05, 4))
            case "kill":
                self._kill(node, committed=None)
            case "kill_in_sync":
                busy = [node for node in self._voters() if node.alive and node.syncing]
                for victim in busy[: self.rng.choice((1, 2, 5))]:
                    self._kill(victim, committed=self.rng.random() < 0.5)
                node.doom = partial(self._kill, node, committed=True)
            case "power_loss":
                for victim in self._voters():
                    self._kill(victim, committed=self.rng.random() < 0.5)
            case "disk_full":
                node.disk_is_full = True
                node.reserve_is_full = self.disk_rng.random() < 0.5
                self.clock.after(self.rng.uniform(0.1, 3), lambda: setattr(node, "disk_is_full", False))
            case "members":
                self.mover.begin(node.replica_id, Reason.ASKED if node.alive else Reason.AWAY)
            case "wipe":
                self._wipe(node)
            case "transfer":
                self.operator.transfer()
            case "trim":
                self._trim()
            case "confirm":
                for _ in range(6):
                    self.clock.after(self.rng.uniform(0, 2), self.operator.confirm)

    def _partition(self, *, one_way: bool) -> None:
        side = {replica_id for replica_id in self.nodes if self.rng.random() < 0.5}
        self._cut_off(side, one_way=one_way)
        self.clock.after(self.rng.uniform(0.2, 5), lambda: self.network.cut(set()))

    def _kill(self, node: SimNode, committed: bool | None) -> None:
        node.kill(committed=committed)
        self.clock.after(self.rng.uniform(0.01, 4), lambda: self.restart(node))

    def _wipe(self, node: SimNode) -> None:
        """The disk is lost. The replica never comes back under this id; another takes its place."""
        if self.mover.replacing is not None or not self._can_spare(node):
            return
        node.kill()
        node.removed = True
        self.mover.begin(node.replica_id, Reason.LOST)

    def _can_spare(self, node: SimNode) -> bool:
        """A promise of majorities is worth nothing once a majority of disks is gone."""
        return len(self.nodes) > 2 and not self.spoiled and self._nothing_lost()

    def _nothing_lost(self) -> bool:
        """All replicas have what they promised, as far as bits do not flip."""
        return not any(other.removed or other.disk.copied for other in self.nodes.values())

    def _back_up(self) -> None:
        node = self.backup_rng.choice(self._voters())
        self.backups[node.replica_id] = node.disk.disk.copy()

    def _restore(self) -> None:
        """An older copy of its own takes the place of a replica's disk. A group of one would simply lose the rest."""
        found = [node for node in self._voters() if node.replica_id in self.backups]
        if not found or len(self.nodes) < 2 or self.spoiled or self.mover.replacing or not self._nothing_lost():
            return
        self._replace_by_copy(self.backup_rng.choice(found))

    def _replace_by_copy(self, node: SimNode) -> None:
        node.restore(self.backups.pop(node.replica_id))
        self.clock.after(self.backup_rng.uniform(0.01, 3), lambda: self.restart(node))

    def _rot(self) -> None:
        """A bit flips on a disk, of a minority of the replicas and never beside a disk that was lost altogether."""
        node = self.reader_rng.choice(self._voters())
        lost = any(
            (other.removed and other.replica_id not in self.spoiled) or other.disk.copied
            for other in self.nodes.values()
        )
        if node.replica_id in self.spoiled or (len(self.spoiled) < self.may_spoil and not lost):
            self.spoiled.add(node.replica_id)
            flip_a_bit(node, self.reader_rng)

    def _replace_damaged(self) -> None:
        """As the keeper does: who says that its disk is damaged, or does not start any more, is replaced."""
        for node in list(self.nodes.values()):
            if not node.removed and self.mover.replacing is None and (node.broken or node.disk.damaged is not None):
                node.removed = node.broken
                self.mover.begin(node.replica_id, Reason.LOST)
        self.clock.after(0.5, self._replace_damaged)

    def _scrub(self) -> None:
        for node in list(self.nodes.values()):
            if not node.paused:
                node.scrub()
        self.clock.after(0.2, self._scrub)

    def _trim(self) -> None:
        leader = self.operator.leader()
        if leader is not None and self.groups:
            retain(leader, 0.0)
        elif leader is not None and leader.machine.next_offset:
            to = self.rng.randint(leader.machine.start_offset, leader.machine.next_offset)
            leader.propose(trim_command(to), lambda _: None)

    # -- the schedule -----------------------------------------------------------------------------

    def run(self) -> Outcome:
        self.clock.run_until(self.rng.uniform(0.5, 5))
        faults = self.rng.randint(3, 25)
        for _ in range(faults):
            self.clock.at(self.rng.uniform(self.clock.now, SAFETY_S), self._one_fault)
        for _ in range(4):
            self.clock.at(self.rng.uniform(self.clock.now, SAFETY_S), self._weather)
        for producer in self.producers:
            for _ in range(8):
                when = self.rng.uniform(self.clock.now, SAFETY_S)
                self.clock.at(when, partial(producer.want, self.rng.randint(1, 4)))
        for group in self.groups:
            for _ in range(ACTIONS):
                self.clock.at(self.group_rng.uniform(self.clock.now, SAFETY_S), group.act)
        for reader in self.readers:
            for _ in range(12):
                self.clock.at(self.reader_rng.uniform(self.clock.now, SAFETY_S), reader.look)
        if ROT in self.faults:
            for _ in range(self.reader_rng.randint(1, 6)):
                self.clock.at(self.reader_rng.uniform(self.clock.now, SAFETY_S), self._rot)
            self._replace_damaged()
            if self.scrubs:
                self._scrub()
        if self.mover.loses_learners:
            for _ in range(8):
                self.clock.at(self.mover.rng.uniform(self.clock.now, SAFETY_S), self.mover.lose_the_learner)
        if RESTORE in self.faults:
            for action in (self._back_up, self._restore):
                for _ in range(self.backup_rng.randint(2, 8)):
                    self.clock.at(self.backup_rng.uniform(self.clock.now, SAFETY_S), action)
        self.clock.run_until(SAFETY_S)
        self._heal()
        endings = {
            "none": lambda: None,
            "return": self._return_of_a_replica,
            "lost_message": self._one_lost_message,
            "late_answers": self._late_answers,
            "split_vote": self._split_vote,
            "deposed": self._deposed_leader_is_asked,
            "echo": self._answers_to_an_older_term,
        }
        drawn = self.rng.choice(sorted(endings))
        endings[self.ending or drawn]()
        members = self._members()
        self.checker.finally_agree(members)
        if self.groups:
            sound = [node for node in members if not node.is_spoiled]
            check_groups(self.checker.committed, self.checker.last_committed, sound)
        return Outcome(self.seed, len(self.checker.acks), self.checker.last_committed, self.snapshots)

    def _members(self) -> list[SimNode]:
        leader = self.operator.leader()
        if leader is None:
            raise BrokenError(Invariant.PROGRESS, "no leader")
        return self._in_service(leader)

    def _in_service(self, leader: SimNode) -> list[SimNode]:
        """All but a learner whose move was undone when the request to add it was still on its way: the next move of the
        group removes it."""
        members = leader.engine.replica_set
        everyone = [self.nodes[replica_id] for replica_id in sorted(members.everyone)]
        return [node for node in everyone if not (node.removed and node.replica_id in members.learners)]

    def _heal(self) -> None:
        self.network.weather = Weather()
        self.faults = set()
        self.network.cut(set())
        self.clock.run_until(self.clock.now + 5)  # whatever was under way, pauses and restarts, comes to its end
        self.network.cut(set())
        for node in list(self.nodes.values()):
            node.disk_is_full = False
            self.restart(node)
        for producer in self.producers:
            producer.want(2)
        for reader in self.readers:
            reader.drain()
        self._demand_progress("after healing")

    def _demand_progress(self, when: str) -> None:
        if not self.clock.run_until(self.clock.now + HEAL_S, self._settled):
            raise BrokenError(Invariant.PROGRESS, f"no progress {when}: {self._describe()}")

    def _settled(self) -> bool:
        if not all(producer.idle for producer in self.producers) or self.mover.replacing is not None:
            return False
        leader = self.operator.leader()
        if leader is None:
            return False
        last = leader.disk.last_index
        if len(leader.engine.replica_set.voters) != self.size:
            return False  # the group has its full number of replicas
        members = self._in_service(leader)
        if not all(node.alive and node.engine.applied == node.disk.last_index == last for node in members):
            return False
        if any(node.disk.copied for node in members):
            return False
        if self.scrubs and any(node.disk.disk.rotten for node in members):
            return False  # it is found without a reader, and who has it is replaced
        return all(reader.is_at_end for reader in self.readers)

    def _return_of_a_replica(self) -> None:
        """Cut one follower off a healthy group for a while: nobody else may notice, then or when it is back."""
        leader = self.operator.leader()
        assert leader is not None
        term = leader.engine.term
        followers = sorted(leader.engine.replica_set.voters - {leader.replica_id})
        if not followers:
            return
        away = self.rng.choice(followers)
        self._cut_off({away})
        if self.rng.random() < 0.5:
            for producer in self.producers:
                producer.want(2)
        self.clock.run_until(self.clock.now + self.rng.uniform(3, 8))
        self.network.cut(set())
        self.clock.run_until(self.clock.now + 4)
        if leader.engine.term != term or not leader.engine.is_leader:
            raise BrokenError(
                Invariant.UNDISTURBED,
                f"{away} came back and deposed {leader.replica_id}, which led term {term} in health",
            )
        self._demand_progress("after a replica came back")

    def _one_lost_message(self) -> None:
        """Lose the first message of a full window: what follows it is refused, and must be sent once more, no more."""
        leader = self.operator.leader()
        assert leader is not None
        followers = sorted(leader.engine.replica_set.voters - {leader.replica_id})
        if not followers:
            return
        behind = self.rng.choice(followers)
        self.nodes[behind].pause(0.5)
        for producer in self.producers:
            producer.want(30)
        first = leader.disk.last_index + 1
        sent: list[int] = []
        send = self.send

        def lose_the_first(sender: ReplicaId, peer: ReplicaId, event: Event) -> None:
            entries = getattr(getattr(event, "message", None), "entries", ())
            if peer == behind and entries:
                sent.extend(entry.index for entry in entries if entry.index >= first)
                if first in sent and len(sent) == len(entries):
                    return
            send(sender, peer, event)

        self.send = lose_the_first  # type: ignore[method-assign]
        self._demand_progress("after a message was lost")
        self.send = send  # type: ignore[method-assign]
        needed = leader.disk.last_index - first + 1
        if len(sent) > 3 * needed:
            raise BrokenError(
                Invariant.NO_STORM, f"one lost message made the leader send {len(sent)} entries where {needed} were new"
            )

    def _late_answers(self) -> None:
        """A leader, cut off with one follower, writes what nobody will commit. It is deposed, follows, leads again,
        and only then hears that follower's answers to its first leadership."""
        leader = self.operator.leader()
        assert leader is not None
        others = sorted(leader.engine.replica_set.voters - {leader.replica_id})
        if len(others) < 4:
            return
        ally = others[0]
        held: list[Event] = []
        send = self.send

        def hold(sender: ReplicaId, peer: ReplicaId, event: Event) -> None:
            if (sender, peer) == (ally, leader.replica_id):
                held.append(event)
            else:
                send(sender, peer, event)

        self.send = hold  # type: ignore[method-assign]
        self._cut_off({leader.replica_id, ally})
        for _ in range(40):
            leader.propose(trim_command(0), lambda _: None)
        self.clock.run_until(self.clock.now + 6)
        self.network.cut(set())
        self._demand_progress("after a minority wrote for itself")
        self.send = send  # type: ignore[method-assign]
        self._hand_to(leader.replica_id)
        self._cut_off({leader.replica_id, others[1]})
        for event in held:
            leader.take(event)
        self.clock.run_until(self.clock.now + 1)
        self.network.cut(set())
        self._demand_progress("after late answers")

    def _hand_to(self, replica_id: ReplicaId) -> None:
        """Have this replica lead, if it can be had."""
        for _ in range(20):
            now_leading = self.operator.leader()
            if now_leading is not None:
                if now_leading.replica_id == replica_id:
                    return
                now_leading.transfer(replica_id, lambda _: None)
            self.clock.run_until(self.clock.now + 1)

    def _split_vote(self) -> None:
        """The leader dies, and two replicas hear so late of each other that both stand for the same term."""
        leader = self.operator.leader()
        assert leader is not None
        voters = sorted(leader.engine.replica_set.voters - {leader.replica_id})
        if len(voters) < 2:
            return
        candidates = self.rng.sample(voters, 2)
        send = self.send

        def slowly(sender: ReplicaId, peer: ReplicaId, event: Event) -> None:
            message = event.message if isinstance(event, Received) else None
            if isinstance(message, PreVote) and sender not in candidates:
                return
            if isinstance(message, PreVoteReply | RequestVote | AppendEntries):
                delay = 0.3 if isinstance(message, AppendEntries) else self.rng.uniform(0.05, 0.1)
                self.clock.after(delay, partial(send, sender, peer, event))
                return
            send(sender, peer, event)
            if isinstance(message, VoteReply):
                send(sender, peer, event)

        self.send = slowly  # type: ignore[method-assign]
        leader.kill()
        for other in self.nodes.values():
            self._report_dead(leader, other)
        self.clock.run_until(self.clock.now + 3)
        self.send = send  # type: ignore[method-assign]
        self.restart(leader)
        self._demand_progress("after a divided vote")

    def _deposed_leader_is_asked(self) -> None:
        leader = self.operator.leader()
        assert leader is not None
        if len(leader.engine.replica_set.voters) < 3:
            return
        self._cut_off({leader.replica_id})
        for other in self.nodes.values():
            if other is not leader:
                other.take(peer_gone(leader, True))  # a broken connection looks like this
        for producer in self.producers:
            producer.target = None
            producer.want(4)
        for _ in range(15):
            self.clock.run_until(self.clock.now + 0.1)
            self.operator.confirm(leader)
        self.clock.run_until(self.clock.now + 3)
        self.network.cut(set())
        self._demand_progress("after a leader was replaced")

    def _answers_to_an_older_term(self) -> None:
        """A leader asks for many confirmations and leads once more later, in a newer term. There it hears answers to
        copies of its old questions. When it is then replaced without noticing, they must not speak for it."""
        leader = self.operator.leader()
        assert leader is not None
        others = sorted(leader.engine.replica_set.voters - {leader.replica_id})
        if len(others) < 2:
            return
        newest: dict[ReplicaId, Event] = {}
        send = self.send

        def copy(sender: ReplicaId, peer: ReplicaId, event: Event) -> None:
            if sender == leader.replica_id and isinstance(event, Received) and isinstance(event.message, AppendEntries):
                newest[peer] = event
            send(sender, peer, event)

        self.send = copy  # type: ignore[method-assign]
        for _ in range(30):
            self.operator.confirm(leader)
        self.clock.run_until(self.clock.now + 1)
        self.send = send  # type: ignore[method-assign]
        self._hand_to(self.rng.choice(others))
        self._hand_to(leader.replica_id)
        for peer, event in sorted(newest.items()):
            self.nodes[peer].take(event)
        self.clock.run_until(self.clock.now + 0.5)
        if leader.engine.is_leader:
            self._deposed_leader_is_asked()

    def _cut_off(self, side: set[ReplicaId], *, one_way: bool = False) -> None:
        links = {(a, b) for a in self.nodes for b in self.nodes if (a in side) != (b in side)}
        self.network.cut({(a, b) for a, b in links if a in side} if one_way else links)

    def _describe(self) -> str:
        lines = []
        for node in self.nodes.values():
            engine, store = node.engine, node.disk
            state = "removed" if node.removed else "alive" if node.alive else "dead"
            lines.append(
                f"{node.replica_id} {state} term={engine.term} leader={engine.leader} leads={engine.is_leader}"
                f" base={store.base_index} last={store.last_index} commit={engine.commit} applied={engine.applied}"
                f" voters={sorted(engine.replica_set.voters)} learners={sorted(engine.replica_set.learners)}"
            )
        waiting = {producer.producer_id: len(producer.window) for producer in self.producers}
        return "\n  ".join([f"waiting={waiting} replacing={self.mover.replacing}", *lines])
