"""The consumer of a replica: takes tasks, gives them to their handlers, and ends them by what these did.

One thread with an event loop of its own. Coroutine handlers run in that loop,
others in a pool of threads; ``concurrency`` tasks at a time over both.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from rayqueue.client.queue.dead import DeadJob
from rayqueue.client.queue.job import Job, JobId, explained, said
from rayqueue.client.queue.queue import JobQueue
from rayqueue.errors import InvalidInputError, RayQueueError
from rayqueue.serve.config import Task, decode_task, encode_task

_log = logging.getLogger(__name__)

UNREADABLE = "unprocessable"
"""The name, in a queue for failed or unprocessable tasks, of one that had none to be read."""
_SWEEP_S = 5.0
_SWEEP_PAGE = 100
_SWEEP_PAGES = 100
"""Dead letters that are looked at in one turn, a page at a time: nobody has to hold them all."""
_MOST_SHOWN = 16_000
"""Characters of arguments, as they are told to the queues for failed and unprocessable tasks."""
_BY_THE_QUEUE = ("lease expired", "worker gone", "nack")
"""How a task dies without its consumer giving it up: it took its worker with it, or a queue that was there before
allows fewer deliveries than ``max_retries``."""


class Consumer:
    """Of one replica. Started once."""

    def __init__(
        self,
        queue: JobQueue[Any, Any],
        handlers: Mapping[str, Callable[..., Any]],
        *,
        concurrency: int,
        max_retries: int | None,
        failed: JobQueue[Any, Any] | None,
        unprocessable: JobQueue[Any, Any] | None,
        remembers_ms: int,
    ) -> None:
        """``remembers_ms``: how long the failed tasks' queue knows a ``dedupe_id``."""
        self.succeeded = 0
        self.failed_attempts = 0
        self._queue = queue
        self._handlers = handlers
        self._concurrency = concurrency
        self._max_retries = max_retries
        self._failed = failed
        self._unprocessable = unprocessable
        self._remembers_ms = remembers_ms
        self._stopping = threading.Event()
        self._running: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix=f"task of {queue.name}")
        self._thread = threading.Thread(target=self._main, name=f"tasks of {queue.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping.is_set()

    def stop(self, timeout_s: float) -> bool:
        """Take no more tasks, and wait for those that run. After ``timeout_s`` they are left, and tried again by
        others: their handlers had begun, so this attempt counts as one that failed. Whether all have ended."""
        self._stopping.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._loop is not None and self._running is not None:
            self._loop.call_soon_threadsafe(self._running.cancel)
            self._thread.join(1.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception:  # noqa: BLE001  # of a thread of its own: nobody else would say so
            _log.exception("the consumer of %s has ended", self._queue.name)
        finally:
            self._stopping.set()

    async def _work(self) -> None:
        self._loop = asyncio.get_running_loop()
        sweeping = asyncio.ensure_future(self._sweep())
        self._running = asyncio.ensure_future(self._take())
        try:
            await self._running
        except asyncio.CancelledError:
            _log.warning("tasks of %s were still running when its consumer was stopped", self._queue.name)
        finally:
            sweeping.cancel()

    async def _take(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._queue.work_async(self._handle, concurrency=self._concurrency, stop=self._stopping.is_set)
            except RayQueueError as error:
                if not error.retriable:
                    raise
                _log.warning("tasks of %s cannot be taken, trying again: %s", self._queue.name, error)
                await asyncio.sleep(1.0)

    # -- one task ----------------------------------------------------------------------------------

    async def _handle(self, job: Job[Any, Any]) -> Any:
        try:
            task = decode_task(job.value)
        except ValueError as error:
            await self._set_aside(job, Task(UNREADABLE), _shown(job.value), str(error))
            return None
        handler = self._handlers.get(task.task)
        if handler is None:
            message = f"args={_shown(task.args)} kwargs={_shown(task.kwargs)}"
            await self._set_aside(job, task, message, f"no handler is registered for {task.task!r}")
            return None
        try:
            result = await self._call(handler, task)
        except Exception as error:
            self.failed_attempts += 1
            if self._max_retries is not None and job.attempt > self._max_retries:
                await self._give_up(job, task, error)
                return None
            raise  # it is tried again
        self.succeeded += 1
        return result

    async def _call(self, handler: Callable[..., Any], task: Task) -> Any:
        if inspect.iscoroutinefunction(handler):
            return await handler(*task.args, **task.kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, partial(handler, *task.args, **task.kwargs))

    async def _give_up(self, job: Job[Any, Any], task: Task, error: Exception) -> None:
        """First to the failed tasks' queue, then to the dead letters: a crash in between does it again, and the
        ``dedupe_id`` leaves one of the two."""
        reason, traceback = explained(error)
        if self._failed is not None:
            told = [str(job.id), said(error), _shown(task.args), _shown(task.kwargs), traceback]
            try:
                await self._move(self._failed, task.task, told, job.id)
            except RayQueueError as unheard:
                raise error from unheard  # its own reason is kept with the job; whoever sweeps tells of it later
        _log.error("task %s (%s) of %s has failed for good: %s", job.id, task.task, self._queue.name, reason)
        await job.reject_async(reason, traceback=traceback)

    async def _set_aside(self, job: Job[Any, Any], task: Task, message: str, reason: str) -> None:
        """Under its own name, with what Serve's own processor tells of one: name, id, message, reason, more."""
        if self._unprocessable is not None:
            told = [task.task, str(job.id), message, reason, ""]
            await self._move(self._unprocessable, task.task, told, job.id)
        _log.error("task %s of %s cannot be processed: %s", job.id, self._queue.name, reason)
        await job.reject_async(reason)

    async def _move(self, queue: JobQueue[Any, Any], task: str, args: list[Any], job_id: Any) -> None:
        """What that queue will never take it is not told: the dead letter has all of it, and holds nobody up."""
        origin = f"{self._queue.name}/{job_id}"
        try:
            await queue.put_async(
                encode_task(Task(task, args)), headers={"origin": origin.encode()}, dedupe_id=origin[-256:]
            )
        except InvalidInputError as error:
            _log.error("%s cannot be told of task %s of %s: %s", queue.name, job_id, self._queue.name, error)

    # -- tasks that the queue itself gave up ----------------------------------------------------

    async def _sweep(self) -> None:
        """Their workers could not tell the failed tasks' queue. Whoever lives does, while that queue remembers what it
        has been told."""
        told: dict[JobId, int] = {}
        after: JobId | None = None
        while self._failed is not None:
            await asyncio.sleep(_SWEEP_S)
            try:
                after = await self._sweep_some(told, after)
            except RayQueueError as error:
                _log.warning("dead tasks of %s could not be looked at: %s", self._queue.name, error)

    async def _sweep_some(self, told: dict[JobId, int], after: JobId | None) -> JobId | None:
        """Look through the dead letters behind this one, at most so many in one turn. Where to go on; None: from the
        first one again. ``told``: those that the failed tasks' queue was told of, and when they died."""
        since_ms = time.time() * 1000 - 0.9 * self._remembers_ms
        for job_id in [job_id for job_id, died_ms in told.items() if died_ms <= since_ms]:
            del told[job_id]
        if not await self._queue.dead.count_async():
            return None
        for _ in range(_SWEEP_PAGES):
            dead = await self._queue.dead.list_async(_SWEEP_PAGE, after=after)
            for each in dead:
                by_the_queue = bool(each.history) and each.history[-1].kind in _BY_THE_QUEUE
                if each.id not in told and by_the_queue and each.died_ms > since_ms:
                    await self._tell_of(each)
                    told[each.id] = each.died_ms
            if len(dead) < _SWEEP_PAGE:
                return None
            after = dead[-1].id
        return after

    async def _tell_of(self, dead: DeadJob[Any, Any]) -> None:
        if self._failed is None:
            return
        try:
            task = decode_task(dead.value)
        except ValueError:
            task = Task(UNREADABLE)
        last = dead.history[-1]
        told = [str(dead.id), last.reason or last.kind, _shown(task.args), _shown(task.kwargs), last.traceback]
        await self._move(self._failed, task.task, told, dead.id)


def _shown(value: Any) -> str:
    """As it is written in Python; of a long one the beginning."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}… ({len(text)} characters)"
