"""Who leads which group, and an open channel to it.

``GroupRoute`` is the way to one Raft group, ``ClusterRoutes`` the cluster as
a client sees it: its topics, and a route per partition. Both belong to the
loop of ``rayqueue.client.io``: every method is called there, and none blocks it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

from rayqueue.client.channel import Channel
from rayqueue.client.replicas import Replicas, coordinator_nodes
from rayqueue.client.retry import Retry
from rayqueue.client.routing import same_topic
from rayqueue.config import Settings
from rayqueue.errors import (
    ClosedError,
    NotLeaderError,
    OutcomeUnknownError,
    RayQueueError,
    UnknownPartitionError,
    UnknownTopicError,
)
from rayqueue.protocol.calls import Call, CreateTopic, GetStatus, GetTopics, ReplicaStatus, Topics
from rayqueue.protocol.topics import PartitionInfo, TopicInfo, TopicPartition, TopicSettings, check_name

_log = logging.getLogger(__name__)

COORDINATOR = "coordinator"

_T = TypeVar("_T")

_ASK_S = 1.0
"""How long one replica may take to say who leads, connecting to it included."""
_LOOK_AGAIN_MAX_S = 0.1
"""An election takes a few tenths of a second, and to ask costs little."""
_REFRESH_EVERY = 5
"""After so many vain attempts the replicas themselves may be others."""
_LEADERLESS_S = 1.0
"""When nobody leads for so long, the topic may be gone, or another one may have its name."""


class GroupRoute:
    """The way to one Raft group."""

    def __init__(
        self,
        group_id: str,
        nodes: Iterable[str],
        namespace: str,
        settings: Settings,
        *,
        on_leaderless: Callable[[], None] | None = None,
    ) -> None:
        """``on_leaderless`` is called now and then while a leader is looked for in vain."""
        self.group_id = group_id
        self.leader_channel: Channel | None = None
        """The open channel to whoever is known to lead, without waiting."""
        self.term = 0
        """The newest in which somebody was seen to lead."""
        self.closed = False
        self._settings = settings
        self._on_leaderless = on_leaderless
        self._replicas = Replicas(group_id, nodes, namespace, settings)
        self._hint: str | None = None
        self._search: asyncio.Task[Channel] | None = None
        self._doubt: asyncio.Task[None] | None = None
        self._rng = random.Random()  # noqa: S311  # jitter

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._replicas.nodes

    # -- who leads -----------------------------------------------------------------------

    async def leader(self) -> Channel:
        """An open channel to whoever leads. ``NotLeaderError`` if nobody does within ``client.call_timeout_ms``.

        ``ClosedError`` once this route is closed, also to those who wait: ask ``ClusterRoutes`` for the way of now.
        """
        channel = self.leader_channel
        if channel is not None:
            return channel
        search = self._searching()
        await asyncio.wait((search,))
        if search.cancelled():
            raise self._closed_error()
        return search.result()

    async def any_replica(self, prefer_host: str | None = None) -> Channel:
        """An open channel to any replica, one on this host if there is one. For reads that followers may serve."""
        self._check_open()
        return await self._replicas.any(prefer_host)

    def failed(self, error: RayQueueError) -> None:
        """A request to the leader ended with an error that says that this route is out of date."""
        channel = self.leader_channel
        if not error.refresh_metadata or self.closed:
            return
        known = None if channel is None else channel.endpoint.node
        said = error.details.get("leader") if isinstance(error, NotLeaderError) else None
        if known is not None and (said == known or error.details.get("node", known) != known):
            return  # about somebody who is not asked any more
        self._hint = said
        self._forget_leader()
        self._searching()

    def close(self) -> None:
        """Close its channels."""
        self.closed = True
        for task in (self._search, self._doubt):
            if task is not None:
                task.cancel()
        self.leader_channel = None
        self._replicas.close()

    # -- calls ---------------------------------------------------------------------------

    async def call(
        self, call: Call, *, timeout_ms: int | None = None, may_take_ms: int = 0, idempotent: bool = True
    ) -> Any:
        """Ask whoever leads, and again if the error says that this may help."""
        loop = asyncio.get_running_loop()
        retry = Retry(self._settings.client, self._rng, loop.time(), idempotent=idempotent)
        if timeout_ms is not None:
            retry.deadline_s = loop.time() + timeout_ms / 1000
        retry.deadline_s += may_take_ms / 1000
        while True:
            try:
                channel = await self._in_time(self.leader(), retry.deadline_s, written=False)
                answer = channel.call(call, may_take_ms=may_take_ms)
                return await self._in_time(answer, retry.deadline_s, written=True)
            except RayQueueError as error:
                wait = retry.after(error, loop.time())
                if wait.refresh:
                    self.failed(error)
                await asyncio.sleep(wait.seconds)

    async def _in_time(
        self, work: Coroutine[Any, Any, _T] | asyncio.Future[_T], deadline_s: float, *, written: bool
    ) -> _T:
        try:
            return await asyncio.wait_for(work, max(0.0, deadline_s - asyncio.get_running_loop().time()))
        except asyncio.TimeoutError:
            if written:
                raise OutcomeUnknownError(f"{self.group_id} has not answered in time; outcome unknown") from None
            raise NotLeaderError(f"no replica of {self.group_id} leads at the moment", leader=None) from None

    # -- looking for the leader ---------------------------------------------------------------

    def _searching(self) -> asyncio.Task[Channel]:
        self._check_open()
        if self._search is None:
            self._search = asyncio.get_running_loop().create_task(self._find())
            self._search.add_done_callback(self._found)
        return self._search

    def _found(self, search: asyncio.Task[Channel]) -> None:
        self._search = None
        if not search.cancelled():
            search.exception()  # those who wait for it have it; there may be none

    async def _find(self) -> Channel:
        loop, client = asyncio.get_running_loop(), self._settings.client
        deadline_s = loop.time() + client.call_timeout_ms / 1000
        pause_s = client.retry_min_ms / 1000
        attempts = count(1)
        tell_s = loop.time() + _LEADERLESS_S
        while True:
            with suppress(OutcomeUnknownError):
                await self._replicas.refresh(force=next(attempts) % _REFRESH_EVERY == 0)
            found = await self._look()
            if found is not None:
                return found
            if loop.time() + pause_s > deadline_s:
                raise NotLeaderError(f"no replica of {self.group_id} leads at the moment", leader=None)
            if loop.time() >= tell_s and self._on_leaderless is not None:
                self._on_leaderless()
                tell_s = loop.time() + _LEADERLESS_S
            await asyncio.sleep(pause_s * (0.5 + self._rng.random() / 2))
            pause_s = min(2 * pause_s, client.retry_max_ms / 1000, _LOOK_AGAIN_MAX_S)

    async def _look(self) -> Channel | None:
        """Ask everybody at once; the first that says it leads, in the newest term we know or a newer one, does."""
        nodes = self.nodes
        hint, self._hint = self._hint, None
        if hint in nodes:
            nodes = (hint,)
        asked = [asyncio.ensure_future(self._ask(node)) for node in nodes]
        try:
            for answer in asyncio.as_completed(asked):
                status, channel = await answer
                if status is not None and channel is not None and self._leads(status):
                    return self._follow(channel, status.term)
        finally:
            for task in asked:
                task.cancel()
        return None

    async def _ask(self, node: str) -> tuple[ReplicaStatus | None, Channel | None]:
        try:
            return await asyncio.wait_for(self._status(node), _ASK_S)
        except (RayQueueError, asyncio.TimeoutError):
            return None, None

    async def _status(self, node: str) -> tuple[ReplicaStatus, Channel]:
        channel = await self._replicas.channel(node)
        return await channel.call(GetStatus()), channel

    def _leads(self, status: ReplicaStatus) -> bool:
        return status.role == "leader" and status.term >= self.term

    def _follow(self, channel: Channel, term: int) -> Channel:
        self._check_open()
        self.term = term
        self._forget_leader()
        self.leader_channel = channel
        channel.add_closed_callback(self._lost)
        channel.watch(self._overdue)
        self._replicas.keep_only(channel)
        return channel

    def _forget_leader(self) -> None:
        """It is still watched: what it was asked before and does not answer must not wait for it (``_overdue``)."""
        self.leader_channel = None

    def _lost(self, channel: Channel) -> None:
        """The connection broke. If this was the leader's, there will be another one soon: look for it now."""
        if channel is self.leader_channel and not self.closed:
            self._forget_leader()
            self._searching()

    # -- doubt ------------------------------------------------------------------------------

    def _overdue(self, channel: Channel) -> None:
        """The leader does not answer. It may be slow, stopped, or cut off from the others, who then know better.

        Or it was the leader: then whoever waits for it is told, and asks the one that leads now.
        """
        leader = self.leader_channel
        if leader is not None and channel is not leader:
            channel.close(f"it did not answer, and {leader.endpoint.node} leads now")
        elif leader is not None and self._doubt is None:
            self._doubt = asyncio.get_running_loop().create_task(self._ask_others(channel))
            self._doubt.add_done_callback(self._doubted)

    def _doubted(self, doubt: asyncio.Task[None]) -> None:
        self._doubt = None
        if not doubt.cancelled():
            doubt.exception()

    async def _ask_others(self, doubtful: Channel) -> None:
        others = [node for node in self.nodes if node != doubtful.endpoint.node]
        asked = [asyncio.ensure_future(self._ask(node)) for node in others]
        try:
            for answer in asyncio.as_completed(asked):
                status, channel = await answer
                if status is None or channel is None or doubtful is not self.leader_channel:
                    continue
                if status.role == "leader" and status.term > self.term:
                    self._follow(channel, status.term)
                    doubtful.close(f"it did not answer, and {status.node} leads now")
                    return
        finally:
            for task in asked:
                task.cancel()
            if self.leader_channel is not None:
                self._replicas.keep_only(self.leader_channel)

    def _check_open(self) -> None:
        if self.closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the route to {self.group_id} was closed")


