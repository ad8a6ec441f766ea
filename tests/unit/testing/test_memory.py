"""The queue in memory, as an application's tests use it."""

from __future__ import annotations

import asyncio
import pickle  # noqa: TID251  # as Ray would
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from rayqueue import Consumer, Record, TopicPartition
from rayqueue.config import Settings
from rayqueue.errors import (
    ClosedError,
    InvalidInputError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    OversizedRecordError,
    QueueFullError,
    TopicDiffersError,
    TopicExistsError,
    UnknownTopicError,
)
from rayqueue.testing import memory
from rayqueue.testing.memory import MemoryQueue

pytest_plugins = ["rayqueue.testing.pytest_plugin"]


@pytest.fixture
def rq(memory_queue: MemoryQueue) -> Iterator[MemoryQueue]:
    yield memory_queue
    assert not ray.is_initialized()


def send(rq: MemoryQueue, *values: bytes, topic: str = "orders", **options: Any) -> None:
    with rq.producer() as producer:
        for value in values:
            producer.send(topic, value, **options)


def take(consumer: Consumer, count: int) -> list[Record]:
    found: list[Record] = []
    deadline_s = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline_s:
        found += consumer.poll(timeout_ms=200)
    return found


def values(rq: MemoryQueue, topic: str = "orders") -> list[bytes | None]:
    """All that is in it, read alone."""
    described = rq.topic(topic)
    with rq.consumer(topic) as consumer:
        return [record.value for record in take(consumer, described.records)]


# -- what a queue does -------------------------------------------------------------------------


def test_keys_headers_lanes_and_partitions(rq: MemoryQueue) -> None:
    rq.create_topic("orders", partitions=3, lanes=2)
    with rq.producer() as producer:
        sent = [
            producer.send("orders", b"%d" % number, key=b"k%d" % (number % 5), headers={"n": b"%d" % number})
            for number in range(20)
        ]
        producer.send("orders", b"first", partition=1, priority=1, timestamp_ms=7)
        assert len({(each.result().partition, each.result().offset) for each in sent}) == 20
    with rq.consumer("orders") as consumer:
        found = take(consumer, 21)
    (urgent,) = [record for record in found if record.lane == 1]
    assert (urgent.value, urgent.partition, urgent.timestamp) == (b"first", 1, 7)
    for key in {record.key for record in found if record.key}:
        mine = [record for record in found if record.key == key]
        assert len({record.partition for record in mine}) == 1
        assert [record.value for record in mine] == [dict(record.headers)["n"] for record in mine]
        assert [record.offset for record in mine] == sorted(record.offset for record in mine)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_many_records_as_columns(rq: MemoryQueue, compression: str) -> None:
    rq.create_topic("orders", partitions=2)
    sent = [b"%d" % number * 50 for number in range(5000)]
    with rq.producer(compression=compression, acks="leader") as producer:  # type: ignore[call-overload]
        producer.send_many("orders", sent)
    with rq.consumer("orders") as consumer:
        assert sorted(record.value or b"" for record in take(consumer, 5000)) == sorted(sent)


@dataclass
class Order:
    number: int


def test_values_that_are_not_bytes(rq: MemoryQueue) -> None:
    rq.create_topic("orders")
    orders = rq.topic("orders", model=Order, key_model="str")
    with orders.producer() as producer:
        producer.send(Order(7), key="x")
    with orders.consumer() as consumer:
        (record,) = consumer.poll()
    assert (record.value, record.key) == (Order(7), "x")
    with rq.consumer("orders", value_deserializer="json") as plain:
        assert plain.poll()[0].value == {"number": 7}


def test_a_group_shares_goes_on_where_it_was_and_takes_over(rq: MemoryQueue) -> None:
    rq.create_topic("orders", partitions=4)
    send(rq, *[b"%d" % number for number in range(40)])
    with rq.consumer("orders", group="billing") as first:
        assert len(take(first, 40)) == 40
        with rq.consumer("orders", group="billing") as second:
            deadline_s = time.monotonic() + 10
            while len(second.assignment()) != 2 and time.monotonic() < deadline_s:
                first.poll(timeout_ms=10)
                second.poll(timeout_ms=10)
            assert len(first.assignment()) == len(second.assignment()) == 2
            assert len(rq.group("billing").members) == 2
            for number in range(4):
                send(rq, b"more", b"more", partition=number)
            assert len(take(first, 4)) == len(take(second, 4)) == 4
        while len(first.assignment()) != 4 and time.monotonic() < deadline_s + 10:
            first.poll(timeout_ms=10)
        assert len(first.assignment()) == 4
    with rq.consumer("orders", group="billing") as third:
        assert third.poll(timeout_ms=100) == []
    assert rq.group("billing").lag == 0
    rq.reset_group("billing", to="earliest")
    with rq.consumer("orders", group="billing") as again:
        assert len(take(again, 48)) == 48
    assert rq.delete_group("billing")
    assert rq.groups() == []


