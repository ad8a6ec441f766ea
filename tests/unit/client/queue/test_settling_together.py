"""Settlements of several callers in one call: what is wrong with one of them concerns nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rayqueue.client.queue.detached import DetachedQueue
from rayqueue.errors import InvalidInputError, OutcomeUnknownError, OversizedRecordError, RayQueueError
from rayqueue.protocol.jobs import MAX_RESULT_BYTES
from rayqueue.testing import memory

_NO_NAME = "/data/\udcff"
"""As Python has a file's name that is no UTF-8."""
_WAIT_S = 10.0


@pytest.fixture
def rq() -> Iterator[memory.MemoryQueue]:
    with memory.connect() as made:
        yield made


def _take(queue: Any, count: int) -> list[Any]:
    jobs: list[Any] = []
    while len(jobs) < count:
        jobs += queue.get(count - len(jobs), timeout_ms=10_000)
    return jobs


def _together(rq: memory.MemoryQueue, *calls: Callable[[], Any]) -> list[BaseException | None]:
    """Said at once, so that they go in one call. What each raised; a call that does not return fails the test."""
    begin, begun, go = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(_WAIT_S)

    def say(call: Callable[[], Any]) -> BaseException | None:
        begin.wait(_WAIT_S)
        try:
            call()
        except RayQueueError as error:
            return error
        return None

    with ThreadPoolExecutor(len(calls)) as pool:
        told = [pool.submit(say, call) for call in calls]
        rq.io.loop.call_soon_threadsafe(hold)  # the I/O thread waits until all have said theirs
        begun.wait(_WAIT_S)
        begin.set()
        threading.Timer(0.1, go.set).start()
        return [each.result(_WAIT_S) for each in told]


def test_a_reason_that_cannot_be_written_is_escaped_and_disturbs_nobody(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", max_deliveries=1)
    queue.put_many([b"bad", b"good"])
    bad, good = _take(queue, 2)
    told = _together(rq, lambda: bad.nack(reason=_NO_NAME, traceback=_NO_NAME), good.ack)
    assert told == [None, None]
    (dead,) = queue.dead.list()
    assert (dead.value, dead.reason, dead.traceback) == (b"bad", "/data/\\udcff", "/data/\\udcff")


def test_an_exception_whose_text_cannot_be_written_is_kept_with_its_job(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", max_deliveries=1)
    queue.put_many([b"1", b"2", b"3"])

    def handle(job: Any) -> None:
        if job.value == b"1":
            raise OSError(_NO_NAME)

    assert queue.work(handle, max_jobs=2, idle_ms=1000) == 2
    with pytest.raises(OSError), _take(queue, 1)[0]:
        raise OSError(_NO_NAME)
    first, last = sorted(queue.dead.list(), key=lambda each: each.id)
    assert (first.value, last.value) == (b"1", b"3")
    assert first.reason == last.reason == "OSError: /data/\\udcff"
    assert "/data/\\udcff" in first.traceback


def test_a_lease_that_nobody_keeps_takes_the_same_texts(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", max_deliveries=1)
    queue.put(b"1")
    detached = DetachedQueue(rq.routes, rq.settings, "q", "gateway")
    (taken,) = rq.io.call(detached.take(1, wait_ms=5000))
    assert rq.io.call(detached.settle("nack", [taken.lease], reason=_NO_NAME, traceback=_NO_NAME)) == []
    assert queue.dead.list()[0].reason == "/data/\\udcff"


def test_a_result_that_is_too_large_is_told_to_its_own_job_only(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q")
    queue.put_many([b"1", b"2"], want_result=True)
    large, other = _take(queue, 2)
    told = _together(rq, lambda: large.done(b"x" * (MAX_RESULT_BYTES + 1)), other.ack)
    assert isinstance(told[0], OversizedRecordError)
    assert told[1] is None
    assert not large.settled
    large.done(b"x" * MAX_RESULT_BYTES)
    assert queue.size().leased == 0


def test_work_rejects_a_job_whose_result_is_too_large_with_the_cause(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", max_deliveries=3, retry_backoff_ms=0)
    queue.put(b"1", want_result=True)
    calls: list[bytes] = []

    def handle(job: Any) -> bytes:
        calls.append(job.value)
        return b"x" * (MAX_RESULT_BYTES + 1)

    assert queue.work(handle, max_jobs=1, idle_ms=5000) == 1
    assert calls == [b"1"]
    assert "65537 bytes" in queue.dead.list()[0].reason


@pytest.mark.slow
def test_many_large_results_go_in_several_calls(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q")
    queue.put_many([b"%d" % number for number in range(60)], want_result=True)
    jobs = _take(queue, 60)
    told = _together(rq, *[lambda job=job: job.done(b"x" * 30_000) for job in jobs])
    assert told == [None] * 60
    assert queue.size().leased == 0


def test_what_a_replica_refuses_is_told_to_whoever_said_it(rq: memory.MemoryQueue) -> None:
    """Also where no check of this client's has seen that it would."""
    queue = rq.queue("q")
    queue.put_many([b"%d" % number for number in range(5)])
    jobs = _take(queue, 5)
    too_late = 2**60
    told = _together(
        rq,
        jobs[0].ack,
        lambda: jobs[1].nack(delay_ms=too_late),
        jobs[2].ack,
        lambda: jobs[3].nack(delay_ms=10**30),
        jobs[4].ack,
    )
    assert [type(each) for each in told] == [
        type(None),
        InvalidInputError,
        type(None),
        InvalidInputError,
        type(None),
    ]
    with pytest.raises(InvalidInputError, match="delay_ms"):
        jobs[1].nack(delay_ms=-5)


def test_whoever_waits_is_told_whatever_happens(rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = rq.queue("q")
    queue.put_many([b"1", b"2", b"3"])
    first, second, third = _take(queue, 3)
    worker = first.grant.worker

    async def broken(*_: Any) -> Any:
        raise RuntimeError("nobody has thought of this")

    with monkeypatch.context() as patched:
        patched.setattr(worker, "_say", broken)
        told = _together(rq, first.ack, second.ack)
    assert [type(each) for each in told] == [OutcomeUnknownError] * 2
    third.ack()
