"""Consumers for tests that run in processes of their own, so that they can be killed or stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ray

import rayqueue
from rayqueue.actors.names import actor_name
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.handle import RayQueue
from rayqueue.errors import ClosedError, RayQueueError
from rayqueue.protocol.topics import TopicPartition

Seen = tuple[int, int, int]
"""Partition, lane, offset."""


@contextlib.contextmanager
def running_queue() -> Iterator[RayQueue]:
    """A queue on a Ray of its own."""
    data = tempfile.mkdtemp(prefix="rqd-")
    try:
        with embedded_ray():
            rq = rayqueue.connect(data_dir=data)
            try:
                yield rq
            finally:
                rq.shutdown()
    finally:
        shutil.rmtree(data, ignore_errors=True)


class MemberProcess:
    """A consumer, its application and its listener. Polls by itself once it is started, or when it is told to."""

    def __init__(self, rq: RayQueue, topics: Sequence[str], group: str, options: dict[str, Any]) -> None:
        logging.getLogger("rayqueue").setLevel(logging.ERROR)
        self._told: list[tuple[str, list[int]]] = []
        self._seen: list[Seen] = []
        self._failures: list[str] = []
        self._consumer = rq.consumer(*topics, group=group, listener=self, **options)
        self._thread: threading.Thread | None = None

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._told.append(("assigned", [each.partition for each in partitions]))

    def revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self._told.append(("revoked", [each.partition for each in partitions]))

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._told.append(("lost", [each.partition for each in partitions]))

    def start(self) -> int:
        """Poll until it is closed. Returns the process's id."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return os.getpid()

    def pid(self) -> int:
        return os.getpid()

    def _run(self) -> None:
        try:
            while True:
                self.poll(100)
        except ClosedError:
            return
        except RayQueueError as error:
            self._failures.append(repr(error))

    def poll(self, timeout_ms: int) -> int:
        found = self._consumer.poll(timeout_ms=timeout_ms)
        self._seen += [(record.partition, record.lane, record.offset) for record in found]
        return len(found)

    def state(self) -> tuple[set[int], list[Seen], list[tuple[str, list[int]]]]:
        """What it reads, has seen, and was told."""
        assert not self._failures, self._failures
        return {each.partition for each in self._consumer.assignment()}, self._seen, self._told

    def commit(self) -> str:
        """The code of the error, or nothing."""
        try:
            self._consumer.commit()
        except RayQueueError as error:
            return error.code
        return ""

    def close(self) -> None:
        self._consumer.close()
        if self._thread is not None:
            self._thread.join(10)


_MemberActor: Any = ray.remote(MemberProcess).options(num_cpus=0, max_concurrency=4)


class Member:
    """The test's side of a ``MemberProcess``."""

    def __init__(self, rq: RayQueue, topics: Sequence[str], group: str, **options: Any) -> None:
        self.handle: Any = _MemberActor.remote(rq, topics, group, options)

    def start(self) -> int:
        self.pid = int(ray.get(self.handle.start.remote(), timeout=60))
        return self.pid

    @property
    def reads(self) -> set[int]:
        found: set[int] = ray.get(self.handle.state.remote(), timeout=30)[0]
        return found

    @property
    def seen(self) -> list[Seen]:
        found: list[Seen] = ray.get(self.handle.state.remote(), timeout=30)[1]
        return found

    @property
    def told(self) -> list[tuple[str, list[int]]]:
        found: list[tuple[str, list[int]]] = ray.get(self.handle.state.remote(), timeout=30)[2]
        return found

    def close(self) -> None:
        ray.get(self.handle.close.remote(), timeout=30)
        ray.kill(self.handle)


def leader_pid(rq: RayQueue, topic: str, partition: int) -> int:
    """The process of the replica that leads."""
    route = rq.io.call(rq.routes.partition(TopicPartition(topic, partition)))
    return _pid_of_leader(rq, route)


def coordinator_pid(rq: RayQueue) -> int:
    return _pid_of_leader(rq, rq.routes.coordinator)


def _pid_of_leader(rq: RayQueue, route: Any) -> int:
    channel = rq.io.call(route.leader())
    handle: Any = ray.get_actor(actor_name(route.group_id, channel.endpoint.replica_id), rq.namespace)
    return int(ray.get(handle.process.remote(), timeout=30).pid)
