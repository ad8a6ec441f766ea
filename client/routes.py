"""The cluster as a client sees it: its topics, and a route to each partition.

Belongs to the loop of ``rayqueue.client.io``: every method is called there, and none blocks it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from rayqueue.config import Settings
from rayqueue.errors import ClosedError, UnknownTopicError
from rayqueue.net.directory import ClusterDirectory, ReplicaName
from rayqueue.net.interfaces import same_topic
from rayqueue.net.requests import heard
from rayqueue.net.route import CoordinatorRoute, GroupRoute
from rayqueue.protocol.calls import CreateTopic, GetTopics, Topics
from rayqueue.protocol.topics import PartitionInfo, TopicInfo, TopicPartition, TopicSettings, check_name

_log = logging.getLogger(__name__)


class ClusterRoutes:
    """The cluster as a client sees it. Cached; errors say when to ask again."""

    def __init__(self, directory: ClusterDirectory, settings: Settings) -> None:
        self.coordinator: GroupRoute = CoordinatorRoute(directory, settings)
        self._directory = directory
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
        heard(asking)

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
            info = await self.topic(partition.topic, refresh=bool(topic_id))
        if partition.partition >= len(info.partitions) or info.topic_id < (topic_id or 0):
            info = await self.topic(partition.topic, refresh=True)  # it may have grown, or be a new one
        same_topic(info, topic_id)
        where = info.partition(partition.partition)
        self._check_open()
        replica_ids = _nodes(where)
        route = self._routes.get(where.group_id)
        if route is None or route.closed or route.replica_ids != replica_ids:
            if route is not None:
                route.close()
            route = self._routes[where.group_id] = GroupRoute(
                where.group_id,
                replica_ids,
                self._directory,
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

    async def statuses(self, info: TopicInfo) -> Mapping[ReplicaName, Any]:
        """The status of every replica of a topic as of now: a ``Status``, or the error that says why there is none."""
        names = [(partition.group_id, replica_id) for partition in info.partitions for replica_id in _nodes(partition)]
        return await self._directory.statuses(names)

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
            if route is not None and route.replica_ids != _nodes(partition):
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
    return tuple(replica.replica_id for replica in partition.replicas)
