"""The herald: tells the partitions of work queues which Ray nodes are dead, so that leases of workers there end.

Part of the keeper, and speaks where the keeper acts. Every replica is told, once
for each node: whoever leads acts on it, and whoever leads later knows it. A
replica that has started again asks Ray itself (``PartitionActor``). If nobody can
be told, the leases end by their time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

import ray

from rayqueue.actors.keeper.plan import ReplicaKey
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.requests import in_time

if TYPE_CHECKING:
    from rayqueue.actors.keeper.hands import Hands
    from rayqueue.replica.coordinator_service import ClusterView

_ANSWER_S = 10.0


def gone_nodes() -> list[str]:
    """Ids of the nodes that Ray has found dead, as far as it remembers them. It never gives one again."""
    return [node["NodeID"] for node in ray.nodes() if not node["Alive"]]  # type: ignore[no-untyped-call]


class Herald:
    """Belongs to the event loop of its keeper."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._told: dict[ReplicaKey, frozenset[str]] = {}

    def lead_no_more(self) -> None:
        self._told.clear()

    async def look(self, view: ClusterView) -> None:
        replicas = {
            ReplicaKey(GroupId(partition.group_id), ReplicaId(replica.replica_id))
            for info in view.topics.values()
            if info.settings.queue
            for partition in info.partitions
            for replica in partition.replicas
        }
        self._told = {key: told for key, told in self._told.items() if key in replicas}
        gone = frozenset(await asyncio.to_thread(gone_nodes)) if replicas else frozenset()
        for key in replicas:
            news = gone - self._told.get(key, frozenset())
            if news:
                self._hands.begin(("nodes gone", key), self._tell(key, gone, news))

    async def _tell(self, key: ReplicaKey, gone: frozenset[str], news: Collection[str]) -> None:
        handle = await self._hands.handle(key)
        await in_time(handle.nodes_gone.remote(sorted(news)), _ANSWER_S)
        self._told[key] = gone
