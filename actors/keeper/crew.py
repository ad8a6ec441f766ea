"""The crew: starts, ends and removes the actors of replicas, and tells partitions what their topics are to be.

Part of the keeper, which says what there should be; ``rayqueue.actors.keeper.plan`` says which steps
lead there, and here each of them is carried out, as a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray

from rayqueue.actors._ray import pinned_to
from rayqueue.actors.coordinator_actor import CoordinatorSpec
from rayqueue.actors.keeper import nodes
from rayqueue.actors.keeper.census import Census
from rayqueue.actors.keeper.hands import Hands, in_short
from rayqueue.actors.keeper.home import ClusterManifest, Home
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
from rayqueue.actors.names import PREFIX, actor_name
from rayqueue.actors.partition_actor import PartitionSpec
from rayqueue.actors.ray_calls import FAILURES
from rayqueue.actors.start import start_actor, start_coordinator
from rayqueue.cluster.commands import RecoverySettled, ReplicaFound, ReplicaLost, ReplicasMade
from rayqueue.cluster.recoveries import Recovery
from rayqueue.config import Settings
from rayqueue.errors import (
    DamagedLogError,
    DiskFullError,
    NoBrokerError,
    NotLeaderError,
    RayQueueError,
    ReplicaClosedError,
    StoreAbandonedError,
    StoreMissingError,
)
from rayqueue.ids import COORDINATOR, GroupId, ReplicaId
from rayqueue.net.requests import in_time
from rayqueue.partition import PartitionSettings
from rayqueue.partition.commands import configure_command
from rayqueue.protocol.topics import PartitionInfo, TopicInfo

if TYPE_CHECKING:
    from rayqueue.replica.coordinator_service import ClusterView
    from rayqueue.replica.status import Status

_log = logging.getLogger(__name__)

_ANSWER_S = 60.0
_READY_S = 5.0
_START_S = 10.0
_CLOSE_S = 10.0
_ERASE_S = 60.0
_FIND_AGAIN_S = 5.0
_FREE_NAME_S = 5.0
_FREE_NAME_AGAIN_S = 0.02


class Crew:
    """Belongs to the event loop of its keeper."""

    recoveries: Mapping[str, Recovery] = {}
    """As the metadata has them, by Raft group."""

    def __init__(self, hands: Hands, census: Census, settings: Settings, manifest: ClusterManifest) -> None:
        self._hands = hands
        self._census = census
        self._settings = settings
        self.manifest = manifest
        """What a coordinator is told of its cluster."""
        self._places: dict[str, str] = {}
        """Actors by name, and the Ray node that each is pinned to."""
        self._starting: dict[str, asyncio.Semaphore] = {}
        """By host: what one machine starts at the same time."""
        self.made: set[ReplicaKey] = set()
        self.failing: dict[ReplicaKey, str] = {}
        """New replicas that could not be made when that was last tried, and why."""
        self.removed: set[ReplicaKey] = set()
        self.configured: dict[str, int] = {}
        """Which version of its topic's settings a partition has, by Raft group."""

    def lead_no_more(self) -> None:
        """Another coordinator leads, and finds out for itself what is made, removed and told."""
        self.made.clear()
        self.failing.clear()
        self.removed.clear()
        self.configured.clear()

    async def act(self, wanted: list[Wanted], view: ClusterView, doomed: list[Doomed], behind: list[Behind]) -> None:
        actors = await asyncio.to_thread(self._look_at_actors)
        busy = {*self._hands.steps, *self.made, *self.removed}
        partitions = {
            partition.group_id: (info, partition) for info in view.topics.values() for partition in info.partitions
        }
        unmade = {each.key for each in wanted if each.unmade}
        self.failing = {key: why for key, why in self.failing.items() if key in unmade}
        for step in plan(Picture(self._census.current, actors, wanted, doomed, behind, busy)):
            key = step.group_id if isinstance(step, Configure) else step.key
            self._hands.begin(key, self._take(step, partitions))

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

    async def _take(self, step: Step, partitions: Mapping[str, tuple[TopicInfo, PartitionInfo]]) -> None:
        makes = isinstance(step, Confirm) or (isinstance(step, Start | Restart) and step.create)
        made = step.key if makes and not isinstance(step, Configure) else None
        try:
            await self._take_now(step, partitions)
        except FAILURES as error:
            if made is not None and not isinstance(error, NoBrokerError):
                self.failing[made] = in_short(error)
            raise
        if made is not None:
            self.failing.pop(made, None)

    async def _take_now(self, step: Step, partitions: Mapping[str, tuple[TopicInfo, PartitionInfo]]) -> None:
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
        host = self._census.home_of(broker).host
        # A few at a time, in the order of the metadata: partitions serve one after the other, not all at the end.
        async with self._starting.setdefault(host, asyncio.Semaphore(self._settings.cluster.starts_at_once)):
            home = self._census.home_of(broker)  # its turn may have come late
            start = self._start_at(home, key, create, partitions)
            _log.info("starting %s %s on %s%s", *key, broker, ", new" if create else "")
            handle: Any = await asyncio.to_thread(start)
            self._places[actor_name(*key)] = home.ray_node
            if create:
                await self._answered(handle.address.remote())
                self.made.add(key)
            else:
                with suppress(*FAILURES):  # why it does not run is its own to say
                    await in_time(handle.address.remote(), _START_S)

    def _start_at(
        self, home: Home, key: ReplicaKey, create: bool, partitions: Mapping[str, tuple[TopicInfo, PartitionInfo]]
    ) -> Callable[[], Any]:
        if key.group_id == COORDINATOR:
            coordinator = CoordinatorSpec(
                COORDINATOR,
                key.replica_id,
                self._settings,
                create=create,
                voters=None,  # what is made here joins a group that there is
                host=home.host,
                directory=home.directory,
                cluster=self.manifest,
            )
            return lambda: start_coordinator(coordinator, ray_node_id=home.ray_node)
        info, partition = partitions[key.group_id]
        recovery = self.recoveries.get(key.group_id)
        surviving = recovery if recovery is not None and recovery.survivor == key.replica_id else None
        spec = PartitionSpec(
            key.group_id,
            key.replica_id,
            self._settings,
            create=create,
            voters=_first_voters(partition, key.replica_id),
            epoch=0 if recovery is None else recovery.epoch,
            alone=surviving is not None and not surviving.settled,
            begins_at=None if surviving is None else surviving.begins_at,
            host=home.host,
            directory=home.directory,
            partition=PartitionSettings.of(info.settings, info.version),
        )
        return lambda: start_actor(spec, ray_node_id=home.ray_node)

    async def _confirm(
        self, key: ReplicaKey, broker: str, partitions: Mapping[str, tuple[TopicInfo, PartitionInfo]]
    ) -> None:
        handle = await self._hands.handle(key)
        try:
            await self._answered(handle.address.remote())
        except (StoreMissingError, DiskFullError) as error:
            _log.warning("%s %s was never made, and is started anew: %s", *key, error)
            await self._end(key)
            await self._start(key, broker, True, partitions)
            return
        except DamagedLogError as error:
            # It was made, and may have voted: it is lost under this id, as one that was known to be made.
            _log.warning("%s %s is damaged already: %s", *key, error)
            await self._hands.change(ReplicasMade((key,)))
            await self._hands.change(ReplicaLost(*key, str(error)))
            return
        self.made.add(key)

    async def _end(self, key: ReplicaKey, *, close: bool = False) -> None:
        """End its actor, and wait until its name is free."""
        try:
            handle = await self._hands.handle(key)
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
                await self._hands.handle(key)
            except ValueError:
                break
            await asyncio.sleep(_FREE_NAME_AGAIN_S)
        self._places.pop(actor_name(*key), None)

    async def _remove(self, key: ReplicaKey, broker: str) -> None:
        await self._end(key, close=True)
        home = self._census.home_of(broker)
        directory = self._settings.data_dir / home.directory
        recovery = self.recoveries.get(key.group_id)
        keep = recovery is not None and key.replica_id in dict(recovery.abandoned)
        ref = await asyncio.to_thread(nodes.erase_at, home.ray_node, directory, *key, keep=keep)
        problem: RayQueueError | None = await in_time(ref, _ERASE_S)
        if problem is not None:
            raise problem
        self.removed.add(key)

    async def recover(self, recovery: Recovery) -> bool:
        """A partition goes on with one replica (``rayqueue.cluster.recoveries``): its actor is ended if it runs as
        before, and the plan starts it anew, alone. Once it leads, that is written down."""
        key = ReplicaKey(GroupId(recovery.group_id), ReplicaId(recovery.survivor))
        try:
            handle = await self._hands.handle(key)
            status: Status = await in_time(handle.status.remote(), _READY_S)
        except (StoreAbandonedError, ReplicaClosedError):
            await self._end(key)
            return True
        if status.epoch < recovery.epoch:
            _log.warning("%s of %s goes on alone: %s", recovery.survivor, recovery.group_id, recovery.said)
            await self._end(key, close=True)
        elif status.role == "leader":
            await self._hands.change(RecoverySettled(recovery.group_id, recovery.epoch))
        else:
            return False
        return True

    async def find_again(self, key: ReplicaKey) -> bool:
        """A partition's only replica was reported as lost. If its disk is back, it serves, and that is written down."""
        try:
            status: Status = await in_time((await self._hands.handle(key)).status.remote(), _READY_S)
        except FAILURES:
            well = False
        else:
            well = status.role == "leader" and status.damaged is None and status.doubted is None
        if well:
            _log.warning("%s %s serves again", *key)
            await self._hands.change(ReplicaFound(*key))
        else:
            await asyncio.sleep(_FIND_AGAIN_S)
        return well

    async def _configure(self, info: TopicInfo, partition: PartitionInfo, version: int) -> None:
        """Tell the partition's leader, whoever that is."""
        await self.tell_leader(partition, configure_command(PartitionSettings.of(info.settings, version)))
        self.configured[partition.group_id] = version

    async def tell_leader(self, partition: PartitionInfo, command: bytes) -> None:
        refusal: Exception = NotLeaderError(f"no replica of {partition.group_id} leads")
        for replica in partition.replicas:
            key = ReplicaKey(GroupId(partition.group_id), ReplicaId(replica.replica_id))
            try:
                handle = await self._hands.handle(key)
                await self._answered(handle.command.remote(command))
            except FAILURES as error:
                refusal = error
                continue
            return
        raise refusal

    async def _answered(self, call: Awaitable[Any]) -> Any:
        return await in_time(call, _ANSWER_S)


def _first_voters(partition: PartitionInfo, replica_id: ReplicaId) -> tuple[ReplicaId, ...] | None:
    """The voters of a new group. None if it is not new: one of its replicas was replaced since, which its id shows.
    Then what is made now waits for the leader, which knows who belongs to the group."""
    if any("." in node for node in (replica_id, *(replica.replica_id for replica in partition.replicas))):
        return None
    return tuple(ReplicaId(replica.replica_id) for replica in partition.replicas)
