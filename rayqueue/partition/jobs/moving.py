"""Moving: jobs that wait for long are appended again, so that the log before them can be trimmed.

The leader looks whether little of what is retained is still needed. If so it
proposes a control batch with the oldest jobs; each record says which job it is,
and brings the reasons of its failures along. Jobs that wait ahead of a frontier
are among them: handed back, or of a lane that is starved by a higher one, they may
wait as long as any. Such a job has a row from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from rayqueue.log.store import Snapshot
from rayqueue.partition.jobs.frontier import Frontier
from rayqueue.partition.jobs.queue import MOVED_HEADER, JobQueue, Moved
from rayqueue.partition.jobs.reading import batches_of, jobs_of, texts_of
from rayqueue.partition.jobs.rows import Note, State
from rayqueue.partition.jobs.runs import Part
from rayqueue.protocol.jobs import Job
from rayqueue.records import RecordBatch

MOVED_AT_ONCE = 500
MAX_WASTE = 4
"""So many records may be retained for each job that is not done."""
SLACK = 1000
"""And so many more."""

_encode = msgspec.msgpack.Encoder().encode


class Planned(NamedTuple):
    """A job that is to be moved, as it is now."""

    id: int
    place: int
    token: int
    lane: int
    notes: tuple[Note, ...]


def wasteful(queue: JobQueue, end: int) -> bool:
    """Whether much more is retained than is needed."""
    counts = queue.counts
    needed = counts.ready + counts.leased + counts.delayed + counts.dead
    return end - queue.first_place(end) > MAX_WASTE * needed + SLACK


def plan_move(queue: JobQueue, count: int, end: int) -> list[Planned]:
    """The jobs with the lowest places, in the first half of what is retained."""
    first = queue.first_place(end)
    below = first + (end - first + 1) // 2
    planned: list[Planned] = []
    for place, job_id in queue.places.lowest(count, below):
        row = queue.rows.get(job_id)
        if row is not None and row.state != State.CANCELLED:
            planned.append(Planned(job_id, place, row.token, row.lane, row.notes))
    for lease in queue.leases.holding():
        for start, length, lane in lease.runs:
            stop = min(start + length, below, start + count)
            planned += [Planned(job_id, job_id, lease.token, lane, ()) for job_id in range(start, stop)]
    for lane, front in queue.frontiers.items():
        planned += [Planned(job_id, job_id, 0, lane, ()) for job_id in _ahead(queue, front, count, below)]
    return sorted(planned, key=lambda each: each.place)[:count]


def _ahead(queue: JobQueue, front: Frontier, count: int, below: int) -> Iterator[int]:
    """The first jobs ahead of it."""
    for start, end in front.runs() if front.count else ():
        for job_id in range(start, min(end, below)):
            if queue.rows.get(job_id) is None:  # else it was cancelled
                yield job_id
                count -= 1
            if not count:
                return
        if end >= below:
            return


def move_batch(snapshot: Snapshot, planned: list[Planned], max_bytes: int) -> bytes | None:
    """The entry that moves them, as many as fit. In any thread."""
    parts = [Part(each.id, 1, each.place, 0, 0, False) for each in planned]
    jobs = jobs_of(batches_of(snapshot, parts), parts)
    chosen: list[Job] = []
    headers: list[list[tuple[str, bytes]]] = []
    for job, each in zip(jobs, planned, strict=True):
        moved = _encode(Moved(each.id, each.place, each.token, texts_of(snapshot, each.notes)))
        max_bytes -= len(job.value or b"") + len(job.key or b"") + len(moved) + 256
        max_bytes -= sum([len(name) + len(value) for name, value in job.headers])
        if max_bytes < 0 and chosen:
            break
        chosen.append(job)
        headers.append([*job.headers, (MOVED_HEADER, moved)])
    if not chosen:
        return None
    return RecordBatch.encode(
        [job.value for job in chosen],
        [job.key for job in chosen],
        headers,
        timestamps=[job.timestamp for job in chosen],
        control=True,
    )
