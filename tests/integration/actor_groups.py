"""Groups of replica actors under test, without a coordinator: started, looked at, killed; clients reach them as always.

Applications use ``rayqueue.connect()``. Here are the actors alone, so that a
test decides which of them runs, where, and with what.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rayqueue.actors.base import Process
from rayqueue.actors.directory import RayDirectory
from rayqueue.actors.names import actor_name
from rayqueue.actors.partition_actor import PartitionSpec
from rayqueue.actors.ray_calls import typed
from rayqueue.actors.start import start_actor
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.route import GroupRoute
from rayqueue.partition import Fetched, PartitionSettings
from rayqueue.replica.status import Status
from rayqueue.testing import PartitionClient, wait_for
from tests.integration import history
from tests.integration.history import Writer

SECRET = "only for these tests"
ANSWER_S = 60.0
_STATUS_S = 2.0

_producers = iter(range(1, 1_000_000))


def new_producer() -> int:
    return next(_producers)


def actor_settings(**named: Any) -> Settings:
    """Settings for replicas that nobody has made a secret for."""
    return Settings(**named, transport={"secret": SECRET})


def answer_of(ref: Any, timeout_s: float = ANSWER_S) -> Any:
    """What an actor's method returned, or the error that it raised."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except (RayTaskError, RayActorError, GetTimeoutError) as error:
        raise typed(error, "the actor") from None


class ActorGroup:
    """The replicas of one partition. Use it in a ``with`` block: at its end every actor is closed and ended."""

    def __init__(
        self,
        group_id: str,
        settings: Settings,
        *,
        replicas: int = 3,
        create: bool = True,
        ray_node_ids: Sequence[str | None] = (None, None, None),
        partition: PartitionSettings | None = None,
    ) -> None:
        self.group_id = GroupId(group_id)
        self.settings = settings
        self.replica_ids = tuple(ReplicaId(f"n{number}") for number in range(1, replicas + 1))
        self.directory = RayDirectory(settings.namespace)
        self.client = PartitionClient(group_id, self.replica_ids, self.directory, settings)
        for node, place in zip(self.replica_ids, ray_node_ids, strict=False):
            spec = PartitionSpec(
                self.group_id,
                node,
                settings,
                create=create,
                voters=self.replica_ids,
                partition=partition or PartitionSettings(),
            )
            start_actor(spec, ray_node_id=place)
        self.leader()

    def __enter__(self) -> ActorGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        handles = [self.handle(node) for node in self.replica_ids if self._is_named(node)]
        ray.wait([handle.close.remote() for handle in handles], num_returns=len(handles), timeout=15)
        for handle in handles:
            ray.kill(handle, no_restart=True)
        # Ray forgets their names a little later, and until then refuses them to others.
        wait_for(lambda: not any(map(self._is_named, self.replica_ids)), "their names to be free", 30.0)

    def _is_named(self, node: ReplicaId) -> bool:
        try:
            self.handle(node)
        except ValueError:
            return False
        return True

    def handle(self, node: ReplicaId) -> Any:
        return ray.get_actor(actor_name(self.group_id, node), self.settings.namespace)

    def route(self) -> GroupRoute:
        """A route of its own."""
        return GroupRoute(self.group_id, self.replica_ids, self.directory, self.settings)

    def statuses(self) -> dict[ReplicaId, Status]:
        """Of all that answer."""
        asked = {node: self.handle(node).status.remote() for node in self.replica_ids if self._is_named(node)}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STATUS_S)
        found: dict[ReplicaId, Status] = {}
        for node, ref in asked.items():
            try:
                found[node] = answer_of(ref, 0)
            except RayQueueError:
                continue
        return found

    def leader(self) -> ReplicaId:
        """Who leads, as a majority has just confirmed."""

        def confirmed() -> ReplicaId | None:
            leading = [status for status in self.statuses().values() if status.role == "leader"]
            for status in sorted(leading, key=lambda each: -each.term):
                try:
                    answer_of(self.handle(status.replica_id).confirm_leadership.remote(), _STATUS_S)
                except RayQueueError:
                    continue
                return status.replica_id
            return None

        return wait_for(confirmed, f"a leader of {self.group_id}", ANSWER_S)

    def followers(self) -> list[ReplicaId]:
        leader = self.leader()
        return [node for node in self.replica_ids if node != leader]

    def transfer_leadership(self, target: ReplicaId) -> None:
        if (leader := self.leader()) != target:
            answer_of(self.handle(leader).transfer_leadership.remote(target))

    def process(self, node: ReplicaId) -> Process:
        return answer_of(self.handle(node).process.remote())  # type: ignore[no-any-return]

    def kill(self, *nodes: ReplicaId) -> None:
        """kill -9. Ray starts them again."""
        for pid in [self.process(node).pid for node in nodes]:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> int:
        """The first offset that is not written yet."""
        return self.client.fetch(0).high_watermark

    def wait_for_end(self, end: int, *, replicas: int = 3, timeout_s: float = 30.0) -> None:
        def reached() -> bool:
            statuses = self.statuses().values()
            return len(statuses) >= replicas and all(status.high_watermark >= end for status in statuses)

        wait_for(reached, f"{replicas} replicas at offset {end}", timeout_s)

    def logs(self, end: int, *, replicas: int = 3) -> dict[ReplicaId, list[Fetched]]:
        """What each replica has, once so many have everything before ``end``."""
        self.wait_for_end(end, replicas=replicas)
        found = {node: self.client.read_log(via=node) for node in self.statuses()}
        assert len(found) == replicas
        return found


def wait_for_more(writer: Writer, batches: int, timeout_s: float = 30.0) -> None:
    """Until so many more batches are acknowledged."""
    goal = writer.written + batches * history.RECORDS_PER_BATCH
    wait_for(lambda: writer.written >= goal, f"{goal} acknowledged records", timeout_s)


def check_history(group: ActorGroup, writer: Writer, *, replicas: int = 3) -> None:
    """Every replica has every acknowledged batch where its answer says, once and in order."""
    history.check_history(group.logs(history.end_of(writer.acked[-1]), replicas=replicas), writer)


def eventually(raises: type[Exception], call: Callable[[], Any], text: str, timeout_s: float = 30.0) -> None:
    """Until the call raises this, with this in its text."""

    def says_so() -> bool:
        try:
            call()
        except raises as error:
            return text in str(error)
        except RayQueueError:
            return False
        return False

    wait_for(says_so, f"{raises.__name__}: {text}", timeout_s)
