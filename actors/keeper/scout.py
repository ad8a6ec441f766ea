"""The scout: looks now and then who leads each partition, how large it is, and how full the brokers' disks are.

Part of the keeper, and acts where it does. It asks one replica of each partition,
by Ray, at a pace that a thousand partitions do not feel; what it finds is a
few seconds old, and nobody decides more by it than what is worth trying. Leaders
that should be others are asked to make way over the connection layer, where
the leader itself knows whether its successor is ready.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rayqueue.actors.directory import RayDirectory
from rayqueue.actors.keeper import nodes
from rayqueue.actors.keeper.hands import Hands
from rayqueue.actors.keeper.plan import ReplicaKey
from rayqueue.actors.ray_calls import FAILURES
from rayqueue.cluster.leaders import Picture, Spreader, nearest
from rayqueue.cluster.placement import AliveBroker
from rayqueue.config import MIB, Settings
from rayqueue.ids import COORDINATOR, GroupId, ReplicaId
from rayqueue.net.requests import in_time
from rayqueue.net.route import GroupRoute
from rayqueue.protocol.calls import TransferLeader
from rayqueue.protocol.topics import PartitionInfo
from rayqueue.replica.status import Status

if TYPE_CHECKING:
    from rayqueue.replica.coordinator_service import ClusterView

_log = logging.getLogger(__name__)

_ASK_S = 5.0
_TRANSFER_MS = 3_000
_PER_PARTITION_S = 0.01
"""How much longer the pause between two looks is for each partition."""
_EAGER_S = 1.0
_VAIN_LOOKS = 5
_AT_ONCE = 200


class Disk(NamedTuple):
    total_bytes: int
    free_bytes: int


class Scout:
    """Belongs to the event loop of its keeper."""

    def __init__(self, hands: Hands, settings: Settings) -> None:
        self._hands = hands
        self._settings = settings
        self._directory = RayDirectory(settings.namespace)
        self._spreader = Spreader(settings.cluster)
        self._nodes: dict[str, str] = {}
        """Who was last seen to lead, by Raft group."""
        self._next_s = 0.0
        self.leaders: dict[str, str] | None = None
        """Brokers by the Raft group that each leads; None before the first look."""
        self.sizes: dict[str, int] = {}
        """Bytes by Raft group."""
        self.disks: dict[str, Disk] = {}
        """By broker."""
        self.learners: dict[str, tuple[ReplicaId, ...]] = {}
        """By the Raft group that has some, as its leader said."""
        self.settled: int | None = None
        """The number of the rebalance for which the last look has found no leader that should be another; or none that
        makes way."""
        self._vain = 0
        """Looks in a row, for somebody who waits, that have moved nothing."""
        self._waited_for: int | None = None
        """The number of the rebalance that they were for."""
        self._looked_s = 0.0

    def lead_no_more(self) -> None:
        self.leaders = None
        self.learners = {}
        self.settled = self._waited_for = None
        self._vain = 0
        self._spreader.forget()
        self._next_s = 0.0

    def is_due(self, *, eager: bool) -> bool:
        now_s = time.monotonic()
        return now_s >= self._next_s or (eager and now_s >= self._looked_s + _EAGER_S)

    async def look(self, view: ClusterView, alive: Sequence[AliveBroker], *, eager: bool) -> None:
        partitions = {part.group_id: part for info in view.topics.values() for part in info.partitions}
        await self._look_at_disks(view, alive)
        await self._look_at_leaders(partitions, {each.broker for each in alive})
        picture = self._picture(view, partitions, alive)
        transfers = self._spreader.look(time.monotonic(), picture, eager=eager)
        moved = 0
        for each in transfers:
            part = partitions[each.group_id]
            node = next(replica.replica_id for replica in part.replicas if replica.broker == each.target)
            try:
                await self.transfer(part, node)
            except FAILURES as error:
                _log.info("%s is not led by %s: %s", each.group_id, each.target, error)
            else:
                moved += 1
                _log.info("%s is led by %s now, instead of %s", each.group_id, each.target, each.source)
        in_vain = eager and not moved
        self._vain = 0 if not in_vain else self._vain + 1 if self._waited_for == view.rebalance else 1
        self._waited_for = view.rebalance
        self.settled = view.rebalance if eager and (not transfers or self._vain >= _VAIN_LOOKS) else None
        least_s = _EAGER_S if eager else self._settings.cluster.leaders_look_ms / 1000
        self._looked_s = time.monotonic()
        self._next_s = self._looked_s + max(least_s, _PER_PARTITION_S * len(partitions))

    async def transfer(self, partition: PartitionInfo, node: str, *more: str) -> None:
        """Let this replica lead. ``more``: replicas that are not in the metadata yet."""
        ids = (*(replica.replica_id for replica in partition.replicas), *more)
        route = GroupRoute(partition.group_id, ids, self._directory, self._settings)
        try:
            await route.call(TransferLeader(to=node), timeout_ms=_TRANSFER_MS)
        finally:
            route.close()

    # -- looking ---------------------------------------------------------------------------------

    async def _look_at_leaders(self, partitions: Mapping[str, PartitionInfo], here: set[str]) -> None:
        """One replica of each: the last leader, or, if that does not know better, each time another one."""
        asked: dict[str, str] = {}
        for group_id, part in partitions.items():
            ids = [replica.replica_id for replica in part.replicas if replica.broker in here]
            known = self._nodes.get(group_id)
            if ids:
                asked[group_id] = known if known in ids else ids[int(time.monotonic()) % len(ids)]
        names = list(asked.items())
        leaders: dict[str, str] = {}
        learners: dict[str, tuple[ReplicaId, ...]] = {}
        for first in range(0, len(names), _AT_ONCE):
            statuses = await self._directory.statuses(names[first : first + _AT_ONCE])
            for (group_id, _), status in statuses.items():
                leader = status.leader if isinstance(status, Status) else None
                brokers = {replica.replica_id: replica.broker for replica in partitions[group_id].replicas}
                if isinstance(status, Status):
                    self.sizes[group_id] = status.size_bytes
                    if status.role == "leader" and status.learners:
                        learners[group_id] = status.learners
                if leader in brokers and brokers[leader] in here:
                    leaders[group_id] = brokers[leader]
                    self._nodes[group_id] = leader
                else:
                    self._nodes.pop(group_id, None)
        self.leaders, self.learners = leaders, learners
        self.sizes = {group_id: size for group_id, size in self.sizes.items() if group_id in partitions}
        self._nodes = {group_id: node for group_id, node in self._nodes.items() if group_id in partitions}

    async def _look_at_disks(self, view: ClusterView, alive: Sequence[AliveBroker]) -> None:
        there: dict[str, ReplicaKey] = {}
        for info in view.topics.values():
            for part in info.partitions:
                for replica in part.replicas:
                    there.setdefault(replica.broker, ReplicaKey(GroupId(part.group_id), ReplicaId(replica.replica_id)))
        for node, broker in view.coordinators.items():
            there.setdefault(broker, ReplicaKey(COORDINATOR, node))
        found = await asyncio.gather(*(self._disk(each, there.get(each.broker)) for each in alive))
        self.disks = {
            each.broker: disk or self.disks.get(each.broker, Disk(0, 0))
            for each, disk in zip(alive, found, strict=True)
        }

    async def _disk(self, broker: AliveBroker, replica: ReplicaKey | None) -> Disk | None:
        """Of any replica that is there; by a task of its own if there is none."""
        try:
            if replica is not None:
                answer = (await self._hands.handle(replica)).disk.remote()
            elif self.disks.get(broker.broker, Disk(0, 0)).total_bytes:
                return None  # nothing of ours grows there
            else:
                answer = await asyncio.to_thread(nodes.disk_at, broker.ray_node, self._settings.data_dir)
            total_bytes, free_bytes = await in_time(answer, _ASK_S)
        except FAILURES as error:
            _log.debug("the disk of %s could not be looked at: %s", broker.broker, error)
            return None
        step_bytes = max(64 * MIB, total_bytes // 100)  # what changes less is no news
        return Disk(total_bytes, free_bytes // step_bytes * step_bytes if free_bytes > step_bytes else free_bytes)

    def _picture(
        self, view: ClusterView, partitions: Mapping[str, PartitionInfo], alive: Sequence[AliveBroker]
    ) -> Picture:
        leaders = self.leaders or {}
        stay = {each.broker for each in alive if each.stays}
        held = {
            group_id: tuple(
                replica.broker
                for replica in part.replicas
                if replica.broker in stay
                and (group_id, replica.replica_id) not in view.lost
                and (group_id, replica.replica_id) not in view.unmade
            )
            for group_id, part in partitions.items()
            if group_id not in view.moves
        }
        wished: dict[str, str] = {}
        at = {each.ray_node: each.broker for each in alive}
        for (topic, number), readers in view.readers.items():
            info = view.topics.get(topic)
            group_id = info.partitions[number].group_id if info and number < len(info.partitions) else ""
            if group_id in held:
                near = {at[node]: count for node, count in readers.items() if node in at}
                broker = nearest(near, held[group_id], leaders.get(group_id))
                if broker is not None:
                    wished[group_id] = broker
        return Picture(held, leaders, wished)
