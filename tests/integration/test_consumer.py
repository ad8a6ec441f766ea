"""The public consumer on a real queue: every way to read, wherever Ray runs code, and every way to steer it."""

from __future__ import annotations

import asyncio
import os
import pickle  # noqa: TID251 - what Ray would do with it
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import ray

from rayqueue.client.consumer.consumer import Consumer
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.producer import Producer
from rayqueue.client.producer.topic import Topic
from rayqueue.errors import (
    ClosedError,
    DeserializationError,
    InvalidInputError,
    OffsetOutOfRangeError,
    UnknownPartitionError,
    UnknownTopicError,
)
from rayqueue.net.channel import Channel
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchRequest
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record
from rayqueue.records.table import SCHEMA
from rayqueue.testing import wait_for
from tests.integration.consumers import leader_pid, running_queue

ORDERS = 2000
"""Records in each partition of "orders", from the beginning of the tests on. Nobody adds any."""

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def rq() -> Iterator[RayQueue]:
    with running_queue() as queue:
        queue.create_topic("orders", partitions=2, replication=1)
        with queue.producer(linger_ms=1) as producer:
            for partition in range(2):
                producer.send_many(
                    "orders",
                    [b"value %d" % number for number in range(ORDERS)],
                    keys=[b"key %d" % number for number in range(ORDERS)],
                    partition=partition,
                    timestamps_ms=[1_000_000 + number for number in range(ORDERS)],
                )
        yield queue


def drained(consumer: Consumer, count: int, **options: Any) -> list[Record]:
    found: list[Record] = []
    deadline_s = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline_s:
        found += consumer.poll(**options)
    return found


def whole(records: list[Record]) -> bool:
    """All of "orders", each partition in order and complete."""
    return all(
        [
            (record.offset, record.key, record.value, record.timestamp)
            for record in records
            if record.partition == partition
        ]
        == [(number, b"key %d" % number, b"value %d" % number, 1_000_000 + number) for number in range(ORDERS)]
        for partition in range(2)
    )


# -- ways to read --------------------------------------------------------------------------


def test_poll_iterate_and_arrow_give_the_same(rq: RayQueue) -> None:
    with rq.consumer("orders") as consumer:
        assert whole(drained(consumer, 2 * ORDERS, max_records=333))
        assert consumer.poll(timeout_ms=0) == []
    with rq.consumer("orders") as consumer:
        found = []
        for record in consumer:
            found.append(record)
            if len(found) == 2 * ORDERS:
                break
        assert whole(found)
    with rq.consumer("orders") as consumer:
        rows: list[dict[str, Any]] = []
        while len(rows) < 2 * ORDERS:
            table = consumer.poll_arrow()
            assert table.schema == SCHEMA
            rows += table.to_pylist()
        assert {row["topic"] for row in rows} == {"orders"}
        stamped = ({**row, "timestamp": round(row["timestamp"].timestamp() * 1000)} for row in rows)
        assert whole([Record(**{**row, "headers": tuple(row["headers"])}) for row in stamped])


def test_what_arrow_gives_can_be_sent(rq: RayQueue) -> None:
    rq.create_topic("copied", partitions=1)
    with rq.consumer("orders") as consumer, rq.producer() as producer:
        table = consumer.poll_arrow(max_records=50, timeout_ms=5000)
        columns = {"keys": table["key"], "headers": table["headers"], "timestamps_ms": table["timestamp"]}
        producer.send_many("copied", table["value"], partition=0, **columns).result(timeout=30)
    with rq.consumer("copied") as consumer:
        copied = consumer.poll_arrow(timeout_ms=5000)
    for name in ("key", "value", "headers", "timestamp"):
        assert copied[name].to_pylist() == table[name].to_pylist()


def test_arrow_is_cut_where_records_were_taken(rq: RayQueue) -> None:
    with rq.consumer(partitions=[("orders", 1)]) as consumer:
        assert len(drained(consumer, 7, max_records=7)) == 7
        table = consumer.poll_arrow(max_records=5)
        assert table["offset"].to_pylist() == [7, 8, 9, 10, 11]
        assert table["value"].to_pylist() == [b"value %d" % number for number in range(7, 12)]
        assert consumer.poll(max_records=1)[0].offset == 12


def read_all(rq: RayQueue) -> bool:
    with rq.consumer("orders") as consumer:
        return whole(drained(consumer, 2 * ORDERS))


class Sync:
    def __init__(self, rq: RayQueue) -> None:
        self._rq = rq

    def read(self) -> bool:
        return read_all(self._rq)