class _CoordinatorRoute(GroupRoute):
    """The coordinator's replicas are found by their names in Ray."""

    def __init__(self, namespace: str, settings: Settings) -> None:
        super().__init__(COORDINATOR, (), namespace, settings)
        self._replicas = Replicas(COORDINATOR, (), namespace, settings, find=coordinator_nodes)


class ClusterRoutes:
    """The cluster as a client sees it. Cached; errors say when to ask again."""

    def __init__(self, namespace: str, settings: Settings) -> None:
        self.coordinator: GroupRoute = _CoordinatorRoute(namespace, settings)
        self.version = 0
        """Of the newest topics that were seen."""
        self._namespace = namespace
        self._settings = settings
        self._topics: dict[str, TopicInfo] = {}
        self._asking: dict[tuple[str, bool], asyncio.Task[TopicInfo]] = {}
        self._looking: dict[str, asyncio.Task[TopicInfo]] = {}
        self._routes: dict[str, GroupRoute] = {}
        self._closed = False

    async def topic(self, name: str, *, refresh: bool = False) -> TopicInfo:
        """``UnknownTopicError`` if there is none; made if ``cluster.auto_create_topics``.

        ``refresh``: as of now. Who looks again means a topic that was there, so none is made then.
        """
        known = self._topics.get(name)
        if known is not None and not refresh:
            return known
        key = (name, not refresh and self._settings.cluster.auto_create_topics)
        asking = self._asking.get(key)
        if asking is None:
            check_name("topic", name)
            self._check_open()
            asking = self._asking[key] = asyncio.get_running_loop().create_task(self._ask_topic(*key))
            asking.add_done_callback(lambda task: self._asked(key, task))
        await asyncio.wait((asking,))
        if asking.cancelled():
            raise self._closed_error()
        return asking.result()

    def _asked(self, key: tuple[str, bool], asking: asyncio.Task[TopicInfo]) -> None:
        self._asking.pop(key, None)
        if not asking.cancelled():
            asking.exception()  # those who wait for it have it; there may be none

    def cached_topic(self, name: str) -> TopicInfo | None:
        """Without asking anybody."""
        return self._topics.get(name)

    async def partition(self, partition: TopicPartition, topic_id: int | None = None) -> GroupRoute:
        """The way to this partition. ``UnknownPartitionError`` if the topic has fewer.

        Who is bound to a partition gives its topic's id, and gets ``TopicRecreatedError`` if another topic has the
        name by now: never the way to another log. (Ids only grow.)
        """
        info = self._topics.get(partition.topic)
        if info is None:
            info = await self.topic(partition.topic, refresh=topic_id is not None)
        if partition.partition >= len(info.partitions) or info.topic_id < (topic_id or 0):
            info = await self.topic(partition.topic, refresh=True)  # it may have grown, or be a new one
        same_topic(info, topic_id)
        if not 0 <= partition.partition < len(info.partitions):
            raise UnknownPartitionError(
                f"{partition.topic} has {len(info.partitions)} partitions; there is no {partition.partition}",
                topic=partition.topic,
                partition=partition.partition,
            )
        self._check_open()
        where = info.partitions[partition.partition]
        nodes = _nodes(where)
        route = self._routes.get(where.group_id)
        if route is None or route.closed or route.nodes != nodes:
            if route is not None:
                route.close()
            route = self._routes[where.group_id] = GroupRoute(
                where.group_id,
                nodes,
                self._namespace,
                self._settings,
                on_leaderless=lambda: self._look_again(partition.topic),
            )
        return route

    def _look_again(self, name: str) -> None:
        """A partition of this topic has no leader. If the topic is gone, or its replicas are others, its routes close,
        and whoever waits there asks for the new ones."""
        if not self._closed and not self._looking.get(name):
            looking = asyncio.get_running_loop().create_task(self.topic(name, refresh=True))
            self._looking[name] = looking
            looking.add_done_callback(lambda task: self._looked(name, task))

    def _looked(self, name: str, looking: asyncio.Task[TopicInfo]) -> None:
        self._looking.pop(name, None)
        if not looking.cancelled() and looking.exception() is not None:
            _log.info("topic %s was looked up again: %s", name, looking.exception())

    async def refresh(self) -> None:
        """Ask again for every topic that is cached."""
        names = tuple(self._topics)
        if not names:
            return
        answer: Topics = await self.coordinator.call(GetTopics(names=names))
        found = {info.name: info for info in answer.topics}
        self.version = max(self.version, answer.version)
        for name in names:
            if name in found:
                self._learn(found[name])
            else:
                self._forget(name)

    async def close(self) -> None:
        self._closed = True
        for asking in (*self._asking.values(), *self._looking.values()):
            asking.cancel()
        for route in (self.coordinator, *self._routes.values()):
            route.close()
        self._routes.clear()
        self._topics.clear()

    async def _ask_topic(self, name: str, create: bool) -> TopicInfo:
        answer: Topics = await self.coordinator.call(GetTopics(names=(name,)))
        self.version = max(self.version, answer.version)
        for info in answer.topics:
            if info.name == name:
                return self._learn(info)
        self._forget(name)
        if not create:
            raise UnknownTopicError(f"there is no topic {name!r}", topic=name)
        made: TopicInfo = await self.coordinator.call(
            CreateTopic(name=name, settings=TopicSettings(), if_missing=True, attempt=uuid.uuid4().hex)
        )
        return self._learn(made)

    def _learn(self, info: TopicInfo) -> TopicInfo:
        before = self._topics.get(info.name)
        if before is not None and before.topic_id != info.topic_id:
            self._forget(info.name)
        self._topics[info.name] = info
        for partition in info.partitions:
            route = self._routes.get(partition.group_id)
            if route is not None and route.nodes != _nodes(partition):
                self._routes.pop(partition.group_id).close()  # its replicas are others now
        return info

    def _forget(self, name: str) -> None:
        """The topic is gone, or another one has its name: nobody answers at the old places any more."""
        info = self._topics.pop(name, None)
        for partition in () if info is None else info.partitions:
            route = self._routes.pop(partition.group_id, None)
            if route is not None:
                route.close()

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> ClosedError:
        return ClosedError("the connection with the cluster was closed")


def _nodes(partition: PartitionInfo) -> tuple[str, ...]:
    return tuple(replica.node for replica in partition.replicas)
