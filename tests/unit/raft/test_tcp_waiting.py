"""Waiting in the TCP transport's ``poll``: how long, and what ends it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from rayqueue.errors import TransportError
from tests.unit.raft.tcp_net import (
    DEADLINE_S,
    HOST,
    A,
    B,
    Clock,
    Net,
    reply,
)


def test_poll_waits_as_long_as_told_and_no_longer(net: Net) -> None:
    a = net.node(A)
    begin = time.monotonic()
    a.poll(0.05)
    assert 0.045 <= time.monotonic() - begin < 5
    assert a.events == []


def test_poll_ends_although_a_tests_clock_stands_still(net: Net) -> None:
    a = net.node(A, clock=Clock())
    a.transport.set_peers({B: (HOST, 9)})
    for _ in range(3):
        a.poll(0.02)


def test_wake_from_another_thread(net: Net) -> None:
    a = net.node(A)
    for _ in range(20):
        waker = threading.Timer(0.005, a.transport.wake)
        waker.start()
        begin = time.monotonic()
        a.poll(DEADLINE_S)
        assert time.monotonic() - begin < DEADLINE_S / 2
        waker.join()


def test_a_wake_before_the_poll_counts_and_many_are_one(net: Net) -> None:
    a = net.node(A)
    for _ in range(100_000):
        a.transport.wake()
    begin = time.monotonic()
    a.poll(DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S / 2
    begin = time.monotonic()
    a.poll(0.05)
    assert time.monotonic() - begin >= 0.045


def test_no_wake_is_lost_in_a_race(net: Net) -> None:
    """Work is handed over by a list; after each wake, a poll must return and find it."""
    a = net.node(A)
    work: list[int] = []
    done = threading.Semaphore(0)

    def producer() -> None:
        for i in range(3000):
            work.append(i)
            a.transport.wake()
            if i % 3 == 0:
                done.acquire(timeout=DEADLINE_S)

    thread = threading.Thread(target=producer)
    thread.start()
    seen = 0
    begin = time.monotonic()
    while seen < 3000:
        a.poll(DEADLINE_S)
        new = len(work)
        for i in range(seen, new):
            if i % 3 == 0:
                done.release()
        seen = new
    thread.join()
    assert time.monotonic() - begin < DEADLINE_S  # one lost wake would cost a whole poll


def test_no_wake_is_lost_in_the_one_race_there_is(net: Net) -> None:
    """A wake while poll takes the last one back."""
    a = net.node(A)
    transport, waker = a.transport, a.transport._waker
    real = waker._reader

    class Raced:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def recv(self, size: int) -> bytes:
            transport.wake()
            return real.recv(size)

    raced: Any = Raced()
    waker._reader = raced
    for _ in range(3):
        transport.wake()
        begin = time.monotonic()
        a.poll(DEADLINE_S)
        assert time.monotonic() - begin < DEADLINE_S / 2


def test_closed(net: Net) -> None:
    a, _ = net.pair()
    a.transport.close()
    a.transport.close()
    a.transport.wake()
    assert not a.transport.send(B, reply(1))
    with pytest.raises(TransportError):
        a.transport.poll(0)
