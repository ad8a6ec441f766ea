"""The public producer, in front of scripted partitions, in real threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from rayqueue.client.io import IoThread
from rayqueue.client.producer.callbacks import CallbackThread
from rayqueue.client.producer.delivery import Delivery
from rayqueue.client.producer.producer import Producer
from rayqueue.config import Settings
from rayqueue.errors import (
    ClosedError,
    ConfigError,
    DeliveryFailedError,
    InvalidInputError,
    OutcomeUnknownError,
    OversizedRecordError,
    QueueFullError,
    TopicRecreatedError,
    UnknownPartitionError,
    UnknownTopicError,
)
from rayqueue.records import RecordBatch
from rayqueue.records.table import SCHEMA
from rayqueue.testing import wait_for
from tests.unit.client.producer import scripted
from tests.unit.client.producer.scripted import ScriptedPartition, ScriptedRoutes

Make = Callable[..., Producer]


class Cluster:
    """What a producer needs of a connection."""

    def __init__(self, partitions: int = 1, lanes: int = 1, script: Any = (), **bounds: int) -> None:
        self.io = IoThread.shared()
        self.settings = Settings()
        script = iter(script)
        self.partitions = [ScriptedPartition(self.io.loop, script, lanes=lanes, **bounds) for _ in range(partitions)]
        self.routes = ScriptedRoutes(self.partitions, lanes)

    def values(self) -> list[list[bytes | None]]:
        return [partition.records for partition in self.partitions]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Producer] = []

    def producer(cluster: Cluster, **options: Any) -> Producer:
        made.append(Producer(cluster, **options))
        return made[-1]

    yield producer
    for each in made:
        with contextlib.suppress(DeliveryFailedError):  # a test that is about it has closed its own
            each.close(timeout_ms=0 if each._accumulator.used_bytes else None)


def silent() -> Cluster:
    """Nobody answers."""
    return Cluster(script=[scripted.SILENT] * 9)


def fill(producer: Producer) -> None:
    while True:
        producer.send("orders", bytes(100))


def test_send_and_its_metadata(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster)
    delivery = producer.send("orders", b"value", key=b"k", headers={"h": b"v"}, timestamp_ms=5)
    assert delivery.result(timeout_ms=5000) == ("orders", 0, 0, 5)
    record = RecordBatch.decode(cluster.partitions[0].log.payloads[0]).records()[0]
    assert (record.key, record.value, record.headers, record.timestamp) == (b"k", b"value", (("h", b"v"),), 5)
    assert producer.send("orders", None).result(timeout_ms=5000).offset == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"value": "text"}, InvalidInputError),
        ({"value": [b"x"]}, InvalidInputError),
        ({"value": b"x", "key": "k"}, InvalidInputError),
        ({"value": b"x", "headers": {"h": "v"}}, InvalidInputError),
        ({"value": b"x", "priority": 2}, InvalidInputError),
        ({"value": b"x", "priority": -1}, InvalidInputError),
        ({"value": b"x", "priority": "high"}, InvalidInputError),
        ({"value": b"x", "partition": 3}, UnknownPartitionError),
        ({"value": b"x", "partition": "0"}, InvalidInputError),
        ({"value": b"x", "timestamp_ms": 1.5}, InvalidInputError),
        ({"value": b"x", "timestamp_ms": 2**63}, InvalidInputError),
        ({"value": bytes(1_000_001)}, OversizedRecordError),
        ({"value": bytes(999_990), "key": bytes(11)}, OversizedRecordError),
        ({"value": b"x", "topic": "no such name!"}, InvalidInputError),
        ({"value": b"x", "topic": None}, InvalidInputError),
    ],
    ids=str,
)
def test_a_mistake_is_told_at_once_and_nothing_is_accepted(make: Make, arguments: Any, error: Any) -> None:
    cluster = Cluster(partitions=3, lanes=2)
    producer = make(cluster)
    topic = arguments.pop("topic", "orders")
    with pytest.raises(error):
        producer.send(topic, **arguments)
    many = {
        {"value": "values", "key": "keys", "timestamp_ms": "timestamps_ms"}.get(k, k): v for k, v in arguments.items()
    }
    for column in ("values", "keys", "headers"):
        if column in many:
            many[column] = [many[column]]
    with pytest.raises(error):
        producer.send_many(topic, **many)
    assert producer._accumulator.used_bytes == 0


def test_an_unknown_topic(make: Make) -> None:
    cluster = Cluster()
    cluster.routes.error = UnknownTopicError("none")
    with pytest.raises(UnknownTopicError):
        make(cluster).send("orders", b"x")


def test_options_are_checked(make: Make) -> None:
    for options in ({"partitioner": "random"}, {"acks": "some"}, {"no_such": 1}, {"in_flight_batches": 33}):
        with pytest.raises(ConfigError):
            make(Cluster(), **options)


def test_a_closed_one_refuses(make: Make) -> None:
    producer = make(Cluster())
    with producer:
        delivery = producer.send("orders", b"x")
    assert delivery.done()  # close has flushed
    for use in (lambda: producer.send("orders", b"x"), lambda: producer.send_many("orders", [b"x"])):
        with pytest.raises(ClosedError):
            use()
    unused = make(Cluster())
    unused.close()
    with pytest.raises(ClosedError):
        unused.send("orders", b"x")


def test_send_many_by_key_keeps_the_order_of_each_partition(make: Make) -> None:
    cluster = Cluster(partitions=4)
    producer = make(cluster, batch_bytes=300)
    keys = [b"key-%d" % (number % 37) if number % 10 else None for number in range(1000)]
    values = [b"%d" % number for number in range(1000)]
    metadata = producer.send_many("orders", values, keys=keys).result(timeout_ms=10_000)
    written = cluster.values()
    assert sum(map(len, written)) == 1000
    for number, (_, partition, offset, _) in enumerate(metadata):
        assert written[partition][offset or 0] == values[number]
    of_key: dict[bytes, set[int]] = {}
    for number, key in enumerate(keys):
        if key is not None:
            of_key.setdefault(key, set()).add(metadata[number].partition)
    assert all(len(partitions) == 1 for partitions in of_key.values())
    keyed = [[int(value or b"") for value in each if int(value or b"") % 10] for each in written]
    assert all(each == sorted(each) for each in keyed)


@pytest.mark.parametrize("partitioner", ["consistent", "murmur2", "roundrobin", "sticky"])
@pytest.mark.parametrize("given", ["lists", "arrow", "as poll_arrow gives it"])
def test_send_many_and_send_agree(make: Make, partitioner: str, given: str) -> None:
    cluster = Cluster(partitions=3, lanes=2)
    producer = make(cluster, partitioner=partitioner, batch_bytes=200)
    values: list[bytes | None] = [b"%d" % number for number in range(100)]
    values[7] = None
    keys = [b"key-%d" % (number % 11) for number in range(100)]
    stamps = list(range(1000, 1100))
    headers = [[("n", b"%d" % number)] for number in range(100)]
    columns: dict[str, Any] = {"values": values, "keys": keys, "timestamps_ms": stamps, "headers": headers}
    if given != "lists":
        kinds = {"values": pa.binary(), "keys": pa.binary(), "timestamps_ms": pa.int64()}
        kinds["headers"] = pa.map_(pa.string(), pa.binary())
        if given != "arrow":
            names = {"values": "value", "keys": "key", "timestamps_ms": "timestamp", "headers": "headers"}
            kinds = {column: SCHEMA.field(name).type for column, name in names.items()}
        columns = {name: pa.chunked_array([column[:40], column[40:]], kinds[name]) for name, column in columns.items()}
    metadata = producer.send_many("orders", **columns, priority=1).result(timeout_ms=10_000)
    assert [each.timestamp for each in metadata] == stamps
    for number, each in enumerate(metadata):
        assert cluster.values()[each.partition][each.offset or 0] == values[number]
    if partitioner in ("consistent", "murmur2"):
        alone = [producer.send("orders", b"", key=key, priority=1) for key in keys]
        assert [each.result(timeout_ms=5000).partition for each in alone] == [each.partition for each in metadata]
    batches = [RecordBatch.decode(payload) for each in cluster.partitions for payload in each.log.payloads]
    found = {record.headers: record for batch in batches for record in batch.records() if record.headers}
    assert len(found) == 100
    assert all(found[(("n", b"%d" % number),)].key == key for number, key in enumerate(keys))
    assert {batch.header.lane for batch in batches} == {1}


def test_columns_of_arrow_that_are_none_are_refused(make: Make) -> None:
    producer = make(Cluster())
    good = pa.array([b"a", b"b"])
    for bad in (
        {"values": pa.array([1, 2])},
        {"values": good, "keys": pa.array([b"k"])},
        {"values": good, "timestamps_ms": pa.array([1, None])},
        {"values": good, "headers": pa.array(["no", "headers"])},
        {"values": good, "headers": pa.array([[("a", None)], []], pa.map_(pa.string(), pa.binary()))},
        {"values": pa.array([bytes(1_000_001)])},
    ):
        with pytest.raises(InvalidInputError):
            producer.send_many("orders", **bad)
    assert producer.send_many("orders", pa.array(["text", None])).result(timeout_ms=5000)[1].offset == 1
    assert producer.send_many("orders", pa.chunked_array([[b"a"], [b"b"]])).result(timeout_ms=5000)[1].offset == 3
    assert len(producer.send_many("orders", pa.array([], pa.binary()))) == 0
    assert len(producer.send_many("orders", [])) == 0


def test_a_full_buffer_raises_if_that_is_wanted_and_takes_all_or_none(make: Make) -> None:
    producer = make(silent(), on_full="raise", buffer_bytes=1000)
    with pytest.raises(QueueFullError):
        fill(producer)
    used = producer._accumulator.used_bytes
    with pytest.raises(QueueFullError):
        producer.send_many("orders", [bytes(10)] * 50)
    assert producer._accumulator.used_bytes == used

    async def send() -> None:
        await producer.send_async("orders", bytes(100))

    with pytest.raises(QueueFullError):
        asyncio.run(send())


def test_a_full_buffer_blocks_until_there_is_space(make: Make) -> None:
    cluster = Cluster()
    cluster.partitions[0].leaderless = OutcomeUnknownError("not yet")
    producer = make(cluster, buffer_bytes=1000)
    sent: list[Delivery] = []

    def send() -> None:
        sent.extend(producer.send("orders", b"%090d" % number) for number in range(50))

    thread = threading.Thread(target=send)
    thread.start()
    wait_for(lambda: producer._accumulator._space_waiters, "the sender to wait for space")
    assert len(cluster.partitions[0].records) == 0
    cluster.partitions[0].leaderless = None
    thread.join(10)
    producer.flush(timeout_ms=10_000)
    assert [delivery.result(0).offset for delivery in sent] == list(range(50))
    assert cluster.partitions[0].records == [b"%090d" % number for number in range(50)]


def test_blocking_ends_with_the_delivery_timeout(make: Make) -> None:
    producer = make(silent(), buffer_bytes=1000, delivery_timeout_ms=150)
    producer._accumulator._timeout_s = 60  # what is in the buffer stays there
    with pytest.raises(QueueFullError):
        fill(producer)
    deliveries = producer.send_many("orders", [bytes(100)] * 3)
    assert all(isinstance(deliveries[row].exception(0), QueueFullError) for row in range(3))


def test_many_async_senders_share_the_space(make: Make) -> None:
    cluster = Cluster()
    producer = make(cluster, buffer_bytes=1000)

    async def send_all() -> list[int | None]:
        found = await asyncio.gather(*(producer.send_async("orders", b"%090d" % number) for number in range(100)))
        many = await producer.send_many_async("orders", [bytes(90)] * 50)
        await producer.flush_async(timeout_ms=5000)
        return [each.offset for each in (*found, *many)]

    assert sorted(offset or 0 for offset in asyncio.run(send_all())) == list(range(150))


def test_in_the_io_thread_nothing_waits_for_itself(make: Make) -> None:
    producer = make(silent(), buffer_bytes=1000)
    producer.send("orders", bytes(900))

    async def misuse() -> list[str]:
        found: list[str] = []
        for use in (
            lambda: producer.send("orders", bytes(900)),
            lambda: producer.send("orders", b"").result(),
            producer.flush,
        ):
            try:
                use()
            except (QueueFullError, InvalidInputError) as error:
                found.append(type(error).__name__)
        return found

    expected = ["QueueFullError", "InvalidInputError", "InvalidInputError"]
    assert producer._io.call(misuse(), timeout_s=5) == expected


def test_on_delivery_is_called_before_flush_returns(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    producer = make(Cluster())
    seen: list[Any] = []
    producer.send("orders", b"a", on_delivery=lambda delivery: seen.append(delivery.result().offset))
    producer.send("orders", b"b", on_delivery=lambda delivery: 1 / 0)
    producer.send_many("orders", [b"c", b"d"], on_delivery=lambda deliveries: seen.append(len(deliveries)))
    with caplog.at_level(logging.ERROR):
        producer.flush(timeout_ms=5000)
    assert seen == [0, 2]


def test_a_callback_may_send_and_wait(make: Make) -> None:
    producer = make(Cluster())
    seen: list[int | None] = []

    def again(delivery: Delivery) -> None:
        seen.append(producer.send("orders", b"again").result(timeout_ms=5000).offset)

    producer.send("orders", b"first", on_delivery=again)
    producer.flush(timeout_ms=5000)
    CallbackThread.shared().drain(5)
    assert seen == [1]


def test_flush_sends_what_lingers_and_ends_in_time(make: Make) -> None:
    producer = make(Cluster(), linger_ms=60_000)
    delivery = producer.send("orders", b"x")
    producer.flush(timeout_ms=5000)
    assert delivery.done()
    stuck = make(silent())
    stuck.send("orders", b"x")
    with pytest.raises(OutcomeUnknownError, match="1 records"):
        stuck.flush(timeout_ms=20)


def test_closing_in_a_hurry_reports_what_is_left(make: Make) -> None:
    producer = make(silent())
    delivery = producer.send("orders", b"x")
    with pytest.raises(DeliveryFailedError) as caught:
        producer.close(timeout_ms=20)
    assert delivery.done()
    assert isinstance(delivery.exception(0), (OutcomeUnknownError, ClosedError))
    assert len(caught.value.deliveries) == 1
    producer.close()  # told once


# -- what nobody has asked about --------------------------------------------------------


def test_flush_tells_what_has_failed_unless_it_was_told_already(make: Make) -> None:
    producer = make(Cluster(script=[scripted.INVALID]), batch_bytes=1000)
    deliveries = [producer.send("orders", b"%d" % number) for number in range(10)]
    deliveries[0].exception()  # the batch has failed by then, and this record's error was told
    failed = [delivery for delivery in deliveries if delivery.done()]
    with pytest.raises(DeliveryFailedError) as caught:
        producer.flush(timeout_ms=5000)
    error = caught.value
    told = [delivery for delivery in deliveries if delivery.exception(0) is not None]
    assert error.details == {"failed": len(told) - 1, "unknown": 0}
    assert len(error.deliveries) == len(told) - 1 >= len(failed) - 1
    assert all(isinstance(each.exception(0), InvalidInputError) for each in error.deliveries)
    assert isinstance(error.__cause__, InvalidInputError)
    assert "orders-0: InvalidInputError: bad batch" in str(error)
    producer.flush(timeout_ms=5000)  # told once
    producer.close()


def test_leaving_a_with_block_tells_it_too_and_hides_nothing() -> None:
    with pytest.raises(DeliveryFailedError), Producer(Cluster(script=[scripted.INVALID])) as producer:
        producer.send("orders", b"x")
    assert producer._accumulator.is_closed
    with pytest.raises(ZeroDivisionError), Producer(Cluster(script=[scripted.INVALID])) as producer:
        _send_and_fail(producer)
    with Producer(Cluster(script=[scripted.INVALID])) as producer:
        with pytest.raises(InvalidInputError):
            producer.send("orders", b"x").result(5)
        for each in producer.send_many("orders", [b"x"]).result(5):
            assert each.offset == 0


def _send_and_fail(producer: Producer) -> None:
    producer.send("orders", b"x")
    raise ZeroDivisionError


def test_the_same_for_await() -> None:
    async def leave() -> None:
        async with Producer(Cluster(script=[scripted.INVALID])) as producer:
            producer.send("orders", b"x")

    async def flush() -> None:
        async with Producer(Cluster(script=[scripted.INVALID])) as producer:
            producer.send("orders", b"x")
            with pytest.raises(DeliveryFailedError):
                await producer.flush_async(timeout_ms=5000)

    with pytest.raises(DeliveryFailedError):
        asyncio.run(leave())
    asyncio.run(flush())


def test_what_is_kept_for_flush_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayqueue.client.producer.accumulator.MAX_FAILED", 3)
    producer = make(Cluster(script=[scripted.INVALID] * 10))
    for _ in range(10):
        producer.send("orders", b"x")
        wait_for(lambda: not producer._accumulator.used_bytes, "it to fail")
    with pytest.raises(DeliveryFailedError) as caught:
        producer.flush()
    assert (caught.value.details["failed"], len(caught.value.deliveries)) == (10, 3)


# -- a topic with a bound -----------------------------------------------------------------


def test_send_waits_for_a_bounded_topic_and_is_woken(make: Make) -> None:
    cluster = Cluster(max_backlog_records=100)
    (partition,) = cluster.partitions
    producer = make(cluster)
    sent: list[Delivery] = []

    def send() -> None:
        sent.extend(producer.send("orders", b"%06d" % number) for number in range(1000))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    wait_for(lambda: len(partition.records) == 100 and producer._accumulator._space_waiters, "the sender to wait")
    assert len(sent) <= 200  # written, and on their way
    deadline = time.monotonic() + 30
    while thread.is_alive() and time.monotonic() < deadline:
        cluster.io.call(_consume(partition, 25))  # where every write checks the bound
        thread.join(0.001)
    while producer._accumulator.used_bytes and time.monotonic() < deadline:
        cluster.io.call(_consume(partition, 25))
    producer.flush(timeout_ms=5000)
    assert partition.records == [b"%06d" % number for number in range(1000)]
    assert [delivery.result(0).offset for delivery in sent] == list(range(1000))


async def _consume(partition: ScriptedPartition, records: int) -> None:
    partition.consume(records)


def test_waiting_for_a_bounded_topic_ends_with_the_delivery_timeout(make: Make) -> None:
    producer = make(Cluster(max_backlog_records=10), delivery_timeout_ms=200)
    with pytest.raises(QueueFullError, match="max_backlog_records = 10"):
        fill(producer)
    with pytest.raises(DeliveryFailedError) as caught:
        producer.close()
    assert {type(each.exception(0)) for each in caught.value.deliveries} == {QueueFullError}


def test_with_on_full_raise_a_bounded_topic_raises_at_send_or_by_the_delivery(make: Make) -> None:
    cluster = Cluster(max_backlog_records=10)
    producer = make(cluster, on_full="raise")
    with pytest.raises(QueueFullError):
        fill(producer)
    wait_for(lambda: not producer._accumulator.used_bytes, "what was accepted to be told")
    assert len(cluster.partitions[0].records) == 10
    assert isinstance(producer.send("orders", b"x").exception(5), QueueFullError)


@pytest.mark.parametrize("arrow", [False, True])
def test_many_at_once_are_cut_to_what_a_bounded_topic_takes(make: Make, arrow: bool) -> None:
    cluster = Cluster(max_backlog_records=30)
    (partition,) = cluster.partitions
    producer = make(cluster)
    values = [b"%d" % number for number in range(100)]
    found: list[Any] = []
    columns = pa.array(values) if arrow else values
    thread = threading.Thread(target=lambda: found.append(producer.send_many("orders", columns)), daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (found and found[0].done()):
        cluster.io.call(_consume(partition, 7))
        thread.join(0.001)
    assert [each.offset for each in found[0].result(0)] == list(range(100))
    assert partition.records == values


def test_a_large_producer_and_many_small_ones_share_a_bounded_topic(make: Make) -> None:
    """In one partition with room for 20: one sends 120 at once, eight send one after the other."""
    cluster = Cluster(max_backlog_records=20)
    (partition,) = cluster.partitions
    large, small = make(cluster), [make(cluster) for _ in range(8)]
    stop = threading.Event()
    counts = [0] * 8

    def send_one_by_one(number: int) -> None:
        while not stop.is_set():
            small[number].send("orders", b"small").result(30)
            counts[number] += 1

    threads = [threading.Thread(target=send_one_by_one, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(partition.records) == 20, "it to be full")
    found: list[Any] = []
    many = threading.Thread(target=lambda: found.append(large.send_many("orders", [b"large"] * 120)), daemon=True)
    many.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (found and found[0].done()):
        cluster.io.call(_consume(partition, 3))
        many.join(0.002)
    stop.set()
    while time.monotonic() < deadline and any(thread.is_alive() for thread in threads):
        cluster.io.call(_consume(partition, 20))
        threads[0].join(0.002)
    assert found
    assert found[0].exception(0) is None
    assert partition.records.count(b"large") == 120
    assert min(counts) >= 2
    assert max(counts) <= 5 * min(counts)  # nobody was passed over


def test_new_partitions_are_used_when_they_are_seen(make: Make) -> None:
    cluster = Cluster(partitions=1)
    producer = make(cluster, partitioner="roundrobin")
    producer.send("orders", b"x").result(timeout_ms=5000)
    cluster.partitions.append(ScriptedPartition(cluster.io.loop))
    producer._sender._looked_up_s -= 100
    producer.send("orders", b"x").result(timeout_ms=5000)

    def seen() -> bool:
        producer.send("orders", b"x").result(timeout_ms=5000)
        return len(producer._targets["orders"].buffer.partitions) == 2

    wait_for(seen, "the new partition to be seen")
    assert producer.send("orders", b"x", partition=1).result(timeout_ms=5000).partition == 1


def test_a_partition_that_exists_by_now_is_found(make: Make) -> None:
    cluster = Cluster(1)
    producer = make(cluster)
    producer.send("orders", b"0", partition=0).result(5)
    for number in range(1, 5):
        cluster.partitions.append(ScriptedPartition(cluster.io.loop))
        if number == 1:
            producer.send("orders", b"x", partition=number).result(5)
        elif number == 2:
            producer.send_many("orders", [b"x"], partition=number).result(5)
        elif number == 3:
            asyncio.run(producer.send_async("orders", b"x", partition=number))
        else:
            asyncio.run(producer.send_many_async("orders", [b"x"], partition=number))
        assert cluster.values()[number] == [b"x"]
    with pytest.raises(UnknownPartitionError):
        producer.send("orders", b"x", partition=5)


def test_after_a_topic_was_made_again_records_go_to_the_new_one(make: Make) -> None:
    cluster = Cluster(2)
    producer = make(cluster)
    producer.send("orders", b"old", partition=1).result(5)
    cluster.routes.topic_id = 2
    cluster.partitions[:] = [ScriptedPartition(cluster.io.loop)]  # fewer partitions than before
    failed = producer.send("orders", b"for the old one", partition=0)
    assert isinstance(failed.exception(5), TopicRecreatedError)
    assert producer.send("orders", b"new", partition=0).result(5).offset == 0
    assert cluster.values() == [[b"new"]]
    with pytest.raises(UnknownPartitionError):
        producer.send("orders", b"x", partition=1)


@pytest.mark.slow
def test_a_producer_that_is_dropped_says_what_it_drops(caplog: pytest.LogCaptureFixture) -> None:
    producer = Producer(silent())
    producer.send("orders", b"x")
    with caplog.at_level(logging.WARNING):
        del producer
        gc.collect()
    assert "1 of its records are not acknowledged" in caplog.text


def test_it_is_made_again_from_its_options(make: Make) -> None:
    producer = make(Cluster(), linger_ms=7, partitioner="murmur2")
    rebuild, arguments = producer.__reduce__()
    again = rebuild(*arguments)
    assert again is not producer
    assert again.settings == producer.settings
    assert again.send("orders", b"x").result(timeout_ms=5000).offset == 0
    again.close()


def test_several_threads(make: Make) -> None:
    cluster = Cluster(partitions=2)
    producer = make(cluster, batch_bytes=500)

    def send(name: int) -> None:
        for number in range(500):
            producer.send("orders", b"%d %d" % (name, number), partition=number % 2)

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    producer.flush(timeout_ms=10_000)
    for parity, written in enumerate(cluster.values()):
        for name in range(4):
            mine = [value for value in written if value and value.startswith(b"%d " % name)]
            assert mine == [b"%d %d" % (name, number) for number in range(parity, 500, 2)]
