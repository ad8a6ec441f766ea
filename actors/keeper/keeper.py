"""The keeper: makes the Ray cluster run what the coordinator's metadata says.

Runs in the actor of every coordinator, beside the engine's thread and never on
it, and acts where its replica leads. It looks at the nodes of Ray every
``cluster.look_ms`` and whenever the metadata changes, learns which broker each
new node is (``census``), writes down what the metadata must know, and has its parts do
the rest: ``crew`` starts and removes actors, ``mover`` moves replicas, ``own_group``
sees to the coordinator's own group, ``scout`` to leaders and disks. Each step is a task of its
own (``hands``), so that a node that hangs holds up nothing else. A step that
fails is planned again, a little later.

The coordinator's own replicas are kept like all others. If the group has lost
its leader for long, every coordinator that is left sees to them, for nobody
else would; a name in Ray can be taken only once, whoever tries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from rayqueue.actors.coordinator_actor import CoordinatorSpec
from rayqueue.actors.directory import RayDirectory
from rayqueue.actors.keeper.census import Census
from rayqueue.actors.keeper.crew import Crew
from rayqueue.actors.keeper.hands import Hands
from rayqueue.actors.keeper.herald import Herald
from rayqueue.actors.keeper.home import Home, memory_bytes
from rayqueue.actors.keeper.mover import Mover
from rayqueue.actors.keeper.own_group import OwnGroup
from rayqueue.actors.keeper.plan import Behind, Doomed, ReplicaKey, Wanted
from rayqueue.actors.keeper.scout import Scout
from rayqueue.actors.keeper.witness import Witness
from rayqueue.actors.ray_calls import FAILURES
from rayqueue.cluster.commands import (
    CreateCluster,
    EndRebalance,
    GroupsForgotten,
    PutBroker,
    ReplicasMade,
    ReplicasRemoved,
)
from rayqueue.cluster.moves import Reason
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.repairs import forgettable, only_and_lost
from rayqueue.cluster.seen import Seen
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.requests import in_time
from rayqueue.partition.commands import expire_groups_command
from rayqueue.replica.carrying import Carrier

if TYPE_CHECKING:
    from rayqueue.replica.coordinator_service import ClusterView, CoordinatorReplica

_log = logging.getLogger(__name__)

_LEADERLESS_S = 5.0
_FORGOTTEN_AT_ONCE = 200
_MOVED_OFF = "its leaders hand over, and its replicas are moved off it"
_LEFT_THERE = (
    "its leaders hand over, and its replicas stay until it is gone, for cluster.replace_after_ms is off;"
    " rayqueue brokers decommission moves them"
)


class Keeper:
    """Belongs to the event loop of its actor, except ``wake``, which makes it look now."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        self._spec = spec
        self._settings = spec.settings
        self._hands = hands = Hands(spec.settings.namespace)
        self._census = Census(hands, spec.settings)
        self._own = OwnGroup(hands, self._census, spec)
        self._crew = Crew(hands, self._census, spec.settings, self._own.manifest)
        self._told_brokers: list[AliveBroker] | None = None
        self._leaderless_since_s = time.monotonic()
        self._leads_since_s: float | None = None
        self._scout = Scout(hands, spec.settings)
        self._mover = Mover(hands, self._scout, spec.settings.cluster)
        self._carrier = Carrier(hands.change, RayDirectory(spec.settings.namespace), spec.settings)
        self._told_seen: Seen | None = None
        self._witness = Witness(hands, spec.replica_id)
        self._herald = Herald(hands)
        self._draining: set[str] = set()
        self.wake = hands.wake

    def runs_on(self, node_id: str) -> None:
        """The Ray node of this process: the one that its broker is on, if another node has the same name.

        Otherwise a broker might be taken to be on another node than its coordinator, which would then be moved there.
        """
        broker = self._spec.cluster.coordinators.get(self._spec.replica_id)
        if broker is not None:
            directory = self._spec.directory
            here = Home(broker, self._spec.host, node_id, 0, self._own.manifest, None, memory_bytes(), directory)
            self._census.note(here)

    async def run(self, replica: CoordinatorReplica) -> None:
        """Until it is cancelled."""
        self._hands.replica = replica
        try:
            while True:
                self._hands.woken.clear()
                try:
                    await self._round()
                except FAILURES as error:
                    _log.warning("a look at the cluster failed: %s", error)
                except Exception:  # noqa: BLE001  # a bug; without any keeper nothing would be started again
                    _log.exception("a look at the cluster failed")
                try:
                    await in_time(self._hands.woken.wait(), self._settings.cluster.look_ms / 1000)
                except asyncio.TimeoutError:
                    continue
        finally:
            for step in self._hands.steps.values():
                step.cancel()

    # -- one look ---------------------------------------------------------------------------

    async def _round(self) -> None:
        view: ClusterView = await self._hands.asked(self._hands.replica.service.view)
        self._own.note(view)
        self._draining = {row.broker for row in view.brokers.values() if row.draining}
        self._crew.recoveries = view.recoveries
        if not view.leads:
            self._crew.lead_no_more()
            self._told_brokers = None
            self._leads_since_s = None
            self._mover.lead_no_more()
            self._scout.lead_no_more()
            self._witness.lead_no_more()
            self._herald.lead_no_more()
            if view.leader is not None:
                self._leaderless_since_s = time.monotonic()
            elif time.monotonic() - self._leaderless_since_s > _LEADERLESS_S:
                await self._census.look(view.brokers.values(), self._own.manifest)
                await self._crew.act(self._own.wanted(view), view, [], [])
            return
        self._leaderless_since_s = time.monotonic()
        if self._leads_since_s is None:
            self._leads_since_s = time.monotonic()
        self._own.note_voters(view)
        self._crew.manifest = self._own.manifest
        await self._census.look(view.brokers.values(), self._own.manifest)
        if not self._expects_more():
            self._mover.note_away(view, self._census.current.keys())
        await self._write_down(view)
        here, leaving = self._census.current, self._census.leaving
        fate = _MOVED_OFF if self._settings.cluster.replace_after_ms is not None else _LEFT_THERE
        drained = {broker: fate for broker, node_id in here.items() if node_id in leaving}
        await self._witness.look(view, here.keys(), self._mover.given_up, drained)
        if not self._expects_more():
            self._mover.look(view, self._alive(), self._crew.failing)
            self._look_further(view)
        if not (self._expects_more() or self._misses_some(view)):
            self._own.grow(view, self._alive(), self._mover.given_up.keys() | self._draining)
        self._forget_expired(view)
        await self._herald.look(view)
        commits = self._carrier.due(view)
        if commits:
            self._hands.begin("carry", self._carrier.carry(commits, view))
        for recovery in view.recoveries.values():
            if not recovery.settled:
                self._hands.begin(("recover", recovery.group_id), self._crew.recover(recovery))
        for key in only_and_lost(view):
            self._hands.begin(("found", key), self._crew.find_again(ReplicaKey(GroupId(key[0]), ReplicaId(key[1]))))
        behind = self._behind(view)
        await self._crew.act([*self._own.wanted(view), *self._replicas(view)], view, self._doomed(view), behind)

    def _look_further(self, view: ClusterView) -> None:
        """Who leads, and how full disks are; not at every look. While a rebalance waits for leaders, more often."""
        moving = view.planned or any(move.reason is Reason.BALANCE for move in view.moves.values())
        eager = (view.rebalance is not None and not moving) or self._census.hurries
        if eager and not moving and view.rebalance is not None and self._scout.settled == view.rebalance:
            self._hands.begin("rebalanced", self._end_rebalance(view.rebalance))
        elif self._scout.is_due(eager=eager or not self._census.current.keys() <= self._scout.disks.keys()):
            self._hands.begin("scout", self._scout.look(view, self._alive(), eager=eager))
        paces, waiting, sizes = dict(self._mover.paces), dict(self._mover.waiting), dict(self._scout.sizes)
        seen = Seen(self._scout.leaders, paces, waiting, sizes)
        if seen != self._told_seen:
            self._told_seen = seen
            self._hands.replica.run(lambda: self._hands.replica.service.tell_seen(seen))

    async def _end_rebalance(self, number: int) -> None:
        await self._hands.change(EndRebalance(number))
        _log.info("rebalance %d is done", number)

    # -- what the metadata must know ------------------------------------------------------------

    async def _write_down(self, view: ClusterView) -> None:
        if not view.cluster_id:
            await self._hands.change(CreateCluster(self._own.manifest.cluster_id))
        alive = self._alive()
        for each in alive:
            row = view.brokers.get(each.broker)
            facts = each.host, each.ray_node, each.memory_bytes, self._census.homes[each.ray_node].directory
            if row is None or (row.host, row.ray_node, row.memory_bytes, row.directory) != facts:
                await self._hands.change(PutBroker(each.broker, *facts))
        here, given_up, coordinators = self._census.current, self._mover.given_up, self._own.coordinators.values()
        for gone in forgettable(self._draining, here, given_up, view.replica_counts, coordinators, view.doomed):
            await self._hands.change(gone)
        if alive != self._told_brokers and not self._expects_more():
            self._hands.replica.run(lambda: self._hands.replica.service.set_brokers(alive))
            self._told_brokers = alive
        if self._crew.made:
            made = set(self._crew.made)
            await self._hands.change(ReplicasMade(tuple((key.group_id, key.replica_id) for key in made)))
            self._crew.made -= made
            self._hands.woken.set()
        if self._crew.removed:
            removed = set(self._crew.removed)
            await self._hands.change(ReplicasRemoved(tuple((key.group_id, key.replica_id) for key in removed)))
            self._crew.removed -= removed
            self._hands.woken.set()

    def _alive(self) -> list[AliveBroker]:
        found: list[AliveBroker] = []
        disks = self._scout.disks
        for broker, node_id in sorted(self._census.current.items()):
            home = self._census.homes[node_id]
            coordinators = sum(each == broker for each in self._own.coordinators.values())
            found.append(
                AliveBroker(
                    broker,
                    home.host,
                    node_id,
                    home.memory_bytes,
                    coordinators,
                    draining=broker in self._draining,
                    rack=self._census.racks.get(node_id, ""),
                    disk_bytes=disks[broker].total_bytes if broker in disks else 0,
                    disk_free_bytes=disks[broker].free_bytes if broker in disks else 0,
                    leaving=node_id in self._census.leaving,
                )
            )
        return found

    def _expects_more(self) -> bool:
        """At the beginning all nodes are new: the first topic should not go to the one that answers first."""
        return self._told_brokers is None and self._census.expects(self._hands.steps)

    def _misses_some(self, view: ClusterView) -> bool:
        """After a start of everything, brokers come one by one: one that is on its way may be the better place."""
        leads_s = 0.0 if self._leads_since_s is None else time.monotonic() - self._leads_since_s
        missing = view.brokers.keys() - self._census.current.keys()
        return bool(missing) and leads_s < self._settings.cluster.broker_wait_ms / 1000

    # -- groups that expired -------------------------------------------------------------------

    def _forget_expired(self, view: ClusterView) -> None:
        """Some groups at a time, and one such step at a time: each asks all partitions."""
        if not view.expired:
            return
        # Not beyond what each was expired with: a new life of the group may have begun above it.
        generation = min(view.expired.values())
        groups = sorted(group for group, each in view.expired.items() if each == generation)[:_FORGOTTEN_AT_ONCE]
        self._hands.begin("forget", self._forget(groups, generation, view))

    async def _forget(self, groups: list[str], generation: int, view: ClusterView) -> None:
        command = expire_groups_command(groups, generation)
        for info in view.topics.values():
            for partition in info.partitions:
                await self._crew.tell_leader(partition, command)
        await self._hands.change(GroupsForgotten(tuple(groups), generation))
        _log.info("%s groups have expired: %s", len(groups), ", ".join(groups[:10]))

    def _replicas(self, view: ClusterView) -> list[Wanted]:
        placed = [
            (partition.group_id, replica.replica_id, replica.broker)
            for info in view.topics.values()
            for partition in info.partitions
            for replica in partition.replicas
        ]
        placed += [(move.group_id, move.add, move.broker) for move in view.moves.values() if move.adds]
        return [
            Wanted(ReplicaKey(GroupId(group_id), ReplicaId(node)), broker, unmade=(group_id, node) in view.unmade)
            for group_id, node, broker in placed
        ]

    def _doomed(self, view: ClusterView) -> list[Doomed]:
        return [
            Doomed(ReplicaKey(GroupId(each.group_id), ReplicaId(each.replica_id)), each.broker) for each in view.doomed
        ]

    def _behind(self, view: ClusterView) -> list[Behind]:
        """Partitions that may not have their topic's newest settings. A topic that was never altered has none."""
        return [
            Behind(GroupId(partition.group_id), info.version)
            for info in view.topics.values()
            for partition in info.partitions
            if info.version > self._crew.configured.get(partition.group_id, 0)
        ]
