"""Dead letters of a queue: jobs that were given up, with what has happened to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from rayqueue.client.arguments import check_count
from rayqueue.client.queue.job import JobId
from rayqueue.client.twins import awaiting, blocking, part
from rayqueue.errors import InvalidInputError, UnknownJobError
from rayqueue.protocol.jobs import Changed, Failure, ListDead, PurgeDead, RedriveDead
from rayqueue.protocol.jobs import DeadJob as WireDeadJob
from rayqueue.records import Headers, KeyT, ValueT

if TYPE_CHECKING:
    from rayqueue.client.queue.queue import JobQueue

_AT_ONCE = 500
_CHANGED = 1000
"""As many as one call may name."""


@dataclass(frozen=True)
class DeadJob(Generic[ValueT, KeyT]):
    """A dead letter. ``history`` is what happened to its last eight deliveries, the oldest first."""

    id: JobId
    value: ValueT | bytes | None
    """As bytes where the queue's model cannot read it."""
    key: KeyT | bytes | None
    headers: Headers
    priority: int
    deliveries: int
    put_ms: int
    died_ms: int
    history: tuple[Failure, ...]

    @property
    def reason(self) -> str:
        """Why it died: what its last failure says."""
        last = self.history[-1] if self.history else None
        return "" if last is None else (last.reason or last.kind)

    @property
    def traceback(self) -> str:
        return self.history[-1].traceback if self.history else ""


class DeadLetters(Generic[ValueT, KeyT]):
    """Of one queue: ``queue.dead``."""

    def __init__(self, queue: JobQueue[Any, Any]) -> None:
        self._queue = queue

    @blocking
    async def list(self, max_jobs: int = 100, *, after: JobId | str | None = None) -> Sequence[DeadJob[ValueT, KeyT]]:
        """Dead letters by partition and id, at most so many, behind ``after``."""
        check_count("max_jobs", max_jobs)
        begin = None if after is None else JobId.of(after)
        found: list[DeadJob[ValueT, KeyT]] = []
        for number in range(await self._queue.partition_count()):
            if begin is not None and number < begin.partition:
                continue
            first = begin.offset + 1 if begin is not None and number == begin.partition else 0
            while len(found) < max_jobs:
                call = ListDead(first=first, max_jobs=min(_AT_ONCE, max_jobs - len(found)))
                some: Sequence[WireDeadJob] = await self._queue.ask_partition(number, call)
                if not some:
                    break
                found += [self._dead(number, each) for each in some]
                first = some[-1].job.id + 1
        return found

    list_async = awaiting(list)  # noqa: A003

    @blocking
    async def get(self, job_id: JobId | str) -> DeadJob[ValueT, KeyT]:
        """One of them. ``UnknownJobError`` if it is none."""
        where = JobId.of(job_id)
        some: Sequence[WireDeadJob] = await self._queue.ask_partition(
            where.partition, ListDead(first=where.offset, max_jobs=1)
        )
        if not some or some[0].job.id != where.offset:
            raise UnknownJobError(f"there is no dead job {where} in {self._queue.name}", job=str(where))
        return self._dead(where.partition, some[0])

    get_async = awaiting(get)

    @blocking
    async def redrive(self, *job_ids: JobId | str, all: bool = False) -> int:  # noqa: A002  # as it is said
        """Let these be tried again, or all of them; with all their deliveries before them, and their history. How many
        there were."""
        return await self._change(RedriveDead, job_ids, all)

    redrive_async = awaiting(redrive)

    @blocking
    async def purge(self, *job_ids: JobId | str, all: bool = False) -> int:  # noqa: A002  # as it is said
        """Delete these for good, or all of them. How many there were."""
        return await self._change(PurgeDead, job_ids, all)

    purge_async = awaiting(purge)

    async def _change(
        self, call: type[RedriveDead] | type[PurgeDead], job_ids: Collection[JobId | str], everything: bool
    ) -> int:
        if job_ids and everything:
            raise InvalidInputError("name the dead letters, or say all=True; not both")
        shares: dict[int, list[int]] = {}
        for where in map(JobId.of, job_ids):
            shares.setdefault(where.partition, []).append(where.offset)
        asked: list[tuple[int, tuple[int, ...] | None]] = [
            (number, tuple(ids[begin : begin + _CHANGED]))
            for number, ids in shares.items()
            for begin in range(0, len(ids), _CHANGED)
        ]
        if everything:
            asked = [(number, None) for number in range(await self._queue.partition_count())]
        total = 0
        for number, ids in asked:
            more = True
            while more:
                changed: Changed = await self._queue.ask_partition(number, call(ids=ids))
                total += changed.jobs
                more = changed.more
        return total

    @blocking
    async def count(self) -> int:
        """How many there are."""
        return (await part(self._queue.size)()).dead

    count_async = awaiting(count)

    def _dead(self, number: int, wire: WireDeadJob) -> DeadJob[ValueT, KeyT]:
        peeked = self._queue.decoding.peeked(wire.job, number)
        return DeadJob(
            peeked.id,
            peeked.value,
            peeked.key,
            peeked.headers,
            peeked.priority,
            peeked.deliveries,
            peeked.put_ms,
            wire.died_ms,
            wire.history,
        )