class Async:
    def __init__(self, rq: RayQueue) -> None:
        self._rq = rq

    async def read(self) -> bool:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.001)

        heart = asyncio.ensure_future(beat())
        async with await asyncio.to_thread(lambda: self._rq.consumer("orders")) as consumer:
            found: list[Record] = []
            async for record in consumer:
                found.append(record)
                if len(found) == ORDERS:
                    break
            while len(found) < 2 * ORDERS:
                found += await consumer.poll_async()
            waiting = beats
            assert await consumer.poll_async(timeout_ms=200) == []
            heart.cancel()
            return whole(found) and beats > waiting + 10  # the actor's loop was free meanwhile


def test_in_tasks_and_actors(rq: RayQueue) -> None:
    task: Any = ray.remote(num_cpus=0)(read_all)
    actors: list[Any] = [ray.remote(num_cpus=0)(kind).remote(rq) for kind in (Sync, Async)]
    assert ray.get([task.remote(rq), *(actor.read.remote() for actor in actors)], timeout=60) == [True] * 3


# -- what is done, and what comes again ----------------------------------------------------------


def test_a_group_goes_on_where_it_committed(rq: RayQueue) -> None:
    with rq.consumer("orders", group="manual", auto_commit=False) as consumer:
        first = drained(consumer, 1000)
        consumer.commit()
        drained(consumer, 500)
        assert sum(consumer.lag().values()) == 2 * ORDERS - len(first)
        for partition in range(2):
            seen = [record.offset for record in first if record.partition == partition]
            assert (consumer.committed(("orders", partition)) or 0) == len(seen)
    with rq.consumer("orders", group="manual") as consumer:  # commits by itself
        rest = drained(consumer, 2 * ORDERS - len(first))
        assert whole(first + rest)
    with rq.consumer("orders", group="manual") as consumer:
        assert consumer.poll(timeout_ms=500) == []
        assert set(consumer.lag().values()) == {0}


def test_a_failure_in_the_block_leaves_its_records_to_the_next(rq: RayQueue) -> None:
    failed: Record

    def application() -> None:
        nonlocal failed
        with rq.consumer("orders", group="failing") as consumer:
            for number, record in enumerate(consumer):
                if number == 10:
                    failed = record
                    raise RuntimeError("in the application")

    with pytest.raises(RuntimeError):
        application()
    with rq.consumer("orders", group="failing", ack="record") as consumer:
        again = drained(consumer, 2 * ORDERS - 10)
        assert len(again) == 2 * ORDERS - 10
        assert failed in again
        for record in again:
            if record != failed:
                consumer.ack(record)
    with rq.consumer("orders", group="failing") as consumer:
        rest = drained(consumer, ORDERS - failed.offset)
        assert [record.offset for record in rest] == list(range(failed.offset, ORDERS))
        assert {record.partition for record in rest} == {failed.partition}


def test_at_most_once_commits_first(rq: RayQueue) -> None:
    consumer = rq.consumer("orders", group="once", delivery="at_most_once")
    found = drained(consumer, 700, max_records=700)
    assert sum(consumer.committed(("orders", each)) or 0 for each in range(2)) == len(found)
    consumer._core.subscription.assigned.clear()  # as if the process ended here, with nothing said
    with rq.consumer("orders", group="once") as heir:
        consumer.close()
        rest = drained(heir, 2 * ORDERS - len(found))
        assert whole(found + rest)


# -- steering --------------------------------------------------------------------------------------


def test_seek_pause_position(rq: RayQueue) -> None:
    p0, p1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
    with rq.consumer("orders") as consumer:
        consumer.pause(p1)
        consumer.seek(p0, 1990)
        assert [(each.partition, each.offset) for each in drained(consumer, 10)] == [(0, n) for n in range(1990, 2000)]
        assert consumer.poll(timeout_ms=300) == []
        assert (consumer.position(p0), consumer.position(p1)) == (ORDERS, 0)
        consumer.seek_to_time(1_000_000 + 1234, p0)
        assert drained(consumer, 1)[0].offset == 1234
        consumer.seek_to_beginning()
        assert drained(consumer, 1)[0].offset == 0
        consumer.seek_to_end()
        consumer.resume()
        assert consumer.poll(timeout_ms=300) == []
        assert consumer.lag() == {p0: 0, p1: 0}
        consumer.seek(p1, 5)
        assert drained(consumer, 1)[0].offset == 5
        with pytest.raises(InvalidInputError):
            consumer.seek(p0, -1)
        with pytest.raises(InvalidInputError):
            consumer.seek(("orders", 7), 0)


