"""Work queues on the queue in memory: the real client, service and state machine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest

from rayqueue.client.queue.buffer import HAND_BACK_S
from rayqueue.client.queue.detached import DetachedQueue
from rayqueue.client.queue.handles import JobHandle
from rayqueue.client.queue.job import JobId
from rayqueue.config import Settings
from rayqueue.errors import (
    ClosedError,
    InvalidInputError,
    JobFailedError,
    LeaseLostError,
    OutcomeUnknownError,
    ResultGoneError,
    TopicDiffersError,
    TopicKindError,
    UnknownJobError,
    UnknownTopicError,
)
from rayqueue.testing import memory, wait_for


@pytest.fixture
def rq() -> Iterator[memory.MemoryQueue]:
    with memory.connect() as made:
        yield made


def _size(queue: Any) -> tuple[int, int, int, int]:
    size = queue.size()
    return size.ready, size.leased, size.delayed, size.dead


# -- the way of a job ----------------------------------------------------------------------------


def test_a_job_is_put_given_out_and_acknowledged(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q")
    handle = queue.put(b"v", key=b"k", headers={"h": b"x"})
    assert _size(queue) == (1, 0, 0, 0)
    (job,) = queue.get()
    assert (job.value, job.key, job.headers, job.deliveries) == (b"v", b"k", (("h", b"x"),), 1)
    assert job.id == handle.id
    assert handle.state().state == "leased"
    assert queue.get(timeout_ms=0) == []
    job.ack()
    assert _size(queue) == (0, 0, 0, 0)
    assert handle.state().state == "gone"


def test_settings_are_made_once_and_differences_are_told(rq: memory.MemoryQueue) -> None:
    rq.queue("q", lease_ms=5000, max_deliveries=2)
    rq.queue("q")
    rq.queue("q", lease_ms=5000)
    with pytest.raises(TopicDiffersError, match="lease_ms is 5000, not 6000"):
        rq.queue("q", lease_ms=6000)
    with pytest.raises(UnknownTopicError):
        rq.queue("other", create=False)
    rq.create_topic("log")
    with pytest.raises(TopicDiffersError):
        rq.queue("log")
    with pytest.raises(TopicKindError):
        rq.queue("log", create=False)


def test_many_jobs_are_put_as_columns_and_taken_in_batches(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", partitions=4, model="json")
    handles = queue.put_many([{"n": number} for number in range(500)])
    assert len(handles) == 500
    assert len(set(handles.ids)) == 500
    seen: list[int] = []
    while len(seen) < 500:
        jobs = queue.get(100, timeout_ms=5000)
        assert 0 < len(jobs) <= 100
        seen += [job.value["n"] for job in jobs if job.value is not None]
        queue.ack(jobs)
    assert sorted(seen) == list(range(500))
    assert _size(queue) == (0, 0, 0, 0)


def test_a_failed_job_is_tried_again_and_then_dead_with_its_history(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", max_deliveries=3, model="str")
    put = queue.put("poison")
    for attempt in (1, 2, 3):
        (job,) = queue.get(timeout_ms=5000)
        assert job.deliveries == attempt
        job.nack(delay_ms=0, reason=f"no {attempt}", traceback="Traceback ...")
    assert queue.get(timeout_ms=0) == []
    assert _size(queue) == (0, 0, 0, 1)
    (dead,) = queue.dead.list()
    assert (dead.id, dead.value, dead.deliveries, dead.reason, dead.traceback) == (
        put.id,
        "poison",
        3,
        "no 3",
        "Traceback ...",
    )
    assert [each.reason for each in dead.history] == ["no 1", "no 2", "no 3"]
    assert queue.dead.get(dead.id) == dead
    assert queue.dead.redrive(dead.id) == 1
    (job,) = queue.get(timeout_ms=5000)
    assert job.value == "poison"
    job.reject("never")
    assert queue.dead.get(str(put.id)).reason == "never"
    assert queue.dead.purge() == 0, "none is named"
    assert queue.dead.purge(all=True) == 1
    assert queue.dead.list() == []
    with pytest.raises(UnknownJobError):
        queue.dead.get(put.id)


def test_dead_letters_are_listed_over_partitions_page_by_page(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", partitions=3, max_deliveries=1)
    queue.put_many([b"%d" % number for number in range(30)], keys=[b"%d" % number for number in range(30)])
    left = 30
    while left:
        jobs = queue.get(30, timeout_ms=5000)
        queue.reject(jobs, reason="no")
        left -= len(jobs)
    ids: list[JobId] = []
    while page := queue.dead.list(7, after=ids[-1] if ids else None):
        ids += [each.id for each in page]
    assert len(set(ids)) == 30
    assert {each.partition for each in ids} == {0, 1, 2}
    assert queue.dead.redrive(all=True) == 30
    assert _size(queue)[0] == 30


def test_a_result_that_is_gone_is_told_from_one_that_never_was(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", result_ttl_ms=1)
    ended, plain = queue.put(b"1", want_result=True), queue.put(b"2")
    queue.get(timeout_ms=5_000)[0].done(b"r")
    wait_for(lambda: rq._queue.cluster.partitions("q", 0)[0].partition.jobs.counts.result_bytes == 0, "it to be gone")  # type: ignore[union-attr]
    with pytest.raises(ResultGoneError, match="has ended"):
        ended.result(timeout=5)
    for never in (plain, JobHandle(queue, JobId(0, 99))):
        with pytest.raises(UnknownJobError) as raised:
            never.result(timeout=5)
        assert type(raised.value) is UnknownJobError


def test_a_worker_that_only_extends_is_known_to_a_new_leader(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", lease_ms=600)
    queue.put(b"long")
    (job,) = queue.get()
    (group,) = rq._queue.cluster.partitions("q", 0)
    jobs = group._service.jobs  # type: ignore[attr-defined]

    def change(_: Any) -> None:
        jobs._workers.clear()  # as another process has it
        jobs._client_of.clear()

    rq._do(change)
    wait_for(lambda: job.grant.worker.id in jobs._client_of, "the worker to extend its lease")


@pytest.mark.slow
def test_dead_letters_may_be_named_by_the_thousand(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", partitions=2)
    handles = queue.put_many([b"x"] * 2500)
    queue.reject(_take(queue, 2500))
    assert queue.dead.purge(*handles.ids) == 2500


def test_an_ack_that_is_too_late_counts_unless_somebody_else_has_the_job(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", lease_ms=150, max_lease_ms=150, retry_backoff_ms=0)
    queue.put(b"1")
    (late,) = queue.get()
    wait_for(lambda: queue.size().leased == 0, "the lease to end")
    late.ack()
    assert _size(queue) == (0, 0, 0, 0)
    queue.put(b"2")
    (late,) = queue.get()
    with rq.queue("q") as other:
        jobs = other.get(timeout_ms=10_000)
        assert jobs[0].deliveries == 2
        with pytest.raises(LeaseLostError):
            late.ack()
        jobs[0].ack()


def test_an_ack_without_waiting_is_committed_by_flush_which_tells_what_was_lost(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", partitions=3)
    queue.put_many([b"%d" % number for number in range(300)])
    done = 0
    while done < 300:
        jobs = queue.get(50, timeout_ms=10_000)
        queue.ack(jobs, wait=False)
        assert all(job.settled for job in jobs)
        done += len(jobs)
    queue.flush()
    assert _size(queue) == (0, 0, 0, 0)

    queue = rq.queue("short", lease_ms=200, max_lease_ms=200, retry_backoff_ms=0)
    queue.put(b"late")
    (late,) = queue.get()
    with rq.queue("short") as other:
        (job,) = other.get(timeout_ms=10_000)
        late.ack(wait=False)
        with pytest.raises(LeaseLostError, match=f"job {late.offset} "):
            queue.flush()
        queue.flush()  # it was told
        job.ack()


@pytest.mark.slow
def test_no_end_of_a_job_has_to_be_waited_for(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", model="json", result_model="json")
    answer = queue.put(0, want_result=True)
    queue.put_many([1, 2, 3, 4])
    jobs = {job.value: job for job in _take(queue, 5)}
    jobs[0].done("zero", wait=False)
    jobs[1].nack(delay_ms=60_000, reason="later", wait=False)
    queue.nack(jobs[2], delay_ms=60_000, wait=False)
    jobs[3].reject("no", wait=False)
    queue.reject([jobs[4]], reason="no", wait=False)
    assert all(job.settled for job in jobs.values())
    queue.flush()
    assert _size(queue) == (0, 0, 2, 2)
    assert answer.result(timeout_ms=5000) == "zero"

    async def lost() -> None:
        short = await rq.queue_async("short", lease_ms=200, max_lease_ms=200, retry_backoff_ms=0)
        for end in ("done", "nack", "reject"):
            await short.put_async(b"x")
            (late,) = await short.get_async(timeout_ms=10_000)
            async with await rq.queue_async("short") as other:
                (job,) = await other.get_async(timeout_ms=10_000)
                ways: dict[str, Any] = {
                    "done": partial(late.done_async, b"x"),
                    "nack": late.nack_async,
                    "reject": late.reject_async,
                }
                await ways[end](wait=False)
                with pytest.raises(LeaseLostError, match=f"job {late.offset} .* this (ack|{end}) does not count"):
                    await short.flush_async()
                await short.flush_async()  # it was told
                await job.ack_async()
        assert (await short.size_async()).dead == 0

    asyncio.run(lost())


def _take(queue: Any, count: int) -> list[Any]:
    jobs: list[Any] = []
    while len(jobs) < count:
        jobs += queue.get(count - len(jobs), timeout_ms=10_000)
    return jobs


def test_flush_waits_for_what_was_said_before_it_and_not_for_others(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q")
    queue.put_many([b"x"] * 2000)
    jobs = queue.get(1000, timeout_ms=5000)
    enough = threading.Event()

    def go_on() -> None:
        while not enough.is_set() and (some := queue.get(1, timeout_ms=20_000)):
            queue.ack(some, wait=False)
            queue.put(b"more", wait=False)

    beside = threading.Thread(target=go_on)
    beside.start()
    try:
        queue.ack(jobs[:500], wait=False)
        queue.flush(timeout_ms=20_000)
        assert rq.queue("q").state(jobs[0].id).state == "gone"
        assert beside.is_alive()
    finally:
        enough.set()
        beside.join()


def test_the_same_job_twice_in_one_ack_is_one(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q")
    queue.put_many([b"1", b"2", b"3"])
    one, two, three = queue.get(3, timeout_ms=5000)
    queue.ack([three, one], one, two)
    assert _size(queue) == (0, 0, 0, 0)
    with pytest.raises(InvalidInputError, match="what get"):
        queue.ack([b"1"])  # type: ignore[list-item]


@pytest.mark.slow
def test_a_lease_is_extended_while_the_job_is_in_use_and_not_when_it_is_let_go(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", lease_ms=300, retry_backoff_ms=0)
    queue.put(b"long")
    (job,) = queue.get()
    time.sleep(1.2)
    assert rq.queue("q").get(timeout_ms=0) == []
    assert job.extend(60_000) > 50_000
    del job
    gc.collect()
    (again,) = queue.get(timeout_ms=5000)
    assert again.deliveries == 2
    again.ack()


@pytest.mark.slow
def test_max_lease_ms_ends_what_hangs(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", lease_ms=200, max_lease_ms=600, retry_backoff_ms=0)
    queue.put(b"hangs")
    (job,) = queue.get()
    with rq.queue("q") as other:
        found = other.get(timeout_ms=10_000)
        assert found[0].deliveries == 2
        with pytest.raises(LeaseLostError):
            job.ack()


def test_what_a_worker_has_comes_again_at_once_when_it_is_closed(rq: memory.MemoryQueue) -> None:
    queue, other = rq.queue("q", retry_backoff_ms=0), rq.queue("q")
    queue.put_many([b"1", b"2", b"3"])
    jobs = queue.get(3)
    queue.close()
    found = other.get(3, timeout_ms=5000)
    assert len(found) == len(jobs)
    with pytest.raises(LeaseLostError):
        jobs[0].ack()
    assert queue.get(timeout_ms=0) == []  # a handle that is used again is another worker


def test_the_leases_of_a_broken_connection_end_at_once(rq: memory.MemoryQueue) -> None:
    queue = rq.another().queue("q", retry_backoff_ms=0)
    queue.put(b"1")
    (_job,) = queue.get()
    rq.disconnect("q")
    (again,) = rq.queue("q").get(timeout_ms=5000)
    assert again.deliveries == 2


# -- options -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_delays_and_times(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", model="str")
    queue.put("later", delay_ms=60_000)
    queue.put("at", deliver_at=datetime.now(timezone.utc) + timedelta(milliseconds=400))
    queue.put("soon", delay_ms=200)
    queue.put("now")
    began_s = time.monotonic()
    found: list[Any] = []
    while len(found) < 3:
        jobs = queue.get(timeout_ms=5000)
        found += [job.value for job in jobs]
        queue.ack(jobs)
    assert set(found) == {"now", "at", "soon"}
    assert time.monotonic() - began_s >= 0.3
    assert queue.size().delayed == 1
    with pytest.raises(InvalidInputError, match="time zone"):
        queue.put("x", deliver_at=datetime(2030, 1, 1))  # noqa: DTZ001


def test_a_time_to_live(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q")
    queue.put(b"short", ttl_ms=50)
    time.sleep(0.2)
    assert queue.get(timeout_ms=50) == []
    wait_for(lambda: queue.size().dead == 1, "the job to be given up")


def test_the_same_dedupe_id_is_put_once_and_answered_with_the_first(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", partitions=3)
    first = queue.put(b"1", dedupe_id="order-7")
    second = queue.put(b"2", dedupe_id="order-7")
    assert second.id == first.id
    assert (first.duplicate, second.duplicate) == (False, True)
    handles = queue.put_many([b"a", b"b", b"c"], dedupe_ids=["order-7", "order-8", "order-8"])
    assert handles.ids[0] == first.id
    assert handles.ids[1] == handles.ids[2]
    assert _size(queue) == (2, 0, 0, 0)


@pytest.mark.parametrize("dedupe_ids", [None, ["a", "b", "a"]])
def test_ids_of_many_jobs_can_be_awaited(rq: memory.MemoryQueue, dedupe_ids: list[str] | None) -> None:
    async def main() -> None:
        queue = rq.queue("q", partitions=3)
        handles = queue.put_many([b"1", b"2", b"3"], dedupe_ids=dedupe_ids, wait=False)
        await handles.wait_async()
        ids = await handles.ids_async()
        assert ids == await asyncio.to_thread(lambda: handles.ids)
        assert len(set(ids)) == (3 if dedupe_ids is None else 2)

    asyncio.run(main())


def test_priorities_go_over_the_whole_backlog(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", lanes=3)
    queue.put_many([b"low"] * 50)
    queue.put(b"high", priority=2)
    (job,) = queue.get()
    assert (job.value, job.priority) == (b"high", 2)


def test_jobs_of_one_key_one_at_a_time_and_in_order(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", ordered_by_key=True, model="str", key_model="str")
    queue.put_many(["1", "2", "3"], keys=["a", "a", "a"])
    queue.put("other", key="b")
    first = {job.value: job for job in queue.get(10)}
    assert set(first) == {"1", "other"}
    assert queue.get(timeout_ms=0) == []
    first["1"].ack()
    (second,) = queue.get(timeout_ms=5000)
    assert second.value == "2"


def test_results(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", model="json", result_model="json", max_deliveries=1)
    good, plain, bad = (queue.put(number, want_result=True) for number in range(3))
    with pytest.raises(OutcomeUnknownError):
        good.result(timeout_ms=10)
    for job in sorted(queue.get(3), key=lambda job: job.id):
        assert job.wants_result
        if job.value == 0:
            job.done({"sum": 7})
        elif job.value == 1:
            job.ack()
        else:
            job.reject("cannot", traceback="Traceback")
    assert good.result() == {"sum": 7}
    assert plain.result() is None
    with pytest.raises(JobFailedError, match="cannot"):
        bad.result()
    with pytest.raises(UnknownJobError):
        queue.put(5).result(timeout_ms=1000)


def test_a_result_is_waited_for_in_another_thread(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", result_model="str")
    handle = queue.put(b"1", want_result=True)
    threading.Timer(0.2, lambda: queue.get()[0].done("yes")).start()
    assert handle.result(timeout=10) == "yes"


def test_cancel_peek_and_state(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", model="str")
    one, two = queue.put("one"), queue.put("two", delay_ms=60_000)
    assert [peeked.value for peeked in queue.peek(5)] == ["one"]
    assert two.state().state == "delayed"
    assert two.cancel()
    assert not two.cancel()
    (job,) = queue.get()
    assert not one.cancel()  # somebody works on it
    job.ack()


# -- values --------------------------------------------------------------------------------------


@dataclass
class Order:
    number: int


def test_models_and_a_job_that_nobody_can_read_is_a_dead_letter(rq: memory.MemoryQueue) -> None:
    rq.queue("q").put(b"not json")
    queue = rq.queue("q", model=Order)
    queue.put(Order(7))
    (job,) = queue.get(timeout_ms=5000)
    assert job.value == Order(7)
    wait_for(lambda: queue.dead.count() == 1, "the other one to be set aside")
    (dead,) = queue.dead.list()
    assert dead.value == b"not json"
    assert "is no Order" in dead.reason


# -- loops ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_loop_acknowledges_and_gives_back_what_it_is_left_with(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", model="json", retry_backoff_ms=0)
    queue.put_many([1, 2, 3])

    def fails_at_two() -> None:
        for job in queue:
            if job.value == 2:
                raise ValueError("two")

    with pytest.raises(ValueError, match="two"):
        fails_at_two()
    gc.collect()
    again = []
    for job in queue:
        again.append((job.value, job.deliveries))
        if len(again) == 2:
            job.ack()
            break
    queue.flush()
    assert sorted(again) == [(2, 2), (3, 1)]
    assert _size(queue) == (0, 0, 0, 0)


def test_what_a_loop_was_left_with_says_where(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", max_deliveries=1)
    queue.put_many([b"raises", b"breaks", b"with"])

    def fails(job: Any) -> None:
        raise ValueError("deep inside")

    def loop() -> None:
        for job in queue:
            fails(job)

    with pytest.raises(ValueError, match="deep inside"):
        loop()
    for _ in queue:
        break

    def traced() -> None:
        for job in queue:
            with job:
                fails(job)

    with pytest.raises(ValueError, match="deep inside"):
        traced()
    queue.flush()
    reasons = {each.value: each.reason for each in queue.dead.list()}
    line = fails.__code__.co_firstlineno
    assert f"{__file__}:{line + 5}, in loop," in reasons[b"raises"]
    assert f"{__file__}:{line + 10}, in test_what" in reasons[b"breaks"]
    assert reasons[b"with"] == "ValueError: deep inside"


def test_what_an_async_loop_was_left_with_says_where(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        queue = await rq.queue_async("q", max_deliveries=1)
        await queue.put_many_async([b"raises", b"breaks", b"cancelled", b"closed", b"done"])

        async def fails(job: Any) -> None:
            raise ValueError("deep inside")

        async def loop() -> None:
            async for job in queue:
                await fails(job)

        with pytest.raises(ValueError, match="deep inside"):
            await loop()
        async for _ in queue:
            break
        begun = asyncio.Event()

        async def stops() -> None:
            async for _ in queue:
                begun.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(stops())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        jobs: Any = aiter(queue)
        await anext(jobs)
        await jobs.aclose()
        got = []
        async for job in queue:
            got.append(job.value)
            await job.ack_async()
            break
        await queue.flush_async()
        assert got == [b"done"]
        reasons = {each.value: each.reason for each in await queue.dead.list_async()}
        line = fails.__code__.co_firstlineno
        assert f"{__file__}:{line + 5}, in loop," in reasons[b"raises"]
        assert f"{__file__}:{line + 10}, in main," in reasons[b"breaks"]
        assert f"{__file__}:{line + 16}, in stops," in reasons[b"cancelled"]
        assert reasons[b"closed"] == "the loop over the queue was left before the job was done"

    asyncio.run(main())


def test_an_async_loop_acknowledges_what_it_has_done(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        queue = await rq.queue_async("q", model="json", retry_backoff_ms=0)
        await queue.put_many_async([1, 2, 3])
        seen = []
        async for job in queue:
            seen.append(job.value)
            if len(seen) == 3:
                break
        await queue.flush_async()
        assert seen == [1, 2, 3]
        (again,) = await queue.get_async(timeout_ms=5000)
        assert (again.value, again.deliveries) == (3, 2)
        await again.ack_async()
        assert (await queue.size_async()).leased == 0

    asyncio.run(main())


def test_work_keeps_reasons_and_tracebacks_and_goes_on(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", model="json", result_model="json", max_deliveries=1)
    results = [queue.put(number, want_result=True) for number in range(4)]

    def handle(job: Any) -> int:
        if job.value == 2:
            raise ValueError("two is bad")
        return int(job.value) * 10

    assert queue.work(handle, max_jobs=4, idle_ms=5000) == 4
    assert [each.result() for number, each in enumerate(results) if number != 2] == [0, 10, 30]
    (dead,) = queue.dead.list()
    assert dead.reason == "ValueError: two is bad"
    assert "in handle" in dead.traceback
    assert queue.work(handle, idle_ms=50) == 0


@pytest.mark.slow
def test_many_workers_do_each_job_once(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", partitions=3, model="json")
    queue.put_many(list(range(2000)))
    done: list[Any] = []

    def work() -> None:
        with rq.another().queue("q", model="json") as mine:
            mine.work(lambda job: done.append(job.value), idle_ms=1000)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == list(range(2000))
    assert _size(queue) == (0, 0, 0, 0)


@pytest.mark.slow
def test_what_was_taken_ahead_is_handed_back_uncounted(rq: memory.MemoryQueue) -> None:
    queue, other = rq.queue("q", partitions=2), rq.queue("q")
    queue.put_many([b"x"] * 400)
    for _ in range(60):
        (job,) = queue.get(timeout_ms=5000)
        job.ack()
    time.sleep(3 * HAND_BACK_S)
    wait_for(lambda: queue.size().leased == 0, "what was taken ahead to be handed back")
    assert queue.size().ready == 340
    assert {job.deliveries for job in other.get(340, timeout_ms=5000)} == {1}


@pytest.mark.slow
def test_a_waiting_worker_of_many_partitions_asks_once_in_each(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", partitions=8)
    assert queue.get(timeout_ms=300) == []
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.extend(queue.get(timeout_ms=20_000)))
    waiting.start()
    time.sleep(0.2)
    rq.queue("q").put(b"x")
    waiting.join(20)
    assert [job.value for job in got] == [b"x"]


# -- giving up -------------------------------------------------------------------------------------


def test_a_closed_handle_takes_no_job_with_it(rq: memory.MemoryQueue) -> None:
    queue, other = rq.queue("q", lease_ms=600_000), rq.queue("q")
    got: list[Any] = []

    def wait() -> None:
        with contextlib.suppress(ClosedError):
            got.extend(queue.get(timeout_ms=60_000))

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for(lambda: bool(queue._worker and queue._worker._parked), "it to wait")
    queue.close()
    waiting.join(20)
    other.put(b"x")
    (job,) = other.get(timeout_ms=20_000)
    assert (got, job.deliveries) == ([], 1)


def test_who_gives_up_waiting_stands_in_nobodys_way(rq: memory.MemoryQueue) -> None:
    queue, other = rq.queue("q", lease_ms=600_000), rq.queue("q")
    assert queue.get(timeout_ms=50) == []
    wait_for(lambda: queue._worker is not None and not queue._worker._takes.under_way, "its take to be withdrawn")
    other.put(b"x")
    assert _size(other) == (1, 0, 0, 0)
    (job,) = other.get(timeout_ms=20_000)
    assert job.deliveries == 1
    job.ack()
    other.put(b"y")
    (mine,) = queue.get(timeout_ms=20_000)  # and may come back
    assert mine.value == b"y"


@pytest.mark.slow
def test_a_get_that_is_cancelled_gives_back_what_it_was_given(rq: memory.MemoryQueue) -> None:
    queue, other = rq.queue("q", lease_ms=600_000), rq.queue("q")

    async def cancelled() -> None:
        for _ in range(20):
            waiting = asyncio.ensure_future(queue.get_async(timeout_ms=None))
            await asyncio.sleep(0.01)
            putting = asyncio.ensure_future(other.put_async(b"x"))
            await asyncio.sleep(0.002)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                for job in await waiting:
                    await job.ack_async()
                    found.append(job)
            await putting

    found: list[Any] = []
    asyncio.run(cancelled())
    while len(found) < 20:
        jobs = other.get(20, timeout_ms=20_000)
        assert jobs
        found += jobs
        other.ack(jobs)
    assert {job.deliveries for job in found} == {1}


def _unheard(rq: memory.MemoryQueue, queue: Any, ask: Any) -> Any:
    """Ask for jobs, and let the answers get lost until that is given up. What is asked, in a thread."""
    (group,) = rq._queue.cluster.partitions("q", 0)
    jobs: Any = group._service.jobs  # type: ignore[attr-defined]
    reply, jobs._reply = jobs._reply, lambda *_: None
    asked = ThreadPoolExecutor(1).submit(ask)
    wait_for(lambda: jobs._queue.counts.leased == 1, "the lease")
    wait_for(lambda: not queue or _paused(queue), "the answer to be missed", 10)
    return asked, jobs, lambda: setattr(jobs, "_reply", reply)


def _paused(queue: Any) -> bool:
    return any(each.state.value == "paused" for each in queue._worker._takes._partitions)


_SOON_MISSED = Settings(client={"call_timeout_ms": 300, "retry_min_ms": 1, "retry_max_ms": 5})


def test_a_lease_whose_answer_was_lost_is_asked_for_again() -> None:
    with memory.connect(settings=_SOON_MISSED) as rq:
        queue = rq.queue("q", lease_ms=600_000)
        queue.put(b"x")
        asked, _, heard = _unheard(rq, queue, lambda: queue.get(timeout_ms=60_000))
        heard()
        (job,) = asked.result(10)
        assert (job.value, job.deliveries) == (b"x", 1)
        job.ack()
        assert _size(queue) == (0, 0, 0, 0)


@pytest.mark.slow
def test_a_lease_whose_answer_was_lost_goes_back_if_nobody_wants_it_any_more() -> None:
    with memory.connect(settings=_SOON_MISSED) as rq:
        queue, other = rq.queue("q", lease_ms=600_000), rq.queue("q")
        queue.put(b"x")
        asked, jobs, heard = _unheard(rq, queue, lambda: queue.get(timeout_ms=1_000))
        assert asked.result(10) == []
        heard()
        (job,) = other.get(timeout_ms=20_000)
        assert (job.deliveries, jobs._queue.counts.leased) == (1, 1)


def test_a_handle_that_is_closed_leaves_no_lease_behind_whose_answer_was_lost() -> None:
    with memory.connect(settings=_SOON_MISSED) as rq:
        queue = rq.queue("q", lease_ms=600_000)
        queue.put(b"x")
        asked, jobs, heard = _unheard(rq, queue, lambda: queue.get(timeout_ms=60_000))
        heard()
        queue.close()
        with contextlib.suppress(ClosedError):
            asked.result(10)
        wait_for(lambda: jobs._queue.counts.leased == 0, "it to be there again")


def test_a_detached_lease_whose_answer_was_lost_is_given_back() -> None:
    with memory.connect(settings=_SOON_MISSED) as rq:
        rq.queue("q", lease_ms=600_000).put(b"x")
        detached = DetachedQueue(rq.routes, rq.settings, "q", "gateway")
        asked, jobs, heard = _unheard(rq, None, lambda: rq.io.call(detached.take(1, wait_ms=0)))
        with contextlib.suppress(OutcomeUnknownError):  # or none came in time
            assert asked.result(10) == []
        heard()
        wait_for(lambda: jobs._queue.counts.leased == 0, "it to be there again")


# -- more partitions -------------------------------------------------------------------------------


def test_partitions_that_are_added_are_found_by_all() -> None:
    settings = Settings(consumer={"refresh_ms": 50})
    with memory.connect(settings=settings) as rq:
        queue, other = rq.queue("q", model="json"), rq.another().queue("q", model="json")
        queue.put(0)
        (job,) = other.get(timeout_ms=20_000)
        job.ack()
        rq.alter_topic("q", partitions=4)
        put = [rq.another().queue("q", model="json").put(number, key=f"{number}".encode()) for number in range(40)]
        assert {each.id.partition for each in put} == {0, 1, 2, 3}
        wait_for(lambda: queue.size().ready == 40, "all of them to be counted")
        done: set[Any] = set()
        while len(done) < 40:
            jobs = other.get(10, timeout_ms=20_000)
            assert jobs
            done |= {job.value for job in jobs}
            other.ack(jobs)
        assert done == set(range(40))
        rq.queue("ordered", ordered_by_key=True)
        with pytest.raises(InvalidInputError, match="ordered_by_key keeps its partitions"):
            rq.alter_topic("ordered", partitions=2)


def test_a_dedupe_id_is_put_once_though_partitions_are_added() -> None:
    settings = Settings(consumer={"refresh_ms": 50})
    with memory.connect(settings=settings) as rq:
        queue = rq.queue("q", partitions=2)
        names = [f"order-{number}" for number in range(40)]
        first = [queue.put(b"x", dedupe_id=name, key=b"a").id for name in names]
        assert {each.partition for each in first} == {0, 1}
        for partitions in (5, 8):
            rq.alter_topic("q", partitions=partitions)
            again = rq.another().queue("q")  # it knows all partitions
            assert [again.put(b"y", dedupe_id=name, key=b"other").id for name in names] == first
            assert [each.id for each in again.put_many([b"z"] * 40, dedupe_ids=names)] == first
            assert [queue.put(b"y", dedupe_id=name).duplicate for name in names] == [True] * 40
            assert {again.put(b"", key=b"%d" % key).id.partition for key in range(60)} == set(range(partitions))
        assert queue.size().ready == 160


def test_a_dedupe_id_of_a_queue_that_is_ordered_by_key_goes_with_its_key(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", partitions=4, ordered_by_key=True)
    placed = {queue.put(b"x", key=b"k", dedupe_id=f"{number}").id.partition for number in range(20)}
    assert len(placed) == 1


# -- trouble ---------------------------------------------------------------------------------------


def test_nothing_is_lost_when_leaders_change(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", partitions=2, model="json", retry_backoff_ms=0, lease_ms=2000)
    queue.put_many(list(range(300)))
    done: set[Any] = set()
    changes = 0
    while len(done) < 300:
        for job in queue.get(10, timeout_ms=5000):
            assert job.value not in done  # an acknowledged job never comes back
            with contextlib.suppress(LeaseLostError):  # its connection broke, and it was given out again
                job.ack()
                done.add(job.value)
        if len(done) > 60 * changes:
            rq.change_leader("q", changes % 2)
            changes += 1
    assert changes >= 4
    wait_for(lambda: _size(queue) == (0, 0, 0, 0), "all to be gone")


# -- awaiting --------------------------------------------------------------------------------------


def test_everything_can_be_awaited(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        queue = await rq.queue_async("q", model="json", result_model="json", max_deliveries=1)
        handle = await queue.put_async(1, want_result=True)
        await queue.put_many_async([2, 3, 4])

        async def answer() -> None:
            (job,) = await queue.get_async(timeout_ms=5000)
            await job.done_async("one")

        waiting = asyncio.create_task(answer())
        assert await handle == "one"
        await waiting
        (job,) = await queue.get_async()
        async with job:
            assert await job.extend_async() > 0
        (job,) = await queue.get_async()
        with pytest.raises(ValueError, match="three"):
            async with job:
                raise ValueError("three")
        async for job in queue:
            assert job.value == 4
            await job.reject_async("no")
            break
        assert (await queue.size_async()).dead == 2
        assert {each.reason for each in await queue.dead.list_async()} == {"ValueError: three", "no"}
        assert await queue.dead.redrive_async(all=True) == 2
        seen: list[int] = []

        async def handle_one(job: Any) -> None:
            seen.append(job.value)

        assert await queue.work_async(handle_one, concurrency=2, idle_ms=300) == 2
        assert sorted(seen) == [3, 4]
        await queue.close_async()

    asyncio.run(main())


def test_a_get_that_is_given_up_loses_no_job(rq: memory.MemoryQueue) -> None:
    async def main() -> None:
        queue = await rq.queue_async("q")
        waiting = asyncio.create_task(queue.get_async(timeout_ms=None))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await queue.put_async(b"x")
        (job,) = await queue.get_async(timeout_ms=5000)
        assert job.deliveries == 1
        await job.ack_async()

    asyncio.run(main())


def test_whoever_waits_for_a_cancelled_jobs_result_is_told_at_once(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", result_model="json")
    handle = queue.put(b"x", want_result=True, delay_ms=3_600_000)
    failed: list[JobFailedError] = []

    def wait() -> None:
        try:
            handle.result(timeout=60)
        except JobFailedError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    assert handle.cancel()
    waiting.join(20)
    assert [error.details["reason"] for error in failed] == ["cancelled"]
