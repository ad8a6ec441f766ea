"""A consumer in event loops: every call can be awaited, in any of them, and cancelled at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rayqueue.client.consumer.consumer import Consumer, opened
from rayqueue.client.twins import run_awaiting
from rayqueue.errors import ClosedError, InvalidInputError, UnknownTopicError
from tests.unit.client.consumer.consumer_place import P0, Place, Told, place

__all__ = ["place"]


async def offsets(consumer: Consumer, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        records = await consumer.poll_async(max_records=count - len(found), timeout_ms=5000)
        assert records, f"{found} and no more"
        found += [record.offset for record in records]
    return found


def test_one_consumer_is_used_in_two_event_loops_and_in_a_thread(place: Place) -> None:
    place.append(10)
    consumer = place.consumer()
    assert asyncio.run(offsets(consumer, 4)) == [0, 1, 2, 3]
    assert [record.offset for record in consumer.poll(max_records=2, timeout_ms=5000)] == [4, 5]

    async def rest() -> None:
        async with consumer:
            assert await offsets(consumer, 4) == [6, 7, 8, 9]

    asyncio.run(rest())
    assert place.committed() == {0: 10}
    with pytest.raises(ClosedError):
        asyncio.run(offsets(consumer, 1))


def test_what_a_thread_can_ask_await_can(place: Place) -> None:
    place.append(10, timestamp=5)
    place.append(10, timestamp=1_000_000)

    async def main() -> None:
        async with place.consumer() as consumer:
            assert await offsets(consumer, 3) == [0, 1, 2]
            assert await consumer.position_async(P0) == consumer.position(P0) == 3
            await consumer.commit_async()
            assert await consumer.committed_async(P0) == 3
            assert (await consumer.lag_async())[P0] == 17
            await consumer.seek_async(P0, 7)
            assert await offsets(consumer, 1) == [7]
            await consumer.seek_to_time_async(999_999, P0)
            assert await offsets(consumer, 1) == [10]
            await consumer.seek_to_beginning_async()
            assert await offsets(consumer, 1) == [0]
            assert [each.offset for each in await consumer.peek_async("orders", 0, offset=4, max_records=2)] == [4, 5]
            await consumer.pause_async(P0)
            assert consumer.paused() == {P0}
            assert await consumer.poll_async(timeout_ms=20) == []
            await consumer.resume_async()
            assert await offsets(consumer, 2) == [1, 2]
            await consumer.seek_to_end_async(P0)
            place.append(1)
            assert await offsets(consumer, 1) == [20]
            assert (await consumer.poll_arrow_async(timeout_ms=0)).num_rows == 0

    asyncio.run(main())


def test_making_one_blocks_nobody(place: Place) -> None:
    made = place.consumer()
    rq: Any = type("Rq", (), {"io": made._io, "routes": made._core._routes, "settings": made._core._settings})

    async def main() -> None:
        consumer = Consumer(rq, ["orders"], group="another")  # asks nobody anything
        assert await run_awaiting(opened(consumer)) is consumer
        place.append(1)
        assert await offsets(consumer, 1) == [0]
        await consumer.close_async()
        with pytest.raises(UnknownTopicError):
            await run_awaiting(opened(Consumer(rq, ["nothing"], group="another")))

    asyncio.run(main())


CALLS: dict[str, Callable[[Consumer], Awaitable[Any]]] = {
    "poll": lambda consumer: consumer.poll_async(max_records=3, timeout_ms=2000),
    "poll_arrow": lambda consumer: consumer.poll_arrow_async(max_records=3, timeout_ms=2000),
    "commit": lambda consumer: consumer.commit_async(),
    "lag": lambda consumer: consumer.lag_async(),
    "peek": lambda consumer: consumer.peek_async("orders", 0),
    "committed": lambda consumer: consumer.committed_async(P0),
    "pause": lambda consumer: consumer.pause_async(),
    "seek_to_end": lambda consumer: consumer.seek_to_end_async(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_cancelled_at_any_moment_leaves_the_consumer_as_good_as_before(place: Place, call: str) -> None:
    place.append(40)

    async def main() -> None:
        async with place.consumer() as consumer:
            for moment in range(12):

                async def cancelled() -> None:
                    await CALLS[call](consumer)

                task = asyncio.create_task(cancelled())
                for _ in range(moment):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait((task,))
            await consumer.resume_async()
            await consumer.seek_to_beginning_async()
            assert await offsets(consumer, 40) == list(range(40))
            await consumer.commit_async()
        assert place.committed() == {0: 40}

    asyncio.run(main())


def test_polls_that_are_cancelled_lose_nothing_and_double_nothing(place: Place) -> None:
    place.append(20)
    found: list[int] = []

    async def main() -> None:
        async with place.consumer() as consumer:

            async def poll() -> None:
                found.extend([record.offset for record in await consumer.poll_async(max_records=3, timeout_ms=5000)])

            for moment in range(60):
                if moment % 10 == 0:
                    await asyncio.to_thread(place.append, 10)
                task = asyncio.create_task(poll())
                for _ in range(moment % 7):
                    await asyncio.sleep(0.001)
                task.cancel()
                await asyncio.wait((task,))
            while len(found) < 80:
                await poll()

    asyncio.run(main())
    assert found == list(range(80))


def test_a_close_that_is_cancelled_goes_on(place: Place) -> None:
    place.append(5)

    async def main() -> None:
        consumer = place.consumer()
        assert await offsets(consumer, 5) == [0, 1, 2, 3, 4]
        consumer.commit()
        closing = asyncio.create_task(consumer.close_async())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
        await consumer.close_async()
        while place.owners("billing"):  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert place.committed() == {0: 5}


def test_one_task_at_a_time_and_close_by_any(place: Place) -> None:
    async def main() -> None:
        consumer = place.consumer()
        polling = asyncio.create_task(consumer.poll_async(timeout_ms=60_000))
        await asyncio.sleep(0.05)
        with pytest.raises(InvalidInputError, match="one task, at a time"):
            await consumer.poll_async(timeout_ms=10)
        await consumer.close_async()
        with pytest.raises(ClosedError):
            await polling

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_listener_awaits_the_twins(place: Place) -> None:
    place.append(5)

    class Seeks(Told):
        async def assigned(self, partitions: Any) -> None:  # type: ignore[override]
            await consumer.seek_async(P0, 3)

    consumer = place.consumer(group=None, listener=Seeks())
    assert asyncio.run(offsets(consumer, 2)) == [3, 4]
