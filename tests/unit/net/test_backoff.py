"""The back-off, the retry policy and the request loop: what the errors say, and nothing else, decides."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from rayqueue import errors
from rayqueue.config import ClientSettings
from rayqueue.errors import ClosedError, NotLeaderError, OutcomeUnknownError, QueueFullError, RayQueueError
from rayqueue.net.backoff import Backoff, Retry
from rayqueue.net.requests import request

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RayQueueError)]
SETTINGS = ClientSettings(retry_min_ms=10, retry_max_ms=100, call_timeout_ms=1000)


def retry(*, idempotent: bool = True) -> Retry:
    return Retry(SETTINGS, Random(1), 50.0, idempotent=idempotent)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_the_error_decides(cls: type[RayQueueError]) -> None:
    error = cls("no")
    if cls.retriable:
        assert retry().after(error, 50.0) > 0
    else:
        with pytest.raises(cls) as caught:
            retry().after(error, 50.0)
        assert caught.value is error
    if issubclass(cls, OutcomeUnknownError):
        with pytest.raises(cls):
            retry(idempotent=False).after(error, 50.0)


def test_waits_grow_to_their_limit_and_vary() -> None:
    policy = retry()
    waits_ms = [policy.after(QueueFullError("full"), 50.0) * 1000 for _ in range(12)]
    for number, wait_ms in enumerate(waits_ms):
        longest = min(100, 10 * 2**number)
        assert longest / 2 <= wait_ms <= longest
    assert len({round(wait_ms, 6) for wait_ms in waits_ms}) == len(waits_ms)


def test_patience_ends() -> None:
    policy = retry()
    error = NotLeaderError("no", leader=None)
    policy.after(error, 50.9)
    with pytest.raises(NotLeaderError):
        policy.after(error, 51.0)


def test_a_pause_is_bounded_by_the_lower_limit_and_success_begins_anew() -> None:
    backoff = Backoff(SETTINGS, Random(2), max_ms=25)
    pauses_ms = [backoff.pause_s() * 1000 for _ in range(6)]
    for longest, pause_ms in zip((10, 20, 25, 25, 25, 25), pauses_ms, strict=True):
        assert longest / 2 <= pause_ms <= longest
    assert (backoff.failures, backoff.peek_s()) == (6, 0.025)
    backoff.reset()
    assert (backoff.failures, backoff.peek_s()) == (0, 0.01)
    assert Backoff(SETTINGS, Random(2), max_ms=1000).peek_s() == 0.01  # never above the settings' own limit
    assert Backoff(SETTINGS, Random(2), max_ms=1000, failures=99).peek_s() == 0.1


class FakeRoute:
    def __init__(self) -> None:
        self.told: list[RayQueueError] = []

    def failed(self, error: RayQueueError) -> None:
        self.told.append(error)


def requested(routes: list[FakeRoute], outcomes: list[RayQueueError | str]) -> tuple[str, list[FakeRoute]]:
    """What ``request`` made of these outcomes, one per attempt, and by which routes; the last route stays."""
    left, tried = list(routes), []

    async def way() -> FakeRoute:
        return left[0]

    async def attempt(route: FakeRoute) -> str:
        tried.append(route)
        outcome = outcomes[len(tried) - 1]
        if isinstance(outcome, ClosedError) and len(left) > 1:
            left.pop(0)
        if isinstance(outcome, RayQueueError):
            raise outcome
        return outcome

    async def run() -> str:
        clock_s = asyncio.get_running_loop().time()
        return await request(way, attempt, Retry(SETTINGS, Random(1), clock_s, idempotent=True))

    return asyncio.run(run()), tried


def test_a_request_is_repeated_and_the_route_told_as_the_errors_say() -> None:
    route, moved = FakeRoute(), NotLeaderError("no", leader=None)
    answer, tried = requested([route], [QueueFullError("full"), moved, "done"])
    assert (answer, tried, route.told) == ("done", [route] * 3, [moved])


def test_a_request_goes_on_by_the_route_that_replaces_a_closed_one() -> None:
    old, new = FakeRoute(), FakeRoute()
    answer, tried = requested([old, new], [ClosedError("others now"), "done"])
    assert (answer, tried) == ("done", [old, new])


def test_a_request_ends_when_its_only_route_is_closed() -> None:
    with pytest.raises(ClosedError):
        requested([FakeRoute()], [ClosedError("the connection was closed")])
