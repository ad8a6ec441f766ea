"""Jobs of the bridges in tests: what tasks write, what drivers publish, and what readers see then."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa

from rayqueue.bridge.job import Job
from rayqueue.bridge.rows import RowSettings
from rayqueue.bridge.task import Written
from tests.unit.client.queue_in_memory import MemoryQueue

STAGING = "spark-staging.q"


def job(batch_id: int | None = None, *, inline_bytes: int = 0, batch_bytes: int = 400, **fields: Any) -> Job:
    """An attempt at a batch of one writer, or without one a job that runs once."""
    named = {} if batch_id is None else {"writer": "spark.q", "batch_id": batch_id, "staging": STAGING}
    rows = RowSettings(topic="out", batch_bytes=batch_bytes)
    return Job(("out",), rows, inline_bytes=inline_bytes, **{**named, **fields})


def task(queue: Any, work: Job, values: list[bytes], **columns: Any) -> Written:
    """What a task does with these rows."""
    table = pa.record_batch({"value": pa.array(values, pa.binary()), **columns})
    return work.write(queue, (table.slice(start, 10) for start in range(0, len(values), 10)), 0)


def batch(queue: Any, batch_id: int, run: int = 0, *, identity: bytes = b"", **fields: Any) -> bool:
    """A batch of one task, from its rows to its end. Whether it was written by this."""
    work = job(batch_id, **fields)
    return work.publish(queue, [task(queue, work, values_of(batch_id, run))], identity)


def values_of(batch_id: int, run: int = 0, count: int = 40) -> list[bytes]:
    """Another run of the same batch has other rows: nothing says that a query is deterministic."""
    return [f"batch {batch_id} run {run} row {row:03}".encode() for row in range(count)]


def found(queue: MemoryQueue) -> Counter[bytes | None]:
    """What readers of committed records see."""
    return Counter(record.value for record in queue.committed("out"))


def written(*batches: int, run: int = 0) -> Counter[bytes | None]:
    return Counter(value for batch_id in batches for value in values_of(batch_id, run))


def make_queue(*, partitions: int = 3) -> MemoryQueue:
    """A topic to write to."""
    made = MemoryQueue()
    made.create_topic("out", partitions=partitions, lanes=2)
    return made
