"""A work queue, as applications see it.

    queue = rq.queue("emails", model="json")
    queue.put({"to": "ann@example.com"})

    for job in queue:               # acknowledged when the next one is asked for
        send(job.value)

Any number of processes may put and get; a handle may be used from several
threads and event loops, and handed to Ray tasks and actors, where it is another
worker of the same queue. Every call that waits has a twin for ``await``.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rayqueue.client.arguments import check_count, check_duration, check_timeout_ms
from rayqueue.client.producer.producer import Producer
from rayqueue.client.queue.dead import DeadLetters
from rayqueue.client.queue.decoding import Decoding, PeekedJob
from rayqueue.client.queue.job import Job, JobId
from rayqueue.client.queue.putting import Putting
from rayqueue.client.queue.worker import Worker
from rayqueue.client.queue.working import Working
from rayqueue.client.twins import Twin, awaiting, beside, blocking, in_io, part
from rayqueue.errors import InvalidInputError, OversizedRecordError, TopicKindError
from rayqueue.net.interfaces import ask, same_topic
from rayqueue.protocol.calls import Call
from rayqueue.protocol.jobs import (
    MAX_RESULT_BYTES,
    CancelJobs,
    FindJobs,
    GetJobs,
    GetQueueSizes,
    JobStatus,
    PeekJobs,
    QueueSizes,
)
from rayqueue.protocol.jobs import Job as WireJob
from rayqueue.protocol.topics import TopicInfo, TopicPartition, check_name
from rayqueue.records import KeyT, ValueT
from rayqueue.values import BYTES, form_of, shortened

if TYPE_CHECKING:
    from rayqueue.client.handle import RayQueue

_POLL_MS = 1000


class JobQueue(Putting[ValueT, KeyT], Working[ValueT, KeyT], Twin):
    """Made by ``RayQueue.queue``. Closing a handle hands back what it has; the queue stays."""

    def __init__(
        self, rq: RayQueue, name: str, model: Any = None, key_model: Any = None, result_model: Any = None
    ) -> None:
        self.name = check_name("queue", name)
        self._rq = rq
        self._forms = (model, key_model, result_model)
        self._value = form_of("model", model)
        self._key = form_of("key_model", key_model)
        self.result_form = form_of("result_model", result_model)
        self.decoding = Decoding(name, self._value, self._key)
        self._lock = threading.Lock()
        self._info: TopicInfo | None = None
        self._looked_s = 0.0
        self._worker: Worker | None = None
        self._producer: Producer[Any, Any] | None = None
        self.dead: DeadLetters[ValueT, KeyT] = DeadLetters(self)
        """Jobs that were given up."""

    def __reduce__(self) -> tuple[Any, ...]:
        return JobQueue, (self._rq, self.name, *self._forms)

    def __repr__(self) -> str:
        return f"<JobQueue {self.name}: values {self._value.name}, keys {self._key.name}>"

    # -- waiting ---------------------------------------------------------------------------------

    @blocking
    async def flush(self, *, timeout_ms: int | None = None) -> None:
        """Wait until all that was put with ``wait=False`` is committed, and all that was said of jobs is answered.

        Raises the first failure of an ``ack``, ``nack``, ``reject`` or ``done`` with ``wait=False`` since the last
        ``flush``.
        """
        if self._producer is not None:
            await part(self._producer.flush)(timeout_ms=timeout_ms)
        if self._worker is not None:
            await self._worker.flush()

    flush_async = awaiting(flush)

    # -- getting ---------------------------------------------------------------------------------

    @blocking
    async def get(self, max_jobs: int = 1, *, timeout_ms: int | None = _POLL_MS) -> list[Job[ValueT, KeyT]]:
        """The next jobs, at most so many. Waits up to ``timeout_ms`` for the first, or for ever (None); [] if none
        came. Each is this worker's until it is ended (``ack``, ``nack``, ``reject``) or let go."""
        check_count("max_jobs", max_jobs)
        timeout_s = None if timeout_ms is None else check_timeout_ms(timeout_ms) / 1000
        worker = await self._working()
        return await worker.get(max_jobs, timeout_s)

    get_async = awaiting(get)

    # -- ending jobs -----------------------------------------------------------------------------

    @blocking
    async def ack(self, *jobs: Job[ValueT, KeyT] | Iterable[Job[ValueT, KeyT]], wait: bool = True) -> None:
        """These are finished, and never come back. Returns once that is committed; ``LeaseLostError`` if one of them
        was given to somebody else meanwhile (the others are acknowledged). With ``wait=False`` it returns at once, and
        ``flush`` waits, and raises what has failed."""
        worker = await self._working()
        await worker.settle(_listed(jobs), "ack", wait=wait)

    ack_async = awaiting(ack)

    @blocking
    async def nack(
        self,
        *jobs: Job[ValueT, KeyT] | Iterable[Job[ValueT, KeyT]],
        delay_ms: int | None = None,
        reason: str = "",
        wait: bool = True,
    ) -> None:
        """These are to be tried again, after ``delay_ms`` or the queue's back-off. ``wait`` as for ``ack``."""
        if delay_ms is not None:
            check_duration("delay_ms", delay_ms)
        worker = await self._working()
        await worker.settle(_listed(jobs), "nack", delay_ms=delay_ms, reason=reason, wait=wait)

    nack_async = awaiting(nack)

    @blocking
    async def reject(
        self, *jobs: Job[ValueT, KeyT] | Iterable[Job[ValueT, KeyT]], reason: str = "", wait: bool = True
    ) -> None:
        """These can never be done: to the dead letters at once. ``wait`` as for ``ack``."""
        worker = await self._working()
        await worker.settle(_listed(jobs), "reject", reason=reason, wait=wait)

    reject_async = awaiting(reject)

    @blocking
    async def extend(self, job: Job[ValueT, KeyT], lease_ms: int | None = None) -> int:
        """As ``Job.extend``."""
        worker = await self._working()
        return await worker.extend(job, lease_ms)

    extend_async = awaiting(extend)

    # -- looking ---------------------------------------------------------------------------------

    @blocking
    async def size(self) -> QueueSizes:
        """Exact numbers over all partitions: ready, leased, delayed, dead."""
        found: list[QueueSizes] = await self._of_all(GetQueueSizes())
        return QueueSizes(*(sum(column) for column in zip(*map(msgspec.structs.astuple, found), strict=True)))

    size_async = awaiting(size)

    @blocking
    async def peek(self, max_jobs: int = 1) -> list[PeekedJob]:
        """The next jobs of each partition in turn, without taking them. Values are decoded."""
        check_count("max_jobs", max_jobs)
        found: list[Sequence[WireJob]] = await self._of_all(PeekJobs(max_jobs=min(max_jobs, 1000)))
        peeked: list[PeekedJob] = []
        for turn in range(max(map(len, found), default=0)):
            for number, jobs in enumerate(found):
                if turn < len(jobs):
                    peeked.append(self.decoding.peeked(jobs[turn], number))
        return peeked[:max_jobs]

    peek_async = awaiting(peek)

    @blocking
    async def state(self, job_id: JobId | str) -> JobStatus:
        """Where a job stands: ``ready``, ``leased``, ``delayed``, ``dead`` or ``gone``, and how often it was given
        out."""
        where = JobId.of(job_id)
        found: Sequence[JobStatus] = await self.ask_partition(where.partition, GetJobs(ids=(where.offset,)))
        return found[0]

    state_async = awaiting(state)

    @blocking
    async def cancel(self, job_id: JobId | str) -> bool:
        """Drop a job that nobody works on. False if somebody does, or there is none."""
        where = JobId.of(job_id)
        dropped: int = await self.ask_partition(where.partition, CancelJobs(ids=(where.offset,)))
        return bool(dropped)

    cancel_async = awaiting(cancel)

    # -- the end ---------------------------------------------------------------------------------

    @blocking
    async def close(self) -> None:
        """Wait for what was put and said, and hand back the jobs in hand. The queue stays."""
        with self._lock:
            producer, self._producer = self._producer, None
            worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()
        if producer is not None:
            await part(producer.close)()

    close_async = awaiting(close)

    async def _leave(self, kind: type[BaseException] | None) -> None:
        await part(self.close)()

    # -- within ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """``UnknownTopicError`` if there is no such queue, ``TopicKindError`` if it is a log."""
        await self._opened()

    async def _opened(self) -> TopicInfo:
        info = self._info
        if info is None:
            await beside(lambda: self._rq.io)  # connected, which may block
            info = await in_io(self._rq.io, self._rq.routes.topic(self.name))
            if not info.settings.queue:
                raise TopicKindError(f"{self.name} is no queue but a log: read it by rq.consumer({self.name!r})")
            self._info, self._looked_s = info, time.monotonic()
        return info

    async def _as_of_now(self) -> TopicInfo:
        """The queue with all its partitions, also those that were added in the last seconds."""
        info, now_s = await self._opened(), time.monotonic()
        if now_s - self._looked_s > self._rq.settings.consumer.refresh_ms / 1000:
            found = await in_io(self._rq.io, self._rq.routes.topic(self.name, refresh=True))
            self._info = info = same_topic(found, info.topic_id)
            self._looked_s = now_s
        return info

    async def _sending(self) -> Producer[Any, Any]:
        if self._producer is None:
            await self._opened()
            forms: dict[str, Any] = {}
            if self._value is not BYTES:
                forms["model"] = self._value
            if self._key is not BYTES:
                forms["key_serializer"] = self._key
            made: Producer[Any, Any] = await part(self._rq.producer)(**forms)
            with self._lock:
                if self._producer is None:
                    self._producer = made
        return self._producer

    async def _working(self) -> Worker:
        if self._worker is not None:
            return self._worker
        info = await self._opened()
        with self._lock:
            if self._worker is None:
                self._worker = Worker(
                    self._rq.io,
                    self._rq.routes,
                    self._rq.settings,
                    info,
                    self.decoding,
                    encode_result=self._encoded_result,
                )
                weakref.finalize(self, Worker.close_later, self._worker).atexit = False
            return self._worker

    def _encoded_result(self, result: Any) -> bytes:
        try:
            encoded = self.result_form.encode(result)
        except Exception as error:
            raise InvalidInputError(
                f"a result of {self.name} is no {self.result_form.name}: {shortened(error)}"
            ) from error
        if not isinstance(encoded, bytes):
            raise InvalidInputError(
                f"a result of {self.name} is bytes, not {type(result).__name__}: give rq.queue(result_model=)"
            )
        if len(encoded) > MAX_RESULT_BYTES:
            raise OversizedRecordError(
                f"a result of {self.name} has {len(encoded)} bytes; at most {MAX_RESULT_BYTES} are kept: put it "
                "elsewhere, and its place here",
                size_bytes=len(encoded),
            )
        return encoded

    async def ask_partition(self, partition: int, call: Call, *, may_take_ms: int = 0) -> Any:
        """For handles and dead letters."""
        info = await self._opened()
        place = TopicPartition(self.name, partition)
        return await in_io(
            self._rq.io, ask(self._rq.routes, place, call, topic_id=info.topic_id, may_take_ms=may_take_ms)
        )

    async def partition_count(self) -> int:
        return len((await self._as_of_now()).partitions)

    async def _of_all(self, call: Call) -> list[Any]:
        info = await self._as_of_now()

        async def every() -> list[Any]:
            places = [TopicPartition(self.name, each.number) for each in info.partitions]
            asked = (ask(self._rq.routes, place, call, topic_id=info.topic_id) for place in places)
            return list(await asyncio.gather(*asked))

        return await in_io(self._rq.io, every())

    async def find_first(self, partition: int, dedupe_id: str) -> int | None:
        """The id of the first job of this ``dedupe_id``. For handles."""
        found: Sequence[int | None] = await self.ask_partition(partition, FindJobs(dedupe_ids=(dedupe_id,)))
        return found[0]


def _listed(jobs: Iterable[Job[Any, Any] | Iterable[Job[Any, Any]]]) -> list[Job[Any, Any]]:
    found: list[Job[Any, Any]] = []
    for each in jobs:
        if isinstance(each, Job):
            found.append(each)
        else:
            found += each
    for job in found:
        if type(job) is not Job:
            raise InvalidInputError(f"a job is what get() returned, not {job!r}")
    return found
