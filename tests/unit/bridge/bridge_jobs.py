"""Jobs of the bridges in tests: what tasks stage, what drivers publish, and what is in the topic then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.publish import Publisher
from rayqueue.bridge.rows import Rows, RowSettings
from rayqueue.bridge.staging import Hold, Piece, StageWriter, batch_hold
from tests.unit.client.queue_in_memory import MemoryQueue

STAGING = "spark-staging.q"
TOKEN = "attempt"


def stage(
    queue: Any,
    values: list[bytes],
    *,
    inline_bytes: int = 0,
    batch_bytes: int = 400,
    batch_id: int | None = None,
    token: str = TOKEN,
    **columns: Any,
) -> Any:
    """What a task of an attempt at a batch does with these rows. Which batch, ``values_of`` has said."""
    if batch_id is None:
        batch_id = int(values[0].split()[1])
    rows = Rows(Lookup(queue).topics(["out"]), RowSettings(topic="out", batch_bytes=batch_bytes))
    hold = Hold(queue, STAGING, batch_hold(batch_id, token))
    writer = StageWriter(queue, STAGING, 0, before=hold.take, inline_bytes=inline_bytes)
    table = pa.record_batch({"value": pa.array(values, pa.binary()), **columns})
    for start in range(0, len(values), 10):
        writer.add(rows.add(table.slice(start, 10)))
    writer.add(rows.finish())
    return writer.finish()


def values_of(batch_id: int, run: int = 0, count: int = 40) -> list[bytes]:
    """Another run of the same batch has other rows: nothing says that a query is deterministic."""
    return [f"batch {batch_id} run {run} row {row:03}".encode() for row in range(count)]


def found(queue: MemoryQueue) -> Counter[bytes | None]:
    return Counter(record.value for record in queue.records("out"))


def make_queue(*, partitions: int = 3) -> MemoryQueue:
    """A topic to write to, and a staging topic."""
    made = MemoryQueue()
    made.create_topic("out", partitions=partitions, lanes=2)
    made.create_topic(STAGING, partitions=1)
    return made


class OneTokenPublisher(Publisher):
    """What all tasks hold by the same token, unless a test says otherwise."""

    def publish(
        self, batch_id: int, pieces: Sequence[Piece], *, identity: bytes = b"", token: str | None = TOKEN
    ) -> bool:
        return super().publish(batch_id, pieces, identity=identity, token=token)


def publisher(queue: Any) -> Publisher:
    return OneTokenPublisher(queue, STAGING, "the checkpoint")
