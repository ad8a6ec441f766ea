"""Lasting work: a failure is logged, and is not the end of it."""

from __future__ import annotations

import asyncio

import pytest

from rayqueue.net import lasting as module
from rayqueue.net.lasting import lasting


def test_what_fails_is_told_and_begun_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "MIN_PAUSE_MS", 1)
    calls: list[None] = []

    async def work() -> None:
        calls.append(None)
        if len(calls) < 4:
            raise ZeroDivisionError("a bug")

    asyncio.run(lasting(work, "counting"))
    assert len(calls) == 4, "and what returns is over"
    assert caplog.text.count("counting has failed, and begins again") == 3
    assert "ZeroDivisionError: a bug" in caplog.text


def test_what_is_cancelled_is_over() -> None:
    async def scenario() -> None:
        task = asyncio.ensure_future(lasting(asyncio.Event().wait, "waiting"))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
