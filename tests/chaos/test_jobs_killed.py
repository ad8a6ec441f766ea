"""Jobs while workers, leaders and a node are killed: each is done, each is acknowledged once, and what always fails is
a dead letter with the right count.

    CHAOS_JOBS=100000 python -m pytest tests/chaos/test_jobs_killed.py
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import rayqueue
from rayqueue.client.handle import RayQueue
from rayqueue.errors import LeaseLostError, NotLeaderError, RayQueueError
from tests.integration.consumers import leader_pid
from tests.integration.ray_clusters import ray_cluster

JOBS = int(os.environ.get("CHAOS_JOBS", "3000"))
POISON_EVERY = 100
MAX_DELIVERIES = 6
WORKERS = 3
KILLED = 2
STALLED_S = 90

pytestmark = pytest.mark.timeout(300 + JOBS // 50)


class Worker:
    """Does jobs, and writes down what it did: the effect before its ack, and after it that it was accepted."""

    def __init__(self, rq: RayQueue, notes: str, name: str) -> None:
        self._queue = rq.queue("work", create=False, model="json")
        self._effects = (Path(notes) / f"{name}.effects").open("a")
        self._acks = (Path(notes) / f"{name}.acks").open("a")
        self._unknown = (Path(notes) / f"{name}.unknown").open("a")
        (Path(notes) / f"{name}.node").write_text(ray.get_runtime_context().get_node_id())

    def run(self) -> None:
        while True:
            try:
                jobs = self._queue.get(20, timeout_ms=1000)
            except RayQueueError:
                continue  # its leader is being replaced
            for job in jobs:
                self._do(job)

    def _do(self, job: Any) -> None:
        try:
            if job.value % POISON_EVERY == 0:
                job.nack(delay_ms=0, reason="poison")
                return
            _note(self._effects, job.value)
            job.ack()
            _note(self._acks, job.value)
        except LeaseLostError:
            pass  # somebody else has it
        except RayQueueError:
            _note(self._unknown, job.value)  # it comes again if it did not count


class Hangs:
    """Takes a job and never ends it."""

    def take(self, queue: Any) -> int:
        (self._job,) = queue.get(timeout_ms=30_000)
        return os.getpid()


def test_leases_end_when_ray_reports_the_node_of_a_worker_dead(tmp_path: Path) -> None:
    """The worker's process is stopped, so that it neither dies with its node nor hangs up: as a host that vanishes."""
    with ray_cluster("b1") as cluster:
        rq = rayqueue.connect(data_dir=tmp_path / "data")
        queue = rq.queue("work", replication=1, lease_ms=600_000, retry_backoff_ms=0)
        queue.put(b"x")
        cluster.add("b2")
        away = cluster.nodes["b2"].node_id
        hangs: Any = ray.remote(Hangs)
        worker = hangs.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(away, soft=False)
        ).remote()
        pid = ray.get(worker.take.remote(queue), timeout=60)
        os.kill(pid, signal.SIGSTOP)
        try:
            cluster.kill("b2")
            (job,) = queue.get(timeout_ms=60_000)
            assert job.deliveries == 2
            job.ack()
        finally:
            os.kill(pid, signal.SIGKILL)


def _note(file: Any, number: int) -> None:
    file.write(f"{number}\n")
    file.flush()  # in the kernel: it survives the process


def _noted(notes: Path, kind: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for each in notes.glob(f"*.{kind}"):
        found.update(int(line) for line in each.read_text().splitlines())
    return found


def test_every_job_is_done_and_acknowledged_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    with ray_cluster("b1", "b2", "b3") as cluster:
        rq = rayqueue.connect(data_dir=tmp_path / "data")
        queue = rq.queue(
            "work", model="json", partitions=2, max_deliveries=MAX_DELIVERIES, retry_backoff_ms=0, lease_ms=10_000
        )
        queue.put_many(list(range(JOBS)))
        made: Any = ray.remote(Worker)
        workers: list[Any] = []

        def hire() -> None:
            worker = made.options(num_cpus=0).remote(rq, str(notes), f"w{len(workers)}")
            worker.run.remote()
            workers.append(worker)

        def left() -> int:
            size = queue.size()
            return size.ready + size.leased + size.delayed

        def until(most: float, what: str) -> None:
            """Until so many are left at most: for as long as they become fewer, however slow the machine is."""
            seen, moved_s = JOBS + 1, time.monotonic()
            while seen > most:
                assert time.monotonic() - moved_s < STALLED_S, f"waited {STALLED_S} s for {what}: {seen} were left"
                time.sleep(0.2)
                with suppress(NotLeaderError):  # two of a partition's three replicas are down at a time
                    now = left()
                    if now < seen:
                        seen, moved_s = now, time.monotonic()

        for _ in range(WORKERS):
            hire()
        until(JOBS * 0.9, "work to begin")
        ray.kill(workers[0])
        hire()
        os.kill(leader_pid(rq, "work", 0), signal.SIGKILL)
        until(JOBS * 0.7, "work to go on without its leader")
        doomed, leader = cluster.nodes["b3"].node_id, leader_pid(rq, "work", 1)
        cluster.kill("b3")
        with suppress(ProcessLookupError):  # it was there
            os.kill(leader, signal.SIGKILL)
        ray.kill(workers[1])
        hire()
        hire()
        until(0, "all to be done")

        killed = KILLED + sum(each.read_text() == doomed for each in notes.glob("*.node"))
        poison = set(range(0, JOBS, POISON_EVERY))
        good = set(range(JOBS)) - poison

        def unheard() -> set[int]:
            """Jobs whose acknowledgement nobody was told of: outcome unknown, or who asked was killed."""
            return good - set(_noted(notes, "acks")) - set(_noted(notes, "unknown"))

        deadline_s = time.monotonic() + 10
        while len(unheard()) > killed and time.monotonic() < deadline_s:
            time.sleep(0.1)  # the last notes are written after the last acknowledgements
        effects, acks = _noted(notes, "effects"), _noted(notes, "acks")
        dead = {each.value: each for each in queue.dead.list(JOBS)}
        print(f"{JOBS} jobs: {effects.total()} effects, {acks.total()} acks told, {len(dead)} dead")
        assert set(effects) == good
        assert set(acks.values()) == {1}
        assert len(unheard()) <= killed, unheard()  # a worker acknowledges one job at a time
        assert set(dead) == poison
        assert {each.deliveries for each in dead.values()} == {MAX_DELIVERIES}
        assert {each.reason for each in dead.values()} <= {"poison", "worker gone", "lease expired"}
        assert sum(effects.values()) - len(effects) < JOBS / 2  # some twice, where workers were killed
