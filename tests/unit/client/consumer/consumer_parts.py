"""Parts of consumers' tests: a partition whose reads are the real ones, without replicas or sockets."""

from __future__ import annotations

from itertools import count
from typing import Any

from rayqueue.partition import PartitionSettings
from rayqueue.partition.reader import read_lanes
from rayqueue.protocol.data import FetchAnswer, FetchedBatch, FetchRequest
from rayqueue.records import RecordBatch
from tests.unit.partition.partition_log import Log


class Shelf:
    """One partition: the real state machine over a store in memory. A record's value is its number."""

    def __init__(self, lanes: int = 1) -> None:
        self.lanes = lanes
        self.log = Log(PartitionSettings(lanes=lanes))
        self.lane_of: dict[int, int] = {}
        self._numbers = count()

    def append(self, records: int, lane: int = 0, timestamp: int = 1_000) -> int:
        """Returns the base offset."""
        values = [str(next(self._numbers)).encode() for _ in range(records)]
        answer = self.log.apply(RecordBatch.encode(values, timestamps=timestamp, lane=lane))
        base = int(answer.base_offset)
        self.lane_of |= dict.fromkeys(range(base, base + records), lane)
        return base

    @property
    def end(self) -> int:
        return int(self.log.partition.high_watermark)

    def fetch(self, request: FetchRequest) -> FetchAnswer:
        with self.log.snapshot() as snapshot:
            found = read_lanes(snapshot, request.cursors, request.max_bytes)
        batches = [FetchedBatch(base, records, memoryview(payload)) for base, records, payload in found]
        return FetchAnswer(batches, self.end, int(self.log.partition.start_offset))

    def offsets(self, lane: int, start: int = 0) -> list[int]:
        return [offset for offset, each in sorted(self.lane_of.items()) if each == lane and offset >= start]


def records_of(assigned: Any, chunk: Any, start: int, stop: int) -> list[Any]:
    partition = assigned.partition
    return list(chunk.records(partition.topic, partition.partition)[start - chunk.base : stop - chunk.base])
