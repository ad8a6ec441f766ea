"""The newest batches of a partition, in memory, for readers at the end of the log.

Most readers are there. They are answered without the disk, and before the
rows that say where the batch is are synced: a batch is on a majority of disks
long before the next sync of this replica's small tables. The engine's thread
adds, any thread reads.

A batch leaves only after its rows are synced, so a reader finds each committed
batch here or on disk, and usually in both.
"""

from __future__ import annotations

from bisect import bisect_right
from threading import Lock

from rayqueue.ids import Offset
from rayqueue.partition import Fetched


class Tail:
    def __init__(self, end: Offset, limit_bytes: int) -> None:
        self._lock = Lock()
        self._limit_bytes = limit_bytes
        self._bases: list[int] = []
        self._batches: list[tuple[Fetched, int]] = []
        self._bytes = 0
        self._synced = end
        self.start = end
        self.end = end

    def append(self, batch: Fetched, lane: int) -> None:
        """The next batch was applied."""
        with self._lock:
            self._bases.append(batch.base_offset)
            self._batches.append((batch, lane))
            self._bytes += len(batch.payload)
            self.end = Offset(batch.base_offset + batch.count)

    def synced(self) -> None:
        """All that was applied can be found on disk now; forget what is too much to keep."""
        with self._lock:
            self._synced = self.end
            # In large steps: dropping from the front of a list costs its length.
            if self._bytes > 2 * self._limit_bytes:
                drop = 0
                while self._bytes > self._limit_bytes and drop < len(self._batches):
                    self._bytes -= len(self._batches[drop][0].payload)
                    drop += 1
                del self._bases[:drop]
                del self._batches[:drop]
                self.start = Offset(self._bases[0]) if self._bases else self.end

    def reset(self, end: Offset) -> None:
        """The log was replaced by a checkpoint that ends at ``end``."""
        with self._lock:
            self._bases, self._batches, self._bytes = [], [], 0
            self._synced = self.start = self.end = end

    def read(self, offset: int, max_bytes: int, lane: int | None) -> list[Fetched] | None:
        """Batches from the one that holds ``offset`` on: at least one, then while they fit. None if it is older."""
        with self._lock:
            if offset < self.start:
                return None
            position = max(bisect_right(self._bases, offset) - 1, 0)
            found: list[Fetched] = []
            for batch, batch_lane in self._batches[position:]:
                if batch.base_offset + batch.count <= offset or (lane is not None and lane != batch_lane):
                    continue
                max_bytes -= len(batch.payload)
                if max_bytes < 0 and found:
                    break
                found.append(batch)
            return found
