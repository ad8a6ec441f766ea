"""Transactions on a real Ray: three replicas, killed producers and workers, and the command."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rayqueue import JobQueue, Record
from rayqueue.client.handle import RayQueue
from rayqueue.errors import ProducerFencedError
from rayqueue.testing import wait_for
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


@ray.remote(num_cpus=0)
class Bills:
    """Takes a job and writes its result, in one transaction, which it leaves where it is told to."""

    def bill(self, rq: RayQueue, queue: JobQueue[Any, Any], how: str) -> bytes:
        self._producer = rq.producer(transactional_id=how, transaction_timeout_ms=3000)
        (job,) = queue.get(1, timeout_ms=30_000)
        tx = self._producer.transaction(wait_visible=False)
        tx.begin()
        tx.send("bills", b"%s of %s" % (how.encode(), job.value)).result(timeout_ms=30_000)
        tx.ack(job)
        if how == "commits":
            tx.commit()
        elif how == "aborts":
            tx.abort()
        return bytes(job.value or b"")


@pytest.mark.long
def test_jobs_are_done_with_their_transaction_whatever_becomes_of_the_worker(rq: RayQueue) -> None:
    """One aborts, one is killed between ``ack`` and ``commit``, one commits and is killed before it is visible."""
    rq.create_topic("bills", partitions=2)
    queue = rq.queue("billing", lease_ms=120_000, retry_backoff_ms=0)
    for how in ("aborts", "hangs-with-a-job", "commits"):
        queue.put(how.encode())
        worker = Bills.remote()  # type: ignore[attr-defined]
        assert ray.get(worker.bill.remote(rq, queue, how)) == how.encode()
        ray.kill(worker)
        began_s = time.monotonic()
        if how == "commits":
            assert queue.get(1, timeout_ms=3000) == [], "what was committed is done"
            continue
        (job,) = queue.get(1, timeout_ms=60_000)
        assert time.monotonic() - began_s < 60, "a job waits for the transaction's timeout at most, not for its lease"
        assert (job.value, job.deliveries) == (how.encode(), 2)
        with rq.producer(transactional_id="second-try") as producer, producer.transaction() as tx:
            tx.send("bills", b"second try of %s" % job.value)
            tx.ack(job)
    wanted = [b"second try of aborts", b"second try of hangs-with-a-job", b"commits of commits"]
    assert sorted(read(rq, "bills", 3)) == sorted(wanted)


def test_a_group_that_commits_by_transactions_passes_what_was_aborted_at_the_end(rq: RayQueue) -> None:
    with rq.producer(transactional_id="tail") as producer:
        with pytest.raises(ZeroDivisionError), producer.transaction() as tx:  # noqa: PT012
            for number in (0, 1):
                tx.send("invoices", b"never", partition=number).result(timeout_ms=30_000)
            raise ZeroDivisionError
        with rq.consumer("invoices", group="tail", delivery="exactly_once", auto_commit_ms=100) as consumer:

            def caught_up() -> bool:
                if consumer.poll(timeout_ms=100):
                    with producer.transaction() as tx:
                        tx.commit_offsets(consumer)
                parts = rq.group("tail").partitions
                return len(parts) == 2 and all(part.committed and part.lag == 0 for part in parts)

            wait_for(caught_up, "no lag", timeout_s=60)
            with pytest.raises(ZeroDivisionError), producer.transaction() as tx:  # noqa: PT012
                tx.send("invoices", b"never", partition=0).result(timeout_ms=30_000)
                raise ZeroDivisionError
            assert not caught_up()
            wait_for(caught_up, "no lag", timeout_s=60)


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
