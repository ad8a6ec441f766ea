"""The directory: where replicas serve, and the way there. An interface, so that this layer knows neither Ray nor who is
behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rayqueue.config import Settings
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.channel import Channel
from rayqueue.net.endpoint import Endpoint

ReplicaName = tuple[str, str]
"""Raft group id, replica id."""


class Directory(Protocol):
    """``rayqueue.actors.directory.RayDirectory`` in production: it asks the replicas' actors."""

    async def endpoint(self, group_id: GroupId, replica_id: ReplicaId) -> Endpoint:
        """This replica's endpoint. ``OutcomeUnknownError`` if that cannot be found out now; its own error if it
        could not start."""
        ...

    async def coordinators(self) -> tuple[str, ...]:
        """The ids of the coordinator's replicas that run."""
        ...

    async def open(self, endpoint: Endpoint, settings: Settings) -> Channel:
        """A channel to whoever serves there. ``TransportError`` if it cannot be reached."""
        return await Channel.open(endpoint, settings)


class ClusterDirectory(Directory, Protocol):
    async def statuses(self, replicas: Iterable[ReplicaName]) -> Mapping[ReplicaName, Any]:
        """The status of each as of now: a ``rayqueue.replica.Status``, or the error that says why there is none."""
        ...
