"""The keeper: starts, restarts and removes actors until the Ray cluster runs what the coordinator's metadata says.

Runs in the actor of every coordinator, beside the engine's thread and never on
it, and acts where its replica leads. It looks at the nodes of Ray every
``cluster.look_ms`` and whenever the metadata changes, learns which broker each
new node is, asks ``rayqueue.actors.keeper.plan`` what is to be done, and does it: each
step is a task of its own, so that a node that hangs holds up nothing else. A
step that fails is planned again, a little later.

The coordinator's own replicas are kept like all others. If the group has lost
its leader for long, every coordinator that is left sees to them, for nobody
else would; a name in Ray can be taken only once, whoever tries. Where nodes
join a cluster that began on fewer than three, the group grows
(``rayqueue.cluster.growth``), one step at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from pydantic import SecretStr

from rayqueue.actors._ray import pinned_to
from rayqueue.actors.coordinator_actor import CoordinatorSpec
from rayqueue.actors.directory import RayDirectory
from rayqueue.actors.keeper import nodes
from rayqueue.actors.keeper.census import Census
from rayqueue.actors.keeper.herald import Herald
from rayqueue.actors.keeper.home import ClusterManifest, Home, memory_bytes
from rayqueue.actors.keeper.mover import Mover
from rayqueue.actors.keeper.plan import (
    Behind,
    Configure,
    Confirm,
    Doomed,
    Picture,
    Remove,
    ReplicaKey,
    Restart,
    Start,
    Step,
    Wanted,
    plan,
)
from rayqueue.actors.keeper.scout import Scout
from rayqueue.actors.keeper.witness import Witness
from rayqueue.actors.names import PREFIX, actor_name
from rayqueue.actors.partition_actor import PartitionSpec
from rayqueue.actors.ray_calls import FAILURES
from rayqueue.actors.replies import Reply
from rayqueue.actors.start import start_actor, start_coordinator
from rayqueue.cluster import growth
from rayqueue.cluster.brokers import Seen
from rayqueue.cluster.commands import (
    AnyCommand,
    CreateCluster,
    EndRebalance,
    ForgetBroker,
    GroupsForgotten,
    PlaceCoordinator,
    PutBroker,
    RecoverySettled,
    ReplicasMade,
    ReplicasRemoved,
    RetireCoordinator,
)
from rayqueue.cluster.moves import Reason
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.recoveries import Recovery
from rayqueue.errors import (
    DiskFullError,
    NotLeaderError,
    RayQueueError,
    ReplicaClosedError,
    StoreAbandonedError,
    StoreMissingError,
)
from rayqueue.ids import COORDINATOR, GroupId, ReplicaId
from rayqueue.net.requests import in_time
from rayqueue.partition import PartitionSettings
from rayqueue.partition.commands import configure_command, expire_groups_command
from rayqueue.protocol.topics import PartitionInfo, TopicInfo
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.carrying import Carrier

if TYPE_CHECKING:
    from rayqueue.replica.coordinator_service import ClusterView, CoordinatorReplica
    from rayqueue.replica.status import Status

_log = logging.getLogger(__name__)

_IDENTIFY_S = 30.0
_ANSWER_S = 60.0
_READY_S = 5.0
_START_S = 10.0
_CLOSE_S = 10.0
_ERASE_S = 60.0
_FREE_NAME_S = 5.0
_FREE_NAME_AGAIN_S = 0.02
_AFTER_FAILURE_S = 1.0
_LEADERLESS_S = 5.0
_FORGOTTEN_AT_ONCE = 200


class Keeper:
    """Belongs to the event loop of its actor, except ``wake``."""

    def __init__(self, spec: CoordinatorSpec) -> None:
        self._spec = spec
        self._settings = spec.settings
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._census = Census(self, spec.settings)
        self._places: dict[str, str] = {}
        """Actors by name, and the Ray node that each is pinned to."""
        self._steps: dict[object, asyncio.Task[None]] = {}
        self._made: set[ReplicaKey] = set()
        self._removed: set[ReplicaKey] = set()
        self._configured: dict[str, int] = {}
        self._starting: dict[str, asyncio.Semaphore] = {}
        """By host: what one machine starts at the same time."""
        self._told_brokers: list[AliveBroker] | None = None
        self._leaderless_since_s = time.monotonic()
        self._leads_since_s: float | None = None
        self._mover = Mover(self, spec.settings.cluster)
        self._scout = Scout(self, spec.settings)
        self._carrier = Carrier(self.change, RayDirectory(spec.settings.namespace), spec.settings)
        self._told_seen: Seen | None = None
        self._witness = Witness(self, spec.replica_id)
        self._herald = Herald(self)
        cluster = spec.cluster
        self._manifest = ClusterManifest(cluster.cluster_id, cluster.coordinators, True, cluster.version, cluster.epoch)
        """What every node should have in its ``cluster.json``: the coordinators that vote."""
        self._coordinators: dict[ReplicaId, str] = dict(cluster.coordinators)
        """All that have a place."""
        self._draining: set[str] = set()
        self._recoveries: Mapping[str, Recovery] = {}
        self._last_number = 0
        """The highest that was ever in a coordinator's id."""
        self._told: dict[str, ClusterManifest] = {}
        """Ray nodes that have been told of a group that has changed."""

    def runs_on(self, node_id: str) -> None:
        """The Ray node of this process: the one that its broker is on, if another node has the same name.

        Otherwise a broker might be taken to be on another node than its coordinator, which would then be moved there.
        """
        broker = self._spec.cluster.coordinators.get(self._spec.replica_id)
        if broker is not None:
            directory = self._spec.directory
            here = Home(broker, self._spec.host, node_id, 0, self._manifest, None, memory_bytes(), directory)
            self._census.note(here)

    def wake(self) -> None:
        """Look now. From any thread."""
        self._loop.call_soon_threadsafe(self._woken.set)

    async def run(self, replica: CoordinatorReplica) -> None:
        """Until it is cancelled."""
        self._replica = replica
        try:
            while True:
                self._woken.clear()
                try:
                    await self._round()
                except FAILURES as error:
                    _log.warning("a look at the cluster failed: %s", error)
                try:
                    await in_time(self._woken.wait(), self._settings.cluster.look_ms / 1000)
                except asyncio.TimeoutError:
                    continue
        finally:
            for step in self._steps.values():
                step.cancel()

    # -- one look ---------------------------------------------------------------------------

    async def _round(self) -> None:
        view: ClusterView = await self._asked(self._replica.service.view)
        self._note_coordinators(view)
        self._draining = {row.broker for row in view.brokers.values() if row.draining}
        self._recoveries = view.recoveries
        if not view.leads:
            self._configured.clear()
            self._told_brokers = None
            self._leads_since_s = None
            self._mover.lead_no_more()
            self._scout.lead_no_more()
            self._witness.lead_no_more()
            self._herald.lead_no_more()
            if view.leader is not None:
                self._leaderless_since_s = time.monotonic()
            elif time.monotonic() - self._leaderless_since_s > _LEADERLESS_S:
                await self._census.look(view.brokers.values(), self._manifest)
                await self._act(self._wanted_coordinators(view), view, [], [])
            return
        self._leaderless_since_s = time.monotonic()
        if self._leads_since_s is None:
            self._leads_since_s = time.monotonic()
        self._note_voters(view)
        await self._census.look(view.brokers.values(), self._manifest)
        await self._write_down(view)
        await self._witness.look(view, self._census.current.keys(), self._mover.given_up)
        if not self._expects_more():
            self._mover.look(view, self._alive(), self._scout.sizes)
            self._look_further(view)
        self._grow(view)
        self._forget_expired(view)
        await self._herald.look(view)
        commits = self._carrier.due(view)
        if commits:
            self.begin("carry", self._carrier.carry(commits, view))
        for recovery in view.recoveries.values():
            if not recovery.settled:
                self.begin(("recover", recovery.group_id), self._recover(recovery))
        behind = self._behind(view)
        await self._act([*self._wanted_coordinators(view), *self._replicas(view)], view, self._doomed(view), behind)

    def _look_further(self, view: ClusterView) -> None:
        """Who leads, and how full disks are; not at every look. While a rebalance waits for leaders, more often."""
        moving = view.planned or any(move.reason is Reason.BALANCE for move in view.moves.values())
        eager = (view.rebalance is not None and not moving) or self._census.hurries
        if eager and not moving and self._scout.settled and view.rebalance is not None:
            self.begin("rebalanced", self._end_rebalance(view.rebalance))
        elif self._scout.is_due(eager=eager):
            self.begin("scout", self._scout.look(view, self._alive(), eager=eager))
        seen = Seen(self._scout.leaders, dict(self._mover.paces), dict(self._mover.waiting))
        if seen != self._told_seen:
            self._told_seen = seen
            self._replica.run(lambda: self._replica.service.tell_seen(seen))

    async def _end_rebalance(self, number: int) -> None:
        await self.change(EndRebalance(number))
        self._scout.settled = False
        _log.info("rebalance %d is done", number)

    async def transfer(self, partition: PartitionInfo, node: str, *more: str) -> None:
        """For the mover."""
        await self._scout.transfer(partition, node, *more)

    # -- what the metadata must know ------------------------------------------------------------

    async def _write_down(self, view: ClusterView) -> None:
        if not view.cluster_id:
            await self.change(CreateCluster(self._manifest.cluster_id))
        alive = self._alive()
        for each in alive:
            row = view.brokers.get(each.broker)
            facts = each.host, each.ray_node, each.memory_bytes, self._census.homes[each.ray_node].directory
            if row is None or (row.host, row.ray_node, row.memory_bytes, row.directory) != facts:
                await self.change(PutBroker(each.broker, *facts))
        for broker in self._draining - self._census.current.keys():
            if broker not in self._coordinators.values():
                await self.change(ForgetBroker(broker))  # void as long as it has anything
        if alive != self._told_brokers and not self._expects_more():
            self._replica.run(lambda: self._replica.service.set_brokers(alive))
            self._told_brokers = alive
        if self._made:
            made = set(self._made)
            await self.change(ReplicasMade(tuple((key.group_id, key.replica_id) for key in made)))
            self._made -= made
            self._woken.set()
        if self._removed:
            removed = set(self._removed)
            await self.change(ReplicasRemoved(tuple((key.group_id, key.replica_id) for key in removed)))
            self._removed -= removed
            self._woken.set()

    def _alive(self) -> list[AliveBroker]:
        found: list[AliveBroker] = []
        disks = self._scout.disks
        for broker, node_id in sorted(self._census.current.items()):
            home = self._census.homes[node_id]
            coordinators = sum(each == broker for each in self._coordinators.values())
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
        return self._told_brokers is None and self._census.expects(self._steps)

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
        self.begin("forget", self._forget(groups, generation, view))

    async def _forget(self, groups: list[str], generation: int, view: ClusterView) -> None:
        command = expire_groups_command(groups, generation)
        for info in view.topics.values():
            for partition in info.partitions:
                await self._tell_leader(partition, command)
        await self.change(GroupsForgotten(tuple(groups), generation))
        _log.info("%s groups have expired: %s", len(groups), ", ".join(groups[:10]))

    # -- the coordinator's own group -------------------------------------------------------------

    def _note_coordinators(self, view: ClusterView) -> None:
        """The first ones are in nobody's log; those that have left, and those that came later, are in the metadata."""
        everyone = {**self._spec.cluster.coordinators, **view.coordinators}
        self._coordinators = {node: broker for node, broker in everyone.items() if broker}
        self._last_number = max((int(node[1:]) for node in everyone if node[1:].isdigit()), default=0)

    def _note_voters(self, view: ClusterView) -> None:
        """After a restart of everything, any node's file must say whom to wait for: those who vote."""
        voters = {node: broker for node, broker in self._coordinators.items() if node in view.members.voters}
        if view.members_version is not None and len(voters) == len(view.members.voters):
            self._manifest = ClusterManifest(
                self._manifest.cluster_id, voters, True, view.members_version, view.members.epoch
            )
        if self._manifest.version > self._spec.cluster.version:
            self._told = {node: told for node, told in self._told.items() if node in self._census.racks}
            for node_id in self._census.current.values():
                if self._told.get(node_id) != self._manifest:
                    self.begin(("tell", node_id), self._tell(node_id, self._manifest))

    async def _tell(self, node_id: str, manifest: ClusterManifest) -> None:
        secret = self._settings.transport.secret or SecretStr("")
        ref = await asyncio.to_thread(nodes.settle_at, node_id, self._settings.data_dir, manifest, secret)
        problem: RayQueueError | None = await in_time(ref, _IDENTIFY_S)
        if problem is not None:
            raise problem
        self._told[node_id] = manifest

    def _grow(self, view: ClusterView) -> None:
        if self._expects_more() or self._misses_some(view):
            return
        alive = self._alive()
        replaces = self._settings.cluster.replace_after_ms is not None
        picture = growth.Picture(
            self._coordinators,
            view.members,
            self._spec.replica_id,
            {ReplicaId(node) for group_id, node in view.unmade if group_id == COORDINATOR},
            alive,
            {ReplicaId(node) for group_id, node in view.lost if group_id == COORDINATOR},
            self._mover.given_up.keys() | self._draining | {each.broker for each in alive if each.leaving and replaces},
            self._last_number,
            settled=view.members_version is not None,
        )
        step = growth.next_step(self._settings.cluster.coordinators, picture)
        if step is not None:
            self.begin("growth", self._take_growth(step))

    async def _take_growth(self, step: growth.Step) -> None:
        _log.info("the coordinator's group changes: %s", step)
        match step:
            case growth.Place(node, broker):
                await self.change(PlaceCoordinator(COORDINATOR, node, broker))
            case growth.AddLearner(node):
                await self._change_members(lambda members: members.with_learner(node))
            case growth.Promote(node, ready):
                for each in ready:
                    handle = await self.handle(ReplicaKey(COORDINATOR, each))
                    await in_time(handle.address.remote(), _READY_S)
                await self._change_members(lambda members: members.with_voter(node))
            case growth.Remove(node):
                await self._change_members(lambda members: members.without(node))
            case growth.Transfer(to):
                await self._asked(lambda answer: self._replica.transfer_leadership(to, answer))
            case growth.Retire(node):
                await self.change(RetireCoordinator(COORDINATOR, node, self._coordinators[node]))

    async def _change_members(self, change: Callable[[ReplicaSet], ReplicaSet]) -> None:
        await self._asked(lambda answer: self._replica.change_members(change, answer))

    # -- what there should be --------------------------------------------------------------------

    def _wanted_coordinators(self, view: ClusterView) -> list[Wanted]:
        return [
            Wanted(ReplicaKey(COORDINATOR, node), broker, unmade=(COORDINATOR, node) in view.unmade)
            for node, broker in self._coordinators.items()
        ]

    def _replicas(self, view: ClusterView) -> list[Wanted]:
        placed = [
            (partition.group_id, replica.node, replica.broker)
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
        return [Doomed(ReplicaKey(GroupId(each.group_id), ReplicaId(each.node)), each.broker) for each in view.doomed]

    def _behind(self, view: ClusterView) -> list[Behind]:
        """Partitions that may not have their topic's newest settings. A topic that was never altered has none."""
        return [
            Behind(GroupId(partition.group_id), info.version)
            for info in view.topics.values()
            for partition in info.partitions
            if info.version > self._configured.get(partition.group_id, 0)
        ]

    # -- doing it ----------------------------------------------------------------------------------

    async def _act(self, wanted: list[Wanted], view: ClusterView, doomed: list[Doomed], behind: list[Behind]) -> None:
        actors = await asyncio.to_thread(self._look_at_actors)
        busy = {*self._steps, *self._made, *self._removed}
        partitions = {
            partition.group_id: (info, partition) for info in view.topics.values() for partition in info.partitions
        }
        for step in plan(Picture(self._census.current, actors, wanted, doomed, behind, busy)):
            key = step.group_id if isinstance(step, Configure) else step.key
            self.begin(key, self._take(step, partitions))

    def _look_at_actors(self) -> dict[ReplicaKey, str | None]:
        """Of this cluster's, by name. Asks Ray, so it is not for the event loop."""
        places, namespace = self._places, self._settings.namespace
        names = {name for name in nodes.found_actors(namespace) if name.startswith(PREFIX)}
        for name in places.keys() - names:
            del places[name]
        found: dict[ReplicaKey, str | None] = {}
        for name in names:
            group_id, _, replica_id = name.removeprefix(PREFIX).rpartition("/")
            if not group_id:
                continue
            if name not in places:
                try:
                    place = pinned_to(ray.get_actor(name, namespace))
                except ValueError:
                    continue  # it went just now
                if place is not None:
                    places[name] = place
            found[ReplicaKey(GroupId(group_id), ReplicaId(replica_id))] = places.get(name)
        return found

    def begin(self, key: object, work: Coroutine[Any, Any, None]) -> None:
        """Do it beside everything else, once at a time."""
        if key in self._steps:
            work.close()
            return

        async def guarded() -> None:
            try:
                await work
            except FAILURES as error:
                _log.warning("%s: %s", key, str(error).strip().splitlines()[-1] if str(error) else repr(error))
                await asyncio.sleep(_AFTER_FAILURE_S)
            finally:
                self._steps.pop(key, None)
                self._woken.set()

        self._steps[key] = self._loop.create_task(guarded())

    async def _take(self, step: Step, partitions: Mapping[str, tuple[TopicInfo, PartitionInfo]]) -> None:
        match step:
            case Start(key, broker, create):
                await self._start(key, broker, create, partitions)
            case Restart(key, broker, create):
                _log.info("%s %s is pinned to a node that is gone", *key)
                await self._end(key)
                await self._start(key, broker, create, partitions)
            case Confirm(key, broker):
                await self._confirm(key, broker, partitions)
            case Remove(key, broker):
                await self._remove(key, broker)
            case Configure(group_id, version):
                await self._configure(*partitions[group_id], version)

    async def _start(
        self, key: ReplicaKey, broker: str, create: bool, partitions: Mapping[str, tuple[TopicInfo, PartitionInfo]]
    ) -> None:
        node_id = self._census.current[broker]
        home = self._census.homes[node_id]
        start: Callable[[], Any]
        if key.group_id == COORDINATOR:
            coordinator = CoordinatorSpec(
                COORDINATOR,
                key.replica_id,
                self._settings,
                create=create,
                voters=None,  # what is made here joins a group that there is
                host=home.host,
                directory=home.directory,
                cluster=self._manifest,
            )
            start = lambda: start_coordinator(coordinator, ray_node_id=node_id)  # noqa: E731
        else:
            info, partition = partitions[key.group_id]
            recovery = self._recoveries.get(key.group_id)
            spec = PartitionSpec(
                key.group_id,
                key.replica_id,
                self._settings,
                create=create,
                voters=_first_voters(partition, key.replica_id),
                epoch=0 if recovery is None else recovery.epoch,
                alone=recovery is not None and not recovery.settled and recovery.survivor == key.replica_id,
                host=home.host,
                directory=home.directory,
                partition=PartitionSettings.of(info.settings, info.version),
            )
            start = lambda: start_actor(spec, ray_node_id=node_id)  # noqa: E731
        # A few at a time, in the order of the metadata: partitions serve one after the other, not all at the end.
        async with self._starting.setdefault(home.host, asyncio.Semaphore(self._settings.cluster.starts_at_once)):
            _log.info("starting %s %s on %s%s", *key, broker, ", new" if create else "")
            handle: Any = await asyncio.to_thread(start)
            self._places[actor_name(*key)] = node_id
            if create:
                await self._answered(handle.address.remote())
                self._made.add(key)
            else:
                with suppress(*FAILURES):  # why it does not run is its own to say
                    await in_time(handle.address.remote(), _START_S)

    async def _confirm(
        self, key: ReplicaKey, broker: str, partitions: Mapping[str, tuple[TopicInfo, PartitionInfo]]
    ) -> None:
        handle = await self.handle(key)
        try:
            await self._answered(handle.address.remote())
        except (StoreMissingError, DiskFullError) as error:
            _log.warning("%s %s was never made, and is started anew: %s", *key, error)
            await self._end(key)
            await self._start(key, broker, True, partitions)
            return
        self._made.add(key)

    async def _end(self, key: ReplicaKey, *, close: bool = False) -> None:
        """End its actor, and wait until its name is free."""
        try:
            handle = await self.handle(key)
        except ValueError:
            return
        if close:
            try:
                await in_time(handle.close.remote(), _CLOSE_S)
            except FAILURES as error:
                _log.info("%s %s was not closed in good order: %s", *key, error)
        await asyncio.to_thread(ray.kill, handle, no_restart=True)
        deadline_s = time.monotonic() + _FREE_NAME_S
        while time.monotonic() < deadline_s:
            try:
                await self.handle(key)
            except ValueError:
                break
            await asyncio.sleep(_FREE_NAME_AGAIN_S)
        self._places.pop(actor_name(*key), None)

    async def _remove(self, key: ReplicaKey, broker: str) -> None:
        await self._end(key, close=True)
        ray_node = self._census.current[broker]
        directory = self._settings.data_dir / self._census.homes[ray_node].directory
        recovery = self._recoveries.get(key.group_id)
        keep = recovery is not None and key.replica_id in dict(recovery.abandoned)
        ref = await asyncio.to_thread(nodes.erase_at, ray_node, directory, *key, keep=keep)
        problem: RayQueueError | None = await in_time(ref, _ERASE_S)
        if problem is not None:
            raise problem
        self._removed.add(key)

    async def _recover(self, recovery: Recovery) -> None:
        """A partition goes on with one replica (``rayqueue.cluster.recoveries``): its actor is ended if it runs as
        before, and the plan starts it anew, alone. Once it leads, that is written down."""
        key = ReplicaKey(GroupId(recovery.group_id), ReplicaId(recovery.survivor))
        try:
            handle = await self.handle(key)
            status: Status = await in_time(handle.status.remote(), _READY_S)
        except (StoreAbandonedError, ReplicaClosedError):
            await self._end(key)
            return
        if status.epoch < recovery.epoch:
            _log.warning("%s of %s goes on alone: %s", recovery.survivor, recovery.group_id, recovery.said)
            await self._end(key, close=True)
        elif status.role == "leader":
            await self.change(RecoverySettled(recovery.group_id, recovery.epoch))

    async def _configure(self, info: TopicInfo, partition: PartitionInfo, version: int) -> None:
        """Tell the partition's leader, whoever that is."""
        await self._tell_leader(partition, configure_command(PartitionSettings.of(info.settings, version)))
        self._configured[partition.group_id] = version

    async def _tell_leader(self, partition: PartitionInfo, command: bytes) -> None:
        refusal: Exception = NotLeaderError(f"no replica of {partition.group_id} leads")
        for replica in partition.replicas:
            key = ReplicaKey(GroupId(partition.group_id), ReplicaId(replica.node))
            try:
                handle = await self.handle(key)
                await self._answered(handle.command.remote(command))
            except FAILURES as error:
                refusal = error
                continue
            return
        raise refusal

    # -- small things --------------------------------------------------------------------------

    async def handle(self, key: ReplicaKey) -> Any:
        """``ValueError`` if it has none."""
        return await asyncio.to_thread(ray.get_actor, actor_name(*key), self._settings.namespace)

    async def _answered(self, call: Awaitable[Any]) -> Any:
        return await in_time(call, _ANSWER_S)

    async def change(self, command: AnyCommand) -> Any:
        return await self._asked(lambda answer: self._replica.service.change(command, answer))

    async def _asked(self, ask: Callable[[Callable[[Any], None]], None]) -> Any:
        reply = Reply()
        ask(reply)
        return await reply.future


def _first_voters(partition: PartitionInfo, replica_id: ReplicaId) -> tuple[ReplicaId, ...] | None:
    """The voters of a new group. None if it is not new: one of its replicas was replaced since, which its id shows.
    Then what is made now waits for the leader, which knows who belongs to the group."""
    if any("." in node for node in (replica_id, *(replica.node for replica in partition.replicas))):
        return None
    return tuple(ReplicaId(replica.node) for replica in partition.replicas)
