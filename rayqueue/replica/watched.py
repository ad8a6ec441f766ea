"""The partition of a running replica: it tells readers what it accepts."""

from __future__ import annotations

from typing import Any

from rayqueue.ids import Index
from rayqueue.partition import Appended, Partition
from rayqueue.records import BATCH_TAG, BatchHeader
from rayqueue.replica.tail import Tail


class WatchedPartition(Partition):
    """The partition, telling the tail about each batch it accepts."""

    tail: Tail
    grown: set[int]
    """Lanes that got batches since somebody looked."""

    def apply(self, index: Index, payload: bytes) -> Any:
        answer = super().apply(index, payload)
        if payload[0] == BATCH_TAG and type(answer) is Appended and not answer.duplicate:
            lane = BatchHeader.parse(payload).lane if self.settings.lanes > 1 else 0
            self.tail.append(answer.base_offset, answer.count, payload, lane)
            self.grown.add(lane)
        return answer

    def restore(self, state: bytes) -> None:
        super().restore(state)
        self.tail.reset(self.next_offset, self.lane_ends())
        self.grown.update(range(self.settings.lanes))
