"""The channels to a group's replicas: opened once, and let go when nobody waits for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayqueue.config import Settings
from rayqueue.net.replicas import Replicas


class Wire:
    """An open channel, as far as ``Replicas`` looks at it."""

    closed = False
    retired = False
    unanswered = 0

    def retire(self) -> None:
        self.retired = True


class SlowDirectory:
    """Opens when it is told to."""

    def __init__(self) -> None:
        self.opened: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()

    async def endpoint(self, group_id: str, replica_id: str) -> Any:
        return (group_id, replica_id)

    async def open(self, endpoint: Any, settings: Settings) -> Wire:
        return await self.opened


async def _waiting(replicas: Replicas, times: int) -> list[asyncio.Task[Any]]:
    asked = [asyncio.ensure_future(replicas.channel("b")) for _ in range(times)]
    for _ in range(5):
        await asyncio.sleep(0)
    return asked


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_channel_that_opens_while_its_last_waiter_is_cancelled_is_let_go(after: int) -> None:
    """It stayed open, unused, until the leader changed."""

    async def scenario() -> None:
        directory = SlowDirectory()
        replicas = Replicas("g", ["a", "b"], directory, Settings())  # type: ignore[arg-type]
        (asked,) = await _waiting(replicas, 1)
        wire: Any = Wire()
        directory.opened.set_result(wire)
        for _ in range(after):
            await asyncio.sleep(0)
        given = asked.cancel()
        await asyncio.wait((asked,))
        if given and asked.cancelled():
            assert not replicas._channels
            assert wire.retired or not replicas._opening
        else:
            assert list(replicas._channels.values()) == [wire]

    asyncio.run(scenario())


@pytest.mark.parametrize("cancelled", [0, 1])
def test_it_stays_for_another_one_who_waits(cancelled: int) -> None:
    async def scenario() -> None:
        directory = SlowDirectory()
        replicas = Replicas("g", ["a", "b"], directory, Settings())  # type: ignore[arg-type]
        asked = await _waiting(replicas, 2)
        wire: Any = Wire()
        wire.unanswered = 1  # whoever gets it asks it something at once
        directory.opened.set_result(wire)
        asked[cancelled].cancel()
        assert await asked[1 - cancelled] is wire
        await asyncio.wait(asked)
        assert list(replicas._channels.values()) == [wire]
        assert not wire.retired

    asyncio.run(scenario())
