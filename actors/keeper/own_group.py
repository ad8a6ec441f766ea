"""The coordinator's own group: who is in it, whom it should get and lose, and which nodes have been told so.

Part of the keeper. Its replicas are in no log but their own: the first ones are
in ``cluster.json``, on every node, which must follow the group as it changes
(``rayqueue.cluster.growth``), one step at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from pydantic import SecretStr

from rayqueue.actors.coordinator_actor import CoordinatorSpec
from rayqueue.actors.keeper import nodes
from rayqueue.actors.keeper.census import Census
from rayqueue.actors.keeper.hands import Hands
from rayqueue.actors.keeper.home import ClusterManifest
from rayqueue.actors.keeper.plan import ReplicaKey, Wanted
from rayqueue.cluster import growth
from rayqueue.cluster.commands import PlaceCoordinator, RetireCoordinator
from rayqueue.cluster.placement import AliveBroker
from rayqueue.errors import RayQueueError
from rayqueue.ids import COORDINATOR, ReplicaId
from rayqueue.net.requests import in_time
from rayqueue.raft.replica_set import ReplicaSet

if TYPE_CHECKING:
    from rayqueue.replica.coordinator_service import ClusterView

_log = logging.getLogger(__name__)

_TELL_S = 30.0
_READY_S = 5.0


class OwnGroup:
    """Belongs to the event loop of its keeper."""

    def __init__(self, hands: Hands, census: Census, spec: CoordinatorSpec) -> None:
        self._hands = hands
        self._census = census
        self._spec = spec
        self._settings = spec.settings
        cluster = spec.cluster
        self.manifest = ClusterManifest(cluster.cluster_id, cluster.coordinators, True, cluster.version, cluster.epoch)
        """What every node should have in its ``cluster.json``: the coordinators that vote."""
        self.coordinators: dict[ReplicaId, str] = dict(cluster.coordinators)
        """All that have a place."""
        self._last_number = 0
        """The highest that was ever in a coordinator's id."""
        self._told: dict[str, ClusterManifest] = {}
        """Ray nodes that have been told of a group that has changed."""

    def note(self, view: ClusterView) -> None:
        """The first ones are in nobody's log; those that have left, and those that came later, are in the metadata."""
        everyone = {**self._spec.cluster.coordinators, **view.coordinators}
        self.coordinators = {node: broker for node, broker in everyone.items() if broker}
        self._last_number = max((int(node[1:]) for node in everyone if node[1:].isdigit()), default=0)

    def note_voters(self, view: ClusterView) -> None:
        """After a restart of everything, any node's file must say whom to wait for: those who vote."""
        voters = {node: broker for node, broker in self.coordinators.items() if node in view.replica_set.voters}
        if view.replica_set_version is not None and len(voters) == len(view.replica_set.voters):
            self.manifest = ClusterManifest(
                self.manifest.cluster_id, voters, True, view.replica_set_version, view.replica_set.epoch
            )
        if self.manifest.version > self._spec.cluster.version:
            self._told = {node: told for node, told in self._told.items() if node in self._census.racks}
            for node_id in self._census.current.values():
                if self._told.get(node_id) != self.manifest:
                    self._hands.begin(("tell", node_id), self._tell(node_id, self.manifest))

    async def _tell(self, node_id: str, manifest: ClusterManifest) -> None:
        secret = self._settings.transport.secret or SecretStr("")
        ref = await asyncio.to_thread(nodes.settle_at, node_id, self._settings.data_dir, manifest, secret)
        problem: RayQueueError | None = await in_time(ref, _TELL_S)
        if problem is not None:
            raise problem
        self._told[node_id] = manifest

    def grow(self, view: ClusterView, alive: Sequence[AliveBroker], leaving: Collection[str]) -> None:
        """Take the next step, if there is one. ``leaving``: brokers that are given up, or are to be emptied."""
        replaces = self._settings.cluster.replace_after_ms is not None
        picture = growth.Picture(
            self.coordinators,
            view.replica_set,
            self._spec.replica_id,
            {ReplicaId(node) for group_id, node in view.unmade if group_id == COORDINATOR},
            alive,
            {ReplicaId(node) for group_id, node in view.lost if group_id == COORDINATOR},
            set(leaving) | {each.broker for each in alive if each.leaving and replaces},
            self._last_number,
            settled=view.replica_set_version is not None,
        )
        step = growth.next_step(self._settings.cluster.coordinators, picture)
        if step is not None:
            self._hands.begin("growth", self._take_growth(step))

    async def _take_growth(self, step: growth.Step) -> None:
        _log.info("the coordinator's group changes: %s", step)
        match step:
            case growth.Place(node, broker):
                await self._hands.change(PlaceCoordinator(COORDINATOR, node, broker))
            case growth.AddLearner(node):
                await self._change_replicas(lambda replicas: replicas.with_learner(node))
            case growth.Promote(node, ready):
                for each in ready:
                    handle = await self._hands.handle(ReplicaKey(COORDINATOR, each))
                    await in_time(handle.address.remote(), _READY_S)
                await self._change_replicas(lambda replicas: replicas.with_voter(node))
            case growth.Remove(node):
                await self._change_replicas(lambda replicas: replicas.without(node))
            case growth.Transfer(to):
                await self._hands.asked(lambda answer: self._hands.replica.transfer_leadership(to, answer))
            case growth.Retire(node):
                await self._hands.change(RetireCoordinator(COORDINATOR, node, self.coordinators[node]))

    async def _change_replicas(self, change: Callable[[ReplicaSet], ReplicaSet]) -> None:
        await self._hands.asked(lambda answer: self._hands.replica.change_replicas(change, answer))

    def wanted(self, view: ClusterView) -> list[Wanted]:
        return [
            Wanted(ReplicaKey(COORDINATOR, node), broker, unmade=(COORDINATOR, node) in view.unmade)
            for node, broker in self.coordinators.items()
        ]
