"""A simulated mover: replicas are replaced and moved by the steps of ``cluster.moves``, whoever dies meanwhile.

As ``actors.keeper.mover`` does, it remembers nothing but the move that the
coordinator's log has: each step follows from that and from what somebody says who
believes to lead, which may be old when the step is taken. A move is finished
or undone by the metadata alone, and whoever has no place any more is switched
off: what the picture said must have been so for good.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from rayqueue.cluster import moves
from rayqueue.cluster.moves import Found, Move, Reason
from rayqueue.cluster.repairs import found_of
from rayqueue.ids import ReplicaId

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World

LOOK_EVERY_S = 0.2


class Said(NamedTuple):
    replica_id: ReplicaId
    damaged: str | None
    doubted: str | None


class SimMover:
    """One move at a time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rng = Random(f"mover {world.seed}")
        self._next = 100
        self.move: Move | None = None
        self.loses_learners = self.rng.random() < 0.5
        """The broker of a new replica may die before it is promoted."""
        self._patience = Random(f"patience {world.seed}")
        self._borne_until_s = 0.0
        """From then on the new replica is waited for no longer, as if it could not be made (``cluster.patience``)."""

    @property
    def replacing(self) -> tuple[ReplicaId, ReplicaId] | None:
        move = self.move
        return None if move is None else (ReplicaId(move.remove), ReplicaId(move.add))

    def begin(self, old: ReplicaId, reason: Reason = Reason.ASKED) -> None:
        if self.move is None:
            new = ReplicaId(f"n{self._next}")
            self._next += 1
            self._world.add_node(new)
            self.move = Move("sim-0", new, new, old, reason)
            borne_s = self._patience.uniform(0, 3) if self._patience.random() < 0.15 else float("inf")
            self._borne_until_s = self._world.clock.now + borne_s
            self._look_later()

    def grow(self) -> None:
        """One replica more."""
        self.begin(ReplicaId(""), Reason.GROW)

    def _look_later(self) -> None:
        self._world.clock.after(self.rng.uniform(0.5, 2) * LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        """Ask who believes to lead; act a little later on what it said."""
        if self.move is None:
            return
        believers = [node for node in self._world.nodes.values() if node.alive and node.engine.is_leader]
        if believers:
            newest = max(believers, key=lambda node: node.engine.term)
            leader = self.rng.choice(believers) if self.rng.random() < 0.2 else newest
            step = moves.next_step(self.move, self._found(self.move, leader), self._here())
            move, life = self.move, leader.life
            self._world.clock.after(self.rng.uniform(0.001, 0.3), lambda: self._take(step, move, leader, life))
        self._look_later()

    def _here(self) -> set[str]:
        """Each replica has a broker of its own, named as the replica. One that is only down will be back."""
        away = self.move.remove if self.move is not None and self.move.reason is Reason.AWAY else None
        return {
            node.replica_id
            for node in self._world.nodes.values()
            if not node.removed and (node.alive or node.replica_id != away)
        }

    def _found(self, move: Move, leader: SimNode) -> Found:
        """By the ``found_of`` of the keeper's mover. A node is its own broker; ``removed``, it has gone for good."""
        nodes, members = self._world.nodes, leader.engine.replica_set
        add, remove = ReplicaId(move.add), ReplicaId(move.remove)
        said = [Said(node.replica_id, node.disk.damaged, node.engine.doubted) for node in nodes.values() if node.alive]
        placed = {each for each in nodes if not nodes[each].removed or each in members.voters} | ({remove} - {""})
        # What is lost besides has not been reported yet: one loss is reported at a time (``World._replace_damaged``).
        lost = {add} if nodes[add].broken or nodes[add].disk.damaged is not None else set()
        if move.reason is Reason.LOST:
            lost.add(remove)
        if self._world.clock.now >= self._borne_until_s and add not in members.voters:
            lost.add(add)
        return found_of(
            move,
            leader.replica_id,
            members,
            said,
            {each: str(each) for each in placed - {add}},
            self._here(),
            {each for each in nodes if nodes[each].removed},
            lost=lost,
            settled=leader.engine.replica_set_settled,
        )

    def _take(self, step: moves.Step | None, move: Move, leader: SimNode, life: int) -> None:
        if self.move is not move:
            return
        alive = leader.alive and leader.life == life
        match step:
            case moves.AddLearner(node) if alive:
                leader.change(lambda members: members.with_learner(node), _nothing)
            case moves.Promote(node) if alive:
                leader.change(lambda members: members.with_voter(node), _nothing)
            case moves.Transfer(to) if alive:
                if self.rng.random() < 0.7:
                    leader.transfer(to, _nothing)
                else:  # which must be refused
                    leader.change(lambda members: members.without(leader.replica_id), _nothing)
            case moves.RemoveVoter(node) | moves.RemoveLearner(node) if alive:
                leader.change(lambda members: members.without(node), _nothing)
            case moves.Finish() | moves.Cancel() if alive:
                leader.confirm(lambda refused: self._end(step, move, leader) if refused is None else None)

    def _end(self, step: moves.Step, move: Move, leader: SimNode) -> None:
        """A majority has confirmed the leader: is it still so?"""
        if self.move is not move or moves.next_step(move, self._found(move, leader), self._here()) != step:
            return
        match step:
            case moves.Finish():
                self._done(ReplicaId(move.remove))
                if self._world.nodes[ReplicaId(move.add)].removed:  # it died when it could not be undone any more
                    self.begin(ReplicaId(move.add), Reason.LOST)
            case moves.Cancel(old_is_out):
                self._done(ReplicaId(move.add))
                old = self._world.nodes.get(ReplicaId(move.remove))
                if old is not None and (old_is_out or old.removed or move.reason is Reason.LOST):
                    self.begin(old.replica_id, Reason.LOST)

    def _done(self, gone: ReplicaId) -> None:
        self.move = None
        if gone:
            self._world.retire(gone)

    def lose_the_learner(self) -> None:
        """Its broker dies for good. Beside a lost replica, or in a group of one, only while it cannot be promoted:
        else two of four voters would be gone, or one of two, and the others no majority."""
        if self.move is None or not self.loses_learners:
            return
        new = self._world.nodes[ReplicaId(self.move.add)]
        everyone = [node.engine for node in self._world.nodes.values() if not node.broken]
        others_gone = any(node.removed or node.broken for node in self._world.nodes.values())
        far = new.disk.last_index == 0
        if new.removed or any(new.replica_id in engine.replica_set.voters for engine in everyone):
            return
        copies = any(node.disk.copied for node in self._world.nodes.values())
        spare = self._world.size > 1 and not (others_gone or self._world.spoiled or copies)
        if far or spare:
            new.kill()
            new.removed = True


def _nothing(_: Any) -> None:
    """Whatever came of it, the next look sees."""
