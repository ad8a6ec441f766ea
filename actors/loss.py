"""Loss: a replica whose data is gone or damaged tells the coordinator, which has it replaced.

Over the connection layer, and again and again until the coordinator has it
written down: a replica that cannot start has nothing else to do. It may be told
that it is not needed only because nobody has noted yet that it was made.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from rayqueue.config import Settings
from rayqueue.errors import RayQueueError
from rayqueue.ids import GroupId, ReplicaId

if TYPE_CHECKING:
    from rayqueue.replica.replica import Replica

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_AGAIN_S = 5.0


async def report_loss(
    group_id: GroupId,
    replica_id: ReplicaId,
    settings: Settings,
    why: str,
    *,
    insist: bool = False,
    missing: bool = False,
) -> None:
    """Returns once the coordinator has answered. A replica that was never made is not lost, and it says so.
    ``insist``: only once it has it written down, or this is cancelled. ``missing``: nothing was found, and nothing that
    was wrong; a disk that is mounted later brings the data back."""
    # Every replica's process watches itself; few have anything to tell.
    from rayqueue.actors.directory import RayDirectory
    from rayqueue.net.route import CoordinatorRoute
    from rayqueue.protocol.calls import ReportReplica

    route = CoordinatorRoute(RayDirectory(settings.namespace), settings)
    try:
        while True:
            try:
                known = await route.call(
                    ReportReplica(group_id=group_id, replica_id=replica_id, why=why, missing=missing)
                )
            except RayQueueError as error:
                _log.warning("the coordinator could not be told that %s is lost: %s", replica_id, error)
                await asyncio.sleep(_AGAIN_S)
                continue
            _log.warning(
                "%s: the coordinator %s: %s", replica_id, "has it replaced" if known else "needs it no more", why
            )
            if known or not insist:
                return
            await asyncio.sleep(_AGAIN_S)
    finally:
        route.close()


async def report_damage(replica: Replica[Any], group_id: GroupId, replica_id: ReplicaId, settings: Settings) -> None:
    """Look, for as long as the replica runs, whether it has met damage, or a follower of it has forgotten something."""
    told: set[ReplicaId] = set()
    while True:
        status = replica.status
        if status.damaged is not None and replica_id not in told:
            told.add(replica_id)
            await report_loss(group_id, replica_id, settings, status.damaged, insist=True)
        for peer in set(status.forgetful) - told:
            told.add(peer)
            await report_loss(group_id, peer, settings, f"it has lost what it had acknowledged to {replica_id}")
        await asyncio.sleep(_LOOK_EVERY_S)
