"""Ray Serve's task processor on RayQueue.

A task is a job of the queue ``queue_name``, with its result and state kept for
``result_ttl_ms``; its id is the job's. What Serve promises of tasks becomes what
RayQueue promises of jobs: a task that was enqueued survives processes, leaders
and nodes, and is given to another replica as soon as its replica is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from ray.serve.schema import TaskProcessorAdapter, TaskProcessorConfig, TaskResult

from rayqueue.client.arguments import did_you_mean
from rayqueue.client.handle import RayQueue
from rayqueue.client.queue.handles import JobHandle
from rayqueue.client.queue.job import JobId
from rayqueue.client.queue.queue import JobQueue
from rayqueue.client.twins import part, run_awaiting, run_blocking
from rayqueue.errors import InvalidInputError
from rayqueue.protocol.jobs import ENDED, GetResult, JobResult, JobStatus
from rayqueue.serve.config import RayQueueAdapterConfig, Task, encode_task
from rayqueue.serve.consumer import Consumer

_log = logging.getLogger(__name__)

_OPTIONS = ("key", "priority", "delay_ms", "deliver_at", "ttl_ms", "dedupe_id", "headers")
_MOVED_ONCE_MS = 7 * 86_400_000
_CELERY = ("countdown", "eta", "expires")


class RayQueueTaskProcessorAdapter(TaskProcessorAdapter):
    """For ``TaskProcessorConfig.adapter``. Every operation exists for threads and for ``await``."""

    def __init__(self, config: TaskProcessorConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._config = config
        self._options = RayQueueAdapterConfig.of(config.adapter_config)
        self._concurrency = 1
        self._handlers: dict[str, Callable[..., Any]] = {}
        self._rq: RayQueue | None = None
        self._queues: dict[str, JobQueue[Any, Any]] = {}
        self._consumer: Consumer | None = None

    # -- a replica's life ----------------------------------------------------------------------

    def initialize(self, consumer_concurrency: int = 1) -> None:
        """Connect, and make the queues that are not there yet."""
        self._concurrency = consumer_concurrency
        self._rq = self._options.connected()
        retries = self._config.max_retries
        name = self._config.queue_name
        self._queues[name] = self._options.queue(self._rq, name, None if retries is None else retries + 1)
        for aside in (self._config.failed_task_queue_name, self._config.unprocessable_task_queue_name):
            if aside:  # whoever moves a task there twice, moves it once
                self._queues[aside] = self._options.queue(self._rq, aside, None, dedupe_window_ms=_MOVED_ONCE_MS)

    @property
    def _queue(self) -> JobQueue[Any, Any]:
        try:
            return self._queues[self._config.queue_name]
        except KeyError:
            raise InvalidInputError("initialize() comes before everything else of a task processor") from None

    def register_task_handle(self, func: Callable[..., Any], name: str | None = None) -> None:
        """A function, or a coroutine function, for the tasks of this name."""
        self._handlers[name or func.__name__] = func

    def start_consumer(self, **kwargs: Any) -> None:
        """Begin to do tasks."""
        if self._consumer is not None and self._consumer.alive:
            _log.info("the consumer of %s runs already", self._config.queue_name)
            return
        failed = self._config.failed_task_queue_name or ""
        windows = {each.name: each.settings.dedupe_window_ms for each in self._rq.topics()} if self._rq else {}
        self._consumer = Consumer(
            self._queue,
            self._handlers,
            concurrency=self._concurrency,
            max_retries=self._config.max_retries,
            failed=self._queues.get(failed),
            unprocessable=self._queues.get(self._config.unprocessable_task_queue_name or ""),
            remembers_ms=windows.get(failed, 0),
        )
        self._consumer.start()

    def stop_consumer(self, timeout: float = 10.0) -> None:
        """Take no more tasks, and wait ``timeout`` seconds for those that run; others do what is left. An attempt that
        is cut off so counts as one that failed."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None and not consumer.stop(timeout):
            _log.warning("the consumer of %s did not end within %s s", self._config.queue_name, timeout)

    # -- tasks ---------------------------------------------------------------------------------

    def enqueue_task_sync(self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any) -> TaskResult:
        """Put a task. Options are those of ``JobQueue.put`` (``delay_ms``, ``deliver_at``, ``ttl_ms``, ``priority``,
        ``key``, ``dedupe_id``, ``headers``) and Celery's ``countdown``, ``eta`` and ``expires``."""
        task = encode_task(_task(task_name, args, kwargs))
        return _enqueued(self._queue.put(task, want_result=True, **_options(options)))

    async def enqueue_task_async(
        self, task_name: str, args: Any = None, kwargs: Any = None, **options: Any
    ) -> TaskResult:
        """``await`` what ``enqueue_task_sync`` blocks for."""
        task = encode_task(_task(task_name, args, kwargs))
        return _enqueued(await self._queue.put_async(task, want_result=True, **_options(options)))

    def get_task_status_sync(self, task_id: str) -> TaskResult:
        """PENDING, STARTED, RETRY, SUCCESS with the result, FAILURE with the reason, or REVOKED. GONE: it has ended,
        and its result is not kept any more. A task that was never there is PENDING, as with Celery."""
        return run_blocking(self._get_task_status(task_id))

    async def get_task_status_async(self, task_id: str) -> TaskResult:
        """``await`` what ``get_task_status_sync`` blocks for."""
        return await run_awaiting(self._get_task_status(task_id))

    async def _get_task_status(self, task_id: str) -> TaskResult:
        where = JobId.of(task_id)
        queue = self._queue
        for _ in range(2):
            found: JobResult = await queue.ask_partition(where.partition, GetResult(id=where.offset))
            if found.state == "done":
                result = None if found.value is None else queue.result_form.decode(found.value)
                return TaskResult(id=task_id, status="SUCCESS", result=result)
            if found.state == "dead":
                return TaskResult(id=task_id, status="FAILURE", result=found.reason)
            if found.state == "cancelled":
                return TaskResult(id=task_id, status="REVOKED", result=None)
            if found.state == "gone" and found.reason == ENDED:
                return TaskResult(id=task_id, status="GONE", result=None)
            status = await part(queue.state)(where)
            if status.state not in ("dead", "gone"):
                break  # else it may have ended after the first question, which is asked again then
        return TaskResult(id=task_id, status=_STATUS.get(status.state, _pending)(status), result=None)

    def cancel_task_sync(self, task_id: str) -> bool:
        """Drop a task that has not begun, or waits to be tried again. False if it runs, or is over."""
        return run_blocking(self._cancel_task(task_id))

    async def cancel_task_async(self, task_id: str) -> bool:
        """``await`` what ``cancel_task_sync`` blocks for."""
        return await run_awaiting(self._cancel_task(task_id))

    async def _cancel_task(self, task_id: str) -> bool:
        return await part(self._queue.cancel)(task_id)

    # -- how it is -----------------------------------------------------------------------------

    def get_metrics_sync(self) -> dict[str, Any]:
        """Exact sizes of the queue, and what this replica has done."""
        return run_blocking(self._get_metrics())

    async def get_metrics_async(self) -> dict[str, Any]:
        """``await`` what ``get_metrics_sync`` blocks for."""
        return await run_awaiting(self._get_metrics())

    async def _get_metrics(self) -> dict[str, Any]:
        size = await part(self._queue.size)()
        consumer = self._consumer
        return {
            "queue": self._config.queue_name,
            "ready": size.ready,
            "leased": size.leased,
            "delayed": size.delayed,
            "dead": size.dead,
            "succeeded": 0 if consumer is None else consumer.succeeded,
            "failed_attempts": 0 if consumer is None else consumer.failed_attempts,
        }

    def health_check_sync(self) -> list[dict[str, Any]]:
        """``[{name: {"ok": "pong"}}]`` while the queue answers and the consumer, if it was started, runs."""
        return run_blocking(self._health_check())

    async def health_check_async(self) -> list[dict[str, Any]]:
        """``await`` what ``health_check_sync`` blocks for."""
        return await run_awaiting(self._health_check())

    async def _health_check(self) -> list[dict[str, Any]]:
        await part(self._queue.size)()
        name = f"rayqueue@{self._config.queue_name}"
        if self._consumer is not None and not self._consumer.alive:
            return [{name: {"error": "the consumer has ended"}}]
        return [{name: {"ok": "pong"}}]


