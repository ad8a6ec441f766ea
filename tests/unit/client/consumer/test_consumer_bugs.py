"""Bugs in a consumer's background: whoever polls is told, or what has failed is begun again. Never silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rayqueue import RayQueue
from rayqueue.client.consumer.commits import Commits
from rayqueue.client.consumer.fetcher import Fetcher
from rayqueue.client.consumer.group import GroupMembership
from rayqueue.errors import OutcomeUnknownError
from rayqueue.net import lasting
from rayqueue.testing import memory, wait_for


@pytest.fixture
def rq() -> Iterator[RayQueue]:
    with memory.connect() as queue:
        queue.create_topic("orders")
        with queue.producer() as producer:
            producer.send("orders", b"1").result(timeout_ms=5000)
        yield queue


async def bug(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a bug")


def test_a_membership_that_fails_is_told(
    rq: RayQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GroupMembership, "_heartbeats", bug)
    with rq.consumer("orders", group="g") as consumer, pytest.raises(OutcomeUnknownError, match="see the log"):
        wait_for(lambda: consumer.poll(timeout_ms=50) and None, "an error")
    assert "a bug" in caplog.text


def test_a_partition_that_is_not_begun_is_told(
    rq: RayQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Fetcher, "begin", bug)
    with rq.consumer("orders") as consumer, pytest.raises(OutcomeUnknownError, match="see the log"):
        wait_for(lambda: consumer.poll(timeout_ms=50) and None, "an error")
    assert "a bug" in caplog.text


def test_commits_by_the_clock_go_on(
    rq: RayQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lasting, "MIN_PAUSE_MS", 1)
    original: Any = Commits.commit_due
    failed: list[None] = []

    async def commit_due(self: Any, *args: Any, **options: Any) -> Any:
        if not failed:
            failed.append(None)
            await bug()
        return await original(self, *args, **options)

    monkeypatch.setattr(Commits, "commit_due", commit_due)
    with rq.consumer("orders", group="g", auto_commit_ms=20) as consumer:

        def committed() -> bool:
            consumer.poll(timeout_ms=50)
            return consumer.committed(("orders", 0)) == 1

        wait_for(committed, "a commit")
    assert failed
    assert "committing has failed, and begins again" in caplog.text
