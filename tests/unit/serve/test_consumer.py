"""The consumer of a Serve replica, on the queue in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="Ray Serve is not installed: scripts/setup installs the extra 'serve'")

from rayqueue.client.queue.job import Job
from rayqueue.client.queue.queue import JobQueue
from rayqueue.errors import QueueFullError
from rayqueue.serve import consumer
from rayqueue.serve.config import Task, decode_task, encode_task
from rayqueue.serve.consumer import Consumer
from rayqueue.testing import memory, wait_for


@pytest.fixture
def rq() -> Iterator[memory.MemoryQueue]:
    with memory.connect() as made:
        yield made


def _consumer(
    queue: JobQueue[Any, Any],
    handlers: dict[str, Callable[..., Any]],
    failed: JobQueue[Any, Any] | None = None,
    max_retries: int = 1,
) -> Consumer:
    return Consumer(
        queue,
        handlers,
        concurrency=1,
        max_retries=max_retries,
        failed=failed,
        unprocessable=None,
        remembers_ms=3_600_000,
    )


def _failed(rq: memory.MemoryQueue) -> JobQueue[Any, Any]:
    return rq.queue("failed", dedupe_window_ms=3_600_000)


def _fails(*_: Any) -> None:
    raise ValueError("no")


def _take(queue: JobQueue[Any, Any], count: int) -> list[Job[Any, Any]]:
    jobs: list[Job[Any, Any]] = []
    while len(jobs) < count:
        jobs += queue.get(count - len(jobs), timeout_ms=10_000)
    return jobs


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


def test_a_failed_task_that_is_too_large_to_be_told_of_is_told_of_in_part(
    rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "_SWEEP_S", 0.02)
    queue, failed = rq.queue("tasks", max_deliveries=2, retry_backoff_ms=0), _failed(rq)
    unprocessable = rq.queue("unprocessable", dedupe_window_ms=3_600_000)

    def bad(*_: Any, **__: Any) -> None:
        raise OSError("/data/\udcff")

    large = b"\xff" * 400_000  # 1.6 MB as text
    queue.put(encode_task(Task("bad", [large], {"more": large})))
    queue.put(encode_task(Task("nobody", [large])))
    queue.put(b"\xff" * 900_000)
    working = Consumer(
        queue,
        {"bad": bad},
        concurrency=1,
        max_retries=1,
        failed=failed,
        unprocessable=unprocessable,
        remembers_ms=3_600_000,
    )
    working.start()
    try:
        wait_for(lambda: queue.dead.count() == 3, "all to be given up", 20)
    finally:
        working.stop(10)
    assert {each.history[-1].kind for each in queue.dead.list()} == {"reject"}
    (told,) = [decode_task(job.value) for job in failed.get(3, timeout_ms=1_000)]
    assert told.args[1].startswith("/data/\\udcff")
    assert told.args[2].startswith("[b'\\xff")
    assert told.args[2].endswith("… (1600005 characters)")
    aside = [decode_task(job.value) for job in unprocessable.get(3, timeout_ms=1_000)]
    assert [task.task for task in aside] == ["nobody", "unprocessable"]


def test_a_task_that_the_failed_queue_will_never_take_holds_no_other_up(
    rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "_SWEEP_S", 0.02)
    queue, failed = rq.queue("tasks", max_deliveries=1, retry_backoff_ms=0), _failed(rq)
    rq.alter_topic("failed", max_record_bytes=2_000)
    queue.put(encode_task(Task("lost", ["x" * 3_000])))
    queue.put(encode_task(Task("lost", ["y"])))
    queue.nack(_take(queue, 2))  # the queue gives them up
    queue.put(encode_task(Task("bad", ["x" * 3_000])))
    queue.put(encode_task(Task("bad", ["z"])))
    working = _consumer(queue, {"bad": _fails}, failed, max_retries=0)
    working.start()
    try:
        wait_for(lambda: failed.size().ready == 2, "the small ones to be told of", 20)
        wait_for(lambda: queue.dead.count() == 4, "all to be given up", 20)
    finally:
        working.stop(10)
    assert sorted(decode_task(job.value).args[2] for job in failed.get(3, timeout_ms=1_000)) == ["['y']", "['z']"]


def test_a_task_that_cannot_be_told_of_now_keeps_its_own_reason(
    rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "_SWEEP_S", 60)
    queue, failed = rq.queue("tasks", max_deliveries=1, retry_backoff_ms=0), _failed(rq)

    async def full(*_: Any, **__: Any) -> None:
        raise QueueFullError("full")

    monkeypatch.setattr(failed, "put_async", full)
    queue.put(encode_task(Task("bad")))
    working = _consumer(queue, {"bad": _fails}, failed, max_retries=0)
    working.start()
    try:
        wait_for(lambda: queue.dead.count() == 1, "it to be given up", 20)
    finally:
        working.stop(10)
    (dead,) = queue.dead.list()
    assert (dead.reason, dead.history[-1].kind) == ("ValueError: no", "nack")


def test_a_redriven_task_gets_all_of_its_attempts(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("tasks", max_deliveries=3, retry_backoff_ms=0)
    queue.put(encode_task(Task("bad")))
    attempts: list[int] = []

    def bad() -> None:
        attempts.append(1)
        raise ValueError("no")

    for expected in (3, 6):
        working = _consumer(queue, {"bad": bad}, max_retries=2)
        working.start()
        try:
            wait_for(lambda: queue.dead.count() == 1, "it to be given up", 20)
        finally:
            working.stop(10)
        assert len(attempts) == expected
        assert queue.dead.redrive(all=True) == 1
    (job,) = queue.get(timeout_ms=5_000)
    assert (job.deliveries, job.forgiven, job.attempt) == (7, 6, 1)


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
