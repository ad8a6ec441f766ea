"""Leaders that hang (SIGSTOP): nothing is closed, nothing is said, and every call goes on with whoever leads then."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rayqueue
from rayqueue.client.handle import RayQueue
from rayqueue.testing import wait_for
from tests.integration.consumers import coordinator_pid, leader_pid
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(240)

HANGS_S = 20.0
PATIENCE_S = 8.0
"""Doubt, an election and a busy machine; far less than the leader hangs for."""


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def timed(name: str, call: Callable[[], object]) -> None:
    began_s = time.monotonic()
    call()
    took_s = time.monotonic() - began_s
    print(f"{name} took {took_s:.2f} s")
    assert took_s < PATIENCE_S, f"{name} took {took_s:.1f} s"


def test_every_call_goes_on_without_a_leader_that_hangs(tmp_path: Path) -> None:
    with ray_cluster("b1", "b2", "b3"):
        rq = rayqueue.connect(data_dir=tmp_path)
        rq.create_topic("orders", partitions=1)
        with rq.producer() as producer, rq.consumer("orders", group="billing", auto_commit=False) as consumer:
            producer.send_many("orders", [b"x"] * 10).result(30)
            found: list[object] = []

            def read() -> bool:
                found.extend(consumer.poll(timeout_ms=100))
                return len(found) == 10

            wait_for(read, "the records", 30)

            with stopped(leader_pid(rq, "orders", 0)):
                timed("commit", consumer.commit)
                timed("group", lambda: rq.group("billing"))
                timed("send", lambda: producer.send("orders", b"y").result(30))
                timed("lag", consumer.lag)
                timed("committed", lambda: consumer.committed(("orders", 0)))
                timed("peek", lambda: consumer.peek("orders", 0))
                timed("seek", lambda: consumer.seek_to_beginning())
            assert consumer.committed(("orders", 0)) == 10

            with stopped(coordinator_pid(rq)):
                timed("cluster", rq.cluster)
                timed("groups", rq.groups)
                timed("group", lambda: rq.group("billing"))
                timed("create_topic", lambda: rq.create_topic("more", replication=1, wait=False))
                timed("delete_topic", lambda: rq.delete_topic("more"))
                timed("delete_group", lambda: rq.delete_group("nobody"))

            # One who has no connection yet meets the hung leader first.
            other: RayQueue = rayqueue.connect(data_dir=tmp_path)
            with stopped(leader_pid(rq, "orders", 0)):
                timed("group, asked by a newcomer", lambda: other.group("billing"))
        rq.shutdown()
