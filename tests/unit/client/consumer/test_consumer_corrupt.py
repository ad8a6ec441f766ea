"""Batches in the log that cannot be read: raised with their place, passed over, or set aside; never in a tight loop."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rayqueue.client.consumer.poll import MAX_SET_ASIDE
from rayqueue.errors import UnreadableBatchError
from rayqueue.records import RecordBatch
from rayqueue.testing import wait_for
from tests.unit.client.consumer.consumer_place import P0, Place, place, take
from tests.unit.records.test_records_batch import resealed

__all__ = ["place"]


def poison(place: Place, batches: int = 1) -> bytes:
    """As an earlier release took it: a header that is right, and offsets that are not."""
    good = RecordBatch.encode([b"12345678", b""], timestamps=1)
    at = good.index((8).to_bytes(4, "little") * 2)
    bad = resealed(good[:at] + (2**30).to_bytes(4, "little") + good[at + 4 :])

    for _ in range(batches):
        place.write(bad)
    return bad


@pytest.mark.slow
def test_it_is_raised_with_its_place_and_a_seek_goes_on(place: Place) -> None:
    place.append(3)
    poison(place)
    place.append(3)
    consumer = place.consumer()
    assert [record.offset for record in take(consumer, 3)] == [0, 1, 2]
    began_s = time.monotonic()
    for _ in range(4):
        with pytest.raises(UnreadableBatchError) as caught:
            take(consumer, 1)
    assert time.monotonic() - began_s > 0.2, "asked again and again, it is not answered at once"
    assert caught.value.details == {"topic": "orders", "partition": 0, "offset": 3, "end": 5}
    consumer.seek(P0, caught.value.details["end"])
    assert [record.offset for record in take(consumer, 3)] == [5, 6, 7]


def polled(consumer: Any) -> list[int]:
    return [record.offset for record in consumer.poll(timeout_ms=1000)]


def polled_arrow(consumer: Any) -> list[int]:
    table = consumer.poll_arrow(timeout_ms=1000)
    return [] if table is None else table.column("offset").to_pylist()


def polled_async(consumer: Any) -> list[int]:
    import asyncio

    async def poll() -> list[int]:
        return [record.offset for record in await consumer.poll_async(timeout_ms=1000)]

    return asyncio.run(poll())


@pytest.mark.parametrize("poll", [polled, polled_arrow, polled_async])
@pytest.mark.parametrize("way", ["skip", "set_aside"])
def test_it_is_passed_over(place: Place, way: str, poll: Any, caplog: pytest.LogCaptureFixture) -> None:
    poison(place)
    place.append(3)
    bad = poison(place)
    place.append(1)
    consumer = place.consumer(on_corrupt=way)
    found: list[int] = []
    deadline_s = time.monotonic() + 10
    while len(found) < 4 and time.monotonic() < deadline_s:
        found += poll(consumer)
    assert found == [2, 3, 4, 7]
    assert consumer.skipped_batches == 2
    assert caplog.text.count("cannot be read from offset") == 2
    aside = consumer.take_set_aside()
    expected = [(0, 2, bad), (5, 7, bad)] if way == "set_aside" else []
    assert [(error.details["offset"], error.details["end"], payload) for error, payload in aside] == expected
    assert consumer.take_set_aside() == []
    consumer.poll(timeout_ms=0)  # what was handed out is done
    consumer.close()
    assert place.committed() == {0: 8}


def test_iterating_passes_it_over_too(place: Place) -> None:
    place.append(2)
    poison(place)
    place.append(2)
    with place.consumer(on_corrupt="skip") as consumer:
        found = []
        for record in consumer:
            found.append(record.offset)
            if record.offset == 5:
                break
    assert found == [0, 1, 4, 5]


def test_what_is_passed_over_acknowledges_nothing_before_it(place: Place) -> None:
    place.append(2)
    poison(place)
    place.append(2)
    consumer = place.consumer(on_corrupt="skip", ack="record")
    records = take(consumer, 4)
    consumer.ack(records[1])
    consumer.commit()
    assert place.committed().get(0, 0) == 0
    for record in records:
        consumer.ack(record)
    consumer.commit()
    wait_for(lambda: place.committed() == {0: 6}, "the commit")


def test_no_more_are_set_aside_than_are_kept(place: Place) -> None:
    poison(place, MAX_SET_ASIDE + 1)
    place.append(1)
    consumer = place.consumer(on_corrupt="set_aside")
    with pytest.raises(UnreadableBatchError):
        take(consumer, 1)
    assert len(consumer.take_set_aside()) == MAX_SET_ASIDE
    assert [record.offset for record in take(consumer, 1)] == [2 * MAX_SET_ASIDE + 2]
    assert len(consumer.take_set_aside()) == 1
