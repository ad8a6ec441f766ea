"""Reading jobs from a snapshot of the store: their bytes, and what is told of their failures.

Functions, as in ``rayqueue.partition.reader``: all they need is in the snapshot,
so they may run in any thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from rayqueue.errors import DamagedLogError, OffsetOutOfRangeError
from rayqueue.ids import Index
from rayqueue.log.store import Snapshot
from rayqueue.partition.commands import decode
from rayqueue.partition.jobs.commands import SettleJobs
from rayqueue.partition.jobs.queue import MOVED_HEADER, Moved, Text, decode_moved, part_of
from rayqueue.partition.jobs.rows import KIND_TEXTS, JobRow, Kind, Note
from rayqueue.partition.jobs.runs import Part
from rayqueue.partition.reader import Fetched, read
from rayqueue.protocol.jobs import JOB_HEADER, DeadJob, Failure, Job
from rayqueue.records import BATCH_TAG, RecordBatch
from rayqueue.records.header import HAS_HEADERS
from rayqueue.records.record import Headers

_HIDDEN = (JOB_HEADER, MOVED_HEADER)


class Unpacked(NamedTuple):
    """A batch, column by column."""

    base_offset: int
    end_offset: int
    size_bytes: int
    timestamps: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers]

    @staticmethod
    def of(fetched: Fetched) -> Unpacked:
        base, count, payload = fetched
        batch = RecordBatch.decode(payload)
        headers = batch.headers()
        if batch.header.flags & HAS_HEADERS:
            headers = [_shown(each) for each in headers]
        size_bytes = max(len(payload), batch.header.message_bytes)
        return Unpacked(base, base + count, size_bytes, batch.timestamps(), batch.keys(), batch.values(), headers)

    def jobs(self, part: Part) -> tuple[list[Job], Part | None]:
        """Those jobs of the part that are in this batch, which holds its first; and what is left of it."""
        start = part.place - self.base_offset
        count = min(part.count, self.end_offset - part.place)
        stop = start + count
        jobs = list(
            map(
                Job,
                range(part.first, part.first + count),
                repeat(part.deliveries),
                self.timestamps[start:stop],
                self.keys[start:stop],
                self.values[start:stop],
                self.headers[start:stop],
                repeat(part.lane),
                repeat(part.want_result),
                repeat(part.forgiven),
            )
        )
        if count == part.count:
            return jobs, None
        left = part._replace(first=part.first + count, place=part.place + count, count=part.count - count)
        return jobs, left


def _shown(headers: Headers) -> Headers:
    return tuple([pair for pair in headers if pair[0] not in _HIDDEN])


def batches_of(snapshot: Snapshot, parts: Sequence[Part]) -> dict[int, Unpacked]:
    """The batches that hold these, by their base offsets."""
    known: dict[int, Unpacked] = {}
    end = -1
    for part in sorted(parts, key=lambda part: part.place):
        place = max(part.place, end)
        while place < part.place + part.count:
            found = read(snapshot, place, 1)
            if not found:
                raise OffsetOutOfRangeError(
                    f"job {part.first} is at offset {place}, which is not there yet", offset=place
                )
            batch = Unpacked.of(found[0])
            known[batch.base_offset] = batch
            place = end = batch.end_offset
    return known


def jobs_of(batches: dict[int, Unpacked], parts: Sequence[Part]) -> list[Job]:
    bases = sorted(batches)
    jobs: list[Job] = []
    for part in parts:
        left: Part | None = part
        while left is not None:
            found, left = batches[bases[bisect_right(bases, left.place) - 1]].jobs(left)
            jobs += found
    return jobs


def dead_jobs(snapshot: Snapshot, rows: Sequence[JobRow], max_bytes: int) -> tuple[DeadJob, ...]:
    found: list[DeadJob] = []
    for row in rows:
        parts = [part_of(row)]
        (job,) = jobs_of(batches_of(snapshot, parts), parts)
        max_bytes -= len(job.value or b"") + len(job.key or b"")
        if max_bytes < 0 and found:
            break
        history = tuple([_failure(snapshot, note) for note in row.notes])
        max_bytes -= sum([len(each.reason) + len(each.traceback) for each in history])
        found.append(DeadJob(job, row.due_ms, history))
    return tuple(found)


def _failure(snapshot: Snapshot, note: Note) -> Failure:
    reason, traceback = text_of(snapshot, note)
    return Failure(note.time_ms, KIND_TEXTS[Kind(note.kind)], note.worker, reason, traceback)


def text_of(snapshot: Snapshot, note: Note) -> tuple[str, str]:
    """The reason and the traceback of a note."""
    if not note.index:
        return "", ""
    payload = snapshot.entry(Index(note.index)).payload
    if payload[0] == BATCH_TAG:
        text = _moved(RecordBatch.decode(payload).headers()[note.at]).texts[note.nth]
        return text.reason, text.traceback
    command = decode(payload)
    if not isinstance(command, SettleJobs):
        raise DamagedLogError(f"entry {note.index} does not say why a job failed", index=note.index)
    told = command.settles[note.at]
    return told.reason, told.traceback


def _moved(headers: Headers) -> Moved:
    return decode_moved(next(value for name, value in headers if name == MOVED_HEADER))


def texts_of(snapshot: Snapshot, notes: Sequence[Note]) -> tuple[Text, ...]:
    """Of all notes that have one."""
    return tuple([Text(each.index, each.at, each.nth, *text_of(snapshot, each)) for each in notes if each.index])
