"""Queues: what callers of a gateway can do with work queues. No protocol is known here.

A gateway keeps nothing of a job that it has handed out. Its lease is detached: it
outlives the gateway, ends by its time unless the caller extends it, and any gateway
can settle it (``rayqueue.client.queue.detached``). Only what nobody can have got is
given back by the gateway itself.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rayqueue.client.handle import RayQueue
from rayqueue.client.queue.dead import DeadJob
from rayqueue.client.queue.decoding import PeekedJob
from rayqueue.client.queue.detached import DetachedQueue, JobLease, Kind, TakenJob
from rayqueue.client.queue.handles import no_result
from rayqueue.client.queue.job import JobId
from rayqueue.client.queue.putting import job_options, place_of, with_options
from rayqueue.client.queue.queue import JobQueue
from rayqueue.client.twins import run_awaiting
from rayqueue.errors import InvalidInputError, LeaseLostError, RayQueueError, UnknownJobError, UnknownTopicError
from rayqueue.gateway.audit import Audit
from rayqueue.gateway.operations import Columns, Operations, check_some
from rayqueue.gateway.principals import Caller, Verb
from rayqueue.gateway.requests import Known, Requests, request_id
from rayqueue.gateway.written import Span, packed, unpacked
from rayqueue.protocol.jobs import MAX_RESULT_BYTES, GetResult, JobResult, JobStatus, QueueSizes
from rayqueue.protocol.topics import TopicInfo, check_name, is_internal
from rayqueue.records import Headers
from rayqueue.records.room import Room

MAX_CHANGED = 1000
"""Dead letters that one request names."""
_MAX_KNOWN = 1000
_SIZES_AT_ONCE = 8
_SIZES_S = 5.0

_T = TypeVar("_T")


class Wanted(NamedTuple):
    """What a job wants beside its contents."""

    delay_ms: int = 0
    deliver_at_ms: int | None = None
    ttl_ms: int | None = None
    dedupe_id: str | None = None
    want_result: bool = False


_NOTHING = Wanted()


class PutJob(NamedTuple):
    job: JobId
    duplicate: bool
    """There was one with the same ``dedupe_id``: this one."""


class _Sized(NamedTuple):
    key: Any
    value: Any
    headers: Any


class QueueState(NamedTuple):
    info: TopicInfo
    sizes: QueueSizes | None
    problem: str | None = None
    """Why there are no sizes."""
    oldest_ready_ms: int | None = None
    """When the job was put that is given out next, of all partitions the earliest."""


class Queues:
    """Of one gateway. Belongs to its event loop."""

    def __init__(self, rq: RayQueue, gateway_id: str, operations: Operations, requests: Requests, audit: Audit) -> None:
        self._rq = rq
        self._operations = operations
        self._requests = requests
        self._audit = audit
        self._worker = f"gateway-{gateway_id[:40]}-{secrets.token_hex(8)}"
        self._known: OrderedDict[str, DetachedQueue] = OrderedDict()

    # -- queues ---------------------------------------------------------------------------------

    async def create(
        self, caller: Caller, name: str, settings: Mapping[str, Any], *, if_missing: bool = False
    ) -> TopicInfo:
        _queue(caller, "create", name)
        self._operations.check_size(settings)
        wanted = {**settings, "queue": True}
        made = await self._rq.create_topic_async(name, if_missing=if_missing, **wanted)
        self._audit.note(caller, "create", "queue", name)
        return made

    async def listed(self, caller: Caller) -> list[QueueState]:
        """Those that he may see."""
        check_some(caller, "describe", "queue")
        there = [
            each
            for each in await self._rq.topics_async()
            if each.settings.queue and caller.may("describe", "queue", each.name)
        ]
        turn = asyncio.Semaphore(_SIZES_AT_ONCE)

        async def one(info: TopicInfo) -> QueueState:
            async with turn:
                return await self.state_of(info)

        return [*await asyncio.gather(*map(one, there))]

    async def state_of(self, info: TopicInfo) -> QueueState:
        """Without an error: one queue without a leader does not keep the others from being shown."""
        try:
            sizes = await asyncio.wait_for(self._handle(info.name).size_async(), _SIZES_S)
        except asyncio.TimeoutError:
            return QueueState(info, None, "its partitions do not answer")
        except RayQueueError as error:
            return QueueState(info, None, str(error))
        return QueueState(info, sizes)

    async def describe(self, caller: Caller, name: str) -> QueueState:
        _queue(caller, "describe", name)
        info = await self._info(name)
        handle = self._handle(name)
        sizes = await handle.size_async()
        first = await handle.peek_async(len(info.partitions)) if sizes.ready else []
        return QueueState(info, sizes, None, min((each.put_ms for each in first), default=None))

    async def size(self, caller: Caller, name: str) -> QueueSizes:
        """Exact, over all partitions."""
        _queue(caller, "describe", name)
        await self._info(name)
        return await self._handle(name).size_async()

    async def delete(self, caller: Caller, name: str) -> None:
        _queue(caller, "delete", name)
        await self._info(name)
        if not await self._rq.delete_topic_async(name):
            raise UnknownTopicError(f"there is no queue {name!r}", topic=name)
        self._audit.note(caller, "delete", "queue", name)

    # -- putting --------------------------------------------------------------------------------

    async def put(self, caller: Caller, name: str, columns: Columns, wanted: Sequence[Wanted]) -> list[PutJob]:
        """In the order given, once all are acknowledged; as ``Operations.publish`` otherwise."""
        _queue(caller, "publish", name)
        info = await self._info(name)
        given, keys = columns.headers, columns.keys
        if given is not None or any(each != _NOTHING for each in wanted):
            plain: Sequence[Headers] = [()] * len(wanted) if given is None else given
            columns.headers = [_with_wanted(row, plain[row], each) for row, each in enumerate(wanted)]
        deduplicated = [row for row, each in enumerate(wanted) if each.dedupe_id is not None]
        if deduplicated:
            columns.partitions = [
                place_of(info, None if keys is None else keys[row], each.dedupe_id) for row, each in enumerate(wanted)
            ]
        written = await self._operations.write(name, columns)
        put = [PutJob(JobId(each.partition, each.offset or 0), False) for each in written]
        if deduplicated:
            firsts = await self._in_io(
                self._detached(name).first_of(
                    [put[row].job for row in deduplicated], [wanted[row].dedupe_id or "" for row in deduplicated]
                )
            )
            for row, first in zip(deduplicated, firsts, strict=True):
                put[row] = PutJob(first, first != put[row].job)
        return put

    async def put_once(
        self,
        caller: Caller,
        name: str,
        key: str,
        contents: bytes,
        columns: Columns,
        wanted: Sequence[Wanted],
        encode: Callable[[list[PutJob]], bytes],
        *,
        kind: str,
    ) -> tuple[bytes, bool]:
        """Put them unless a request of this idempotency key has. Its answer, and whether that was before.

        Jobs get ids for duplicates that are derived from the key: within the queue's ``dedupe_window_ms`` a retry puts
        what a gateway that died did not, and no job twice.
        """
        _queue(caller, "publish", name)
        info = await self._operations.identified(caller, name, key, kind, self._info)
        request = request_id(caller.name, name, info.topic_id, key, kind)
        named = [
            each if each.dedupe_id is not None else each._replace(dedupe_id=f"{request.hex()}-{row}")
            for row, each in enumerate(wanted)
        ]

        async def carry_out(_: Known) -> bytes:
            put = await self.put(caller, name, columns, named)
            return packed(
                Span(each.job.partition, each.job.offset, 1, each.duplicate and of.dedupe_id is not None)
                for each, of in zip(put, wanted, strict=True)
            )

        def answer(kept: bytes) -> bytes:
            return encode(
                [
                    PutJob(JobId(partition, offset), bool(mark))
                    for partition, first, count, mark in unpacked(kept)
                    for offset in range(first, first + count)
                ]
            )

        return await self._requests.once(
            request, contents, carry_out, answer, repeatable_ms=info.settings.dedupe_window_ms
        )

    # -- working --------------------------------------------------------------------------------

    async def get(
        self, caller: Caller, name: str, *, max_jobs: int, wait_ms: int, lease_ms: int | None = None
    ) -> list[TakenJob]:
        """The next jobs, each with a lease; waits for the first. Cancelled, it takes none."""
        _queue(caller, "consume", name)
        if not 0 < max_jobs <= MAX_CHANGED:
            raise InvalidInputError(f"1 to {MAX_CHANGED} jobs at a time, not {max_jobs}")
        queue = self._detached(name)
        wait_ms = self._operations.checked_wait(wait_ms)
        taken: list[TakenJob] = []

        async def take() -> bool:
            max_bytes = self._operations.max_answer_bytes
            taken.extend(await queue.take(max_jobs, wait_ms=wait_ms, lease_ms=lease_ms or 0, max_bytes=max_bytes))
            return True

        try:
            if not await self._operations.drain.unless_begun(self._in_io(take()), False):
                self._rq.io.loop.call_soon_threadsafe(queue.give_back, taken)
                return []
        except asyncio.CancelledError:
            self._rq.io.loop.call_soon_threadsafe(queue.give_back, taken)
            raise
        try:
            _queue(self._operations.again(caller), "consume", name)  # he has waited
        except RayQueueError:
            self.give_back(name, taken)
            raise
        return taken

    async def check_worker(self, caller: Caller, name: str) -> None:
        """He may work on it, and it is a queue."""
        self.check_grant(caller, name)
        await self._info(name)

    def check_grant(self, caller: Caller, name: str) -> None:
        _queue(caller, "consume", name)

    def give_back(self, name: str, taken: Sequence[TakenJob]) -> None:
        """Their caller went before he could get them."""
        self._rq.io.loop.call_soon_threadsafe(self._detached(name).give_back, taken)

    async def settle(
        self,
        caller: Caller,
        name: str,
        kind: Kind,
        leases: Sequence[str],
        *,
        delay_ms: int | None = None,
        reason: str = "",
        traceback: str = "",
        result: bytes | None = None,
    ) -> list[JobLease]:
        """Those that were lost; the others have ended so, on the disks of a majority. ``LeaseLostError`` if all were.
        May be repeated."""
        _queue(caller, "consume", name)
        held = _leases(leases)
        if result is not None and (len(held) > 1 or len(result) > MAX_RESULT_BYTES):
            raise InvalidInputError(f"a result is of one job, and has at most {MAX_RESULT_BYTES} bytes")
        lost = await self._in_io(
            self._detached(name).settle(
                kind, held, delay_ms=delay_ms, reason=reason, traceback=traceback, result=result
            )
        )
        return _some_left(name, held, lost)

    async def extend(
        self, caller: Caller, name: str, leases: Sequence[str], lease_ms: int | None
    ) -> tuple[list[JobLease], int]:
        """Those that were lost, and how many milliseconds the others last. ``LeaseLostError`` if all were lost."""
        _queue(caller, "consume", name)
        held = _leases(leases)
        lost, lasts_ms = await self._in_io(self._detached(name).extend(held, lease_ms or 0))
        return _some_left(name, held, lost), lasts_ms

    # -- single jobs ----------------------------------------------------------------------------

    async def peek(self, caller: Caller, name: str, max_jobs: int) -> list[PeekedJob]:
        """Those that are given out next. They stay."""
        _queue(caller, "consume", name)
        await self._info(name)
        found = await self._handle(name).peek_async(max_jobs)
        return found[: Room(self._operations.max_answer_bytes).cut(found)]

    async def state(self, caller: Caller, name: str, job: str) -> JobStatus:
        _queue(caller, "describe", name)
        await self._info(name)
        return await self._handle(name).state_async(_job(job))

    async def result(self, caller: Caller, name: str, job: str, wait_ms: int) -> JobResult:
        """What became of a job whose result was wanted; waits for it. ``UnknownJobError`` if there is none."""
        _queue(caller, "describe", name)
        where = _job(job)
        wait_ms = self._operations.checked_wait(wait_ms)
        if where.partition >= len((await self._info(name)).partitions):
            raise UnknownJobError(f"there is no job {job} in {name}", job=job)
        handle = self._handle(name)

        async def ask(wait_ms: int) -> JobResult | None:
            call = GetResult(id=where.offset, wait_ms=wait_ms)
            told: JobResult = await run_awaiting(handle.ask_partition(where.partition, call, may_take_ms=wait_ms))
            return told

        found = (await self._operations.drain.unless_begun(ask(wait_ms), None)) or await ask(0)
        assert found is not None  # noqa: S101  # it is asked for without an end
        _queue(self._operations.again(caller), "describe", name)  # he has waited
        if found.state == "gone":
            raise no_result(name, job, found)
        return found

    async def cancel(self, caller: Caller, name: str, job: str) -> None:
        """Drop it. ``UnknownJobError`` if somebody works on it, or it is gone."""
        _queue(caller, "alter", name)
        await self._info(name)
        if not await self._handle(name).cancel_async(_job(job)):
            raise UnknownJobError(
                f"there is no job {job} in {name} that waits: somebody works on it, or it is gone", job=job
            )
        self._audit.note(caller, "alter", "queue", name)

    # -- dead letters -----------------------------------------------------------------------------

    async def dead(self, caller: Caller, name: str, *, max_jobs: int, after: str | None) -> Sequence[DeadJob[Any, Any]]:
        _queue(caller, "consume", name)
        await self._info(name)
        found: Sequence[DeadJob[Any, Any]] = await self._handle(name).dead.list_async(
            max_jobs, after=None if after is None else _job(after)
        )
        return found[: Room(self._operations.max_answer_bytes).cut(list(map(_with_history, found)))]

    async def dead_job(self, caller: Caller, name: str, job: str) -> DeadJob[Any, Any]:
        _queue(caller, "consume", name)
        await self._info(name)
        return await self._handle(name).dead.get_async(_job(job))

    async def redrive(self, caller: Caller, name: str, jobs: Sequence[str] | None) -> int:
        """Let these be tried again, or all (None). How many there were."""
        _queue(caller, "alter", name)
        chosen = _jobs(jobs)
        await self._info(name)
        count = await self._handle(name).dead.redrive_async(*chosen, all=jobs is None)
        self._audit.note(caller, "alter", "queue", name)
        return count

    async def purge(self, caller: Caller, name: str, jobs: Sequence[str] | None) -> int:
        """Delete these for good, or all (None). How many there were."""
        _queue(caller, "alter", name)
        chosen = _jobs(jobs)
        await self._info(name)
        count = await self._handle(name).dead.purge_async(*chosen, all=jobs is None)
        self._audit.note(caller, "alter", "queue", name)
        return count

    # -- within -----------------------------------------------------------------------------------

    def _handle(self, name: str) -> JobQueue[Any, Any]:
        """For questions only: it starts no worker and no producer, and knows the queue as it is now."""
        return JobQueue(self._rq, name)

    def _detached(self, name: str) -> DetachedQueue:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = DetachedQueue(self._rq.routes, self._rq.settings, name, self._worker)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(name)
        return known

    async def _info(self, name: str, *, fresh: bool = False) -> TopicInfo:
        return await self._in_io(self._detached(name).info(fresh=fresh))

    async def _in_io(self, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wrap_future(self._rq.io.run(work))


def _queue(caller: Caller, verb: Verb, name: str) -> None:
    check_name("queue", name)
    caller.check(verb, "queue", name)
    if is_internal(name):
        raise UnknownTopicError(f"there is no queue {name!r}", topic=name)


def _with_wanted(row: int, headers: Headers, wanted: Wanted) -> Headers:
    """``InvalidInputError`` names the job that is wrong."""
    try:
        options = job_options(*wanted)
        made: Any = with_options(headers, options)
    except InvalidInputError as error:
        raise InvalidInputError(f"job {row}: {error}", row=row) from None
    return tuple(made)


def _with_history(job: DeadJob[Any, Any]) -> _Sized:
    told = [(each.reason, each.traceback) for each in job.history]
    return _Sized(job.key, job.value, (*job.headers, *told))


def _leases(texts: Sequence[str]) -> list[JobLease]:
    if not 0 < len(texts) <= MAX_CHANGED:
        raise InvalidInputError(f"1 to {MAX_CHANGED} leases at a time, not {len(texts)}")
    return list(map(JobLease.of, dict.fromkeys(texts)))


def _some_left(name: str, held: Sequence[JobLease], lost: list[JobLease]) -> list[JobLease]:
    if len(lost) == len(held):
        raise LeaseLostError(
            f"the lease of job {held[0].job} of {name} has ended and somebody else was given it since, or it is gone; "
            "this does not count",
            queue=name,
        )
    return lost


def _job(text: str) -> JobId:
    job = JobId.of(text) if len(text) <= 50 else None
    if job is None or max(job) >= 2**63:
        raise InvalidInputError(f"a job's id is a text such as '3-120', not {text[:100]!r}")
    return job


def _jobs(texts: Sequence[str] | None) -> list[JobId]:
    """Of none, all are meant: nobody says so by a list without any."""
    if texts is not None and not 0 < len(texts) <= MAX_CHANGED:
        raise InvalidInputError(f"name 1 to {MAX_CHANGED} jobs, or say that all are meant")
    return list(map(_job, texts or ()))
