"""``close`` at any moment, by anybody: what the application is at work with is read again, never skipped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rayqueue.client.consumer.consumer import Consumer
from rayqueue.client.consumer.poll import Polling
from rayqueue.errors import ClosedError
from rayqueue.testing import wait_for
from tests.unit.client.consumer.consumer_place import Place, place, take

__all__ = ["place"]


def by_another_thread(consumer: Consumer) -> None:
    thread = threading.Thread(target=consumer.close)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def by_a_signal_handler(consumer: Consumer) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: consumer.close())
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


CLOSERS = pytest.mark.parametrize("close", [by_another_thread, by_a_signal_handler])


@CLOSERS
def test_while_the_application_is_at_work_with_a_poll(place: Place, close: Callable[[Consumer], None]) -> None:
    place.append(10)
    consumer = place.consumer()
    assert len(consumer.poll(max_records=4, timeout_ms=5000)) == 4
    assert len(consumer.poll(max_records=4, timeout_ms=5000)) == 4
    close(consumer)
    assert place.committed() == {0: 4}
    with pytest.raises(ClosedError):
        consumer.poll()
    assert [record.offset for record in take(place.consumer(), 6)] == [4, 5, 6, 7, 8, 9]


@CLOSERS
def test_in_the_middle_of_an_iteration(place: Place, close: Callable[[Consumer], None]) -> None:
    place.append(10)
    seen: list[int] = []
    with place.consumer() as consumer:
        for record in consumer:
            seen.append(record.offset)
            if record.offset == 3:
                close(consumer)
                assert place.committed() == {0: 3}, "this record is being worked on"
    assert seen == [0, 1, 2, 3]
    assert place.committed() == {0: 3}


@CLOSERS
def test_what_was_acknowledged_is_committed(place: Place, close: Callable[[Consumer], None]) -> None:
    place.append(10)
    consumer = place.consumer(ack="record")
    for record in take(consumer, 10)[:5]:
        consumer.ack(record)
    close(consumer)
    assert place.committed() == {0: 5}


def test_while_a_poll_takes_its_records(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records are out of the buffer and not yet with the application when another thread closes."""
    place.append(10)
    consumer = place.consumer()
    wait_for(lambda: consumer.poll(max_records=1, timeout_ms=100) or None, "the first record")
    real = Polling._take_records
    closing = threading.Thread(target=consumer.close)

    def take_records(self: Polling, most: int, max_bytes: int | None) -> Any:
        taken = real(self, most, max_bytes)
        if taken and not closing.is_alive():
            closing.start()
            wait_for(lambda: self.closing, "the other thread")
        return taken

    monkeypatch.setattr(Polling, "_take_records", take_records)
    assert len(consumer.poll(timeout_ms=5000)) == 9
    closing.join(10)
    assert not closing.is_alive()
    assert place.committed() == {0: 1}


def test_a_signal_that_interrupts_a_poll_closes_once_the_poll_is_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler runs in the thread that holds the lock of what it interrupts; it must not wait for it."""
    place.append(10)
    consumer = place.consumer()
    wait_for(lambda: consumer.poll(max_records=1, timeout_ms=100) or None, "the first record")
    real = consumer._sub._took

    def took(*arguments: Any) -> None:
        by_a_signal_handler(consumer)
        real(*arguments)

    monkeypatch.setattr(consumer._sub, "_took", took)
    assert len(consumer.poll(max_records=4, timeout_ms=5000)) == 4
    assert place.committed() == {0: 1}
    assert place.owners("billing") == {}
    with pytest.raises(ClosedError):
        consumer.poll()


def test_a_signal_ends_an_iteration_that_waits(place: Place) -> None:
    consumer = place.consumer()
    before = signal.signal(signal.SIGUSR1, lambda *_: consumer.close())
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1))
    timer.start()
    try:
        assert list(consumer) == []
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert place.owners("billing") == {}
