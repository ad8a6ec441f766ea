"""Transactions on a real Ray: three replicas, killed producers and workers, and the command."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rayqueue import Record
from rayqueue.client.handle import RayQueue
from rayqueue.errors import ProducerFencedError
from tests.integration.consumers import running_queue

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def rq() -> Iterator[RayQueue]:
    with running_queue() as queue:
        queue.create_topic("orders", partitions=2)
        queue.create_topic("invoices", partitions=2, replication=1)
        yield queue


def read(rq: RayQueue, topic: str, count: int, isolation: Any = "read_committed") -> list[bytes]:
    with rq.consumer(topic, isolation=isolation) as consumer:
        found: list[Record[bytes, bytes]] = []
        deadline_s = time.monotonic() + 60
        while len(found) < count and time.monotonic() < deadline_s:
            found += consumer.poll(timeout_ms=500)
        found += consumer.poll(timeout_ms=300)
        return [each.value or b"" for each in found]


@ray.remote(num_cpus=0)
class Hangs:
    """Begins a transaction, and never ends it."""

    def begin(self, rq: RayQueue, timeout_ms: int) -> None:
        self._producer = rq.producer(transactional_id="hangs", transaction_timeout_ms=timeout_ms)
        tx = self._producer.transaction()
        tx.begin()
        tx.send_many("orders", [b"never"] * 10)
        self._producer.flush()


def test_a_transaction_over_two_topics_and_one_whose_producer_dies(rq: RayQueue) -> None:
    hangs = Hangs.remote()  # type: ignore[attr-defined]
    ray.get(hangs.begin.remote(rq, 2000))
    ray.kill(hangs)
    with rq.producer(transactional_id="writes") as producer:
        with producer.transaction() as tx:
            tx.send_many("orders", [b"%d" % each for each in range(1000)])
            tx.send_many("invoices", [b"%d" % each for each in range(1000)])
        with pytest.raises(ZeroDivisionError), producer.transaction() as tx:  # noqa: PT012
            tx.send_many("orders", [b"aborted"] * 1000)
            raise ZeroDivisionError
        with producer.transaction() as tx:
            tx.send("orders", b"last")
    wanted = Counter([*(b"%d" % each for each in range(1000)), b"last"])
    assert Counter(read(rq, "orders", 1001)) == wanted, "nobody waits for the dead one for longer than its timeout"
    assert sorted(read(rq, "invoices", 1000)) == sorted(b"%d" % each for each in range(1000))
    states = {each.transactional_id: each.state for each in rq.transactions()}
    assert set(states) == {"hangs", "writes"}


def test_a_newer_producer_fences_and_a_hanging_one_is_aborted_by_hand(rq: RayQueue) -> None:
    older = rq.producer(transactional_id="hangs", transaction_timeout_ms=600_000)
    tx = older.transaction()
    tx.begin()
    tx.send("invoices", b"zombie").result(timeout_ms=30_000)
    newer = rq.producer(transactional_id="hangs", transaction_timeout_ms=600_000)
    second = newer.transaction()
    second.begin()
    with pytest.raises(ProducerFencedError):
        tx.commit()
    second.send("invoices", b"hangs").result(timeout_ms=30_000)
    assert rq.abort_transaction("hangs")
    newer.close()


@pytest.mark.long
def test_a_loop_whose_workers_are_killed_has_each_result_once(rq: RayQueue) -> None:
    rq.create_topic("in", partitions=4, replication=1)
    rq.create_topic("out", partitions=4, replication=1)
    count = 4000
    with rq.producer() as producer:
        producer.send_many(
            "in", [b"%d" % each for each in range(count)], keys=[b"%d" % (each % 50) for each in range(count)]
        )

    def slow(record: Record[bytes, bytes]) -> bytes:
        time.sleep(0.001)
        return record.value or b""

    with rq.process("in", "out", slow, group="loop", batch=100, workers=2, transaction_timeout_ms=5000) as run:
        for _ in range(3):
            time.sleep(2)
            ray.kill(run._workers._actors[0], no_restart=False)  # type: ignore[attr-defined]
        results = read(rq, "out", count)
    assert Counter(results) == Counter(b"%d" % each for each in range(count))
