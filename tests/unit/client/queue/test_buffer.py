"""The buffer of a worker: those who wait first, and nothing kept that nobody will come to soon."""

from __future__ import annotations

from typing import Any

from rayqueue.client.queue.buffer import BLOCKED_S, HAND_BACK_S, LINGER_S, Buffer, Waiter
from rayqueue.client.queue.job import Grant, Job


def _jobs(first: int, count: int, partition: int = 0) -> list[Job[Any, Any]]:
    grant = Grant(None, partition, 1)  # type: ignore[arg-type]  # there is no worker here
    return [Job(grant, offset, b"v", None, (), 0, 1, 0, False, settled=True) for offset in range(first, first + count)]


def _offsets(jobs: Any) -> list[int]:
    return [job.offset for job in jobs]


def _quick(buffer: Buffer, now_s: float = 0.0) -> float:
    """A worker that does a job in a millisecond, and so gets about 30 ahead."""
    for offset in range(20):
        buffer.add(_jobs(offset, 1), 1, now_s)
        found, _ = buffer.ask(1, now_s)
        assert _offsets(found) == [offset]
        now_s += 0.001
    return now_s


def test_those_who_wait_are_served_in_order_and_the_rest_is_kept() -> None:
    buffer = Buffer(10**6)
    first, more = buffer.ask(2, 0.0)
    second, _ = buffer.ask(2, 0.0)
    assert isinstance(first, Waiter)
    assert isinstance(second, Waiter)
    assert more
    assert buffer.wanted(0.0) == (4, 4)
    buffer.add(_jobs(0, 5), 5, 0.0)
    assert _offsets(buffer.leave(first, 0.0)) == [0, 1]
    assert _offsets(buffer.leave(second, 0.0)) == [2, 3]
    assert _offsets(buffer.ask(9, 0.0)[0]) == [4]


def test_what_nobody_asked_for_is_handed_back_soon() -> None:
    buffer = Buffer(10**6)
    waiter, _ = buffer.ask(1, 0.0)
    assert isinstance(waiter, Waiter)
    assert buffer.leave(waiter, 0.0) == []
    buffer.add(_jobs(0, 3), 3, 1.0)  # they came too late for it
    assert buffer.due_s() == 1.0 + LINGER_S
    assert buffer.hand_back(1.0) == []
    assert _offsets(buffer.hand_back(1.0 + LINGER_S)) == [0, 1, 2]
    assert buffer.due_s() is None


def test_a_worker_that_asks_keeps_what_it_does_soon_and_one_that_does_not_keeps_nothing() -> None:
    buffer = Buffer(10**6)
    now_s = _quick(buffer)
    _, wanted = buffer.wanted(now_s)
    assert 25 <= wanted <= 30
    buffer.add(_jobs(100, 200), 200, now_s)
    for _ in range(150):  # it goes on, and so long that what came is old
        now_s += 0.0015
        buffer.ask(1, now_s)
    back = buffer.hand_back(now_s)
    assert 0 < len(back) < 50  # of the 50 that are left
    assert _offsets(back)[-1] == 299  # the last ones
    due_s = buffer.due_s()
    assert due_s is not None
    assert due_s > now_s  # what is kept though it is old is looked at again, but not at once
    assert _offsets(buffer.hand_back(now_s + 2 * HAND_BACK_S))[0] == 250


def test_a_worker_that_waits_for_an_answer_is_given_longer() -> None:
    buffer = Buffer(10**6)
    now_s = _quick(buffer)
    buffer.add(_jobs(100, 10), 10, now_s)
    with buffer.blocked():
        assert buffer.hand_back(now_s + 2 * HAND_BACK_S) == []
        assert len(buffer.hand_back(now_s + BLOCKED_S)) == 10


def test_the_jobs_of_one_partition_or_all_can_be_taken_out() -> None:
    buffer = Buffer(10**6)
    buffer.add(_jobs(0, 2, partition=0), 2, 0.0)
    buffer.add(_jobs(5, 2, partition=1), 2, 0.0)
    assert _offsets(buffer.hand_back(0.0, of=1)) == [5, 6]
    assert _offsets(buffer.hand_back(0.0, everything=True)) == [0, 1]


def test_a_process_without_a_processor_is_spared() -> None:
    buffer = Buffer(10**6)
    buffer.add(_jobs(0, 2), 2, 0.0)
    buffer.spare(3.0)
    assert buffer.due_s() == 3.0 + HAND_BACK_S + LINGER_S
