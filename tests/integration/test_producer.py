"""Producers on a real queue: everything they acknowledge is there, once, in order, whoever is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import pyarrow as pa
import pytest
import ray

from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.delivery import Delivery
from rayqueue.client.producer.producer import Producer
from rayqueue.errors import OversizedRecordError, QueueFullError, UnknownTopicError
from rayqueue.protocol.calls import Commit, GetLag
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchRequest
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record, RecordBatch
from rayqueue.testing import wait_for
from tests.integration.consumers import leader_pid, running_queue

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def rq() -> Iterator[RayQueue]:
    with running_queue() as queue:
        queue.create_topic("orders", partitions=2, replication=1, lanes=2)
        queue.create_topic("safe", partitions=1, replication=3)
        yield queue


def read(rq: RayQueue, topic: str, partition: int = 0) -> list[Record]:
    """All records of a partition, from its leader."""

    async def fetch() -> list[Record]:
        route = await rq.routes.partition(TopicPartition(topic, partition))
        records: list[Record] = []
        while True:
            channel = await route.leader()
            request = FetchRequest((Cursor(ANY_LANE, len(records)),), 4 << 20)
            answer = await channel.fetch(request)
            for base, _, payload in answer.batches:
                records += RecordBatch.decode(payload, base_offset=base).records(topic, partition)
            if len(records) >= answer.high_watermark:
                return records

    return rq.io.call(fetch(), timeout_s=60)


def test_send_send_many_and_await(rq: RayQueue) -> None:
    with rq.producer() as producer:
        first = producer.send("orders", b"one", key=b"k", headers={"h": b"v"}, priority=1).result(timeout_ms=30_000)
        many = producer.send_many("orders", [b"%d" % n for n in range(2000)], keys=[b"k"] * 2000, priority=1)
        arrow = producer.send_many("orders", pa.array([b"x", b"y"]), partition=first.partition, priority=1)

        async def send() -> Any:
            sent = await producer.send_async("orders", b"two", partition=first.partition, priority=1)
            return sent, await producer.send("orders", b"three", partition=first.partition, priority=1)

        second, third = asyncio.run(send())
        offsets = [each.offset for each in many.result(timeout_ms=30_000)]
        assert offsets == list(range(offsets[0] or 0, (offsets[0] or 0) + 2000))
    records = {record.offset: record for record in read(rq, "orders", first.partition)}
    one = records[first.offset or 0]
    assert (one.key, one.value, one.headers, one.lane) == (b"k", b"one", (("h", b"v"),), 1)
    assert [records[offset or 0].value for offset in offsets] == [b"%d" % n for n in range(2000)]
    assert [records[each.offset or 0].value for each in (*arrow.result(0), second, third)] == [
        *(b"x", b"y", b"two", b"three")
    ]


@ray.remote(num_cpus=0)
def in_a_task(producer: Producer, name: bytes) -> list[tuple[int, int | None]]:
    deliveries = [producer.send("orders", b"%s %d" % (name, number)) for number in range(100)]
    producer.close()
    return [(each.result(0).partition, each.result(0).offset) for each in deliveries]


@ray.remote(num_cpus=0)
class InAnActor:
    def __init__(self, rq: RayQueue) -> None:
        self._producer = rq.producer()

    async def send(self, name: bytes) -> list[tuple[int, int | None]]:
        sent = (self._producer.send_async("orders", b"%s %d" % (name, number)) for number in range(100))
        return [(each.partition, each.offset) for each in await asyncio.gather(*sent)]


def test_tasks_and_async_actors_send_with_what_they_were_given(rq: RayQueue) -> None:
    with rq.producer() as producer:
        actor: Any = InAnActor.remote(rq)  # type: ignore[attr-defined]
        calls = [in_a_task.remote(producer, b"task"), actor.send.remote(b"actor")]
        for name, found in zip((b"task", b"actor"), ray.get(calls, timeout=90), strict=True):
            written = {(each.partition, each.offset): each.value for p in (0, 1) for each in read(rq, "orders", p)}
            assert [written[place] for place in found] == [b"%s %d" % (name, number) for number in range(100)]


def test_the_leader_is_killed_while_many_are_on_their_way(rq: RayQueue) -> None:
    """Nothing is lost, doubled or reordered."""
    producer = rq.producer(batch_bytes=4000)
    deliveries: list[Delivery] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            for _ in range(20):
                deliveries.append(producer.send("safe", b"%d" % len(deliveries)))
            time.sleep(0.002)  # a steady stream, not a flood

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(2):
            before = len(deliveries)
            wait_for(lambda before=before: len(deliveries) > before + 500, "a stream of records", 60)  # type: ignore[misc]
            killed = leader_pid(rq, "safe", 0)
            os.kill(killed, signal.SIGKILL)
            at = len(deliveries)
            wait_for(lambda at=at: len(deliveries) > at and deliveries[at].done(), "the next leader", 60)  # type: ignore[misc]
    finally:
        stop.set()
        sender.join()
    producer.close(timeout_ms=60_000)
    values = [record.value for record in read(rq, "safe")]
    assert values == [b"%d" % number for number in range(len(deliveries))]
    assert [each.result(0).offset for each in deliveries] == list(range(len(deliveries)))


@pytest.mark.parametrize("acks", ["leader", "none"])
def test_fewer_acks(rq: RayQueue, acks: Literal["leader", "none"]) -> None:
    with rq.producer(acks=acks, partitioner=lambda key, value, partitions: 1) as producer:
        deliveries = [producer.send("orders", b"%s %d" % (acks.encode(), number)) for number in range(300)]
        producer.flush(timeout_ms=30_000)
        assert all(each.exception(0) is None for each in deliveries)

        def written() -> list[bytes | None] | None:
            found = [each.value for each in read(rq, "orders", 1) if (each.value or b"").startswith(acks.encode())]
            return found if len(found) == 300 else None

        assert wait_for(written, "all of them") == [b"%s %d" % (acks.encode(), number) for number in range(300)]


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed(rq: RayQueue, compression: Literal["lz4", "zstd"]) -> None:
    with rq.producer(compression=compression) as producer:
        sent = producer.send_many("orders", [b"the same over and over"] * 500, partition=0).result(timeout_ms=30_000)
    written = {record.offset: record.value for record in read(rq, "orders", 0)}
    assert {written[each.offset or 0] for each in sent} == {b"the same over and over"}


def test_a_topic_that_is_full_makes_the_producer_wait_or_raises(rq: RayQueue) -> None:
    rq.create_topic("bounded", replication=1, max_backlog_records=100)
    route = rq.io.call(rq.routes.partition(TopicPartition("bounded", 0)))

    def commit(offset: int) -> None:
        rq.io.call(route.call(Commit(group="slow", generation=0, offsets={0: offset})))

    commit(0)  # somebody reads, and has read nothing
    with rq.producer(on_full="raise") as producer:
        producer.send_many("bounded", [b"x"] * 100).result(timeout_ms=30_000)
        with pytest.raises(QueueFullError):
            producer.send("bounded", b"too much").result(timeout_ms=30_000)
    with rq.producer(delivery_timeout_ms=500) as producer, pytest.raises(QueueFullError):
        producer.send("bounded", b"waits in vain").result(timeout_ms=30_000)
    with rq.producer() as producer:
        delivery = producer.send("bounded", b"waits")
        assert not delivery.done()
        commit(50)
        assert delivery.result(timeout_ms=30_000).offset == 100
    assert [record.value for record in read(rq, "bounded")] == [b"x"] * 100 + [b"waits"]


def test_a_bound_holds_exactly_while_one_sends_as_fast_as_it_can_and_one_reads(rq: RayQueue) -> None:
    """As a newcomer tried it: 20,000 sends in a row, room for 100, and a consumer that drains."""
    total, bound = 20_000, 100
    rq.create_topic("narrow", replication=1, max_backlog_records=bound)
    route = rq.io.call(rq.routes.partition(TopicPartition("narrow", 0)))
    lags: list[int] = []
    read_values: list[bytes | None] = []

    def drain() -> None:
        with rq.consumer("narrow", group="drain", auto_commit=False) as consumer:
            deadline_s = time.monotonic() + 90
            while len(read_values) < total and time.monotonic() < deadline_s:
                read_values.extend(record.value for record in consumer.poll(timeout_ms=1000))
                lags.append(rq.io.call(route.call(GetLag(group="drain"))).records)
                consumer.commit()

    with rq.producer() as producer:
        for number in range(bound):
            producer.send("narrow", b"%d" % number)
        producer.flush(timeout_ms=30_000)
        with pytest.raises(QueueFullError):
            rq.producer(on_full="raise").send("narrow", b"no").result(30)
        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        for number in range(bound, total):
            producer.send("narrow", b"%d" % number)  # waits
            assert producer._accumulator.unresolved_records <= bound
    thread.join(90)
    assert read_values == [b"%d" % number for number in range(total)]
    assert max(lags) <= bound


def test_mistakes(rq: RayQueue) -> None:
    with rq.producer() as producer:
        with pytest.raises(UnknownTopicError):
            producer.send("no-such-topic", b"x")
        with pytest.raises(OversizedRecordError):
            producer.send("orders", bytes(1_000_001))
        assert producer.send("orders", bytes(1_000_000)).result(timeout_ms=30_000).offset is not None


def test_new_partitions_and_a_topic_that_is_deleted(rq: RayQueue) -> None:
    rq.create_topic("grows", replication=1)
    with rq.producer(partitioner="roundrobin") as producer:
        producer.send("grows", b"x").result(timeout_ms=30_000)
        rq.alter_topic("grows", partitions=2)
        producer._sender._looked_up_s -= 60  # half a minute later

        def used() -> bool:
            return producer.send("grows", b"x").result(timeout_ms=30_000).partition == 1

        wait_for(used, "a record in the new partition", 30)
        rq.delete_topic("grows")

        def gone() -> bool:
            return isinstance(producer.send("grows", b"x").exception(timeout_ms=60_000), UnknownTopicError)

        wait_for(gone, "it to be noticed that the topic is gone", 60)
