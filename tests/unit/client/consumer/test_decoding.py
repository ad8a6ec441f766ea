"""Consumers with deserializers: values as the application wants them; what cannot be read goes where it is told to."""

from __future__ import annotations

import asyncio
import pickle  # noqa: TID251 - what Ray does with what a task raises
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from rayqueue.client.consumer.decoding import DecodingPolling
from rayqueue.client.consumer.poll import _LATE_SKIPS, _LOGGED_SKIPS, MAX_SET_ASIDE, Polling
from rayqueue.errors import ClosedError, ConfigError, DeserializationError, InvalidInputError
from rayqueue.records import Record, RecordBatch
from rayqueue.testing import wait_for
from tests.unit.client.consumer.consumer_place import P0, Place, place
from tests.unit.client.consumer.test_consumer_corrupt import poison

__all__ = ["place"]


@dataclass
class Order:
    number: int


def write(place: Place, *values: bytes | None, keys: list[bytes | None] | None = None, lane: int = 0) -> None:
    """One batch."""
    place.write(RecordBatch.encode(values, keys, timestamps=1, lane=lane))


def polled(consumer: Any, count: int) -> list[Record[Any, Any]]:
    found: list[Record[Any, Any]] = []
    deadline_s = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline_s:
        found += consumer.poll(timeout_ms=1000)
    return found


def polled_for(consumer: Any, timeout_ms: int) -> None:
    while not consumer.poll(timeout_ms=timeout_ms):
        pass


def polled_one_by_one(consumer: Any, count: int) -> list[Record[Any, Any]]:
    found: list[Record[Any, Any]] = []
    deadline_s = time.monotonic() + 10
    while len(found) < count and time.monotonic() < deadline_s:
        found += consumer.poll(max_records=1, timeout_ms=1000)
    return found


def polled_async(consumer: Any, count: int) -> list[Record[Any, Any]]:
    async def poll() -> list[Record[Any, Any]]:
        found: list[Record[Any, Any]] = []
        deadline_s = time.monotonic() + 10
        while len(found) < count and time.monotonic() < deadline_s:
            found += await consumer.poll_async(timeout_ms=1000)
        return found

    return asyncio.run(poll())


def iterated(consumer: Any, count: int) -> list[Record[Any, Any]]:
    found: list[Record[Any, Any]] = []
    for record in consumer:
        found.append(record)
        if len(found) == count:
            break
    return found


def iterated_async(consumer: Any, count: int) -> list[Record[Any, Any]]:
    async def iterate() -> list[Record[Any, Any]]:
        found: list[Record[Any, Any]] = []
        async for record in consumer:
            found.append(record)
            if len(found) == count:
                break
        return found

    return asyncio.run(iterate())


WAYS = [polled, polled_one_by_one, polled_async, iterated, iterated_async]
Way = Callable[[Any, int], list[Record[Any, Any]]]


@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_every_way_to_read(place: Place, read: Way, delivery: str) -> None:
    write(place, b'{"number":1}', None, b'{"number":2}', keys=[b"a", b"b", None])
    write(place, b'{"number":3}')
    consumer: Any = place.consumer(model=Order, key_deserializer="str", delivery=delivery)
    records = read(consumer, 4)
    assert [record.value for record in records] == [Order(1), None, Order(2), Order(3)]
    assert [record.key for record in records] == ["a", "b", None, None]
    assert [(record.topic, record.partition, record.offset, record.timestamp) for record in records] == [
        ("orders", 0, offset, 1) for offset in range(4)
    ]
    consumer.poll(timeout_ms=0)  # what was handed out is done
    consumer.commit()
    assert place.committed() == {0: 4}


@pytest.mark.slow
@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_it_is_raised_with_its_place_and_a_seek_goes_on(place: Place, read: Way, delivery: str) -> None:
    write(place, b"0", b"1", b"{poison", b"3")
    consumer: Any = place.consumer(value_deserializer="json", delivery=delivery)
    assert [record.value for record in read(consumer, 2)] == [0, 1]
    began_s = time.monotonic()
    for _ in range(3):
        with pytest.raises(
            DeserializationError, match=r"orders-0 cannot be read at offset 2: its value .* json"
        ) as told:
            read(consumer, 1)
    assert time.monotonic() - began_s > 0.2, "asked again and again, it is not answered at once"
    assert consumer.position(P0) == 2
    consumer.commit()
    assert place.committed() == {0: 2}, "nobody has seen it"
    details = pickle.loads(pickle.dumps(told.value)).details
    assert details.pop("record") == Record(2, 1, None, b"{poison", topic="orders")
    assert details == {"topic": "orders", "partition": 0, "offset": 2, "end": 3}
    consumer.seek(P0, details["end"])
    assert [record.value for record in read(consumer, 1)] == [3]
    assert consumer.skipped_records == 0


