"""The carrier: brings the markers of commits to participants that may lack them, so that the commits can be forgotten.

Beside the coordinator that leads, over the connection layer. Usually the producer
has done it, and says so with its next transaction; what it has not said within
``AFTER_MS`` is done again here, which changes nothing where it was done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from rayqueue.cluster.commands import AnyCommand, FinishTransactions
from rayqueue.cluster.transactions import CommitRow, unfinished
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError
from rayqueue.net.directory import Directory
from rayqueue.net.route import GroupRoute
from rayqueue.protocol.seals import Seals
from rayqueue.protocol.topics import PartitionInfo
from rayqueue.protocol.transactions import MarkTransaction
from rayqueue.replica.secret import secret_of

if TYPE_CHECKING:
    from rayqueue.replica.coordinator_service import ClusterView

_log = logging.getLogger(__name__)

AFTER_MS = 5_000
_MARK_MS = 5_000
_AT_ONCE = 1_000
_GROUPS_AT_ONCE = 8


class Carrier:
    """``change`` writes to the coordinator's log."""

    def __init__(
        self, change: Callable[[AnyCommand], Awaitable[object]], directory: Directory, settings: Settings
    ) -> None:
        self._change = change
        self._settings = settings
        self._directory = directory

    def due(self, view: ClusterView) -> list[CommitRow]:
        """Some of the commits that are not known to be finished though they should be."""
        return list(unfinished(view.commits, time.time_ns() // 1_000_000, AFTER_MS))[:_AT_ONCE]

    async def carry(self, commits: list[CommitRow], view: ClusterView) -> None:
        """Carry these decisions to their partitions. One that fails is tried again at another look."""
        partitions = {part.group_id: part for info in view.topics.values() for part in info.partitions}
        waiting: dict[str, list[CommitRow]] = {}
        for row in commits:
            for group_id in row.waiting:
                waiting.setdefault(group_id, []).append(row)
        gate = asyncio.Semaphore(_GROUPS_AT_ONCE)

        async def one(group_id: str, rows: list[CommitRow]) -> None:
            async with gate:
                await self._carry(group_id, rows, partitions)

        await asyncio.gather(*(one(group_id, rows) for group_id, rows in waiting.items()))

    async def _carry(self, group_id: str, rows: list[CommitRow], partitions: Mapping[str, PartitionInfo]) -> None:
        part = partitions.get(group_id)
        told = [row.key for row in rows] if part is None else []  # its topic was deleted
        if part is not None:
            ids = [replica.replica_id for replica in part.replicas]
            route = GroupRoute(group_id, ids, self._directory, self._settings)
            try:
                seals = Seals(secret_of(self._settings))
                for row in rows:
                    seal = seals.marker(group_id, *row.key, commit=True)
                    mark = MarkTransaction(producer_id=row.producer_id, epoch=row.epoch, commit=True, seal=seal)
                    await route.call(mark, timeout_ms=_MARK_MS)
                    told.append(row.key)
            except RayQueueError as error:
                _log.info("%s has not taken its markers yet: %s", group_id, error)
            finally:
                route.close()
        if told:
            await self._change(FinishTransactions(tuple(told), group_id))
