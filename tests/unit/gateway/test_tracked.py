"""Tracked consumers: what was committed and not handed out, beside what REST's tests say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rayqueue.config import GatewaySettings
from rayqueue.gateway.limits import Slots
from rayqueue.gateway.principals import ANYONE
from rayqueue.gateway.sessions import Sessions
from rayqueue.gateway.tracked import TrackedSession
from rayqueue.testing import memory

Open = Callable[[], Awaitable[TrackedSession]]


def with_sessions(rq: memory.MemoryQueue, work: Callable[[Sessions, Open], Awaitable[None]]) -> None:
    rq.create_topic("orders")
    with rq.producer() as producer:
        producer.send_many("orders", [b"%d" % number for number in range(6)])
        producer.flush()

    async def run() -> None:
        sessions = Sessions(rq, "g1", GatewaySettings(), Slots("sessions", 10))
        await work(sessions, lambda: sessions.tracked(ANYONE, "orders", "w", TrackedSession))
        await sessions.close()

    asyncio.run(run())


def values(records: Any) -> list[bytes]:
    return [each.value for each in records]


def test_what_nobody_was_handed_comes_first(rq: memory.MemoryQueue) -> None:
    async def work(_: Sessions, opened: Open) -> None:
        session = await opened()
        first = await session.take(3, 5000)
        session.not_taken(first)
        assert values(await session.take(2, 5000)) == [b"0", b"1"]
        assert values(await session.take(10, 5000)) == [b"2"]
        assert values(await session.take(10, 5000)) == [b"3", b"4", b"5"]

    with_sessions(rq, work)
    assert rq.group("w").lag == 0


def test_what_nobody_was_handed_is_read_again_after_the_session(rq: memory.MemoryQueue) -> None:
    async def work(sessions: Sessions, opened: Open) -> None:
        session = await opened()
        assert values(await session.take(2, 5000)) == [b"0", b"1"]
        session.not_taken(await session.take(2, 5000))
        await sessions.drop(session)
        again = await opened()
        assert again is not session
        assert values(await again.take(10, 5000)) == [b"2", b"3", b"4", b"5"]

    with_sessions(rq, work)


def test_what_nobody_was_handed_is_not_read_again_if_others_behind_it_were(
    rq: memory.MemoryQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """Those would be doubled."""

    async def work(sessions: Sessions, opened: Open) -> None:
        session = await opened()
        found = await session.take(2, 5000)
        polling = asyncio.ensure_future(session.take(2, 5000))
        session.not_taken(found)
        session._returned, held = [], session._returned  # as if it came while the other was asking already
        await asyncio.sleep(0)
        session._returned = held
        assert values(await polling) == [b"2", b"3"]
        await sessions.drop(session)
        assert values(await (await opened()).take(10, 5000)) == [b"4", b"5"]

    with_sessions(rq, work)
    assert "2 records of consumer w were not handed out" in caplog.text
