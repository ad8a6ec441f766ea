"""A replica that is lost says so until that is written down."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayqueue.actors import loss
from rayqueue.config import Settings
from rayqueue.errors import OutcomeUnknownError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net import route


def test_who_is_damaged_before_it_is_known_to_be_made_says_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool | Exception] = [OutcomeUnknownError("no leader"), False, False, True]

    class Route:
        def __init__(self, *_: object) -> None:
            pass

        async def call(self, _: object) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def close(self) -> None:
            pass

    monkeypatch.setattr(route, "CoordinatorRoute", Route)
    monkeypatch.setattr(loss, "_AGAIN_S", 0.0)

    async def report(node: str, status: Any) -> None:
        replica: Any = type("Replica", (), {"status": status})
        watching = asyncio.create_task(loss.report_damage(replica, GroupId("orders-0.1"), ReplicaId(node), Settings()))
        await asyncio.wait([watching], timeout=0.2)
        watching.cancel()

    damaged = type("Status", (), {"damaged": "a checksum", "forgetful": ()})
    asyncio.run(report("r1", damaged))
    assert answers == []
    answers = [False, True]
    asyncio.run(report("r1", type("Status", (), {"damaged": None, "forgetful": ("r2",)})))
    assert answers == [True], "a follower that is not needed any more is said once"
