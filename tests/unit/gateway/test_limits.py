"""Shares of requests, bytes and streams, on a clock of the test's own."""

from __future__ import annotations

import pytest

from rayqueue.config import GatewaySettings
from rayqueue.errors import RateLimitedError
from rayqueue.gateway import limits
from rayqueue.gateway.limits import Buckets, Limits, Peers, Slots


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_share_is_had_once_and_comes_back_with_time() -> None:
    clock = Clock()
    buckets = Buckets("requests", 10, clock)
    for _ in range(10):
        buckets.take("a")
    with pytest.raises(RateLimitedError) as refused:
        buckets.take("a")
    assert refused.value.details["retry_after_ms"] >= 1
    buckets.take("b")
    clock.now_s += 0.05
    buckets.take("a")
    with pytest.raises(RateLimitedError):
        buckets.take("a")


def test_what_is_larger_than_a_share_passes_and_is_paid_for_later() -> None:
    clock = Clock()
    buckets = Buckets("bytes", 100, clock)
    buckets.take("a", 1000)
    clock.now_s += 8.9
    with pytest.raises(RateLimitedError):
        buckets.take("a", 1)
    clock.now_s += 0.2
    buckets.take("a", 1)


def test_many_addresses_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MAX_KNOWN", 10)
    buckets = Buckets("requests", 10, Clock())
    for number in range(1000):
        buckets.take(str(number))
    assert len(buckets._known) == 10


def test_a_debt_is_not_forgotten_for_those_who_come_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_MAX_KNOWN", 10)
    clock = Clock()
    buckets = Buckets("bytes", 10, clock)
    buckets.take("debtor", 10_000)
    for number in range(1000):
        buckets.take(str(number))
    assert len(buckets._known) == 10
    with pytest.raises(RateLimitedError):
        buckets.take("debtor")
    for number in range(1000):  # all of them are: the memory has an end nevertheless
        buckets.take(f"{number} too", 10_000)
    assert len(buckets._known) == 10
    clock.now_s += 10_000
    buckets.take("debtor")


def test_slots_are_given_back() -> None:
    slots = Slots("streams", 2)
    with slots.held("a"), slots.held("a"):
        with pytest.raises(RateLimitedError), slots.held("a"):
            pass
        slots.take("b")
    slots.take("a")
    slots.release("b")
    assert slots._held == {"a": 1}


def test_guessing_keys_is_limited_by_address() -> None:
    shares = Limits(GatewaySettings(requests_per_s=3), Clock())
    for _ in range(3):
        shares.arrived("10.0.0.1")
    with pytest.raises(RateLimitedError):
        shares.arrived("10.0.0.1")
    shares.arrived("10.0.0.2")


def test_connections_that_are_closed_again_do_not_keep_others_out() -> None:
    """Nobody says that they are: those that were idle the longest are taken for it."""
    clock = Clock()
    peers = Peers(10, 75, clock)
    with peers.held("a", "lasting"):
        for number in range(300):
            with peers.held("a", str(number)):
                pass
            clock.now_s += 0.2
        assert set(peers._known["a"]) == {"lasting", *map(str, range(291, 300))}
    busy = [peers.held("b", str(number)) for number in range(10)]
    for each in busy:
        each.__enter__()
    clock.now_s += 70
    with pytest.raises(RateLimitedError), peers.held("b", "another"):
        pass
    busy[3].__exit__(None, None, None)
    with pytest.raises(RateLimitedError), peers.held("b", "another"):
        pass
    clock.now_s += 1
    with peers.held("b", "another"):
        assert "3" not in peers._known["b"]
