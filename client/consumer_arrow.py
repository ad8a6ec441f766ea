"""Fetched batches as one Arrow table. Loads Arrow; imported when somebody asks for Arrow.

Key, value, headers and timestamp are the fetched bytes themselves, not copies;
a batch that is read from its middle is a slice. The columns that are the same
for a whole batch are cut from longer ones that are made once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from rayqueue.client.feed import Feed
from rayqueue.client.positions import Chunk
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records.arrow import HEADERS, KEY, TIMESTAMP, VALUE
from rayqueue.records.header import BatchHeader

SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        TIMESTAMP,
        KEY,
        VALUE,
        HEADERS,
        pa.field("lane", pa.uint8(), nullable=False),
    ]
)

_BLOCK_ROWS = 4096


class Part(NamedTuple):
    """A stretch of one batch."""

    batch: Any
    size_bytes: int
    topic: str
    partition: int


def part(feed: Feed, chunk: Chunk, start: int, stop: int) -> Part:
    """The records of these offsets as a ``pyarrow.RecordBatch`` of ``SCHEMA``."""
    stored = chunk.arrow(start, stop)
    rows = stop - start
    partition = feed.partition
    lane = BatchHeader.parse(chunk.payload).lane
    columns = [
        _constant(partition.topic, "topic", rows),
        _constant(partition.partition, "partition", rows),
        _offsets(start, stop),
        *stored.columns,
        _constant(lane, "lane", rows),
    ]
    return Part(pa.RecordBatch.from_arrays(columns, schema=SCHEMA), chunk.size_bytes, *_name(partition))


def _name(partition: TopicPartition) -> tuple[str, int]:
    return partition.topic, partition.partition


def table(parts: list[Part]) -> Any:
    return pa.Table.from_batches([each.batch for each in parts], schema=SCHEMA)


def _constant(value: Any, name: str, rows: int) -> Any:
    blocks = -(-rows // _BLOCK_ROWS)
    return _block(value, name, blocks * _BLOCK_ROWS).slice(0, rows)


@lru_cache(maxsize=1024)
def _block(value: Any, name: str, rows: int) -> Any:
    return pa.repeat(pa.scalar(value, SCHEMA.field(name).type), rows)


def _offsets(start: int, stop: int) -> Any:
    if hasattr(pa, "arange"):
        return pa.arange(start, stop)
    return pa.array(range(start, stop), pa.int64())
