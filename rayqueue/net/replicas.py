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
        nodes: Iterable[str],
        directory: Directory,
        settings: Settings,
        *,
        find: Callable[[], Awaitable[tuple[str, ...]]] | None = None,
    ) -> None:
        self.nodes = tuple(nodes)
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
        if self._find is not None and (force or not self.nodes):
            self._check_open()
            found = await self._find()
            self.nodes = found or self.nodes

    async def channel(self, node: str) -> Channel:
        """An open channel to this replica."""
        known = self._channels.get(node)
        if known is not None and not known.closed:
            return known
        opening = self._opening.get(node)
        if opening is None or opening.done():
            self._check_open()
            opening = self._opening[node] = asyncio.get_running_loop().create_task(self._open(node))
            opening.add_done_callback(lambda task: self._opened(node, task))
        self._waiters[node] = self._waiters.get(node, 0) + 1
        got_it = False
        try:
            await asyncio.wait((opening,))
            got_it = True
        finally:
            self._waiters[node] -= 1
            if not got_it and not self._waiters[node]:  # nobody waits for it any more
                self._give_up(node, opening)
        if opening.cancelled():
            raise self._closed_error()
        return opening.result()

    async def any(self, prefer_host: str | None) -> Channel:
        """One that is open if it will do, else to any that answers."""
        await self.refresh()
        nodes = list(self.nodes)
        random.shuffle(nodes)
        if prefer_host is not None:
            await asyncio.gather(*(self._endpoint(node) for node in nodes), return_exceptions=True)
        order = {node: rank for rank, node in enumerate(nodes)}
        nodes.sort(key=lambda node: (not self._is_on(node, prefer_host), node not in self._channels, order[node]))
        problem: RayQueueError = OutcomeUnknownError(f"{self._group_id} has no replicas")
        for node in nodes:
            try:
                channel = await self.channel(node)
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
        for node, channel in list(self._channels.items()):
            if channel is not wanted and channel not in self._lent:
                del self._channels[node]
                channel.retire()

    def close(self) -> None:
        self._closed = True
        for task in list(self._opening.values()):
            task.cancel()
        for channel in list(self._channels.values()):
            channel.close("its route was closed")
        self._channels.clear()

    # -- one replica ----------------------------------------------------------------------

    def _is_on(self, node: str, host: str | None) -> bool:
        endpoint = self._endpoints.get(node)
        return host is not None and endpoint is not None and endpoint.host == host

    def _give_up(self, node: str, opening: asyncio.Task[Channel]) -> None:
        """It may have opened in the very moment in which the last one who waited for it was cancelled."""
        if not opening.done():
            del self._opening[node]
            opening.cancel()
        elif not opening.cancelled() and opening.exception() is None:
            channel = opening.result()
            if channel not in self._lent and not channel.unanswered:  # else another one who waited uses it
                if self._channels.get(node) is channel:
                    del self._channels[node]
                channel.retire()

    def _opened(self, node: str, task: asyncio.Task[Channel]) -> None:
        if self._opening.get(node) is task:
            del self._opening[node]
        heard(task)

    async def _open(self, node: str) -> Channel:
        channel: Channel | None = None
        if node in self._endpoints:
            try:
                channel = await self._directory.open(self._endpoints[node], self._settings)
            except TransportError:
                del self._endpoints[node]  # it is gone, or lives elsewhere now
        if channel is None:
            endpoint = await self._endpoint(node)
            try:
                channel = await self._directory.open(endpoint, self._settings)
            except TransportError as error:
                self._endpoints.pop(node, None)
                raise OutcomeUnknownError(f"{node} of {self._group_id}: {error}", node=node) from None
        if self._closed:
            channel.close("its route was closed")
            raise self._closed_error()
        self._channels[node] = channel
        return channel

    async def _endpoint(self, node: str) -> Endpoint:
        known = self._endpoints.get(node)
        if known is not None:
            return known
        self._check_open()
        endpoint = await self._directory.endpoint(self._group_id, ReplicaId(node))
        self._endpoints[node] = endpoint
        return endpoint

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the route to {self._group_id} was closed")