def test_seeks_and_what_is_not_there(rq: MemoryQueue) -> None:
    rq.create_topic("orders")
    for number in range(10):
        send(rq, b"%d" % number, timestamp_ms=1000 * number)
    place = TopicPartition("orders", 0)
    with rq.consumer(partitions=[place], start="error") as consumer:
        consumer.seek(place, 7)
        assert [record.value for record in take(consumer, 3)] == [b"7", b"8", b"9"]
        consumer.seek_to_time(3000, place)
        assert take(consumer, 1)[0].value == b"3"
        consumer.seek(place, 99)
        with pytest.raises(OffsetOutOfRangeError):
            take(consumer, 1)


def test_retention_deletes(rq: MemoryQueue) -> None:
    rq.create_topic("orders", retention_ms=60_000)
    send(rq, b"old", timestamp_ms=1)
    send(rq, b"new")
    rq.apply_retention()
    assert rq.topic("orders").partitions[0].start_offset == 1
    assert values(rq) == [b"new"]
    rq.alter_topic("orders", retention_ms=None, retention_consumed=True)
    with rq.consumer("orders", group="billing") as consumer:
        take(consumer, 1)
        consumer.poll(timeout_ms=0)
        consumer.commit()
    rq.apply_retention()
    assert rq.topic("orders").partitions[0].start_offset == 2


def test_limits_are_those_of_the_topic(rq: MemoryQueue) -> None:
    rq.create_topic("orders", max_record_bytes=10, max_backlog_records=3)
    with rq.producer(on_full="raise", delivery_timeout_ms=500) as producer:
        with pytest.raises(OversizedRecordError):
            producer.send("orders", b"x" * 11)
        for _ in range(3):
            producer.send("orders", b"x").result()
        with pytest.raises(QueueFullError):
            producer.send("orders", b"x").result()
    rq.alter_topic("orders", max_backlog_records=None)
    with rq.producer() as producer:
        producer.send("orders", b"x")
    assert rq.topic("orders").records == 4


def test_topics_are_made_altered_and_deleted(rq: MemoryQueue) -> None:
    made = rq.create_topic("orders")
    assert rq.create_topic("orders", if_missing=True) == made
    with pytest.raises(TopicExistsError):
        rq.create_topic("orders")
    with pytest.raises(TopicDiffersError):
        rq.create_topic("orders", partitions=2, if_missing=True)
    assert [each.number for each in rq.alter_topic("orders", partitions=2).partitions] == [0, 1]
    send(rq, b"x", partition=1)
    assert [each.end_offset for each in rq.topic("orders").partitions] == [0, 1]
    assert {each.leader for each in rq.topic("orders").partitions} <= {"b1", "b2", "b3"}
    assert (rq.cluster().topics, rq.cluster().partitions, len(rq.cluster().brokers)) == (1, 2, 3)
    assert rq.delete_topic("orders")
    with pytest.raises(UnknownTopicError):
        rq.topic("orders")
    assert rq.create_topic("orders").topic_id != made.topic_id
    assert values(rq) == []


def test_all_of_it_can_be_awaited() -> None:
    async def run() -> list[bytes | None]:
        async with await memory.connect_async() as rq:
            await rq.create_topic_async("orders", partitions=2)
            async with await rq.producer_async() as producer:
                await asyncio.gather(*(producer.send_async("orders", b"%d" % number) for number in range(10)))
            found: list[Record] = []
            async with await rq.consumer_async("orders", group="billing") as consumer:
                while len(found) < 10:
                    found += await consumer.poll_async()
            assert (await rq.topic_async("orders")).records == 10
            return sorted(record.value for record in found if record.value)  # type: ignore[return-value]

    assert asyncio.run(asyncio.wait_for(run(), 30)) == [b"%d" % number for number in range(10)]