@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
@pytest.mark.parametrize("way", ["skip", "set_aside"])
def test_it_is_passed_over_alone(
    place: Place, way: str, delivery: str, read: Way, caplog: pytest.LogCaptureFixture
) -> None:
    write(place, b"{first", b"1", b"{mid", b"{dle", b"4", b"{end", keys=[b"k", None, None, None, None, None])
    write(place, b"{alone")
    bad = poison(place)
    write(place, b"9", b"{last")
    consumer: Any = place.consumer(value_deserializer="json", on_corrupt=way, delivery=delivery)
    assert [(record.offset, record.value) for record in read(consumer, 3)] == [(1, 1), (4, 4), (9, 9)]
    wait_for(lambda: consumer.poll(timeout_ms=10) == [] and consumer.skipped_records == 6, "the last one")
    assert consumer.skipped_batches == 1
    assert consumer.position(P0) == 11
    told = [line for line in caplog.messages if "cannot be read" in line]
    assert len(told) == 7
    assert all(line.endswith(f"({way.replace('_', ' ').replace('skip', 'skipped')})") for line in told)
    aside = [(error.details["offset"], error.details["end"], data) for error, data in consumer.take_set_aside()]
    kept = [(0, 1, b"{first"), (2, 3, b"{mid"), (3, 4, b"{dle"), (5, 6, b"{end"), (6, 7, b"{alone"), (7, 9, bad)]
    assert aside == ([*kept, (10, 11, b"{last")] if way == "set_aside" else [])
    consumer.commit()
    assert place.committed() == {0: 11}


def test_what_is_set_aside_has_the_whole_record(place: Place) -> None:
    write(place, b"fine", keys=[b"\xff"])
    consumer: Any = place.consumer(key_deserializer="str", on_corrupt="set_aside")
    assert consumer.poll(timeout_ms=300) == []
    [(error, value)] = consumer.take_set_aside()
    assert "its key of 1 bytes is no str: UnicodeDecodeError" in str(error)
    assert value == b"fine"
    assert error.details["record"] == Record(0, 1, b"\xff", b"fine", topic="orders")


def test_what_is_passed_over_acknowledges_nothing_before_it(place: Place) -> None:
    write(place, b"0", b"{poison", b"2", b"{poison")
    consumer: Any = place.consumer(value_deserializer="json", on_corrupt="skip", ack="record")
    records = polled(consumer, 2)
    assert consumer.poll(timeout_ms=50) == []
    consumer.ack(records[1])
    consumer.commit()
    assert place.committed().get(0, 0) == 0
    consumer.ack(records[0])
    consumer.commit()
    assert place.committed() == {0: 4}


def test_an_iteration_that_is_left_has_done_what_it_has_shown(place: Place) -> None:
    write(place, b"0", b"{poison", b"2", b"3", b"4")
    with place.consumer(value_deserializer="json", on_corrupt="skip") as consumer:
        for record in consumer:
            if record.value == 2:  # type: ignore[comparison-overlap]
                break
    assert place.committed() == {0: 3}


def test_no_more_are_set_aside_than_are_kept(place: Place) -> None:
    write(place, *[b"{poison"] * (MAX_SET_ASIDE + 1), b"1")
    consumer: Any = place.consumer(value_deserializer="json", on_corrupt="set_aside")
    with pytest.raises(DeserializationError, match=f"offset {MAX_SET_ASIDE}"):
        polled(consumer, 1)
    assert len(consumer.take_set_aside()) == MAX_SET_ASIDE
    assert [record.value for record in polled(consumer, 1)] == [1]
    assert len(consumer.take_set_aside()) == 1


def test_a_flood_of_them_keeps_to_the_time_and_does_not_fill_the_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    write(place, *[b"x"] * 4000, b"1")
    consumer: Any = place.consumer(value_deserializer=int, on_corrupt="skip")
    wait_for(lambda: consumer.poll(timeout_ms=0) == [] and consumer.skipped_records, "the first poll with something")
    assert consumer.skipped_records <= _LATE_SKIPS + 1, "it went on for as long as there was something"
    assert [record.value for record in polled(consumer, 1)] == [1]
    assert consumer.skipped_records == 4000
    assert len([line for line in caplog.messages if "cannot be read" in line]) == _LOGGED_SKIPS + 4


