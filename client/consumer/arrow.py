"""Fetched batches as one Arrow table of ``rayqueue.records.table``. Nothing is copied; loads Arrow."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa

from rayqueue.client.consumer.assigned import AssignedPartition
from rayqueue.client.consumer.lane import Chunk
from rayqueue.records.header import LANE_AT
from rayqueue.records.table import SCHEMA, rows_of


class Part(NamedTuple):
    """A stretch of one batch."""

    batch: Any
    size_bytes: int
    topic: str
    partition: int


def part(assigned: AssignedPartition, chunk: Chunk, start: int, stop: int) -> Part:
    """The records of these offsets."""
    topic, partition = assigned.partition.topic, assigned.partition.partition
    stored = chunk.arrow(start, stop)
    rows = rows_of(stored, start, stop, topic=topic, partition=partition, lane=chunk.payload[LANE_AT])
    return Part(rows, chunk.size_bytes, topic, partition)


def table(parts: list[Part]) -> Any:
    return pa.Table.from_batches([each.batch for each in parts], schema=SCHEMA)
