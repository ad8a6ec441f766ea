"""Who leads which group, and an open channel to it.

``GroupRoute`` is the way to one Raft group, ``ClusterRoutes`` the cluster as
a client sees it: its topics, and a route per partition. Both belong to the
loop of ``rayqueue.client.io``: every method is called there, and none blocks it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rayqueue.client.channel import Channel
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError
from rayqueue.protocol.calls import Call
from rayqueue.protocol.topics import TopicInfo, TopicPartition


class GroupRoute:
    """The way to one Raft group."""

    group_id: str
    nodes: tuple[str, ...]
    leader_channel: Channel | None
    """The open channel to whoever is known to lead, without waiting."""

    def __init__(self, group_id: str, nodes: Iterable[str], namespace: str, settings: Settings) -> None:
        raise NotImplementedError

    async def leader(self) -> Channel:
        """An open channel to whoever leads. ``NotLeaderError`` if nobody does within ``client.call_timeout_ms``."""
        raise NotImplementedError

    async def any_replica(self, prefer_host: str | None = None) -> Channel:
        """An open channel to any replica, one on this host if there is one. For reads that followers may serve."""
        raise NotImplementedError

    async def call(
        self, call: Call, *, timeout_ms: int | None = None, may_take_ms: int = 0, idempotent: bool = True
    ) -> Any:
        """Ask whoever leads, and again if the error says that this may help."""
        raise NotImplementedError

    def failed(self, error: RayQueueError) -> None:
        """A request to the leader ended with an error that says that this route is out of date."""
        raise NotImplementedError

    def close(self) -> None:
        """Close its channels."""
        raise NotImplementedError


class ClusterRoutes:
    """The cluster as a client sees it. Cached; errors say when to ask again."""

    coordinator: GroupRoute
    version: int
    """Of the newest topics that were seen."""

    def __init__(self, namespace: str, settings: Settings) -> None:
        raise NotImplementedError

    async def topic(self, name: str, *, refresh: bool = False) -> TopicInfo:
        """``UnknownTopicError`` if there is none; made if ``cluster.auto_create_topics``."""
        raise NotImplementedError

    def cached_topic(self, name: str) -> TopicInfo | None:
        """Without asking anybody."""
        raise NotImplementedError

    async def partition(self, partition: TopicPartition) -> GroupRoute:
        """The way to this partition. ``UnknownPartitionError`` if the topic has fewer."""
        raise NotImplementedError

    async def refresh(self) -> None:
        """Ask again for every topic that is cached."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