def test_peek_consumes_nothing(rq: RayQueue) -> None:
    with rq.consumer("orders") as consumer:
        assert [each.offset for each in consumer.peek("orders", 0, offset=1500, max_records=3)] == [1500, 1501, 1502]
        assert consumer.peek("orders", 1, timestamp_ms=1_000_042, max_records=1)[0].offset == 42
        assert len(consumer.peek("orders", 0, max_records=ORDERS + 5)) == ORDERS
        assert consumer.peek("orders", 0, offset=ORDERS) == []
        with pytest.raises(OffsetOutOfRangeError):
            consumer.peek("orders", 0, offset=ORDERS + 1)
        assert drained(consumer, 1)[0].offset == 0


def test_a_closed_or_woken_consumer_does_not_wait(rq: RayQueue) -> None:
    consumer = rq.consumer("orders")
    drained(consumer, 2 * ORDERS)
    timer = threading.Timer(0.2, consumer.wakeup)
    timer.start()
    started_s = time.monotonic()
    assert consumer.poll(timeout_ms=30_000) == []
    assert time.monotonic() - started_s < 10
    timer = threading.Timer(0.2, consumer.close)
    timer.start()
    assert list(consumer) == []
    timer.join()
    with pytest.raises(ClosedError):
        consumer.poll()
    consumer.close()


# -- values that are not bytes -------------------------------------------------------------


@dataclass
class Meal:
    number: int


@ray.remote(num_cpus=0)
def cook(producer: Producer[Meal, str], meals: Topic[Meal, str]) -> list[Meal | None]:
    """What it was given works where it arrives: a producer, a topic handle, and their forms."""
    with producer:
        producer.send("meals", Meal(1), key="a")
    with meals.producer() as own:
        own.send_many([Meal(2), None], keys=["a", "a"])
    with meals.consumer() as consumer:
        found: list[Record[Meal, str]] = []
        deadline_s = time.monotonic() + 20
        while len(found) < 3 and time.monotonic() < deadline_s:
            found += consumer.poll()
    return [record.value for record in found]


def test_models_go_in_and_come_out_also_in_a_task(rq: RayQueue) -> None:
    rq.create_topic("meals", replication=1)
    meals = rq.topic("meals", model=Meal, key_model="str")
    assert ray.get(cook.remote(rq.producer(model=Meal, key_serializer="str"), meals)) == [Meal(1), Meal(2), None]
    assert meals.describe().records == 3

    async def awaited() -> list[Record[Meal, str]]:
        async with rq.producer(model=Meal, key_serializer="str") as producer:
            await producer.send_async("meals", Meal(3), key="b")
        found: list[Record[Meal, str]] = []
        async with rq.consumer("meals", model=Meal, key_deserializer="str") as consumer:
            async for record in consumer:
                found.append(record)
                if len(found) == 4:
                    break
        return found

    records = asyncio.run(awaited())
    assert [(record.key, record.value) for record in records] == [
        ("a", Meal(1)),
        ("a", Meal(2)),
        ("a", None),
        ("b", Meal(3)),
    ]


@pytest.mark.parametrize("way", ["raise", "skip", "set_aside"])
def test_a_value_that_cannot_be_read_in_the_middle_of_a_batch(
    rq: RayQueue, way: Literal["raise", "skip", "set_aside"]
) -> None:
    topic, place = f"poisoned-{way}", TopicPartition(f"poisoned-{way}", 0)
    rq.create_topic(topic, replication=1)
    with rq.producer() as producer:
        producer.send_many(topic, [b'{"number":0}', b"poison", b'{"number":2}', b'{"number":"x"}'])

    def member() -> Consumer[Meal]:
        return rq.consumer(topic, group=topic, model=Meal, on_corrupt=way)

    def read(consumer: Consumer[Meal], count: int) -> list[Meal | None]:
        found: list[Meal | None] = []
        deadline_s = time.monotonic() + 20
        while len(found) < count and time.monotonic() < deadline_s:
            found += [record.value for record in consumer.poll(timeout_ms=1000)]
        return found

    with member() as consumer:
        if way == "raise":
            assert read(consumer, 1) == [Meal(0)]
            for offset, after in ((1, [Meal(2)]), (3, [])):
                with pytest.raises(DeserializationError) as told:
                    read(consumer, 1)
                assert (told.value.details["topic"], told.value.details["offset"]) == (topic, offset)
                consumer.seek(place, told.value.details["end"])
                assert read(consumer, len(after)) == after
        else:
            assert read(consumer, 2) == [Meal(0), Meal(2)]
            wait_for(lambda: consumer.poll(timeout_ms=100) == [] and consumer.skipped_records == 2, "the last one")
            aside = [(error.details["offset"], data) for error, data in consumer.take_set_aside()]
            assert aside == ([(1, b"poison"), (3, b'{"number":"x"}')] if way == "set_aside" else [])
    assert rq.group(topic).lag == 0, "the group has committed past what nobody could read"
    with member() as consumer:
        assert consumer.poll(timeout_ms=300) == []


