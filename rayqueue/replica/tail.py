"""The newest batches of a partition, in memory, for readers at the end of the log.

Most readers are there. They are answered without the disk, and before the
rows that say where the batch is are synced: a batch is on a majority of disks
long before the next sync of this replica's small tables. The engine's thread
adds, any thread reads.

A batch leaves only after its rows are synced, so a reader finds each committed
batch here or on disk, and usually in both.

Columns of numbers and bytes, not a list of batches: there may be hundreds of
thousands of small ones, and every object that the garbage collector has to
look at makes its pauses longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from threading import Lock

from rayqueue.ids import Offset
from rayqueue.partition import Fetched


class Tail:
    def __init__(self, end: Offset, limit_bytes: int) -> None:
        self._lock = Lock()
        self._limit_bytes = limit_bytes
        self._clear(end)

    def _clear(self, end: Offset) -> None:
        # Offsets have no gaps: a batch ends where the next one begins.
        self._bases: list[Offset] = []
        self._payloads: list[bytes] = []
        self._lanes: dict[int, list[Offset]] = {}  # the same bases, lane by lane
        self._bytes = 0
        self.start = self.end = end

    def append(self, base_offset: Offset, count: int, payload: bytes, lane: int) -> None:
        """The next batch was applied."""
        with self._lock:
            self._bases.append(base_offset)
            self._payloads.append(payload)
            self._lanes.setdefault(lane, []).append(base_offset)
            self._bytes += len(payload)
            self.end = Offset(base_offset + count)

    def synced(self) -> None:
        """All that was applied can be found on disk now; forget what is too much to keep."""
        # In large steps: dropping from the front of a list costs its length.
        if self._bytes <= 2 * self._limit_bytes:
            return
        with self._lock:
            drop = 0
            while self._bytes > self._limit_bytes and drop < len(self._payloads):
                self._bytes -= len(self._payloads[drop])
                drop += 1
            del self._bases[:drop]
            del self._payloads[:drop]
            self.start = self._bases[0] if self._bases else self.end
            for bases in self._lanes.values():
                del bases[: bisect_left(bases, self.start)]

    def reset(self, end: Offset) -> None:
        """The log was replaced by a checkpoint that ends at ``end``."""
        with self._lock:
            self._clear(end)

    def read(self, offset: int, max_bytes: int, lane: int | None) -> list[Fetched] | None:
        """Batches from the one that holds ``offset`` on: at least one, then while they fit. None if it is older."""
        with self._lock:
            if offset < self.start:
                return None
            found: list[Fetched] = []
            bases = self._bases if lane is None else self._lanes.get(lane, [])
            for number in range(max(bisect_right(bases, offset) - 1, 0), len(bases)):
                at = number if lane is None else bisect_left(self._bases, bases[number])
                base, payload = self._bases[at], self._payloads[at]
                end = self._bases[at + 1] if at + 1 < len(self._bases) else self.end
                if end <= offset:
                    continue
                max_bytes -= len(payload)
                if max_bytes < 0 and found:
                    break
                found.append(Fetched(base, end - base, payload))
            return found
