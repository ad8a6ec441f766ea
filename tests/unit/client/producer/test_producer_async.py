"""A producer in event loops: what is cancelled is sent all the same, and nothing holds up the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from rayqueue.client.producer.delivery import Delivery
from rayqueue.errors import InvalidInputError, NotLeaderError, OutcomeUnknownError, QueueFullError
from rayqueue.testing import memory
from rayqueue.testing.memory import MemoryQueue


@pytest.fixture
def rq() -> Iterator[MemoryQueue]:
    with memory.connect() as queue:
        queue.create_topic("orders")
        yield queue


def test_a_close_that_is_cancelled_still_sends_what_was_accepted(rq: MemoryQueue) -> None:
    async def main() -> int | None:
        producer = await rq.producer_async()
        await producer.send_async("orders", b"first")
        with rq.without_leader("orders"):
            delivery = producer.send("orders", b"second")
            closing = asyncio.create_task(producer.close_async())
            await asyncio.sleep(0.05)
            closing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await closing
            assert not delivery.done()
        return (await delivery).offset

    assert asyncio.run(asyncio.wait_for(main(), 30)) == 1


def test_a_flush_waits_for_callbacks_and_the_loop_goes_on(rq: MemoryQueue) -> None:
    called: list[bool] = []

    def slowly(delivery: Delivery) -> None:
        time.sleep(0.2)
        called.append(delivery.done())

    async def main() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        async with await rq.producer_async() as producer:
            await producer.send_async("orders", b"first")
            counting = asyncio.create_task(count())
            producer.send("orders", b"second", on_delivery=slowly)
            await producer.flush_async()
            assert called == [True]
            counting.cancel()
        return turns

    assert asyncio.run(asyncio.wait_for(main(), 30)) > 20


def test_a_flush_that_ends_too_soon_leaves_the_producer_at_work(rq: MemoryQueue) -> None:
    async def main() -> None:
        async with await rq.producer_async() as producer:
            await producer.send_async("orders", b"first")
            with rq.without_leader("orders"):
                delivery = producer.send("orders", b"second")
                with pytest.raises(OutcomeUnknownError, match="1 records are not acknowledged after 20 ms"):
                    await producer.flush_async(timeout_ms=20)
            await producer.flush_async()
            assert delivery.done()

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.slow
def test_space_is_waited_for_and_what_finds_none_is_told(rq: MemoryQueue) -> None:
    async def main() -> None:
        async with await rq.producer_async(buffer_bytes=1000, delivery_timeout_ms=500) as producer:
            many = await producer.send_many_async("orders", [bytes(90)] * 50)
            assert [each.offset for each in many] == list(range(50))
            with rq.without_leader("orders"):
                first = producer.send("orders", bytes(800))
                # The first may take as long as this one waits for its space, or leave it a moment before.
                with pytest.raises((QueueFullError, NotLeaderError)):
                    await producer.send_async("orders", bytes(800))
                assert await asyncio.to_thread(first.exception, 30) is not None

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.slow
def test_time_is_up_also_for_what_is_sent_behind_something_given_up(rq: MemoryQueue) -> None:
    async def main() -> None:
        async with await rq.producer_async(buffer_bytes=1000, delivery_timeout_ms=500) as producer:
            await producer.send_async("orders", b"known")
            with rq.without_leader("orders"):
                first = producer.send("orders", bytes(800))
                with pytest.raises((NotLeaderError, OutcomeUnknownError)):
                    await first
                with pytest.raises((NotLeaderError, OutcomeUnknownError)):
                    await asyncio.wait_for(producer.send_async("orders", bytes(800)), 20)

    asyncio.run(main())


def test_in_the_io_thread_a_close_is_awaited(rq: MemoryQueue) -> None:
    producer = rq.producer()
    producer.send("orders", b"x").result(30)

    async def inside() -> None:
        with pytest.raises(InvalidInputError, match="wait for itself"):
            rq.topics()
        await producer.close_async()

    rq.io.call(inside(), 30)


@pytest.mark.parametrize("arrow", [False, True])
def test_of_one_partition_all_records_stay_in_their_order_with_a_key_or_without(rq: MemoryQueue, arrow: bool) -> None:
    values: Any = [b"0", b"1", b"2", b"3"]
    keys: Any = [b"a", None, b"b", None]
    if arrow:
        values, keys = pa.array(values, pa.binary()), pa.array(keys, pa.binary())

    async def main() -> None:
        rq.create_topic("single", partitions=1)
        async with await rq.producer_async() as producer:
            sent = await producer.send_many_async("single", values, keys=keys)
            assert [each.offset for each in sent] == [0, 1, 2, 3]

    asyncio.run(asyncio.wait_for(main(), 30))