def test_mistakes_are_told(rq: RayQueue) -> None:
    with pytest.raises(UnknownTopicError):
        rq.consumer("nothing", group="g")
    with pytest.raises(UnknownTopicError):
        rq.consumer("nothing")
    with pytest.raises(UnknownPartitionError):
        rq.consumer(partitions=[("orders", 9)])
    with pytest.raises(InvalidInputError, match="isolation"):
        rq.consumer("orders", group="g", isolation="dirty")  # type: ignore[call-overload]
    with pytest.raises(InvalidInputError, match="did you mean fetch_bytes"):
        rq.consumer("orders", fetch_bites=3)  # type: ignore[call-overload]
    with rq.consumer("orders") as consumer:
        with pytest.raises(InvalidInputError, match="make the consumer in the task"):
            pickle.dumps(consumer)
        with pytest.raises(InvalidInputError, match="group"):
            consumer.commit()
        consumer.seek_to_end()
        waiting = threading.Thread(target=consumer.poll, kwargs={"timeout_ms": 1500})
        waiting.start()
        wait_for(lambda: consumer._core.last_poll.under_way, "the other thread to poll")
        with pytest.raises(InvalidInputError, match="at a time"):
            consumer.poll()
        consumer.wakeup()
        waiting.join()


# -- lanes -------------------------------------------------------------------------------------------


def test_a_backlog_of_lanes_is_read_highest_first_across_restarts(rq: RayQueue) -> None:
    rq.create_topic("lanes", partitions=1, replication=1, lanes=3)
    with rq.producer() as producer:
        for number in range(600):
            producer.send("lanes", b"%d" % number, priority=number % 3)
    found: list[Record] = []
    for _ in range(6):
        with rq.consumer("lanes", group="lanes") as consumer:
            found += drained(consumer, 100, max_records=100)
    assert [record.lane for record in found] == [2] * 200 + [1] * 200 + [0] * 200
    for lane in range(3):
        values = [int(record.value or b"") for record in found if record.lane == lane]
        assert values == list(range(lane, 600, 3))
    with rq.consumer("lanes", group="lanes") as consumer, rq.producer() as producer:
        assert consumer.poll(timeout_ms=200) == []
        assert set(consumer.lag().values()) == {0}
        producer.send("lanes", b"low").result()
        producer.send("lanes", b"high", priority=2).result()
        assert {record.value for record in drained(consumer, 2)} == {b"low", b"high"}


# -- under stress --------------------------------------------------------------------------------------


def test_more_waiters_than_any_limit_hold_up_nobody(rq: RayQueue) -> None:
    settings = rq.settings.calls
    most = settings.max_fetches + 1000
    rq.create_topic("busy", partitions=1, replication=1)
    partition = TopicPartition("busy", 0)

    async def crowd() -> list[Any]:
        endpoint = (await (await rq.routes.partition(partition)).leader()).endpoint
        channels = [await Channel.open(endpoint, rq.settings) for _ in range(4)]
        request = FetchRequest((Cursor(ANY_LANE, 0),), 1000, 20_000)
        return [channels[number % 4].fetch(request) for number in range(most)]

    waiters = rq.io.call(crowd())
    with rq.producer() as producer, rq.consumer("busy", group="busy") as consumer:
        started_s = time.monotonic()
        assert consumer.poll(timeout_ms=100) == []
        assert consumer.lag() == {partition: 0}
        producer.send("busy", b"x").result()
        assert drained(consumer, 1)[0].value == b"x"
        consumer.commit()
        assert time.monotonic() - started_s < 10

    async def answered() -> int:
        outcomes = await asyncio.gather(*waiters, return_exceptions=True)
        return sum(1 for each in outcomes if not isinstance(each, BaseException) and each.batches)

    assert rq.io.call(answered(), 30) >= settings.max_fetches - 1


def test_a_leader_that_is_killed_loses_and_doubles_nothing(rq: RayQueue) -> None:
    rq.create_topic("durable", partitions=1, replication=3)
    count = 3000
    found: list[int] = []
    with rq.producer() as producer, rq.consumer("durable", group="durable") as consumer:
        for number in range(count):
            producer.send("durable", b"%d" % number)
            if number in (1000, 2000):
                producer.flush()
                os.kill(leader_pid(rq, "durable", 0), signal.SIGKILL)
            if number % 100 == 0:
                found += [int(record.value or b"") for record in consumer.poll(timeout_ms=10)]
        producer.flush()
        deadline_s = time.monotonic() + 30
        while len(found) < count and time.monotonic() < deadline_s:
            found += [int(record.value or b"") for record in consumer.poll(timeout_ms=100)]
    assert found == list(range(count))
