"""Work queues on a real Ray: handles in tasks, killed workers, a held interpreter lock, and ``rayqueue.Queue``."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rayqueue import Empty, Full, JobQueue, Queue
from rayqueue.client.handle import RayQueue
from rayqueue.errors import LeaseLostError
from tests.integration.consumers import running_queue

pytestmark = pytest.mark.timeout(240)

HELD_S = 2
"""Longer than a third of the lease, shorter than two: what docs/jobs.md promises."""
LEASE_MS = 4000


@pytest.fixture(scope="module")
def rq() -> Iterator[RayQueue]:
    with running_queue() as queue:
        yield queue


@ray.remote(num_cpus=0)
def square(queue: JobQueue[Any, Any], count: int) -> int:
    return queue.work(lambda job: (job.value or 0) ** 2, max_jobs=count, idle_ms=20_000)


@ray.remote(num_cpus=0)
class Hangs:
    """Takes a job and never ends it."""

    def __init__(self, queue: JobQueue[Any, Any]) -> None:
        self._queue = queue
        self._job: Any = None

    def take(self) -> str:
        (self._job,) = self._queue.get(timeout_ms=20_000)
        return str(self._job.id)


def test_handles_go_into_tasks_and_results_come_back(rq: RayQueue) -> None:
    queue = rq.queue("squares", model="json", result_model="json", replication=1)
    handles = [queue.put(number, want_result=True) for number in range(20)]
    working = [square.remote(queue, 10) for _ in range(2)]
    assert [handle.result(timeout=30) for handle in handles] == [number**2 for number in range(20)]
    assert sum(ray.get(working)) == 20


def test_the_leases_of_a_killed_worker_end_at_once(rq: RayQueue) -> None:
    queue = rq.queue("killed", lease_ms=120_000, retry_backoff_ms=0, replication=1)
    put = queue.put(b"x")
    worker = Hangs.remote(queue)  # type: ignore[attr-defined]
    assert ray.get(worker.take.remote()) == str(put.id)
    began_s = time.monotonic()
    ray.kill(worker)
    (job,) = queue.get(timeout_ms=60_000)
    assert time.monotonic() - began_s < 60  # and not the lease's two minutes
    assert job.deliveries == 2
    job.ack()


def test_a_lease_outlives_calls_that_hold_the_interpreters_lock(rq: RayQueue) -> None:
    queue = rq.queue("gil", lease_ms=LEASE_MS, retry_backoff_ms=0, replication=1)
    queue.put(b"gpu")
    (job,) = queue.get(timeout_ms=20_000)
    held = ctypes.PyDLL(None)  # calls of a PyDLL keep the lock: no thread of this process runs meanwhile
    for _ in range(4):
        held.sleep(HELD_S)
        time.sleep(0.3)
    try:
        job.ack()
    except LeaseLostError:
        pytest.fail("the lease was not extended in time")
    assert queue.size().ready == queue.size().leased == 0


# -- rayqueue.Queue ------------------------------------------------------------------------------


@ray.remote(num_cpus=0)
def put_later(q: Queue, item: Any) -> None:
    q.put(item)


@ray.remote(num_cpus=0)
def get_later(q: Queue) -> Any:
    return q.get()


@ray.remote(num_cpus=0)
class Owner:
    def make(self) -> list[Any]:
        self._ref = ray.put({"kept": True})
        return [self._ref]


def test_the_drop_in_over_processes(rq: RayQueue) -> None:
    q = Queue(2, actor_options={"num_cpus": 1}, rq=rq)
    getting = get_later.remote(q)
    with pytest.raises(Empty):
        q.get_nowait()
    q.put("a")
    assert ray.get(getting, timeout=60) == "a"
    q.put_nowait_batch([1, 2])
    putting = put_later.remote(q, 3)
    with pytest.raises(Full):
        q.put_nowait(4)
    assert [q.get(timeout=30) for _ in range(2)] == [1, 2]
    ray.get(putting, timeout=60)
    assert q.get(timeout=30) == 3
    assert q.empty()
    many: list[Any] = [put_later.remote(q, number) for number in range(8)]
    assert sorted(ray.get([get_later.remote(q) for _ in range(8)], timeout=120)) == list(range(8))
    ray.get(many)
    q.shutdown()


def test_references_of_ray_in_items(rq: RayQueue) -> None:
    q = Queue(rq=rq)
    q.put(ray.put("an object"))  # as a task's argument: the object itself
    assert q.get() == "an object"
    owner = Owner.remote()  # type: ignore[attr-defined]
    q.put(ray.get(owner.make.remote()))  # inside of something it stays a reference
    (ref,) = q.get()
    assert isinstance(ref, ray.ObjectRef)
    assert ray.get(ref, timeout=30) == {"kept": True}
    q.put([owner])
    (handle,) = q.get()
    assert isinstance(ray.get(handle.make.remote(), timeout=30)[0], ray.ObjectRef)
    q.shutdown()