def test_a_coroutine_lets_others_run_while_it_passes_over(place: Place) -> None:
    write(place, *[b"x"] * 2000, b"1")
    consumer: Any = place.consumer(value_deserializer=int, on_corrupt="skip")
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    async def read() -> list[Any]:
        heart = asyncio.ensure_future(beat())
        found: list[Any] = []
        while not found:
            found = await consumer.poll_async(timeout_ms=10_000)
        heart.cancel()
        return found

    assert [record.value for record in asyncio.run(read())] == [1]
    assert beats > 500


def test_close_ends_a_poll_that_passes_over(place: Place) -> None:
    passing = threading.Event()

    def slow(data: bytes) -> int:
        passing.set()
        time.sleep(0.002)
        return int(data)

    write(place, *[b"x"] * 5000)
    consumer: Any = place.consumer(value_deserializer=slow, on_corrupt="skip")
    closer = threading.Thread(target=lambda: (passing.wait(10), consumer.close()))
    closer.start()
    with pytest.raises(ClosedError):
        polled_for(consumer, 60_000)
    closer.join(20)
    assert consumer.skipped_records < 5000


def test_a_deserializer_may_use_its_consumer(place: Place) -> None:
    """It runs without a lock; what it has changed is seen before anything is handed out."""
    write(place, b"0", b"1", b"2", b"3")
    seen: list[Any] = []

    def reading(data: bytes) -> int:
        seen.append((data, consumer.position(P0)))
        if data == b"1" and len(seen) == 2:
            consumer.seek(P0, 3)
        return int(data)

    consumer: Any = place.consumer(value_deserializer=reading)
    assert [record.value for record in polled(consumer, 1)] == [3]
    assert seen == [(b"0", 0), (b"1", 0), (b"2", 3), (b"3", 3), (b"3", 3)]
    consumer.commit()
    assert place.committed() == {0: 4}


@pytest.mark.slow
def test_a_partition_that_is_paused_while_it_is_decoded_is_not_handed_out(place: Place) -> None:
    write(place, b"0", b"1")

    def pausing(data: bytes) -> int:
        consumer.pause(P0)
        return int(data)

    consumer: Any = place.consumer(value_deserializer=pausing)
    assert consumer.poll(timeout_ms=300) == []
    assert consumer.position(P0) == 0
    consumer.resume(P0)
    closer = threading.Timer(0.3, consumer.close)
    closer.start()
    assert list(consumer) == []
    closer.join(20)


def test_any_exception_is_told_with_its_place_and_in_short(place: Place) -> None:
    def boom(data: bytes) -> None:
        raise RecursionError("deep " * 1000)

    write(place, b"0")
    consumer: Any = place.consumer(value_deserializer=boom)
    with pytest.raises(DeserializationError, match="boom: RecursionError: deep") as told:
        polled(consumer, 1)
    assert len(str(told.value)) < 500
    assert isinstance(told.value.__cause__, RecursionError)


def test_arrow_and_its_poison_stay_bytes(place: Place) -> None:
    write(place, b"0", b"{poison")
    consumer: Any = place.consumer(value_deserializer="json")
    table = consumer.poll_arrow(timeout_ms=5000)
    assert table["value"].to_pylist() == [b"0", b"{poison"]


def test_peek_decodes_too(place: Place) -> None:
    write(place, b"0", b"{poison")
    consumer: Any = place.consumer(value_deserializer="json", on_corrupt="skip")
    assert [record.value for record in consumer.peek("orders", 0, max_records=1)] == [0]
    with pytest.raises(DeserializationError, match="offset 1"):
        consumer.peek("orders", 0)
    assert consumer.skipped_records == 0


def test_bytes_are_the_plain_consumer(place: Place) -> None:
    """What costs nothing is not there."""
    for options in ({}, {"value_deserializer": "bytes", "key_deserializer": None}, {"model": None}):
        assert type(place.consumer(**options)._polling) is Polling
    assert type(place.consumer(key_deserializer="str")._polling) is DecodingPolling


def test_mistakes(place: Place) -> None:
    with pytest.raises(InvalidInputError, match="both say how values are read"):
        place.consumer(model=Order, value_deserializer="json")
    with pytest.raises(InvalidInputError, match="model is a pydantic model"):
        place.consumer(model=len)
    with pytest.raises(InvalidInputError, match="value_deserializer is a function"):
        place.consumer(value_deserializer="jason")
    with pytest.raises(ConfigError, match="did you mean value_deserializer"):
        place.consumer(value_deserialiser="json")
