"""Which replica of a partition leads, and the handles of all of them.

Owns the cache that calls are routed by. It is refreshed when an error says so,
and when a leader does not answer: Ray may take two seconds to report a dead
process, and a process that hangs or is cut off is not dead at all. So a caller
that waits too long (``doubt_ms``) asks the other replicas, and if they follow a
new leader goes there. That is safe for what may be repeated, and only for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rayqueue.actors.names import actor_name
from rayqueue.client.calls import Ref, result_of, typed
from rayqueue.config import ClientSettings
from rayqueue.errors import NotLeaderError, OutcomeUnknownError, RayQueueError
from rayqueue.ids import GroupId, NodeId, Term
from rayqueue.replica import Status

Handle = Any
"""An ``ActorHandle`` of a ``ReplicaActor``."""

_STATUS_TIMEOUT_S = 0.5


class Route:
    def __init__(self, group_id: GroupId, nodes: Iterable[NodeId], namespace: str, settings: ClientSettings) -> None:
        self.group_id = group_id
        self.nodes = tuple(nodes)
        self.leader: NodeId | None = None
        self.term = Term(0)
        self._namespace = namespace
        self._doubt_s = settings.doubt_ms / 1000
        self._handles: dict[NodeId, Handle] = {}

    def handle(self, node: NodeId) -> Handle:
        """``OutcomeUnknownError`` if there is no such actor now."""
        found = self._handles.get(node)
        if found is None:
            try:
                found = ray.get_actor(actor_name(self.group_id, node), self._namespace)
            except ValueError:
                raise OutcomeUnknownError(f"{node} of {self.group_id} has no actor now", node=node) from None
            self._handles[node] = found
        return found

    def to_leader(self) -> tuple[NodeId, Handle]:
        """``NotLeaderError`` if nobody is known to lead."""
        if self.leader is None:
            self.refresh()
        if self.leader is None:
            raise NotLeaderError(f"no replica of {self.group_id} leads at the moment", leader=None)
        return self.leader, self.handle(self.leader)

    def forget(self) -> None:
        """Everything, for the replicas are gone."""
        self.leader, self.term = None, Term(0)
        self._handles.clear()

    def hint(self, leader: NodeId | None) -> None:
        """A replica said who leads, or that it does not know."""
        self.leader = leader if leader in self.nodes else None

    def refresh(self) -> None:
        """Ask the replicas who leads. Of a majority's answers the one of the newest term counts."""
        majority = len(self.nodes) // 2 + 1
        best = max(self.statuses(majority), key=lambda status: (status.leader is not None, status.term), default=None)
        if best is None or best.leader is None:
            self.leader = None
        elif best.term >= self.term:
            self.leader, self.term = best.leader, best.term

    def statuses(self, enough: int, timeout_s: float = _STATUS_TIMEOUT_S) -> list[Status]:
        """Of the first ``enough`` replicas that answer, or of fewer if no more do in time."""
        asked: dict[Ref, NodeId] = {}
        for node in self.nodes:
            try:
                asked[self.handle(node).status.remote()] = node
            except OutcomeUnknownError:
                continue
        deadline_s = time.monotonic() + timeout_s
        found: list[Status] = []
        while asked and len(found) < enough:
            done, _ = ray.wait(list(asked), timeout=max(0.0, deadline_s - time.monotonic()))
            if not done:
                break
            for ref in done:
                node = asked.pop(ref)
                try:
                    found.append(result_of(ref, node, None))
                except RayQueueError:
                    self._handles.pop(node, None)
        return found

    def result(self, ref: Ref, node: NodeId, deadline_s: float, *, may_take_s: float = 0.0) -> Any:
        """What the leader ``node`` answers. ``OutcomeUnknownError`` if another one leads before it does.

        ``may_take_s``: how long the call may wait for something before there is reason for doubt.
        """
        doubt_s = self._doubt_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return ray.get(ref, timeout=max(0.0, min(may_take_s + doubt_s, left_s)))
            except GetTimeoutError as error:
                if left_s <= 0:
                    raise typed(error, node) from None
            except (RayTaskError, RayActorError) as error:
                raise typed(error, node) from None
            may_take_s, doubt_s = 0.0, doubt_s * 2
            self.refresh()
            if self.leader is not None and self.leader != node:
                raise OutcomeUnknownError(
                    f"{node} has not answered, and {self.leader} leads now; outcome unknown", node=node
                )

    def failed(self, error: RayQueueError) -> None:
        """A call ended with an error that says that this route is out of date."""
        if isinstance(error, NotLeaderError):
            self.hint(error.details.get("leader"))
        elif isinstance(error, OutcomeUnknownError) and "node" in error.details:
            self._handles.pop(error.details["node"], None)
        if not isinstance(error, NotLeaderError) or self.leader is None:
            self.refresh()
