"""One replicated partition: its replicas as Ray actors, and the calls of an application to it.

Owns starting the replicas on this Ray, finding those that run already, and
routing a call to the one that leads, with the one retry loop. A group that was
stopped, or whose whole Ray has ended, is started again on the same data.

Topics, placement and consumer groups are not here: they are the coordinator's
and the client's on top of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from random import Random
from types import TracebackType
from typing import Any

import ray
from typing_extensions import Self

from rayqueue.actors.names import actor_name
from rayqueue.actors.replica import Fetch, Process, ReplicaSpec
from rayqueue.actors.start import start_actor
from rayqueue.client.calls import Ref, result_of
from rayqueue.client.retry import Retry
from rayqueue.config import MIB, Settings
from rayqueue.errors import RayQueueError
from rayqueue.ids import GroupId, NodeId, Offset
from rayqueue.partition import Appended, PartitionSettings
from rayqueue.records import BatchHeader
from rayqueue.replica import Status
from rayqueue.testing.ray_group.home import Manifest, load_manifest, save_manifest, with_secret
from rayqueue.testing.ray_group.pipeline import Pipeline
from rayqueue.testing.ray_group.route import Handle, Route

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 15.0
_LOOK_AGAIN_S = 0.02


class ReplicaGroup:
    """A running group. Its actors are detached: they go on until ``stop``, whoever started them."""

    def __init__(self, group_id: GroupId, nodes: Iterable[NodeId], settings: Settings) -> None:
        """The group whose replicas run already; ``start`` starts those that do not."""
        self.group_id = group_id
        self.settings = settings
        self._route = self._new_route(nodes)

    @classmethod
    def start(
        cls,
        group_id: str,
        settings: Settings | None = None,
        *,
        replicas: int = 3,
        ray_node_ids: Sequence[str] | None = None,
        partition: PartitionSettings | None = None,
        host: str = "127.0.0.1",
    ) -> Self:
        """Start the group, new or from its data; returns once it has a leader.

        A group that has data keeps the number of replicas it was made with.
        With ``ray_node_ids`` replicas are pinned to these nodes in turn.
        """
        settings = with_secret(settings or Settings())
        group = GroupId(group_id)
        manifest = load_manifest(settings, group)
        if manifest is None:
            manifest = Manifest(tuple(NodeId(f"n{number}") for number in range(1, replicas + 1)), complete=False)
            save_manifest(settings, group, manifest)
        started = cls(group, manifest.voters, settings)
        places = cycle(ray_node_ids or [None])
        absent = [place for place in zip(manifest.voters, places, strict=False) if not started._is_named(place[0])]
        try:
            for node, place in absent:
                spec = ReplicaSpec(
                    group,
                    node,
                    settings,
                    create=not manifest.complete,
                    voters=manifest.voters,
                    partition=partition or PartitionSettings(),
                    host=host,
                )
                start_actor(spec, ray_node_id=place)
            started._wait_until_running(need_all=not manifest.complete)
            if not manifest.complete:
                save_manifest(settings, group, Manifest(manifest.voters, complete=True))
            started.confirm_leadership()
        except BaseException:
            if len(absent) == len(manifest.voters):  # otherwise others may be using it
                started.stop()
            raise
        return started

    def _wait_until_running(self, *, need_all: bool) -> None:
        """``need_all``: what is made now must be complete. Later, a majority will do."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        asked = {node: self._route.handle(node).address.remote() for node in self.nodes}
        failed: dict[NodeId, RayQueueError] = {}
        for node, ref in asked.items():
            try:
                result_of(ref, node, max(0.0, deadline_s - time.monotonic()))
            except RayQueueError as error:
                _log.error("%s of %s does not run: %s", node, self.group_id, error)
                failed[node] = error
        if failed and (need_all or 2 * len(failed) >= len(self.nodes)):
            raise next(iter(failed.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every replica in good order. The data stays."""
        handles: dict[NodeId, Handle] = {}
        for node in self.nodes:
            try:
                handles[node] = self._route.handle(node)
            except RayQueueError:
                continue
        closing = {node: handle.close.remote() for node, handle in handles.items()}
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for node, ref in closing.items():
            try:
                result_of(ref, node, max(0.0, deadline_s - time.monotonic()))
            except RayQueueError as error:
                _log.info("%s of %s was not closed in good order: %s", node, self.group_id, error)
        for handle in handles.values():
            ray.kill(handle, no_restart=True)
        while any(map(self._is_named, handles)) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_AGAIN_S)  # Ray forgets their names a little later, and until then refuses them to others
        self._route.forget()

    # -- who is there ----------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return self._route.nodes

    def handle(self, node: NodeId) -> Handle:
        """The replica's actor, for calls that are meant for this very one."""
        return self._route.handle(node)

    def leader(self) -> NodeId:
        """Who leads, as a majority has just confirmed."""
        return self._call(lambda handle: handle.confirm_leadership.remote())[0]

    def statuses(self) -> dict[NodeId, Status]:
        """Of all replicas that answer."""
        return {status.node_id: status for status in self._route.statuses(len(self.nodes))}

    def process(self, node: NodeId) -> Process:
        return result_of(self.handle(node).process.remote(), node, _START_TIMEOUT_S)  # type: ignore[no-any-return]

    # -- writing and reading -----------------------------------------------------------------

    def append(self, batch: bytes) -> Appended:
        """Append a batch; returns once a majority has it on disk.

        A batch with a producer id is repeated until its outcome is known. One
        without is not repeated if it may have been written: ``OutcomeUnknownError``.
        """
        idempotent = BatchHeader.parse(batch).producer_id != 0
        return self._call(lambda handle: handle.append.remote(batch), idempotent=idempotent)[1]  # type: ignore[no-any-return]

    def pipeline(self) -> Pipeline:
        """For one producer that appends many batches."""
        return Pipeline(self._new_route(self.nodes), self.settings.client)

    def fetch(self, offset: int, max_bytes: int = MIB, *, max_wait_ms: int = 0, lane: int | None = None) -> Fetch:
        """Batches from ``offset`` on, from the leader; waits for the first one if told to."""
        _, found = self._call(
            lambda handle: handle.fetch.remote(offset, max_bytes, max_wait_ms, lane), may_take_s=max_wait_ms / 1000
        )
        return found  # type: ignore[no-any-return]

    def fetch_from(self, node: NodeId, offset: int, max_bytes: int = MIB) -> Fetch:
        """Batches as this very replica has them, which may be fewer than the leader has. One attempt."""
        ref = self.handle(node).fetch.remote(offset, max_bytes)
        return result_of(ref, node, self.settings.client.call_timeout_ms / 1000)  # type: ignore[no-any-return]

    def end_offset(self) -> Offset:
        """The first offset that is not written yet."""
        self.confirm_leadership()
        return self._call(lambda handle: handle.status.remote())[1].high_watermark  # type: ignore[no-any-return]

    def command(self, payload: bytes) -> Any:
        """Let the group apply a command of ``rayqueue.partition.commands``. All of them may be repeated."""
        return self._call(lambda handle: handle.command.remote(payload))[1]

    def confirm_leadership(self) -> None:
        """Returns once some replica leads and a majority has confirmed it."""
        self._call(lambda handle: handle.confirm_leadership.remote())

    def transfer_leadership(self, target: NodeId) -> None:
        self._call(lambda handle: handle.transfer_leadership.remote(target))

    def _call(
        self, call: Callable[[Handle], Ref], *, idempotent: bool = True, may_take_s: float = 0.0
    ) -> tuple[NodeId, Any]:
        """The retry loop: to the leader, and again if the error says that this may help. Who answered, and what."""
        route = self._route
        retry = Retry(self.settings.client, Random(), time.monotonic() + may_take_s, idempotent=idempotent)  # noqa: S311
        while True:
            try:
                node, handle = route.to_leader()
                return node, route.result(call(handle), node, retry.deadline_s, may_take_s=may_take_s)
            except RayQueueError as error:
                wait = retry.after(error, time.monotonic())
                time.sleep(wait.seconds)
                if wait.refresh:
                    route.failed(error)

    def _new_route(self, nodes: Iterable[NodeId]) -> Route:
        return Route(self.group_id, nodes, self.settings.namespace, self.settings.client)

    def _is_named(self, node: NodeId) -> bool:
        try:
            ray.get_actor(actor_name(self.group_id, node), self.settings.namespace)
        except ValueError:
            return False
        return True
