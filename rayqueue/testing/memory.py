"""A queue in memory, for tests of what is built on RayQueue: no Ray, no sockets, no disk, and it is there at once.

    from rayqueue.testing import memory

    with memory.connect() as rq:
        rq.create_topic("orders", partitions=2)
        ...

``rq`` is a ``RayQueue``, and all of its methods do what they do on a cluster:
producers, consumers and administration are the same code, and so are the state
machines of the coordinator and of the partitions. What is missing is what makes
them survive: a request is carried out, and committed, when it comes. Each
``connect`` is a queue of its own, and what is in it ends with its last handle.

Tests can also break it: ``fail_next``, ``holding``, ``change_leader``,
``without_leader``, ``disconnect``, ``change_coordinator``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Literal, NoReturn, TypeVar, cast

from rayqueue.client.admin.readiness import Progress
from rayqueue.client.handle import RayQueue
from rayqueue.client.io import IoThread
from rayqueue.client.routes import ClusterRoutes
from rayqueue.client.shared import SharedConnections
from rayqueue.config import Settings
from rayqueue.errors import ClosedError, InvalidInputError, RayQueueError
from rayqueue.testing.memory_cluster import MemoryCluster, with_secret
from rayqueue.testing.memory_group import Fault, Request

_T = TypeVar("_T")
_numbers = count(1)


def connect(*, settings: Settings | None = None, brokers: int = 3) -> MemoryQueue:
    """A new, empty queue. ``brokers`` is how many nodes it seems to have.

    Without ``settings`` they are as configured, but groups do not wait for more members before they share
    (``cluster.join_window_ms``).
    """
    settings = with_secret(settings or _impatient(Settings()))
    return MemoryQueue(settings, _Queue(settings, brokers))


async def connect_async(*, settings: Settings | None = None, brokers: int = 3) -> MemoryQueue:
    """The same in an event loop."""
    return await asyncio.to_thread(connect, settings=settings, brokers=brokers)


def _impatient(settings: Settings) -> Settings:
    return settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"join_window_ms": 0})})


class MemoryQueue(RayQueue):
    """Made by ``connect``. It stays in its process."""

    def __init__(self, settings: Settings, queue: _Queue) -> None:
        super().__init__(settings, f"memory {queue.number}")
        self._queue = queue
        self._shared = cast("SharedConnections", _Connections(queue, settings))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a queue in memory stays in its process")

    def another(self, *, settings: Settings | None = None) -> MemoryQueue:
        """Another handle of the same queue, with connections of its own, as another process has. The queue ends with
        its last handle."""
        return MemoryQueue(settings or self.settings, self._queue)

    def _stop(self, on_progress: Progress | None) -> None:
        self.io.call(self._queue.end())

    # -- trouble ---------------------------------------------------------------------------------

    def fail_next(
        self,
        request: Request,
        error: RayQueueError,
        *,
        topic: str | None = None,
        partition: int | None = None,
        carried_out: bool = False,
        times: int = 1,
    ) -> None:
        """Answer the next requests of this kind with an error, in each partition of the topic, or of all topics.

        ``carried_out``: they are carried out all the same, as if the answer were lost on its way.
        """
        if request not in ("append", "fetch", "commit"):
            raise InvalidInputError(f"a request is 'append', 'fetch' or 'commit', not {request!r}")

        def add(cluster: MemoryCluster) -> None:
            for each in cluster.partitions(topic, partition):
                each.faults.append(Fault(request, error, carried_out, times))

        self._do(add)

    def change_leader(self, topic: str, partition: int = 0) -> str:
        """Let another replica lead from now on. Its id."""

        def change(cluster: MemoryCluster) -> str:
            (group,) = cluster.partitions(topic, partition)
            led = group.replica_ids.index(group.leader) if group.leader is not None else -1
            group.change_leader(group.replica_ids[(led + 1) % len(group.replica_ids)])
            return str(group.leader)

        return self._do(change)

    def change_coordinator(self) -> None:
        """Let the coordinator lead anew: it knows what is in its log, and nobody's session."""
        self._do(lambda cluster: cluster.coordinator.change_leader(cluster.coordinator.replica_ids[0]))

    @contextmanager
    def without_leader(self, topic: str, partition: int | None = None) -> Iterator[None]:
        """Nobody leads the topic's partitions, or one of them, within the ``with`` block."""

        def set_leader(cluster: MemoryCluster, led: bool) -> None:
            for group in cluster.partitions(topic, partition):
                group.change_leader(group.replica_ids[0] if led else None)

        self._do(lambda cluster: set_leader(cluster, False))
        try:
            yield
        finally:
            self._do(lambda cluster: set_leader(cluster, True))

    @contextmanager
    def holding(
        self, topic: str, partition: int | None = None, *, request: Request | Literal["any"] = "any"
    ) -> Iterator[None]:
        """The leaders of the topic's partitions, or of one, hang: requests are not answered before the end of the
        ``with`` block."""

        def hold(cluster: MemoryCluster, wanted: Request | Literal["any"] | None) -> None:
            for group in cluster.partitions(topic, partition):
                group.hold(wanted)

        self._do(lambda cluster: hold(cluster, request))
        try:
            yield
        finally:
            self._do(lambda cluster: hold(cluster, None))

    def disconnect(self, topic: str, partition: int | None = None) -> None:
        """Break all connections with the leaders. What is under way has an unknown outcome; clients connect again."""

        def cut(cluster: MemoryCluster) -> None:
            for group in cluster.partitions(topic, partition):
                group.disconnect()

        self._do(cut)

    def apply_retention(self) -> None:
        """Delete now what retention allows to delete; it happens by itself about once per second."""
        self._do(MemoryCluster.apply_retention)

    def _do(self, work: Callable[[MemoryCluster], _T]) -> _T:
        async def do() -> _T:
            return work(self._queue.cluster)

        return self.io.call(do())


class _Queue:
    """A cluster in memory, for as long as it has handles."""

    def __init__(self, settings: Settings, brokers: int) -> None:
        self.number = next(_numbers)
        self.io = IoThread.shared()
        self.ended = False
        self._users: set[_Connections] = set()
        self.cluster = self.io.call(self._make(settings, brokers))

    async def _make(self, settings: Settings, brokers: int) -> MemoryCluster:
        return MemoryCluster(settings, brokers)  # in the thread that it belongs to

    async def routes(self, user: _Connections, settings: Settings) -> ClusterRoutes:
        if self.ended:
            raise ClosedError("this queue has ended, and what was in it is gone")
        self._users.add(user)
        return ClusterRoutes(self.cluster, settings)

    async def let_go(self, user: _Connections) -> None:
        if user in self._users:
            self._users.remove(user)
            await user.routes.close()
        if not self._users and not self.ended:
            self.ended = True
            self.cluster.close()

    async def end(self) -> None:
        for user in list(self._users):
            await self.let_go(user)


class _Connections:
    """The part of ``rayqueue.client.shared.SharedConnections`` that a handle needs."""

    def __init__(self, queue: _Queue, settings: Settings) -> None:
        self._queue = queue
        self.io = queue.io
        self.routes: ClusterRoutes = self.io.call(queue.routes(self, settings))

    @property
    def usable(self) -> bool:
        return self.io.usable

    def let_go(self) -> None:
        self.io.call(self._queue.let_go(self))
