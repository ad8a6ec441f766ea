"""The replicas of one group: where each serves, and channels to them.

Asks the directory for a replica's endpoint and connects there. Remembers
endpoints for as long as they work: a replica that only lost a connection is
found again without the directory. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable

from rayqueue.config import Settings
from rayqueue.errors import ClosedError, OutcomeUnknownError, RayQueueError, TransportError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.channel import Channel
from rayqueue.net.directory import Directory
from rayqueue.net.endpoint import Endpoint
from rayqueue.net.requests import heard


class Replicas:
    """``find`` says who belongs to the group if that is not known beforehand."""

    def __init__(
        self,
        group_id: str,
        replica_ids: Iterable[str],
        directory: Directory,
        settings: Settings,
        *,
        find: Callable[[], Awaitable[tuple[str, ...]]] | None = None,
    ) -> None:
        self.replica_ids = tuple(replica_ids)
        self._group_id = GroupId(group_id)
        self._directory = directory
        self._settings = settings
        self._find = find
        self._endpoints: dict[str, Endpoint] = {}
        self._channels: dict[str, Channel] = {}
        self._opening: dict[str, asyncio.Task[Channel]] = {}
        self._waiters: dict[str, int] = {}
        self._lent: dict[Channel, None] = {}
        self._closed = False

    async def refresh(self, *, force: bool = False) -> None:
        """Find out who belongs to the group, if that is for us to find out; again only by ``force``."""
        if self._find is not None and (force or not self.replica_ids):
            self._check_open()
            found = await self._find()
            self.replica_ids = found or self.replica_ids

    async def channel(self, replica_id: str) -> Channel:
        """An open channel to this replica."""
        known = self._channels.get(replica_id)
        if known is not None and not known.closed:
            return known
        opening = self._opening.get(replica_id)
        if opening is None or opening.done():
            self._check_open()
            opening = self._opening[replica_id] = asyncio.get_running_loop().create_task(self._open(replica_id))
            opening.add_done_callback(lambda task: self._opened(replica_id, task))
        self._waiters[replica_id] = self._waiters.get(replica_id, 0) + 1
        got_it = False
        try:
            await asyncio.wait((opening,))
            got_it = True
        finally:
            self._waiters[replica_id] -= 1
            if not got_it and not self._waiters[replica_id]:  # nobody waits for it any more
                self._give_up(replica_id, opening)
        if opening.cancelled():
            raise self._closed_error()
        return opening.result()

    async def any(self, prefer_host: str | None) -> Channel:
        """One that is open if it will do, else to any that answers."""
        await self.refresh()
        replica_ids = list(self.replica_ids)
        random.shuffle(replica_ids)
        if prefer_host is not None:
            await asyncio.gather(*(self._endpoint(replica_id) for replica_id in replica_ids), return_exceptions=True)
        order = {replica_id: rank for rank, replica_id in enumerate(replica_ids)}
        replica_ids.sort(
            key=lambda replica_id: (
                not self._is_on(replica_id, prefer_host),
                replica_id not in self._channels,
                order[replica_id],
            )
        )
        problem: RayQueueError = OutcomeUnknownError(f"{self._group_id} has no replicas")
        for replica_id in replica_ids:
            try:
                channel = await self.channel(replica_id)
            except RayQueueError as error:
                problem = error
                continue
            if channel not in self._lent:
                self._lent[channel] = None
                channel.add_closed_callback(lambda gone: self._lent.pop(gone, None))
            return channel
        raise problem

    def keep_only(self, wanted: Channel) -> None:
        """The others were only asked who leads. Those that somebody reads from stay, too."""
        for replica_id, channel in list(self._channels.items()):
            if channel is not wanted and channel not in self._lent:
                del self._channels[replica_id]
                channel.retire()

    def close(self) -> None:
        self._closed = True
        for task in list(self._opening.values()):
            task.cancel()
        for channel in list(self._channels.values()):
            channel.close("its route was closed")
        self._channels.clear()

    # -- one replica ----------------------------------------------------------------------

    def _is_on(self, replica_id: str, host: str | None) -> bool:
        endpoint = self._endpoints.get(replica_id)
        return host is not None and endpoint is not None and endpoint.host == host

    def _give_up(self, replica_id: str, opening: asyncio.Task[Channel]) -> None:
        """It may have opened in the very moment in which the last one who waited for it was cancelled."""
        if not opening.done():
            del self._opening[replica_id]
            opening.cancel()
        elif not opening.cancelled() and opening.exception() is None:
            channel = opening.result()
            if channel not in self._lent and not channel.unanswered:  # else another one who waited uses it
                if self._channels.get(replica_id) is channel:
                    del self._channels[replica_id]
                channel.retire()

    def _opened(self, replica_id: str, task: asyncio.Task[Channel]) -> None:
        if self._opening.get(replica_id) is task:
            del self._opening[replica_id]
        heard(task)

    async def _open(self, replica_id: str) -> Channel:
        channel: Channel | None = None
        if replica_id in self._endpoints:
            try:
                channel = await self._directory.open(self._endpoints[replica_id], self._settings)
            except TransportError:
                del self._endpoints[replica_id]  # it is gone, or lives elsewhere now
        if channel is None:
            endpoint = await self._endpoint(replica_id)
            try:
                channel = await self._directory.open(endpoint, self._settings)
            except TransportError as error:
                self._endpoints.pop(replica_id, None)
                raise OutcomeUnknownError(f"{replica_id} of {self._group_id}: {error}", replica_id=replica_id) from None
        if self._closed:
            channel.close("its route was closed")
            raise self._closed_error()
        self._channels[replica_id] = channel
        return channel

    async def _endpoint(self, replica_id: str) -> Endpoint:
        known = self._endpoints.get(replica_id)
        if known is not None:
            return known
        self._check_open()
        endpoint = await self._directory.endpoint(self._group_id, ReplicaId(replica_id))
        self._endpoints[replica_id] = endpoint
        return endpoint

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the route to {self._group_id} was closed")
