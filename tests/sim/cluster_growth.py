"""A simulated keeper: the coordinator's group grows from one replica to three, whoever dies meanwhile.

It takes the steps of ``rayqueue.cluster.growth`` by the picture of whoever
believes to lead, which may be old: what it proposes then must be void. Making a
replica's data and writing down that it was made are two steps on two disks; the
process, or the power, may be gone in between.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from rayqueue.cluster import growth
from rayqueue.cluster.commands import AnyCommand, PlaceCoordinator, ReplicasMade, encode_command
from rayqueue.ids import GroupId, ReplicaId
from tests.sim.cluster_node import BROKERS, ClusterNode
from tests.sim.invariants import BrokenError, Invariant

if TYPE_CHECKING:
    from tests.sim.cluster_world import ClusterWorld

COORDINATOR_GROUP = GroupId("coordinator")
WANTED = 3
LOOK_EVERY_S = 0.3


class SimKeeper:
    def __init__(self, world: ClusterWorld, first: ReplicaId) -> None:
        self._world = world
        self._first = first
        self._rng = Random(f"keeper {world.seed}")
        self._look_later()

    @property
    def done(self) -> bool:
        leader = self._world.leader()
        return leader is not None and len(leader.engine.members.voters) == WANTED == len(self._world.nodes)

    def _look_later(self) -> None:
        self._world.clock.after(self._rng.uniform(0.5, 1.5) * LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        leading = [node for node in self._world.nodes.values() if node.alive and node.engine.is_leader]
        if leading:
            self._take_step(self._rng.choice(leading))
        self._look_later()

    def _take_step(self, leader: ClusterNode) -> None:
        machine, nodes = leader.machine, self._world.nodes
        placed = {self._first: BROKERS[0].broker}
        placed |= {ReplicaId(node): broker for node, broker in machine.coordinators.items()}
        unmade = sorted(ReplicaId(node) for group_id, node in machine.unmade if group_id == COORDINATOR_GROUP)
        for node in unmade:
            if node not in nodes:
                nodes[node] = ClusterNode(self._world, node, None)
                if self._rng.random() < 0.3:
                    return  # whoever made it dies before that is written down
            self._propose(leader, ReplicasMade(((COORDINATOR_GROUP, node),)))
            return
        lost = [node for node in placed if node not in nodes]
        if lost:
            raise BrokenError(
                Invariant.SAME_STATE, f"{leader.replica_id} believes that {lost} were made, which have no disk"
            )
        picture = growth.Picture(placed, leader.engine.members, leader.replica_id, unmade, BROKERS)
        match growth.next_step(WANTED, picture):
            case growth.Place(node, broker):
                self._propose(leader, PlaceCoordinator(COORDINATOR_GROUP, node, broker))
            case growth.AddLearner(node):
                leader.change(lambda members: members.with_learner(node), _ignore)
            case growth.Promote(node, ready):
                if all(nodes[each].alive for each in ready):
                    leader.change(lambda members: members.with_voter(node), _ignore)

    def _propose(self, leader: ClusterNode, command: AnyCommand) -> None:
        leader.propose(encode_command(command), _ignore)


def _ignore(_: object) -> None:
    """Whatever came of it, the next look sees."""
