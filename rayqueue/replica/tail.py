"""The newest batches of a partition, in memory, for readers at the end of the log.

Most readers are there. They are answered without the disk, and before the
rows that say where the batch is are synced: a batch is on a majority of disks
long before the next sync of this replica's small tables. The engine's thread
adds (it is the partition's ``Watcher``), any thread reads.

It knows where each lane ends, even of lanes whose batches it has forgotten: so
whether there is anything for a reader is a comparison per lane.

A batch leaves only after its rows are synced, so a reader finds each committed
batch here or on disk, and usually in both.

Columns of numbers and bytes, not a list of batches: there may be hundreds of
thousands of small ones, and every object that the garbage collector has to
look at makes its pauses longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock

from rayqueue.ids import Offset
from rayqueue.partition import CommittedRead, Fetched, Partition
from rayqueue.protocol.data import ANY_LANE, Cursor


class Tail:
    def __init__(self, end: Offset, limit_bytes: int, lane_ends: Mapping[int, Offset] | None = None) -> None:
        """``lane_ends`` tells where the last batch of each lane before ``end`` ends: ``Partition.lane_ends()``.
        Without it, lane 0 ends at ``end`` and there is no other."""
        self._lock = Lock()
        self._limit_bytes = limit_bytes
        self.grown: set[int] = set()
        """Lanes that got batches since somebody emptied this. The engine's thread's."""
        self._clear(end, lane_ends)

    @classmethod
    def opened(cls, partition: Partition, limit_bytes: int) -> Tail:
        """Of a partition that was just opened. Its readers find everything on disk, unless that is so full that what
        was written ahead has not come into the tables: then the tail begins there."""
        begin, lanes = partition.synced_end(), partition.settings.lanes
        tail = cls(begin, limit_bytes, {lane: min(begin, end) for lane, end in partition.lane_ends().items()})
        for batch, payload in partition.batches(begin):
            tail.append(batch.base_offset, batch.count, payload, batch.lane if lanes > 1 else 0)
            if partition.is_aborted(batch.base_offset):
                tail._aborted.add(batch.base_offset)
        return tail

    def _clear(self, end: Offset, lane_ends: Mapping[int, Offset] | None) -> None:
        # Offsets have no gaps: a batch ends where the next one begins.
        self._bases: list[Offset] = []
        self._payloads: list[bytes] = []
        self._lanes: dict[int, list[Offset]] = {}  # the same bases, lane by lane
        self._lane_ends = {0: end} if lane_ends is None else dict(lane_ends)
        self._lane_starts = dict(self._lane_ends)  # all of a lane that is at or after this is in memory
        self._aborted: set[Offset] = set()  # bases of batches whose transaction was aborted
        self._bytes = 0
        self.start = self.end = end

    def append(self, base_offset: Offset, count: int, payload: bytes, lane: int) -> None:
        """The next batch was applied."""
        with self._lock:
            self._bases.append(base_offset)
            self._payloads.append(payload)
            self._lanes.setdefault(lane, []).append(base_offset)
            self._bytes += len(payload)
            self.end = self._lane_ends[lane] = Offset(base_offset + count)
        self.grown.add(lane)

    def ended(self, lanes: Iterable[int], aborted: Iterable[tuple[Offset, Offset]]) -> None:
        """A transaction has ended: those who wait in these lanes may go on. These ranges were aborted."""
        with self._lock:
            for start, end in aborted:
                first, last = bisect_left(self._bases, start), bisect_left(self._bases, end)
                self._aborted.update(self._bases[first:last])
        self.grown.update(lanes)

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
            self.start = self._bases[drop] if drop < len(self._bases) else self.end
            for lane, bases in self._lanes.items():
                gone = bisect_left(bases, self.start)
                if gone:
                    self._lane_starts[lane] = self._end_of(bisect_left(self._bases, bases[gone - 1]))
                    del bases[:gone]
            if self._aborted:
                self._aborted.difference_update(self._bases[:drop])
            del self._bases[:drop]
            del self._payloads[:drop]

    def reset(self, end: Offset, lane_ends: Mapping[int, Offset] | None = None) -> None:
        """The log was replaced by a checkpoint that ends at ``end``."""
        with self._lock:
            self._clear(end, lane_ends)
        self.grown.update(self._lane_ends)

    def read_lanes(self, cursors: Sequence[Cursor], max_bytes: int) -> list[Fetched] | None:
        """Batches of the highest lane that has any after its cursor, then of the next while they fit.

        As ``rayqueue.partition.read_lanes``. None if a lane has some that are only on disk and whose turn it is.
        """
        with self._lock:
            found: list[Fetched] = []
            for lane, offset in sorted(cursors, reverse=True):
                any_lane = lane == ANY_LANE
                if offset >= (self.end if any_lane else self._lane_ends.get(lane, 0)):
                    continue
                if offset < (self.start if any_lane else self._lane_starts.get(lane, 0)):
                    return found or None
                left = self._read(found, offset, max_bytes, None if any_lane else lane)
                if left is None:
                    break
                max_bytes = left
            return found

    def read_committed(
        self, cursors: Sequence[Cursor], max_bytes: int, first_open: Callable[[int | None], Offset | None]
    ) -> CommittedRead | None:
        """As ``rayqueue.partition.read_committed``. None if a lane has some that are only on disk and whose turn it is.

        ``first_open`` tells where the first batch of a lane is whose transaction is open; on the engine's thread.
        """
        with self._lock:
            found: list[Fetched] = []
            then: list[Cursor] = []
            for lane, offset in sorted(cursors, reverse=True):
                which = None if lane == ANY_LANE else lane
                end = self.end if which is None else self._lane_ends.get(lane, Offset(0))
                unstable = first_open(which)
                stop = end if unstable is None else min(end, unstable)
                at = offset
                if at < stop and (max_bytes >= 0 or not found):
                    if at < (self.start if which is None else self._lane_starts.get(lane, 0)):
                        if not found:
                            return None
                        max_bytes = -1  # the rest is for the next fetch
                    else:
                        at, max_bytes = self._read_stable(found, at, stop, which, max_bytes)
                then.append(Cursor(lane, at))
            return CommittedRead(found, then)

    def _read_stable(
        self, found: list[Fetched], offset: int, stop: int, lane: int | None, max_bytes: int
    ) -> tuple[int, int]:
        """As ``_read``, up to ``stop`` and without what was aborted. Where to continue, and what is left of
        ``max_bytes``."""
        bases = self._bases if lane is None else self._lanes.get(lane, [])
        for number in range(max(bisect_right(bases, offset) - 1, 0), len(bases)):
            at = number if lane is None else bisect_left(self._bases, bases[number])
            base, end = self._bases[at], self._end_of(at)
            if base >= stop:
                break
            if end <= offset or base in self._aborted:
                continue
            payload = self._payloads[at]
            max_bytes -= len(payload)
            if max_bytes < 0 and found:
                return max(offset, base), max_bytes
            found.append(Fetched(base, end - base, payload))
        return stop, max_bytes

    def _read(self, found: list[Fetched], offset: int, max_bytes: int, lane: int | None) -> int | None:
        """Add batches to those found. What is left of ``max_bytes``; None if there is one that does not fit."""
        bases = self._bases if lane is None else self._lanes.get(lane, [])
        for number in range(max(bisect_right(bases, offset) - 1, 0), len(bases)):
            at = number if lane is None else bisect_left(self._bases, bases[number])
            base, payload, end = self._bases[at], self._payloads[at], self._end_of(at)
            if end <= offset:
                continue
            max_bytes -= len(payload)
            if max_bytes < 0 and found:
                return None
            found.append(Fetched(base, end - base, payload))
        return max_bytes

    def _end_of(self, at: int) -> Offset:
        return self._bases[at + 1] if at + 1 < len(self._bases) else self.end