def _task(name: str, args: Any, kwargs: Any) -> Task:
    if args is not None and not isinstance(args, (list, tuple)):
        raise InvalidInputError(f"args of a task are a list or a tuple, not {type(args).__name__}", option="args")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidInputError(f"kwargs of a task are a mapping, not {type(kwargs).__name__}", option="kwargs")
    return Task(name, list(args or ()), dict(kwargs or {}))


def _enqueued(handle: JobHandle) -> TaskResult:
    return TaskResult(id=str(handle.id), status="PENDING", created_at=time.time(), result=None)


def _pending(status: JobStatus) -> str:
    return "RETRY" if status.deliveries else "PENDING"


_STATUS: dict[str, Callable[[JobStatus], str]] = {
    "ready": _pending,
    "delayed": _pending,
    "leased": lambda _: "STARTED",
    "dead": lambda _: "FAILURE",
    "gone": lambda _: "PENDING",
}


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """What ``put`` takes, from our names and Celery's."""
    for name in given:
        if name not in (*_OPTIONS, *_CELERY):
            known = (*_OPTIONS, *_CELERY)
            raise InvalidInputError(f"a task has no option {name!r}{did_you_mean(name, known)}", option=name)
    found = {name: value for name, value in given.items() if name in _OPTIONS}
    if given.get("countdown") is not None:
        found["delay_ms"] = round(given["countdown"] * 1000)
    if given.get("eta") is not None:
        found["deliver_at"] = _aware(given["eta"])
    expires = given.get("expires")
    if expires is not None:
        left = expires if not isinstance(expires, datetime) else _aware(expires) - datetime.now(timezone.utc)
        seconds = left.total_seconds() if isinstance(left, timedelta) else float(left)
        found["ttl_ms"] = max(1, round(seconds * 1000))
    return found


def _aware(time_given: Any) -> Any:
    """Celery takes a time without zone for UTC."""
    if isinstance(time_given, datetime) and time_given.tzinfo is None:
        return time_given.replace(tzinfo=timezone.utc)
    return time_given
