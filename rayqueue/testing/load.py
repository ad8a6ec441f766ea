"""Load from inside a replica's process, and what it cost.

A test that sends every batch through a channel measures the channel. So the
leader's process appends to itself: ``drive`` is what a producer would do, with
a bounded number of batches in flight, in a thread of its own as the actor's
callers are. What it measures includes making each batch anew (its sequence
changes, so its checksum does).
"""

from __future__ import annotations

import resource
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rayqueue.errors import AppendTimeoutError, RayQueueError
from rayqueue.records import HEADER_BYTES, BatchHeader
from rayqueue.records.header import pack_header
from rayqueue.replica import PartitionReplica, Status


@dataclass(frozen=True, slots=True)
class Usage:
    """What a replica's process has used since it started."""

    cpu_s: float
    engine_cpu_s: float
    """Of it, by the thread that drives the engine."""
    memory_bytes: int
    """Its own memory now, without the pages of files that are mapped into it."""
    written_bytes: int
    """What it made the kernel write to a disk."""
    syncs: int
    sync_s: float
    """Time spent in syncs."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What happened while ``batches`` were appended, seen from the leader's process."""

    batches: int
    records: int
    batch_bytes: int
    wall_s: float
    latencies_ms: array[float]
    """From the call to its answer, batch by batch."""

    @property
    def batches_per_s(self) -> float:
        return self.batches / self.wall_s

    @property
    def records_per_s(self) -> float:
        return self.records / self.wall_s

    def percentile_ms(self, percent: float) -> float:
        ordered = sorted(self.latencies_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def usage(status: Status) -> Usage:
    """Call it on the engine's thread, as an answer of ``Replica.inspect``: it asks for that thread's own time."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(
        cpu_s=time.process_time(),
        engine_cpu_s=time.thread_time(),
        memory_bytes=_memory_bytes(),
        written_bytes=spent.ru_oublock * 512,
        syncs=status.syncs,
        sync_s=status.sync_ms / 1000,
    )


def _memory_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class _Stamp:
    """The same batch again and again, each time with the producer's next sequence."""

    def __init__(self, batch: bytes) -> None:
        header = BatchHeader.parse(batch)
        self._batch = batch
        self._parts: list[bytes | bytearray | memoryview] = [batch[HEADER_BYTES:]]
        self._next = 0
        self._count = header.count
        self._idempotent = header.producer_id != 0
        self._fields: dict[str, Any] = {
            name: getattr(header, name)
            for name in (
                "count",
                "producer_id",
                "epoch",
                "lane",
                "compression",
                "flags",
                "min_timestamp",
                "max_timestamp",
                "message_bytes",
            )
        }

    def next(self) -> bytes:
        if not self._idempotent:
            return self._batch
        header = pack_header(parts=self._parts, sequence=self._next, **self._fields)
        self._next += self._count
        return b"".join((header, *self._parts))


def drive(replica: PartitionReplica, batch: bytes, count: int, in_flight: int, timeout_s: float) -> LoadReport:
    """Append the batch ``count`` times, with at most ``in_flight`` unanswered. The first error ends it."""
    stamp = _Stamp(batch)
    answers: SimpleQueue[tuple[float, float, Any]] = SimpleQueue()
    latencies_ms = array("d")
    clock = time.perf_counter

    def send() -> None:
        prepared = stamp.next()
        sent_s = clock()
        replica.append(prepared, lambda result: answers.put((sent_s, clock(), result)))

    started_s = clock()
    deadline_s = started_s + timeout_s
    sent = min(in_flight, count)
    for _ in range(sent):
        send()
    while len(latencies_ms) < count:
        try:
            sent_s, answered_s, result = answers.get(timeout=max(0.0, deadline_s - clock()))
        except Empty:
            text = f"{len(latencies_ms)} of {count} batches were answered within {timeout_s} s"
            raise AppendTimeoutError(text) from None
        if isinstance(result, RayQueueError):
            raise result
        latencies_ms.append((answered_s - sent_s) * 1000)
        if sent < count:
            send()
            sent += 1
    wall_s = clock() - started_s
    records = BatchHeader.parse(batch).count * count
    return LoadReport(count, records, len(batch) * count, wall_s, latencies_ms)
