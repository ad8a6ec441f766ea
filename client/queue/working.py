"""The working side of a queue: loops that give jobs to the application, and end them by what it did."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from types import CodeType, FrameType
from typing import Any, Generic

from rayqueue.client.arguments import check_count, hinted
from rayqueue.client.queue.job import Job, explained
from rayqueue.client.queue.worker import Worker
from rayqueue.client.twins import run_awaiting, run_blocking
from rayqueue.errors import InvalidInputError
from rayqueue.records import KeyT, ValueT

_POLL_S = 1.0


class Working(Generic[ValueT, KeyT]):
    """Of a ``JobQueue``."""

    _worker: Worker | None

    async def _working(self) -> Worker:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Job[ValueT, KeyT]]:
        """Jobs for ever, each acknowledged, beside the loop, when the next is asked for.

        One that is in hand when the loop is left, by an exception or by ``break``, is tried again, unless it was ended
        in the loop; the reason that is kept with it says where that was. What was raised a loop cannot see: ``with
        job:`` in its body keeps the traceback, and so does ``work``, which goes on.
        """
        worker = run_blocking(self._working())
        while True:
            for job in run_blocking(worker.get(1, None)):
                try:
                    yield job
                except GeneratorExit:
                    _left_behind(job, sys._getframe().f_back)
                    raise
                if not job.settled:
                    worker.settle_later(job, "ack")

    def __aiter__(self) -> AsyncIterator[Job[ValueT, KeyT]]:
        """The same for ``async for``."""
        return _AsyncJobs(self._working)

    @hinted
    def work(
        self,
        handle: Callable[[Job[ValueT, KeyT]], Any],
        *,
        max_jobs: int | None = None,
        idle_ms: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """Call ``handle`` with every job, until ``max_jobs`` are through, none has come for ``idle_ms``, or ``stop()``.

        A job is acknowledged when ``handle`` returns, with what it returned if its result is wanted; if it raises, the
        job is tried again later, and the reason and traceback are kept with it. How many jobs were through.
        """
        worker = run_blocking(self._working())
        through = 0
        for job in self._some(worker, max_jobs, idle_ms, stop):
            try:
                result = handle(job)
            except Exception as error:  # noqa: BLE001  # the application's: it goes to the job
                _failed(worker, job, error)
            else:
                _succeeded(worker, job, result)
            through += 1
        run_blocking(worker.flush())
        return through

    def _some(
        self, worker: Worker, max_jobs: int | None, idle_ms: int | None, stop: Callable[[], bool]
    ) -> Iterator[Job[Any, Any]]:
        given = 0
        idle_s = 0.0
        while (max_jobs is None or given < max_jobs) and not stop():
            wait_s = _POLL_S if idle_ms is None else min(_POLL_S, idle_ms / 1000 - idle_s)
            found = run_blocking(worker.get(1, wait_s))
            idle_s = 0.0 if found else idle_s + wait_s
            if idle_ms is not None and idle_s * 1000 >= idle_ms:
                return
            given += len(found)
            yield from found

    @hinted
    async def work_async(
        self,
        handle: Callable[[Job[ValueT, KeyT]], Awaitable[Any]],
        *,
        concurrency: int = 1,
        max_jobs: int | None = None,
        idle_ms: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """The same for coroutines, so many jobs at a time.

        If it is cancelled, jobs whose coroutines had begun are tried again, and the delivery counts.
        """
        check_count("concurrency", concurrency)
        worker = await run_awaiting(self._working())
        through = 0
        running: set[asyncio.Task[None]] = set()

        async def one(job: Job[ValueT, KeyT]) -> None:
            nonlocal through
            try:
                result = await handle(job)
            except asyncio.CancelledError:
                if not job.settled:
                    worker.settle_later(job, "nack", reason="its worker was stopped")
                raise
            except Exception as error:  # noqa: BLE001  # the application's: it goes to the job
                _failed(worker, job, error)
            else:
                _succeeded(worker, job, result)
            through += 1

        given, idle_s = 0, 0.0
        try:
            while (max_jobs is None or given < max_jobs) and not stop():
                if len(running) >= concurrency:
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    continue
                wait_s = _POLL_S if idle_ms is None else min(_POLL_S, idle_ms / 1000 - idle_s)
                found = await run_awaiting(worker.get(1, wait_s))
                idle_s = 0.0 if found or running else idle_s + wait_s
                if idle_ms is not None and idle_s * 1000 >= idle_ms:
                    break
                given += len(found)
                running |= {asyncio.ensure_future(one(job)) for job in found}
            if running:
                await asyncio.wait(running)
        except asyncio.CancelledError:
            for task in running:
                task.cancel()
            raise
        await run_awaiting(worker.flush())
        return through


class _AsyncJobs(AsyncIterator[Job[Any, Any]]):
    """The iterator of an ``async for``. No generator: that one would be closed some time later, by the event loop; this
    one is let go where the loop is left, and can tell where that was."""

    def __init__(self, working: Callable[[], Coroutine[Any, Any, Worker]]) -> None:
        self._working = working
        self._job: Job[Any, Any] | None = None
        self._asking: CodeType | None = None

    def __anext__(self) -> Coroutine[Any, Any, Job[Any, Any]]:
        self._asking = sys._getframe(1).f_code
        return self._next()

    async def _next(self) -> Job[Any, Any]:
        worker = await run_awaiting(self._working())
        job, self._job = self._job, None
        if job is not None and not job.settled:
            worker.settle_later(job, "ack")
        while self._job is None:
            for found in await run_awaiting(worker.get(1, None)):
                self._job = found
        return self._job

    async def aclose(self) -> None:
        """The loop is left."""
        job, self._job = self._job, None
        if job is not None:
            _left_behind(job)

    def __del__(self) -> None:
        if self._job is not None:
            frame = sys._getframe().f_back
            _left_behind(self._job, frame if frame is not None and frame.f_code is self._asking else None)


def _left_behind(job: Job[Any, Any], frame: FrameType | None = None) -> None:
    """``frame`` is where the iterator was let go: that of the loop, where it is at what has left it."""
    if job.settled:
        return
    job.settled = True
    where = f" at {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}," if frame else ""
    reason = f"the loop over the queue was left{where} before the job was done"
    job.grant.worker.dropped(job.grant, job.offset, reason)


def _failed(worker: Worker, job: Job[Any, Any], error: BaseException) -> None:
    if not job.settled:
        reason, traceback = explained(error)
        worker.settle_later(job, "nack", reason=reason, traceback=traceback)


def _succeeded(worker: Worker, job: Job[Any, Any], result: Any) -> None:
    if job.settled:
        return
    if not job.wants_result:
        worker.settle_later(job, "ack")
        return
    try:
        encoded = worker.encoded_result(result)
    except InvalidInputError as error:  # nobody could ever read it
        reason, traceback = explained(error)
        worker.settle_later(job, "reject", reason=reason, traceback=traceback)
    else:
        worker.settle_later(job, "ack", result=encoded)
