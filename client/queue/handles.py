"""Handles of jobs that were put: their ids, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, overload

from rayqueue.client.arguments import seconds_of
from rayqueue.client.producer.delivery import Deliveries, Delivery, RecordMetadata
from rayqueue.client.queue.job import JobId
from rayqueue.client.twins import awaiting, blocking, part
from rayqueue.errors import JobFailedError, OutcomeUnknownError, ResultGoneError, UnknownJobError
from rayqueue.protocol.jobs import ENDED, GetResult, JobResult, JobStatus

if TYPE_CHECKING:
    from rayqueue.client.queue.queue import JobQueue

_WAIT_MS = 10_000
"""How long one question for a result waits in the partition."""


class JobHandle:
    """Of one job. It may be passed on to other processes once its id is known."""

    __slots__ = ("_dedupe_id", "_delivery", "_id", "_queue", "duplicate")

    def __init__(
        self, queue: JobQueue[Any, Any], where: Delivery | JobId, dedupe_id: str | None = None, duplicate: bool = False
    ) -> None:
        self._queue = queue
        self._delivery = where if isinstance(where, Delivery) else None
        self._id = where if isinstance(where, JobId) else None
        self._dedupe_id = dedupe_id
        self.duplicate = duplicate
        """There was one with the same ``dedupe_id`` before; this is a handle of that one."""

    @property
    def id(self) -> JobId:
        """Waits until the job is committed, if it was put with ``wait=False``. Raises why it could not be put."""
        if self._id is None or self._dedupe_id is not None:
            self.wait()
        assert self._id is not None  # noqa: S101  # or waiting would have raised
        return self._id

    def wait(self) -> None:
        """Until it is committed."""
        if self._id is None and self._delivery is not None:
            self._found(self._delivery.result())
        if self._dedupe_id is not None:
            self._first()

    async def wait_async(self) -> None:
        if self._id is None and self._delivery is not None:
            self._found(await self._delivery)
        if self._dedupe_id is not None:
            await self._first_async()

    def _found(self, where: RecordMetadata) -> None:
        assert where.offset is not None  # noqa: S101  # the producer of a queue waits for all replicas
        self._id = JobId(where.partition, where.offset)

    @blocking
    async def _first(self) -> None:
        put, dedupe_id = self._id, self._dedupe_id
        if put is None or dedupe_id is None:
            return
        first = await self._queue.find_first(put.partition, dedupe_id)
        if first is not None:  # else the window is over already: it was this one's
            self.duplicate = first != put.offset
            self._id = JobId(put.partition, first)
        self._dedupe_id = None

    _first_async = awaiting(_first)

    @blocking
    async def state(self) -> JobStatus:
        """Where it stands."""
        return await part(self._queue.state)(self.id)

    state_async = awaiting(state)

    @blocking
    async def cancel(self) -> bool:
        """Drop it, if nobody works on it."""
        return await part(self._queue.cancel)(self.id)

    cancel_async = awaiting(cancel)

    @blocking
    async def result(self, timeout: float | None = None, *, timeout_ms: int | None = None) -> Any:
        """What its worker gave to ``Job.done``, or ``None`` if it was only acknowledged. Of a job that was put with
        ``want_result``.

        Waits for ``timeout`` seconds, as ``concurrent.futures`` does, or for ``timeout_ms``; then
        ``OutcomeUnknownError``. ``JobFailedError`` if the job is dead, with its reason and traceback, or cancelled;
        ``ResultGoneError`` if the job has ended and there is no result any more (``result_ttl_ms``,
        ``max_results_bytes``); ``UnknownJobError`` if none was wanted, or there is no such job.
        """
        timeout_s = seconds_of(timeout, timeout_ms)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        where = self.id
        while True:
            left_ms = _WAIT_MS if deadline_s is None else max(0, round((deadline_s - time.monotonic()) * 1000))
            wait_ms = min(_WAIT_MS, left_ms)
            call = GetResult(id=where.offset, wait_ms=wait_ms)
            found: JobResult = await self._queue.ask_partition(where.partition, call, may_take_ms=wait_ms)
            if found.state == "done":
                return None if found.value is None else self._queue.result_form.decode(found.value)
            if found.state == "cancelled":
                raise JobFailedError(
                    f"job {where} of {self._queue.name} was cancelled", job=str(where), reason="cancelled", traceback=""
                )
            if found.state == "dead":
                raise JobFailedError(
                    f"job {where} of {self._queue.name} is dead: {found.reason or 'it was given up'}",
                    job=str(where),
                    reason=found.reason,
                    traceback=found.traceback,
                )
            if found.state == "gone":
                raise no_result(self._queue.name, where, found)
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise OutcomeUnknownError(f"job {where} of {self._queue.name} is not done yet", job=str(where))

    result_async = awaiting(result)

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result_async().__await__()

    def __reduce__(self) -> tuple[Any, ...]:
        return JobHandle, (self._queue, self.id, None, self.duplicate)

    def __repr__(self) -> str:
        known = "being put" if self._id is None else str(self._id)
        return f"<JobHandle {self._queue.name} {known}>"


class JobHandles(Sequence[JobHandle]):
    """Of the jobs of one ``put_many``, in the order in which they were given."""

    def __init__(
        self,
        queue: JobQueue[Any, Any],
        parts: Sequence[tuple[Sequence[int] | None, Deliveries | Sequence[RecordMetadata]]],
        dedupe_ids: Sequence[str] | None = None,
    ) -> None:
        """``parts``: each with the rows that it is of; None if it is of all, in order."""
        self._queue = queue
        self._parts = [part for _, part in parts]
        self._dedupe_ids = dedupe_ids
        self._places: list[tuple[int, int]] | None = None
        if dedupe_ids is not None:
            places = {
                row: (number, index) for number, (rows, _) in enumerate(parts) for index, row in enumerate(rows or ())
            }
            self._places = [places[row] for row in range(len(places))]

    def __len__(self) -> int:
        return len(self._parts[0]) if self._places is None else len(self._places)

    @overload
    def __getitem__(self, index: int) -> JobHandle: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[JobHandle]: ...
    def __getitem__(self, index: int | slice) -> JobHandle | Sequence[JobHandle]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        number, at = (0, index) if self._places is None else self._places[index]
        where = self._parts[number][at]
        dedupe_id = None if self._dedupe_ids is None else self._dedupe_ids[index]
        return JobHandle(self._queue, where if isinstance(where, Delivery) else _id(where), dedupe_id)

    @property
    def ids(self) -> list[JobId]:
        """Waits until all are committed. Where there are dedupe ids, one question for each."""
        self.wait()
        return [each.id for each in self]

    async def ids_async(self) -> list[JobId]:
        """``ids``, awaited."""
        await self.wait_async()
        handles = list(self)
        for each in handles:
            await each.wait_async()
        return [each.id for each in handles]

    def wait(self) -> None:
        """Until all are committed. Raises the first error there is."""
        for each in self._parts:
            if isinstance(each, Deliveries):
                each.result()

    async def wait_async(self) -> None:
        """``wait``, awaited."""
        for each in self._parts:
            if isinstance(each, Deliveries):
                await each

    def __repr__(self) -> str:
        return f"<JobHandles {self._queue.name}: {len(self)}>"


def no_result(queue: str, job: JobId | str, found: JobResult) -> UnknownJobError:
    """Why there is none."""
    if found.reason == ENDED:
        return ResultGoneError(
            f"job {job} of {queue} has ended, and there is no result of it (any more): none was wanted, result_ttl_ms "
            "is over, or later ones needed the room (max_results_bytes)",
            job=str(job),
        )
    return UnknownJobError(
        f"there is no result of job {job} of {queue}: none was wanted, it is gone, or there is no such job",
        job=str(job),
    )


def _id(where: RecordMetadata) -> JobId:
    return JobId(where.partition, where.offset or 0)
