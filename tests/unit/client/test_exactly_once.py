"""Exactly once, in a queue in memory: readers of committed records, positions and jobs in transactions; the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rayqueue import Processing, RayQueue, Record, Result
from rayqueue.client.process import state
from rayqueue.client.process.settings import Figures
from rayqueue.errors import InvalidInputError, ProducerFencedError, TransactionAbortedError, UnknownTransactionError
from rayqueue.net import interfaces
from rayqueue.protocol.calls import Trim
from rayqueue.testing import memory, wait_for


@pytest.fixture
def rq() -> Iterator[RayQueue]:
    with memory.connect() as queue:
        for name in ("orders", "invoices", "state"):
            queue.create_topic(name, partitions=2)
        queue.create_topic("dead")
        yield queue


def values(rq: RayQueue, topic: str, count: int, **options: Any) -> list[bytes]:
    """So many, or what comes within some time, in the order of each partition."""
    with rq.consumer(topic, **options) as consumer:  # what is committed, unless it is said otherwise
        found: list[Record[bytes, bytes]] = []
        deadline_s = time.monotonic() + 10
        while len(found) < count and time.monotonic() < deadline_s:
            found += consumer.poll(timeout_ms=100)
        found += consumer.poll(timeout_ms=50)  # nothing more
        return [record.value or b"" for record in found]


def feed(rq: RayQueue, count: int) -> None:
    with rq.producer() as producer:
        producer.send_many(
            "orders", [b"%d" % each for each in range(count)], keys=[b"%d" % (each % 5) for each in range(count)]
        )


@pytest.mark.slow
def test_readers_of_committed_records_see_all_or_nothing(rq: RayQueue) -> None:
    producer = rq.producer(transactional_id="t")
    with pytest.raises(ZeroDivisionError), producer.transaction() as tx:  # noqa: PT012
        tx.send_many("orders", [b"never"] * 3, partition=0)
        producer.send("orders", b"never", partition=1).result(timeout_ms=5000)
        raise ZeroDivisionError
    tx = producer.transaction()
    tx.begin()
    tx.send("orders", b"a", partition=0).result(timeout_ms=5000)
    with rq.producer() as plain:
        plain.send("orders", b"behind it", partition=0)
    assert values(rq, "orders", 0) == []
    assert len(values(rq, "orders", 6, isolation="read_uncommitted")) == 6, "read_uncommitted has everything"
    with rq.consumer(partitions=[("orders", 0)]) as reader:
        assert reader.peek("orders", 0) == []
        assert reader.poll(timeout_ms=100) == []
        wait_for(
            lambda: list(reader.lag().values()) == [0], "no lag: what is aborted is passed over, what is open waits"
        )
        tx.commit()
        assert [record.value for record in reader.peek("orders", 0)] == [b"a", b"behind it"]
    assert values(rq, "orders", 2) == [b"a", b"behind it"]


def test_positions_move_with_the_transaction_or_not_at_all(rq: RayQueue) -> None:
    feed(rq, 10)
    producer = rq.producer(transactional_id="t")
    with rq.consumer("orders", group="g", delivery="exactly_once") as consumer:
        with pytest.raises(InvalidInputError, match="transactions"):
            consumer.commit()
        first = wait_for(lambda: consumer.poll(timeout_ms=200), "records")
        tx = producer.transaction()
        tx.begin()
        tx.send("invoices", b"torn")
        tx.commit_offsets(consumer)
        tx.abort()
        again = wait_for(lambda: consumer.poll(timeout_ms=200), "the same records")
        assert again[0].offset == 0
        assert {(each.partition, each.offset) for each in again} & {(each.partition, each.offset) for each in first}
        while len(again) < 10:
            again += consumer.poll(timeout_ms=200)
        with producer.transaction() as tx:
            tx.send_many("invoices", [each.value for each in again])
            tx.commit_offsets(consumer)
        assert sum(consumer.lag().values()) == 0
        assert consumer.poll(timeout_ms=50) == []
    assert sorted(values(rq, "invoices", 10)) == sorted(b"%d" % each for each in range(10))
    with (
        rq.consumer("orders", group="other") as plain,
        producer.transaction() as tx,
        pytest.raises(InvalidInputError, match="exactly_once"),
    ):
        tx.commit_offsets(plain)


def test_an_exception_before_commit_offsets_needs_a_rewind(rq: RayQueue) -> None:
    feed(rq, 4)
    producer = rq.producer(transactional_id="t")
    with rq.consumer("orders", group="g", delivery="exactly_once") as consumer:
        first = wait_for(lambda: consumer.poll(timeout_ms=200), "records")
        with pytest.raises(ZeroDivisionError), producer.transaction():
            raise ZeroDivisionError
        consumer.rewind()
        again = wait_for(lambda: consumer.poll(timeout_ms=200), "the same records")
        assert again[0].offset == first[0].offset == 0


def test_jobs_are_done_with_the_transaction(rq: RayQueue) -> None:
    queue = rq.queue("work", retry_backoff_ms=1)
    for each in (b"a", b"b"):
        queue.put(each)
    producer = rq.producer(transactional_id="t")
    jobs: list[Any] = []
    while len(jobs) < 2:
        jobs += queue.get(2, timeout_ms=5000)
    with producer.transaction() as tx:
        tx.send("invoices", b"for a")
        tx.ack(jobs[0])
        with pytest.raises(InvalidInputError, match="ended already"):
            tx.ack(jobs[0])
    with pytest.raises(ZeroDivisionError), producer.transaction() as tx:  # noqa: PT012
        tx.ack(jobs[1])
        raise ZeroDivisionError
    (again,) = queue.get(1, timeout_ms=5000)
    assert (again.value, again.deliveries) == (jobs[1].value, 2)
    again.ack()
    assert queue.get(1, timeout_ms=100) == []
    assert values(rq, "invoices", 1) == [b"for a"]


def test_jobs_are_put_with_the_transaction(rq: RayQueue) -> None:
    queue = rq.queue("work")
    producer = rq.producer(transactional_id="t")
    with producer.transaction() as tx:
        tx.send("work", b"a")
        tx.send("invoices", b"for a").result(timeout_ms=5000)
        assert queue.get(1, timeout_ms=100) == []
    with pytest.raises(ZeroDivisionError), producer.transaction() as tx:  # noqa: PT012
        tx.send("work", b"never")
        raise ZeroDivisionError
    (job,) = queue.get(2, timeout_ms=5000)
    assert job.value == b"a"
    with producer.transaction() as tx:  # a step of a chain: this is done, and the next is there
        tx.send_many("work", [b"b", b"c"])
        tx.ack(job)
    found: list[Any] = []
    while len(found) < 2:
        found += queue.get(2, timeout_ms=5000)
    assert sorted(each.value for each in found) == [b"b", b"c"]
    queue.ack(found)
    assert queue.get(1, timeout_ms=100) == []


def test_a_newer_producer_of_the_id_fences(rq: RayQueue) -> None:
    first = rq.producer(transactional_id="t")
    tx = first.transaction()
    tx.begin()
    tx.send("orders", b"zombie").result(timeout_ms=5000)
    with rq.producer(transactional_id="t").transaction() as newer:
        newer.send("orders", b"newer")
    with pytest.raises(ProducerFencedError, match="must stop"):
        tx.commit()
    assert values(rq, "orders", 1) == [b"newer"]


def test_an_operator_sees_and_ends_what_hangs(rq: RayQueue) -> None:
    producer = rq.producer(transactional_id="t")
    tx = producer.transaction()
    tx.begin()
    tx.send("orders", b"hangs").result(timeout_ms=5000)
    (found,) = rq.transactions()
    assert (found.transactional_id, found.timeout_ms) == ("t", 60_000)
    assert "process" in found.owner
    with pytest.raises(UnknownTransactionError):
        rq.abort_transaction("nobody")
    assert rq.abort_transaction("t")
    with pytest.raises(TransactionAbortedError):
        tx.commit()
    with producer.transaction() as tx:
        tx.send("orders", b"goes on")
    assert values(rq, "orders", 1) == [b"goes on"]


def processed(run: Processing, records: int) -> Figures:
    """Once it has done so many."""
    wait_for(lambda: run.figures().records >= records, f"{records} records", timeout_s=30)
    return run.figures()


@pytest.mark.slow
def test_an_idle_loop_ends(rq: RayQueue) -> None:
    feed(rq, 3)
    with rq.process("orders", "invoices", lambda record: record.value, group="g", idle_ms=50) as run:
        assert run.wait(timeout_ms=30_000)


# -- the loop -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_record_is_processed_once(rq: RayQueue) -> None:
    feed(rq, 50)

    def double(record: Record[bytes, bytes]) -> Any:
        number = int(record.value or b"")
        if number % 10 == 0:
            return None
        return [b"%d" % number, Result(b"%d!" % number, record.key, topic="dead")] if number == 7 else b"%d" % number

    with rq.process("orders", "invoices", double, group="g", batch=7) as run:
        figures = processed(run, 50)
    assert (figures.records, figures.results) == (50, 46)
    wanted = [b"%d" % each for each in range(50) if each % 10]
    assert sorted(values(rq, "invoices", 45)) == sorted(wanted)
    assert values(rq, "dead", 1) == [b"7!"]


def test_what_always_fails_becomes_a_dead_letter_and_what_fails_sometimes_does_not(rq: RayQueue) -> None:
    feed(rq, 6)
    calls: dict[bytes, int] = {}

    async def fails(record: Record[bytes, bytes]) -> bytes:
        await asyncio.sleep(0)
        value = record.value or b""
        calls[value] = calls.get(value, 0) + 1
        if value == b"3" or (value == b"4" and calls[value] < 3):
            raise ValueError("poison")
        return value

    options: Any = {"group": "g", "retries": 2, "retry_backoff_ms": 1}
    with rq.process("orders", "invoices", fails, dead_letters="dead", **options) as run:
        figures = processed(run, 6)
        assert (figures.dead_letters, figures.results) == (1, 5)
    assert (calls[b"3"], calls[b"4"]) == (3, 3)
    assert sorted(values(rq, "invoices", 5)) == [b"0", b"1", b"2", b"4", b"5"]
    with rq.consumer("dead") as consumer:
        (letter,) = wait_for(lambda: consumer.poll(timeout_ms=200), "the dead letter")
    assert letter.value == b"3"
    assert dict(letter.headers)["dead-letter-reason"] == b"ValueError: poison"


def test_without_dead_letters_the_error_ends_the_loop(rq: RayQueue) -> None:
    feed(rq, 1)

    def fails(record: Record[bytes, bytes]) -> bytes:
        raise ValueError("poison")

    run = rq.process("orders", "invoices", fails, group="g", retries=0)
    with pytest.raises(ValueError, match="poison"):
        run.wait(timeout_ms=20_000)
    assert values(rq, "invoices", 0) == []


@pytest.mark.slow
def test_a_state_is_committed_with_the_results_and_is_there_again(rq: RayQueue) -> None:
    feed(rq, 20)

    def count(record: Record[bytes, bytes], kept: Any) -> bytes:
        key = record.key or b""
        kept[key] = b"%d" % (int(kept.get(key, b"0")) + 1)
        if record.value == b"7" and failing:
            failing.clear()
            raise ValueError("after it has changed the state")
        return key + b"=" + kept[key]  # type: ignore[no-any-return]

    failing = [True]
    for _ in range(2):
        with rq.process("orders", "invoices", count, group="g", batch=3, state="state", retry_backoff_ms=1) as run:
            assert processed(run, 20).records == 20
        feed(rq, 20)
    wanted = [b"%d=%d" % (key, number) for key in range(5) for number in range(1, 9)]
    assert sorted(values(rq, "invoices", 40)) == sorted(wanted), "no count twice, none missing"


@pytest.mark.slow
def test_a_state_topic_stays_short_and_has_all_of_the_state(rq: RayQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of five keys, ten keys that never change, and one that goes away; restarted in between."""
    monkeypatch.setattr(state, "SPARE_RECORDS", 20)

    def count(record: Record[bytes, bytes], kept: Any) -> bytes:
        key = record.key or b""
        if not kept:
            kept.update({b"cold %d" % each: b"c" for each in range(10)})
            kept[b"gone"] = b"g"
        kept.pop(b"gone", None)
        kept[key] = b"%d" % (int(kept.get(key, b"0")) + 1)
        return b"%s=%s of %d" % (key, kept[key], len(kept))

    lengths, count_of = [], 500
    for _ in range(4):
        feed(rq, count_of)
        with rq.process("orders", "invoices", count, group="g", batch=5, state="state") as run:
            assert processed(run, count_of).records == count_of
        bounds = rq.topic("state").partitions
        lengths.append(max(each.end_offset - each.start_offset for each in bounds))
    assert all(each.start_offset > 0 for each in bounds), "nothing was trimmed"
    assert max(lengths) < 150, lengths  # and not the number of changes
    found = values(rq, "invoices", 4 * count_of)
    for key in range(5):
        counts = [int(each.split(b"=")[1].split()[0]) for each in found if each.startswith(b"%d=" % key)]
        assert sorted(counts) == list(range(1, 4 * count_of // 5 + 1)), "no count twice, none missing"
    for number in range(len(rq.topic("state").partitions)):
        kept = rq.io.call(state.restored(rq, "state", number))
        assert {key for key in kept if key.startswith(b"cold")} == {b"cold %d" % each for each in range(10)}
        assert b"gone" not in kept


def test_a_state_that_is_trimmed_while_it_is_read(rq: RayQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner before writes all of it again, and trims, between two steps of whoever comes next."""
    with rq.producer() as producer:
        producer.send_many("state", [b"1", b"2"], keys=[b"a", b"b"], partition=0).result(timeout_ms=5000)
        original: Any = interfaces.ask
        asked: list[Any] = []

        async def ask(routes: Any, place: Any, call: Any, **options: Any) -> Any:
            answer = await original(routes, place, call, **options)
            if not asked:
                asked.append(call)
                moved = producer.send_many("state", [b"2", b"1"], keys=[b"b", b"a"], partition=0)
                await moved
                await original(routes, place, Trim(before=2), topic_id=options["topic_id"])
            return answer

        monkeypatch.setattr(state, "ask", ask)
        assert dict(rq.io.call(state.restored(rq, "state", 0))) == {b"a": b"1", b"b": b"2"}
    assert asked


def test_impossible_loops_are_refused(rq: RayQueue) -> None:
    wishes: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (("orders", "orders", len), {}),
        (("orders", "invoices", "no function"), {}),
        (("orders", "invoices", len), {"batch": 0}),
        (("orders", "invoices", len), {"workers": -1}),
        (("orders", "invoices", len), {"state": "invoices"}),
        (("orders", "invoices", len), {"state": "dead"}),
        (("orders", "invoices", len), {"retires": 1}),
    ]
    for arguments, options in wishes:
        with pytest.raises(InvalidInputError):
            rq.process(*arguments, group="g", **options)
