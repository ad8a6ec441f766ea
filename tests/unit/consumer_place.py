"""A small cluster in its I/O thread, and public consumers of it in the test's. ``place`` is a fixture."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayqueue.client.consumer import Consumer
from rayqueue.client.io import IoThread
from rayqueue.config import ClientSettings
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record
from tests.unit.small_cluster import Connected, SmallCluster, quick_settings

P0 = TopicPartition("orders", 0)


class Place:
    """A small cluster in its I/O thread, and consumers of it in the test's."""

    def __init__(self, io: IoThread, tmp: Path) -> None:
        self.io = io
        self._tmp = tmp

        async def make() -> SmallCluster:
            return SmallCluster()

        self.cluster = io.call(make())
        self.consumers: list[Consumer] = []

    def create(self, partitions: int = 1, lanes: int = 1) -> None:
        self.io.call(self.cluster.create("orders", partitions, lanes))

    def append(self, records: int, number: int = 0, topic: str = "orders", **options: Any) -> None:
        async def append() -> None:
            self.cluster.partitions[TopicPartition(topic, number)].append(records, **options)

        self.io.call(append())

    def delete(self) -> None:
        self.io.call(self.cluster.delete("orders"))

    def consumer(
        self,
        group: str | None = "billing",
        settings: dict[str, Any] | None = None,
        client_settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> Consumer:
        async def process() -> Any:
            return self.cluster.process()

        quick = quick_settings(self._tmp, **(settings or {}))
        if client_settings is not None:
            quick = quick.model_copy(update={"client": ClientSettings(**client_settings)})
        rq = Connected(self.io, self.io.call(process()), quick)
        topics = () if "partitions" in options else options.pop("topics", ("orders",))
        self.consumers.append(Consumer(rq, topics, group, **options))
        return self.consumers[-1]

    def committed(self, number: int = 0) -> dict[int, int]:
        partition = self.cluster.partitions[TopicPartition("orders", number)].shelf.log.partition
        position = partition.position("billing")
        return {} if position is None else position.offsets


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    io = IoThread("test io")
    made = Place(io, tmp_path)
    made.create(2)
    try:
        yield made
    finally:
        for consumer in made.consumers:
            consumer.close()
        io.loop.call_soon_threadsafe(made.cluster.close)
        io.close()


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
