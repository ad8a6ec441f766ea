"""The settler: a partition asks the coordinator what became of transactions that nobody ends.

Beside the replica, over the connection layer. While nothing stays open it asks
nothing, and has no connection.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from rayqueue.actors.directory import RayDirectory
from rayqueue.actors.replies import Reply
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError, ReplicaClosedError
from rayqueue.ids import GroupId
from rayqueue.net.lasting import lasting
from rayqueue.net.route import CoordinatorRoute
from rayqueue.protocol.transactions import OpenFor, ResolveTransactions

if TYPE_CHECKING:
    from rayqueue.replica.start import PartitionReplica

_log = logging.getLogger(__name__)

_LOOKS = 2
"""How often it looks within the time after which it asks."""


async def settle_transactions(replica: PartitionReplica, group_id: GroupId, settings: Settings) -> None:
    """For as long as the replica runs."""
    await lasting(partial(_settle, replica, group_id, settings), f"the settler of {group_id}")


async def _settle(replica: PartitionReplica, group_id: GroupId, settings: Settings) -> None:
    route = CoordinatorRoute(RayDirectory(settings.namespace), settings)
    try:
        while True:
            await asyncio.sleep(settings.cluster.resolve_after_ms / 1000 / _LOOKS)
            settling, looked = replica.service.settling, Reply()
            try:
                replica.look(settling.questions, looked)
                asked: tuple[OpenFor, ...] = await looked.future
                if asked:
                    fates = await route.call(ResolveTransactions(group_id=group_id, transactions=asked))
                    replica.run(partial(settling.answered, asked, fates))
            except ReplicaClosedError:
                return
            except RayQueueError as error:
                _log.info("the fate of open transactions is not known yet: %s", error)
    finally:
        route.close()
