"""The bytes of jobs for those who get them: from memory at the end of the log, from disk otherwise.

Batches that jobs were read from are kept unpacked, a few of them: workers ask
for one job at a time, and the next one is in the same batch.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rayqueue.errors import RayQueueError
from rayqueue.partition.jobs.reading import Unpacked, batches_of, dead_jobs, jobs_of
from rayqueue.partition.jobs.rows import JobRow
from rayqueue.partition.jobs.runs import Part
from rayqueue.protocol.data import ANY_LANE, Cursor
from rayqueue.protocol.jobs import DeadJob, Job
from rayqueue.replica.disk_reads import DiskReads
from rayqueue.replica.tail import Tail

if TYPE_CHECKING:
    from rayqueue.replica.core import ReplicaCore

_CACHED_BYTES = 8 * 1024 * 1024


class JobReader:
    """On the engine's thread; ``disk`` has others."""

    def __init__(self, replica: ReplicaCore[Any], tail: Tail, disk: DiskReads) -> None:
        self._replica = replica
        self._tail = tail
        self._disk = disk
        self._batches: OrderedDict[int, Unpacked] = OrderedDict()
        self._bases: list[int] = []
        self._bytes = 0

    def read(self, parts: Sequence[Part], done: Callable[[list[Job] | RayQueueError], None]) -> None:
        """``done`` gets the jobs, in order; at once, if they are all in memory."""
        jobs: list[Job] = []
        left: list[Part] = list(parts)[::-1]
        while left:
            part = left.pop()
            batch = self._in_memory(part.place)
            if batch is None:
                self._read_disk(jobs, [part, *left[::-1]], done)
                return
            found, rest = batch.jobs(part)
            jobs += found
            if rest is not None:
                left.append(rest)
        done(jobs)

    def _in_memory(self, place: int) -> Unpacked | None:
        at = bisect_right(self._bases, place) - 1
        if at >= 0:
            batch = self._batches[self._bases[at]]
            if place < batch.end_offset:
                self._batches.move_to_end(batch.base_offset)
                return batch
        if place < self._tail.start:
            return None
        found = self._tail.read_lanes((Cursor(ANY_LANE, place),), 1)
        return self._keep(Unpacked.of(found[0])) if found else None

    def _keep(self, batch: Unpacked) -> Unpacked:
        if batch.base_offset not in self._batches:
            insort(self._bases, batch.base_offset)
            self._bytes += batch.size_bytes
        self._batches[batch.base_offset] = batch
        while self._bytes > _CACHED_BYTES and len(self._batches) > 1:
            base, old = self._batches.popitem(last=False)
            self._bases.remove(base)
            self._bytes -= old.size_bytes
        return batch

    def forget(self) -> None:
        """The log may be another."""
        self._batches.clear()
        self._bases.clear()
        self._bytes = 0

    def _read_disk(
        self, jobs: list[Job], parts: Sequence[Part], done: Callable[[list[Job] | RayQueueError], None]
    ) -> None:
        def work() -> list[Unpacked]:
            with self._replica.snapshot() as snapshot:
                return list(batches_of(snapshot, parts).values())

        def finish(result: Any) -> None:
            if isinstance(result, RayQueueError):
                done(result)
                return
            known = {batch.base_offset: batch for batch in result}
            for batch in result:
                self._keep(batch)
            done([*jobs, *jobs_of(known, parts)])

        self._replica.once_settled(lambda: self._disk.read(work, finish))

    def read_dead(self, rows: Sequence[JobRow], max_bytes: int, done: Callable[[Any], None]) -> None:
        """``done`` gets a ``DeadJob`` for each row, for fewer if they are large; or the error."""

        def work() -> tuple[DeadJob, ...]:
            with self._replica.snapshot() as snapshot:
                return dead_jobs(snapshot, rows, max_bytes)

        self._replica.once_settled(lambda: self._disk.read(work, done))
