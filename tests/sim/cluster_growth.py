"""A simulated keeper: the coordinator's group follows its brokers, up and down, and what is lost is replaced.

It takes the steps of ``rayqueue.cluster.growth`` by the picture of whoever
believes to lead, some time after it looked: what it proposes then must be void if
it is not true any more. Each leader has its own opinion of who has been away for
too long. Making a replica's data and writing down that it was made are two steps
on two disks, and so are deleting it and writing that down; the process, the
power, or the broker may be gone in between.

Brokers join, go for good, come back after they were given up, are drained, and
lose a disk; the one that a learner is on dies in the middle. Disks are replaced by
older copies of themselves, also from when their replica was the only one. As many replicas are
left as any membership that anybody has needs to decide: what cannot decide
cannot be asked to go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from rayqueue.cluster import growth
from rayqueue.cluster.catalog import ReplicaKey
from rayqueue.cluster.commands import (
    AnyCommand,
    PlaceCoordinator,
    ReplicasMade,
    ReplicasRemoved,
    RetireCoordinator,
    encode_command,
)
from rayqueue.cluster.placement import AliveBroker
from rayqueue.ids import COORDINATOR, ReplicaId
from rayqueue.log.memory_store import MemoryDisk
from rayqueue.protocol.calls import ReportReplica
from rayqueue.raft.replica_set import ReplicaSet
from tests.sim.cluster_node import ClusterNode
from tests.sim.invariants import BrokenError, Invariant

if TYPE_CHECKING:
    from tests.sim.cluster_world import ClusterWorld

MOST_BROKERS = 6
LOOK_EVERY_S = 0.3
GIVEN_UP_AFTER_S = (0.3, 1.5)
"""Whoever leads counts from when it saw it first, so that two leaders do not agree."""
NOTICED_AFTER_S = 6.5
"""More than the heartbeats after which the engine counts on nobody who is silent, the longest way of an answer that was
sent before, and the longest pause of the leader itself."""


class SimKeeper:
    def __init__(self, world: ClusterWorld, brokers: int) -> None:
        self._world = world
        self._rng = Random(f"keeper {world.seed}")
        self._first = {node: f"b{at}" for at, node in enumerate(sorted(world.nodes))}
        """Those of the new cluster, which are in nobody's log."""
        self._wanted = max(3, len(self._first))
        self._joined = brokers
        self.here = {f"b{at}" for at in range(brokers)}
        self._away_since_s: dict[str, float] = {}
        self._draining: set[str] = set()
        self._broker_of: dict[ReplicaId, str] = dict(self._first)
        """Of every replica that ever was."""
        self._lost: set[ReplicaId] = set()
        self._lost_s = float("-inf")
        self._reports_s: dict[ReplicaId, float] = {}
        """When each can say that it is lost: some cannot be started at first."""
        self._erased: set[ReplicaId] = set()
        self._backups: dict[ReplicaId, MemoryDisk] = {}
        self._busy: dict[tuple[ReplicaId, int], growth.Step] = {}
        """By process, the step of the group that its keeper is in the middle of: it takes one at a time."""
        self._look_later()

    # -- what there should be -----------------------------------------------------------------

    @property
    def target(self) -> int:
        return growth.coordinators_for(len(self.here - self._draining), self._wanted)

    @property
    def done(self) -> bool:
        """The group has as many replicas as it should, all of them voters, alive, and each on a broker of its own."""
        leader = self._world.leader()
        if leader is None:
            return False
        members, machine = leader.engine.replica_set, self._world.checker.reference
        brokers = {self._broker_of[node] for node in members.voters}
        return (
            not (members.learners or _ours(machine.unmade) or _ours(machine.lost))
            and len(members.voters) == len(brokers) == self.target
            and brokers <= self.here - self._draining
            and all(self._world.nodes[node].alive for node in members.voters)
            and not any(machine.doomed[key].broker in self.here for key in machine.doomed if _ours([key]))
            and self._placed(leader).keys() == members.voters
        )

    def may_run(self, node: ReplicaId) -> bool:
        return node not in self._lost | self._erased and self._broker_of[node] in self.here

    def describe(self) -> str:
        leader = self._world.leader()
        placed = None if leader is None else self._placed(leader)
        members = None if leader is None else leader.engine.replica_set
        return (
            f"here {sorted(self.here)} draining {sorted(self._draining)} lost {sorted(self._lost)} "
            f"erased {sorted(self._erased)} wanted {self.target} placed {placed} members {members}"
        )

    # -- one look ----------------------------------------------------------------------------------

    def _look_later(self) -> None:
        self._world.clock.after(self._rng.uniform(0.5, 1.5) * LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        # A keeper acts for a leader that has applied what was decided before it (``Tenure``).
        leading = [
            node
            for node in self._world.nodes.values()
            if node.alive and node.engine.is_leader and node.engine.applied >= node.engine.noop_index
        ]
        if leading:
            leader = self._rng.choice(leading)
            self._report_lost(leader)
            self._make(leader)
            self._erase(leader)
            self._grow(leader)
        self._look_later()

    def _placed(self, leader: ClusterNode) -> dict[ReplicaId, str]:
        """As ``Keeper._note_coordinators``."""
        everyone = {**self._first, **{ReplicaId(node): at for node, at in leader.machine.coordinators.items()}}
        return {node: broker for node, broker in everyone.items() if broker}

    def _report_lost(self, leader: ClusterNode) -> None:
        """Each says it itself, again and again, as long as its broker is there."""
        for node in sorted(self._lost):
            if self._broker_of[node] in self.here and self._reports_s[node] <= self._world.clock.now:
                leader.handle(0, ReportReplica(group_id=COORDINATOR, replica_id=node, why="no data"), _ignore)

    def _make(self, leader: ClusterNode) -> None:
        nodes, placed = self._world.nodes, self._placed(leader)
        unmade = sorted(_ours(leader.machine.unmade))
        missing = [node for node in placed if node not in nodes and node not in unmade]
        if missing:
            raise BrokenError(
                Invariant.SAME_STATE, f"{leader.replica_id} believes that {missing} were made, which have no disk"
            )
        for node in unmade:
            if placed[node] not in self.here:
                continue
            if node not in nodes:
                self._broker_of[node] = placed[node]
                nodes[node] = ClusterNode(self._world, node, None)
                if self._rng.random() < 0.3:
                    continue  # whoever made it dies before that is written down
            if nodes[node].alive:
                self._propose(leader, ReplicasMade(((COORDINATOR, node),)))

    def _erase(self, leader: ClusterNode) -> None:
        """What is doomed is switched off and deleted, once its broker is there."""
        for each in list(leader.machine.doomed.values()):
            node = ReplicaId(each.replica_id)
            if each.broker not in self.here or each.group_id != COORDINATOR:
                continue
            if node in self._world.nodes and node not in self._erased:
                self._world.checker.erased(node)
                self._erased.add(node)
                self._lost.discard(node)
                self._world.nodes[node].kill()
                if self._rng.random() < 0.3:
                    continue  # deleted, and not written down
            self._propose(leader, ReplicasRemoved(((COORDINATOR, node),)))

    def _grow(self, leader: ClusterNode) -> None:
        me = (leader.replica_id, leader.life)
        if me in self._busy:
            return
        now, machine = self._world.clock.now, leader.machine
        patience_s = self._rng.uniform(*GIVEN_UP_AFTER_S)
        away = {broker for broker, since_s in self._away_since_s.items() if now - since_s > patience_s}
        placed = self._placed(leader)
        picture = growth.Picture(
            placed,
            leader.engine.replica_set,
            leader.replica_id,
            _ours(machine.unmade),
            [AliveBroker(broker, f"host{int(broker[1:]) % 2}") for broker in sorted(self.here)],
            _ours(machine.lost),
            away | self._draining,
            max(int(node[1:]) for node in (*self._first, *machine.coordinators)),
            settled=leader.engine.replica_set_settled,
        )
        step = growth.next_step(self._wanted, picture)
        if step is not None:
            self._busy[me] = step
            # Between the look and the step the keeper asks Ray, which may take long.
            delay_s = self._rng.uniform(0.001, 0.05) if self._rng.random() < 0.8 else self._rng.uniform(0.1, 1.5)
            self._world.clock.after(delay_s, partial(self._take, step, leader, me, placed))

    def _take(
        self, step: growth.Step, leader: ClusterNode, me: tuple[ReplicaId, int], placed: dict[ReplicaId, str]
    ) -> None:
        def answered(_: object) -> None:
            """Whatever came of it, the next look sees."""
            self._busy.pop(me, None)

        if not leader.alive or leader.life != me[1]:
            answered(None)
            return
        match step:
            case growth.Place(node, broker):
                self._propose(leader, PlaceCoordinator(COORDINATOR, node, broker), answered)
            case growth.AddLearner(node):
                leader.change(lambda members: members.with_learner(node), answered)
            case growth.Promote(node, ready):
                if all(self._world.nodes[each].alive for each in ready):
                    leader.change(lambda members: members.with_voter(node), answered)
                else:
                    answered(None)
            case growth.Remove(node):
                if self._is_noticed or not self.may_run(node):
                    leader.change(lambda members: members.without(node), answered)
                else:
                    answered(None)
            case growth.Transfer(to):
                leader.transfer(to, answered)
            case growth.Retire(node):
                self._propose(leader, RetireCoordinator(COORDINATOR, node, placed[node]), answered)

    def _propose(self, leader: ClusterNode, command: AnyCommand, answer: object = None) -> None:
        leader.propose(encode_command(command), answer if callable(answer) else _ignore)

    @property
    def _is_noticed(self) -> bool:
        """The leader had time to miss what was lost last. A voter that is lost in the very moment in which another one
        leaves on purpose leaves no majority, whoever does it."""
        return self._world.clock.now - self._lost_s > NOTICED_AFTER_S

    # -- what happens to brokers ---------------------------------------------------------------------

    def draw_faults(self, until_s: float) -> None:
        clock = self._world.clock
        for _ in range(self._rng.randint(1, 10)):
            clock.at(self._rng.uniform(clock.now, until_s), self.fault)

    def draw_restores(self, until_s: float) -> None:
        clock = self._world.clock
        for action in (self.back_up, self.restore):
            for _ in range(6):
                clock.at(self._rng.uniform(clock.now, until_s), action)

    def fault(self) -> None:
        match self._rng.choice(("join", "go", "go", "learner_goes", "back", "wipe", "drain")):
            case "join" if len(self.here) < MOST_BROKERS:
                self.here.add(f"b{self._joined}")
                self._joined += 1
            case "go":
                self._go(self._rng.choice(sorted(self.here)))
            case "learner_goes":
                possible = self._world.checker.possible_members(self._lost | self._erased)
                voters = {node for members in possible for node in members.voters}
                young = sorted(node for node in self._world.nodes if node not in voters and self.may_run(node))
                if young:
                    self._go(self._broker_of[self._rng.choice(young)])
            case "back" if self._away_since_s:
                self._back(self._rng.choice(sorted(self._away_since_s)))
            case "wipe":
                self._wipe(self._rng.choice(sorted(self._world.nodes)))
            case "drain":
                self._drain(self._rng.choice(sorted(self.here)))

    def _go(self, broker: str) -> None:
        """It and its disks: until it comes back, if it does."""
        gone = {node for node, at in self._broker_of.items() if at == broker}
        if self.here - self._draining - {broker} and self._decide_without(gone):
            self.here.discard(broker)
            self._draining.discard(broker)
            self._away_since_s[broker] = self._lost_s = self._world.clock.now
            for node in sorted(gone & self._world.nodes.keys()):
                self._world.nodes[node].kill()

    def _back(self, broker: str) -> None:
        del self._away_since_s[broker]
        self.here.add(broker)
        for node, at in sorted(self._broker_of.items()):
            if at == broker and node in self._world.nodes:
                self._world.restart(self._world.nodes[node])

    def _wipe(self, node: ReplicaId) -> None:
        """A disk that was in use is empty. What has not been written down as made is made again."""
        made = (COORDINATOR, node) not in self._world.checker.reference.unmade
        if made and self.may_run(node) and self._decide_without({node}):
            self._world.nodes[node].kill()
            self._lost.add(node)
            self._lost_s = self._world.clock.now
            self._reports_s[node] = self._lost_s + self._rng.choice((0, self._rng.uniform(0, 14)))

    def back_up(self) -> None:
        node = self._rng.choice(sorted(self._world.nodes))
        if node not in self._backups or self._rng.random() < 0.3:
            self._backups[node] = self._world.nodes[node].disk.disk.copy()

    def restore(self) -> None:
        """An older copy is in the place of a voter's disk. It decides nothing before all others have answered it."""
        _, members = self._world.checker.members
        found = [node for node in sorted(self._backups.keys() & members.voters) if self.may_run(node)]
        if found and self._decide_without({found[0]}):
            node = self._world.nodes[found[0]]
            node.restore(self._backups.pop(found[0]))
            self._lost_s = self._world.clock.now
            self._world.clock.after(self._rng.uniform(0.01, 3), partial(self._world.restart, node))

    def _drain(self, broker: str) -> None:
        if broker in self._draining:
            self._draining.discard(broker)
        elif len(self.here - self._draining) > 1:
            self._draining.add(broker)

    def _decide_without(self, gone: Iterable[ReplicaId]) -> bool:
        """Whatever membership counts by now, or will by a step that is under way, decides with those that are left."""
        left = {each for each, node in self._world.nodes.items() if self.may_run(each) and not node.disk.copied}
        left -= set(gone)
        possible = self._world.checker.possible_members(self._lost | self._erased)
        for step in self._busy.values():
            possible += [_after(step, members) for members in possible]
        return all(members.is_majority(left) for members in possible)


def _ours(keys: Iterable[ReplicaKey]) -> set[ReplicaId]:
    return {ReplicaId(node) for group_id, node in keys if group_id == COORDINATOR}


def _after(step: growth.Step, members: ReplicaSet) -> ReplicaSet:
    match step:
        case growth.Promote(node) if node in members.learners:
            return members.with_voter(node)
        case growth.Remove(node) if node in members.everyone and members.voters != {node}:
            return members.without(node)
    return members


def _ignore(_: object) -> None:
    """Whatever came of it, the next look sees."""
