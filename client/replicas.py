"""Where the replicas of a group are, and channels to them.

Asks Ray for a replica's actor by its name, the actor for its endpoint, and
connects there. Remembers endpoints for as long as they work: a replica that
only lost a connection is found again without Ray. Ray's calls that block run
in other threads. Belongs to the loop of ``rayqueue.client.io``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rayqueue.actors.endpoint import Endpoint
from rayqueue.actors.names import COORDINATOR_PREFIX, actor_name
from rayqueue.client.calls import typed
from rayqueue.client.channel import Channel
from rayqueue.config import Settings
from rayqueue.errors import ClosedError, OutcomeUnknownError, RayQueueError, TransportError
from rayqueue.ids import GroupId, NodeId

_ENDPOINT_S = 5.0


class Replicas:
    """``find`` says who belongs to the group if that is not known beforehand; it may block."""

    def __init__(
        self,
        group_id: str,
        nodes: Iterable[str],
        namespace: str,
        settings: Settings,
        *,
        find: Callable[[str], tuple[str, ...]] | None = None,
    ) -> None:
        self.nodes = tuple(nodes)
        self._group_id = GroupId(group_id)
        self._namespace = namespace
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
            found = await asyncio.to_thread(self._find, self._namespace)
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
        try:
            await asyncio.wait((opening,))
        finally:
            self._waiters[node] -= 1
            if not self._waiters[node] and not opening.done():  # nobody waits for it any more
                del self._opening[node]
                opening.cancel()
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

    def _opened(self, node: str, task: asyncio.Task[Channel]) -> None:
        if self._opening.get(node) is task:
            del self._opening[node]
        if not task.cancelled():
            task.exception()  # those who wait for it have it; there may be none

    async def _open(self, node: str) -> Channel:
        channel: Channel | None = None
        if node in self._endpoints:
            try:
                channel = await Channel.open(self._endpoints[node], self._settings)
            except TransportError:
                del self._endpoints[node]  # it is gone, or lives elsewhere now
        if channel is None:
            endpoint = await self._endpoint(node)
            try:
                channel = await Channel.open(endpoint, self._settings)
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
        try:
            answer = await asyncio.to_thread(self._ask, node)
            endpoint: Endpoint = await asyncio.wait_for(asyncio.wrap_future(answer), _ENDPOINT_S)
        except (RayError, asyncio.TimeoutError, concurrent.futures.CancelledError) as error:
            cause = typed(error if isinstance(error, RayError) else GetTimeoutError(), node)
            if isinstance(cause, RayQueueError):
                raise cause from None
            raise OutcomeUnknownError(f"{node} of {self._group_id}: {cause}", node=node) from None
        self._endpoints[node] = endpoint
        return endpoint

    def _ask(self, node: str) -> concurrent.futures.Future[Any]:
        """In a thread beside: Ray may block here."""
        with _asking():
            try:
                actor: Any = ray.get_actor(actor_name(self._group_id, NodeId(node)), self._namespace)
            except ValueError:
                raise OutcomeUnknownError(f"{node} of {self._group_id} has no actor now", node=node) from None
            answer: concurrent.futures.Future[Any] = actor.endpoint.remote().future()
            return answer

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the route to {self._group_id} was closed")


def coordinator_nodes(namespace: str) -> tuple[str, ...]:
    """The replicas of the coordinator that have actors. Blocks."""
    with _asking():
        named = ray.util.list_named_actors(all_namespaces=True)
    return tuple(
        sorted(
            actor["name"].removeprefix(COORDINATOR_PREFIX)
            for actor in named
            if actor["namespace"] == namespace and actor["name"].startswith(COORDINATOR_PREFIX)
        )
    )


_under_way = 0
_changed = threading.Condition()


@contextmanager
def _asking() -> Iterator[None]:
    """Around every call to Ray in a thread beside.

    Ray starts itself when it is asked something before it was started, or after it was shut down: not for us. And it
    ends the process if it is shut down while it is being asked: see ``wait_for_answers``.
    """
    global _under_way
    with _changed:
        if not ray.is_initialized():
            raise OutcomeUnknownError("this process is not connected with Ray any more")
        _under_way += 1
    try:
        yield
    finally:
        with _changed:
            _under_way -= 1
            _changed.notify_all()


def wait_for_answers(timeout_s: float) -> bool:
    """Call after routes were closed: once it returns True, nobody asks Ray any more on their behalf."""
    with _changed:
        return _changed.wait_for(lambda: not _under_way, timeout_s)


def _after_fork() -> None:
    global _under_way, _changed
    _under_way, _changed = 0, threading.Condition()  # the threads that ask are the parent's


os.register_at_fork(after_in_child=_after_fork)