@pytest.mark.slow
def test_the_guides_example_runs_without_ray() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "guide.md").read_text()
    section = page.partition("## Testing your own code\n")[2].partition("\n## ")[0]
    (example,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/guide.md", "exec"), names)
    assert names["bill"] is not None
    assert not ray.is_initialized()


# -- trouble -----------------------------------------------------------------------------------


def test_an_answer_that_is_lost_makes_no_duplicate(rq: MemoryQueue) -> None:
    rq.create_topic("orders")
    send(rq, b"before")
    rq.fail_next("append", OutcomeUnknownError("lost"), topic="orders", carried_out=True)
    send(rq, b"once")
    rq.fail_next("append", OutcomeUnknownError("lost"), times=2)
    send(rq, b"again")
    assert values(rq) == [b"before", b"once", b"again"]


def test_an_error_that_is_no_use_to_retry_reaches_the_application(rq: MemoryQueue) -> None:
    rq.create_topic("orders", partitions=2)
    rq.fail_next("append", OversizedRecordError("too large for today"), topic="orders", partition=1)
    with rq.producer() as producer:
        with pytest.raises(OversizedRecordError, match="today"):
            producer.send("orders", b"x", partition=1).result()
        producer.send("orders", b"y", partition=0)
    assert values(rq) == [b"y"]


def test_fetches_and_commits_can_fail_too(rq: MemoryQueue) -> None:
    rq.create_topic("orders")
    send(rq, b"x")
    rq.fail_next("fetch", OutcomeUnknownError("lost"), times=3)
    with rq.consumer("orders", group="billing", auto_commit=False) as consumer:
        assert len(take(consumer, 1)) == 1
        consumer.poll(timeout_ms=0)
        rq.fail_next("commit", OutcomeUnknownError("lost"), carried_out=True)
        consumer.commit()
    assert rq.group("billing").lag == 0
    with pytest.raises(InvalidInputError, match="'append', 'fetch' or 'commit'"):
        rq.fail_next("send", OutcomeUnknownError("lost"))  # type: ignore[arg-type]


def test_leaders_change_and_connections_break_under_way(rq: MemoryQueue) -> None:
    rq.create_topic("orders", partitions=2)
    with rq.producer() as producer, rq.consumer("orders", group="billing") as consumer:
        found: list[Record] = []
        for number in range(30):
            producer.send("orders", b"%d" % number, partition=number % 2)
            if number % 3 == 0:
                assert rq.change_leader("orders", number % 2) in ("r1", "r2", "r3")
            if number % 5 == 0:
                rq.disconnect("orders")
            found += consumer.poll(timeout_ms=5)
        producer.flush()
        found += take(consumer, 30 - len(found))
    assert sorted(int(record.value or b"") for record in found) == list(range(30))
    assert rq.topic("orders").partitions[0].term > 1


def test_without_a_leader_a_send_waits(rq: MemoryQueue) -> None:
    rq.create_topic("orders")
    with rq.producer(delivery_timeout_ms=60_000) as producer:
        with rq.without_leader("orders"):
            delivery = producer.send("orders", b"x")
            with pytest.raises(OutcomeUnknownError, match="still tries"):
                delivery.result(0.2)
            assert rq.topic("orders").partitions[0].leader is None
        assert delivery.result(10).offset == 0


def test_a_leader_that_hangs(rq: MemoryQueue) -> None:
    rq.create_topic("orders")
    with rq.producer() as producer:
        producer.send("orders", b"x").result()
        with rq.holding("orders", request="append"):
            delivery = producer.send("orders", b"y")
            assert values(rq) == [b"x"]
            assert not delivery.done()
        assert delivery.result(10).offset == 1


# -- its end -----------------------------------------------------------------------------------


def test_each_is_a_queue_of_its_own_and_ends() -> None:
    first, second = memory.connect(), memory.connect(brokers=1)
    first.create_topic("orders")
    assert second.topics() == []
    assert len(second.cluster().brokers) == 1
    producer = first.producer()
    first.shutdown()
    with pytest.raises(ClosedError):
        first.topics()
    with pytest.raises(ClosedError):
        first.change_leader("orders")
    assert "closed" in repr(first)
    second.create_topic("orders", replication=1)
    second.close()
    second.close()
    producer.close(timeout_ms=1000)


def test_another_handle_is_another_process(rq: MemoryQueue) -> None:
    rq.create_topic("orders", partitions=2)
    other = rq.another(settings=Settings(consumer={"max_poll_records": 1}))
    send(rq, b"a", b"b", b"c", partition=0)
    with other.consumer("orders", group="billing") as consumer:
        assert len(take(consumer, 1)) == 1
        rq.change_coordinator()
        assert [len(consumer.poll()) for _ in range(2)] == [1, 1]
    rq.close()
    assert other.topic("orders").records == 3
    other.close()
    with pytest.raises(ClosedError, match="ended"):
        other.another()


def test_settings_count() -> None:
    settings = Settings(cluster={"auto_create_topics": True}, producer={"on_full": "raise"})
    with memory.connect(settings=settings) as rq, rq.producer() as producer:
        assert producer.settings.on_full == "raise"
        producer.send("made", b"x").result()
        assert [info.name for info in rq.topics()] == ["made"]


def test_it_stays_in_its_process(rq: MemoryQueue) -> None:
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(rq)
