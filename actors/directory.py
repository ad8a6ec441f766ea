"""The directory of replicas in Ray: a replica's actor, found by its name, tells where and how the replica serves.

Ray's calls that block run in threads beside, of which Ray may never let go: for
a cluster whose head is gone, ``ray.get_actor`` has no end. So every call has a
deadline, their number is bounded, and nobody waits for them at the end of the
process, as Python does for the threads of its executors.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

from rayqueue.actors.names import COORDINATOR_PREFIX, actor_name
from rayqueue.actors.ray_calls import typed
from rayqueue.errors import OutcomeUnknownError, RayQueueError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.directory import ClusterDirectory, ReplicaName
from rayqueue.net.endpoint import Endpoint
from rayqueue.net.requests import in_time

_T = TypeVar("_T")

_ENDPOINT_S = 5.0
_STATUS_S = 2.0
_SILENT_S = 15.0
"""Of Ray, when it is asked for what it knows itself."""
_MAX_ASKING = 32


class RayDirectory(ClusterDirectory):
    """Of the queue in one Ray namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    async def endpoint(self, group_id: GroupId, replica_id: ReplicaId) -> Endpoint:
        try:
            answer = await _beside(self._ask, group_id, replica_id)
            return await in_time(asyncio.wrap_future(answer), _ENDPOINT_S)
        except (RayError, asyncio.TimeoutError, concurrent.futures.CancelledError) as error:
            cause = typed(error if isinstance(error, RayError) else GetTimeoutError(), replica_id)
            if isinstance(cause, RayQueueError):
                raise cause from None
            raise OutcomeUnknownError(f"{replica_id} of {group_id}: {cause}", replica_id=replica_id) from None

    async def coordinators(self) -> tuple[str, ...]:
        return await _beside(coordinator_ids, self._namespace)

    async def statuses(self, replicas: Iterable[ReplicaName]) -> dict[ReplicaName, Any]:
        return await _beside(self._ask_statuses, tuple(replicas))

    def _ask_statuses(self, replicas: Iterable[ReplicaName]) -> dict[ReplicaName, Any]:
        """One call each. In a thread beside."""
        with _asking():
            return self._statuses(replicas)

    def _statuses(self, replicas: Iterable[ReplicaName]) -> dict[ReplicaName, Any]:
        found: dict[ReplicaName, Any] = {}
        asked: dict[Any, ReplicaName] = {}
        for group_id, replica_id in replicas:
            name = actor_name(GroupId(group_id), ReplicaId(replica_id))
            try:
                asked[ray.get_actor(name, self._namespace).status.remote()] = (group_id, replica_id)
            except ValueError:
                problem = RayQueueError("has no actor now: its broker is away, or it is being started")
                found[group_id, replica_id] = problem
        ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=_STATUS_S) if asked else ([], [])
        for ref in late:
            found[asked[ref]] = RayQueueError("does not answer")
        for ref in ready:
            try:
                found[asked[ref]] = ray.get(ref)
            except (RayError, RayQueueError) as error:
                found[asked[ref]] = typed(error, asked[ref][1])
        return found

    def _ask(self, group_id: GroupId, replica_id: ReplicaId) -> concurrent.futures.Future[Endpoint]:
        """In a thread beside."""
        with _asking():
            try:
                actor: Any = ray.get_actor(actor_name(group_id, replica_id), self._namespace)
            except ValueError:
                raise OutcomeUnknownError(
                    f"{replica_id} of {group_id} has no actor now", replica_id=replica_id
                ) from None
            answer: concurrent.futures.Future[Endpoint] = actor.endpoint.remote().future()
            return answer


def coordinator_ids(namespace: str) -> tuple[str, ...]:
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


async def _beside(ask: Callable[..., _T], *arguments: Any) -> _T:
    """``ask`` in a thread of its own. ``OutcomeUnknownError`` if Ray is silent."""
    if _under_way >= _MAX_ASKING:
        raise OutcomeUnknownError(f"Ray has not answered {_under_way} questions of this process yet")
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            answer = ask(*arguments)
        except BaseException as error:  # noqa: BLE001  # it is for whoever has asked
            future.set_exception(error)
        else:
            future.set_result(answer)

    threading.Thread(target=run, name="rayqueue asks Ray", daemon=True).start()
    answer = asyncio.wrap_future(future)
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # too late for anybody to hear of
    await asyncio.wait([answer], timeout=_SILENT_S)
    if not answer.done():
        raise OutcomeUnknownError(f"Ray has been silent for {_SILENT_S:.0f} s")
    return answer.result()


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
