"""Deliveries: known once, from any thread and any event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from rayqueue.client.producer.callbacks import CallbackThread
from rayqueue.client.producer.delivery import (
    Deliveries,
    Delivery,
    Outcome,
    Part,
    RecordMetadata,
    failed_outcome,
)
from rayqueue.errors import OutcomeUnknownError, QueueFullError


def outcome() -> Outcome:
    return Outcome("orders", 3, [100, 101, 102])


def later(act: object, after_s: float = 0.02) -> threading.Thread:
    thread = threading.Timer(after_s, act)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_each_record_knows_its_place() -> None:
    shared = outcome()
    first, last = Delivery(shared, 0), Delivery(shared, 2)
    assert not first.done()
    assert "on its way" in repr(first)
    shared.resolve(50)
    assert first.result() == RecordMetadata("orders", 3, 50, 100)
    assert last.result() == ("orders", 3, 52, 102)
    assert last.exception() is None


def test_an_outcome_does_not_change() -> None:
    shared = outcome()
    shared.resolve(50)
    shared.resolve(None, QueueFullError("late"))
    assert Delivery(shared, 0).result().offset == 50


def test_an_error_is_raised_by_result_and_returned_by_exception() -> None:
    shared = outcome()
    shared.resolve(None, QueueFullError("full"))
    with pytest.raises(QueueFullError, match="full"):
        Delivery(shared, 0).result()
    assert isinstance(Delivery(shared, 0).exception(), QueueFullError)


def test_without_an_offset_there_is_none() -> None:
    shared = outcome()
    shared.resolve(None)
    assert Delivery(shared, 1).result() == ("orders", 3, None, 101)


def test_waiting_ends_when_it_is_known_or_too_late() -> None:
    shared = outcome()
    with pytest.raises(OutcomeUnknownError):
        Delivery(shared, 0).result(timeout_ms=1)
    thread = later(lambda: shared.resolve(1))
    assert Delivery(shared, 0).result(timeout_ms=5000).offset == 1
    thread.join()


def test_await_in_any_event_loop() -> None:
    shared = outcome()

    async def wait() -> RecordMetadata:
        return await Delivery(shared, 1)

    found: list[RecordMetadata] = []
    threads = [threading.Thread(target=lambda: found.append(asyncio.run(wait()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    later(lambda: shared.resolve(7)).join()
    for thread in threads:
        thread.join(5)
    assert found == [RecordMetadata("orders", 3, 8, 101)] * 3
    assert asyncio.run(wait()).offset == 8


def test_a_loop_that_is_gone_does_no_harm() -> None:
    shared = outcome()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(_awaited(Delivery(shared, 0))), 0.01)

    asyncio.run(give_up())
    shared.resolve(1)
    assert shared.done


async def _awaited(delivery: Delivery) -> RecordMetadata:
    return await delivery


def test_callbacks_run_in_their_own_thread_in_order_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    shared = outcome()
    seen: list[tuple[int | None, str]] = []

    def note(delivery: Delivery) -> None:
        seen.append((delivery.result().offset, threading.current_thread().name))

    Delivery(shared, 0).add_done_callback(note)
    Delivery(shared, 1).add_done_callback(lambda delivery: 1 / 0)
    Delivery(shared, 2).add_done_callback(note)
    with caplog.at_level(logging.ERROR):
        shared.resolve(10)
        Delivery(shared, 1).add_done_callback(note)  # after it is known
        assert CallbackThread.shared().drain(5)
    assert seen == [(offset, "rayqueue callbacks") for offset in (10, 12, 11)]
    assert "ZeroDivisionError" in caplog.text


def test_a_slow_callback_does_not_hold_up_whoever_resolves() -> None:
    release = threading.Event()
    slow, other = outcome(), outcome()
    Delivery(slow, 0).add_done_callback(lambda delivery: release.wait(10))
    slow.resolve(1)
    began = time.monotonic()
    other.resolve(2)
    assert Delivery(other, 0).result(timeout_ms=1000).offset == 2
    assert time.monotonic() - began < 5
    assert not CallbackThread.shared().drain(0.01)
    release.set()
    assert CallbackThread.shared().drain(5)
    assert CallbackThread.shared().backlog == 0


# -- many ------------------------------------------------------------------------------


def test_many_are_one_list_across_batches() -> None:
    first, second = outcome(), Outcome("orders", 4, 9)
    deliveries = Deliveries([Part(first, 1, 2), Part(second, 0, 2)])
    assert len(deliveries) == 4
    first.resolve(10)
    assert not deliveries.done()
    assert deliveries[0].done()
    later(lambda: second.resolve(0)).join()
    metadata = deliveries.result(timeout_ms=1000)
    assert list(metadata) == [("orders", 3, 11, 101), ("orders", 3, 12, 102), ("orders", 4, 0, 9), ("orders", 4, 1, 9)]
    assert metadata[-1] == metadata[3]
    assert metadata[1:3] == [metadata[1], metadata[2]]
    with pytest.raises(IndexError):
        metadata[4]


def test_many_in_the_order_they_were_given() -> None:
    first, second = Outcome("orders", 0, 9), Outcome("orders", 1, 9)
    deliveries = Deliveries([Part(first, 0, 2), Part(second, 0, 1)], order=[0, 2, 1])
    first.resolve(100)
    second.resolve(200)
    assert [metadata.offset for metadata in deliveries.result()] == [100, 200, 101]


def test_the_first_error_of_many_is_theirs() -> None:
    good = outcome()
    deliveries = Deliveries([Part(good, 0, 2), Part(failed_outcome("orders", 1, QueueFullError("full")), 0, 1)])
    good.resolve(0)
    with pytest.raises(QueueFullError):
        deliveries.result()
    assert deliveries[1].result().offset == 1
    assert isinstance(deliveries[2].exception(), QueueFullError)


def test_a_callback_of_many_runs_once_at_the_end() -> None:
    first, second = outcome(), outcome()
    deliveries = Deliveries([Part(first, 0, 3), Part(second, 0, 3)])
    seen: list[int] = []
    deliveries.add_done_callback(lambda all_of_them: seen.append(len(all_of_them)))
    first.resolve(0)
    CallbackThread.shared().drain(5)
    assert not seen
    second.resolve(3)
    CallbackThread.shared().drain(5)
    assert seen == [6]

    async def wait() -> int | None:
        return (await deliveries)[-1].offset

    assert asyncio.run(wait()) == 5


def test_none_is_done() -> None:
    assert Deliveries([]).done()
    assert list(Deliveries([]).result()) == []
