"""The consumer of a Serve replica, on the queue in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="Ray Serve is not installed: scripts/setup installs the extra 'serve'")

from rayqueue.client.queue.queue import JobQueue
from rayqueue.serve import consumer
from rayqueue.serve.config import Task, decode_task, encode_task
from rayqueue.serve.consumer import Consumer
from rayqueue.testing import memory, wait_for


@pytest.fixture
def rq() -> Iterator[memory.MemoryQueue]:
    with memory.connect() as made:
        yield made


def _consumer(
    queue: JobQueue[Any, Any], handlers: dict[str, Callable[..., Any]], failed: JobQueue[Any, Any] | None = None
) -> Consumer:
    return Consumer(
        queue, handlers, concurrency=1, max_retries=1, failed=failed, unprocessable=None, remembers_ms=3_600_000
    )


@pytest.mark.slow
def test_every_dead_task_is_told_of_however_many_there_are(
    rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "_SWEEP_S", 0.02)
    queue, failed = rq.queue("tasks", max_deliveries=1), rq.queue("failed", dedupe_window_ms=3_600_000)
    others = 1_000
    queue.put_many([encode_task(Task("other"))] * others + [encode_task(Task("t", [number])) for number in range(3)])
    jobs = [job for _ in range(20) for job in queue.get(1_000, timeout_ms=100)]
    queue.reject(jobs[:others])  # its consumer has given these up, and told of them
    queue.nack(jobs[others:])
    assert queue.dead.count() == others + 3
    swept = _consumer(queue, {}, failed)
    swept.start()
    try:
        wait_for(lambda: failed.size().ready == 3, "the last ones to be told of", 20)
        told = [decode_task(job.value) for job in failed.get(3, timeout_ms=1_000)]
        assert sorted(task.args[2] for task in told) == ["[0]", "[1]", "[2]"]
        assert not failed.get(timeout_ms=200)  # once each
    finally:
        swept.stop(10)


def test_dead_tasks_are_looked_at_a_bounded_number_at_a_time(
    rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_SWEEP_S", 0.02), ("_SWEEP_PAGE", 2), ("_SWEEP_PAGES", 2)):
        monkeypatch.setattr(consumer, name, value)
    queue, failed = rq.queue("tasks", max_deliveries=1), rq.queue("failed", dedupe_window_ms=3_600_000)
    queue.put_many([encode_task(Task("t", [number])) for number in range(11)])
    queue.nack(queue.get(11, timeout_ms=5_000))
    asked: list[int] = []
    list_async = queue.dead.list_async

    async def asking(most: int, **more: Any) -> Any:
        asked.append(most)
        return await list_async(most, **more)

    monkeypatch.setattr(queue.dead, "list_async", asking)
    swept = _consumer(queue, {}, failed)
    swept.start()
    try:
        wait_for(lambda: failed.size().ready == 11, "all to be told of", 20)
        seen = len(asked)
        wait_for(lambda: len(asked) > seen + 8, "it to begin again", 20)
        assert (set(asked), failed.size().ready) == ({2}, 11)
    finally:
        swept.stop(10)


def test_a_task_that_is_cut_off_by_a_stop_has_had_an_attempt(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("tasks", max_deliveries=3, retry_backoff_ms=0)
    queue.put(encode_task(Task("slow")))
    began, end = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        end.wait(20)

    stopped = _consumer(queue, {"slow": slow})
    stopped.start()
    assert began.wait(20)
    stopped.stop(0.05)
    end.set()
    (job,) = rq.queue("tasks").get(timeout_ms=20_000)
    assert job.deliveries == 2
    job.reject("enough")
    (dead,) = queue.dead.list()
    assert [each.reason for each in dead.history] == ["its worker was stopped", "enough"]
