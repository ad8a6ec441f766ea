"""A queue in memory with the topic ``orders``, and consumers of it, each with connections of its own. ``place`` is a
fixture."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rayqueue.client.consumer.consumer import Consumer
from rayqueue.config import ClientSettings
from rayqueue.protocol.calls import Call, decode_coordinator_call
from rayqueue.protocol.frames import Frame
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record, RecordBatch
from rayqueue.testing import memory
from rayqueue.testing.memory_cluster import MemoryCluster
from rayqueue.testing.memory_group import MemoryPartition
from tests.unit.client.small_cluster import quick_settings

P0 = TopicPartition("orders", 0)
_T = TypeVar("_T")


class Place:
    """A queue in memory, and consumers of it. A record's value is its number."""

    def __init__(self, tmp: Path) -> None:
        self._tmp = tmp
        quick = quick_settings(tmp)
        cluster = quick.cluster.model_copy(update={"join_window_ms": 1})
        self.rq = memory.connect(settings=quick.model_copy(update={"cluster": cluster}))
        self._numbers = count()
        self.consumers: list[Consumer] = []

    def create(self, partitions: int = 1, lanes: int = 1) -> None:
        self.rq.create_topic("orders", partitions=partitions, lanes=lanes)

    def in_io(self, work: Callable[[MemoryCluster], _T]) -> _T:
        """In the thread that the cluster belongs to."""
        return self.rq._do(work)

    def partition(self, number: int = 0, topic: str = "orders") -> MemoryPartition:
        (found,) = self.in_io(lambda cluster: cluster.partitions(topic, number))
        return found

    def append(
        self, records: int, number: int = 0, topic: str = "orders", lane: int = 0, timestamp: int = 1_000
    ) -> None:
        values = [str(next(self._numbers)).encode() for _ in range(records)]
        self.write(RecordBatch.encode(values, timestamps=timestamp, lane=lane), number, topic)

    def write(self, batch: bytes, number: int = 0, topic: str = "orders") -> None:
        """Whatever is in it."""
        partition = self.partition(number, topic)
        self.in_io(lambda _: partition.commit(batch))

    def delete(self) -> None:
        self.rq.delete_topic("orders")

    def consumer(
        self,
        group: str | None = "billing",
        settings: dict[str, Any] | None = None,
        client_settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> Consumer:
        # Client and coordinator share a thread here: it may not run for a while on a busy machine.
        quick = quick_settings(self._tmp, **{"session_timeout_ms": 2000, **(settings or {})})
        if client_settings is not None:
            quick = quick.model_copy(update={"client": ClientSettings(**client_settings)})
        topics = () if "partitions" in options else options.pop("topics", ("orders",))
        self.consumers.append(self.rq.another(settings=quick).consumer(*topics, group=group, **options))
        return self.consumers[-1]

    def committed(self, number: int = 0) -> dict[int, int]:
        position = self.partition(number).partition.position("billing")
        return {} if position is None else position.offsets

    def owners(self, group: str = "billing") -> dict[str, list[str]]:
        known = self.in_io(lambda cluster: cluster.machine.groups.get(group))
        members = () if known is None else known.info().members
        return {each.member: [str(grant.topic_partition) for grant in each.grants] for each in members}

    def coordinator_calls(self) -> list[Call]:
        """What everybody asks the coordinator from now on."""
        found: list[Call] = []

        def listen(cluster: MemoryCluster) -> None:
            serve = cluster.coordinator.received

            def heard(connection: Any, frame: Frame) -> None:
                found.append(decode_coordinator_call(frame.body))
                serve(connection, frame)

            cluster.coordinator.received = heard  # type: ignore[method-assign]

        self.in_io(listen)
        return found

    def close(self) -> None:
        for consumer in self.consumers:
            consumer.close()
        self.rq.shutdown()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    made.create(2)
    try:
        yield made
    finally:
        made.close()


def take(consumer: Consumer, count: int) -> list[Record]:
    found: list[Record] = []
    deadline_s = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline_s:
        found += consumer.poll(timeout_ms=100)
    return found


class Told:
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.threads: set[int] = set()

    def _note(self, kind: str, partitions: Sequence[TopicPartition]) -> None:
        self.calls.append((kind, [each.partition for each in partitions]))
        self.threads.add(threading.get_ident())

    def assigned(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("assigned", partitions)

    def revoked(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("revoked", partitions)

    def lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._note("lost", partitions)
