"""A bridge's batches before a partition that is full: they wait in line, as a whole."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from rayqueue.bridge.append import Appends
from rayqueue.config import ClientSettings
from rayqueue.errors import OversizedBatchError, QueueFullError
from rayqueue.protocol.calls import AwaitRoom, Commit
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import RecordBatch
from tests.unit.client.queue_in_memory import MemoryQueue

PLACE = TopicPartition("orders", 0)


def batch(count: int) -> bytes:
    return RecordBatch.encode([b"x"] * count, timestamps=1, producer_id=7)


def bounded() -> MemoryQueue:
    queue = MemoryQueue()
    queue.create_topic("orders", max_backlog_records=4)
    return queue


def append(queue: MemoryQueue, payload: bytes, **settings: Any) -> None:
    async def way() -> Any:
        return await queue.routes.partition(PLACE)

    patience = ClientSettings(**{"retry_min_ms": 1, "retry_max_ms": 2, "call_timeout_ms": 5000, **settings})

    async def append() -> None:
        with closing(Appends(PLACE, way, patience)) as appends:
            await appends.put(payload)
            await appends.finish()

    queue.io.call(append())


def test_a_batch_that_is_larger_than_the_bound_is_refused_at_once() -> None:
    with pytest.raises(OversizedBatchError, match="max_backlog_records, 4"):
        append(bounded(), batch(5))


def test_a_batch_that_finds_no_room_takes_a_place_in_the_line() -> None:
    queue = bounded()
    queue.append("orders", 0, b"1", b"2")
    line = queue.partitions[PLACE].admission.line
    with pytest.raises(QueueFullError):
        append(queue, batch(3), call_timeout_ms=20)
    assert len(line) == 1


def test_who_waited_before_is_not_overtaken_and_keeps_its_room() -> None:
    queue = bounded()
    partition = queue.partitions[PLACE]
    rooms: list[Any] = []
    wanted = AwaitRoom(producer_id=50, records=2, size_bytes=10**6, least_bytes=1, wait_ms=1000)
    queue.append("orders", 0, b"1", b"2", b"3", b"4")
    queue._do(lambda _: partition.admission.await_room(wanted, 999, float("inf"), rooms.append))
    with pytest.raises(QueueFullError):
        append(queue, batch(3), call_timeout_ms=20)
    assert rooms == []
    partition.call(_commit(3))
    assert [room.records for room in rooms] == [2]
    with pytest.raises(QueueFullError):
        append(queue, batch(3), call_timeout_ms=20)  # 3 are free, and 2 of them are kept
    append(queue, batch(1))
    assert queue.ends("orders")[0] == 5


def _commit(offset: int) -> Any:
    return Commit(group="g", generation=0, offsets={0: offset})
