"""The settler goes on whatever goes wrong, or an open transaction holds up its readers for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rayqueue.actors import settler
from rayqueue.config import Settings
from rayqueue.errors import NotLeaderError, ReplicaClosedError
from rayqueue.ids import GroupId
from rayqueue.net import lasting
from rayqueue.protocol.transactions import OpenFor

ASKED = (OpenFor(1, 0, 5_000),)


class Route:
    """To a coordinator that answers by the script."""

    script: list[Any]

    def __init__(self, *_: object) -> None: ...

    async def call(self, call: Any) -> Any:
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None: ...


class Replica:
    """It is told the fates, and closes then."""

    def __init__(self, looks: list[Any]) -> None:
        self.fates: list[Any] = []
        self.looks = looks
        self.service = SimpleNamespace(settling=SimpleNamespace(questions=None, answered=self._answered))

    def _answered(self, asked: Any, fates: Any) -> None:
        self.fates.append(fates)

    def look(self, _: object, answer: Callable[[Any], None]) -> None:
        found = ReplicaClosedError("it is closed") if self.fates else self.looks.pop(0) if self.looks else ASKED
        if isinstance(found, ZeroDivisionError):
            raise found
        answer(found)

    def run(self, work: Callable[[], None]) -> None:
        work()


@pytest.mark.parametrize("bug", [ZeroDivisionError("a bug"), TypeError("an answer that nobody expects")])
@pytest.mark.parametrize("looks", [[], [ZeroDivisionError("a bug")], [NotLeaderError("not here", leader=None)]])
def test_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bug: Exception, looks: list[Any]
) -> None:
    monkeypatch.setattr(settler, "CoordinatorRoute", Route)
    monkeypatch.setattr(lasting, "MIN_PAUSE_MS", 1)
    monkeypatch.setattr(Route, "script", [NotLeaderError("nobody", leader=None), bug, ("aborted",)], raising=False)
    settings = Settings()
    settings = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"resolve_after_ms": 2})})
    replica: Any = Replica(list(looks))

    async def scenario() -> None:
        await asyncio.wait_for(settler.settle_transactions(replica, GroupId("orders-0"), settings), 10)

    asyncio.run(scenario())
    assert replica.fates == [("aborted",)]
    assert "the settler of orders-0 has failed" in caplog.text
