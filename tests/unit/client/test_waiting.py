"""Long waits say what they wait for."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from typing import Any

import pytest
from rich.console import Console

from rayqueue.cli import common
from rayqueue.client import waiting
from rayqueue.client.admin import admin
from rayqueue.client.waiting import telling
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError, TopicNotReadyError
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicInfo, TopicSettings
from rayqueue.testing import wait_for
from tests.unit.client.small_cluster import until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    monkeypatch.setattr(waiting, "AGAIN_S", 0.01)


def test_a_wait_is_told_again_and_again_and_never_after_its_end(caplog: pytest.LogCaptureFixture) -> None:
    done = iter(range(100))
    with telling(lambda: f"{next(done)} of 3 replicas have started"):
        wait_for(lambda: len(caplog.records) >= 2, "two lines", 5.0)
    told = len(caplog.records)
    assert "0 of 3 replicas have started (for 0 s)" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING  # seen where nobody has set up logging
    time.sleep(0.05)
    assert len(caplog.records) == told


def test_a_short_wait_says_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 60.0)
    with telling(lambda: "something"):
        pass
    assert not caplog.records


def test_a_reason_that_cannot_be_had_ends_no_wait(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> str:
        raise RayQueueError("nobody answers")

    with telling(fails):
        wait_for(lambda: len(caplog.records) >= 2, "two lines", 5.0)
    assert "nobody answers" in caplog.text


class _Slow:
    """As much of the routes as making a topic takes, with partitions that get no leader."""

    def __init__(self, caplog: pytest.LogCaptureFixture, statuses: dict[tuple[str, str], Any]) -> None:
        self._caplog = caplog
        self._statuses = statuses

    async def statuses(self, _: TopicInfo) -> dict[tuple[str, str], Any]:
        return self._statuses

    async def topic(self, _: str, *, refresh: bool) -> None:
        assert refresh
        await until(lambda: bool(self._caplog.records))
        raise TopicNotReadyError("1 of 2 partitions have no leader", missing=["b2"])


class _Status:
    damaged, read_only, term, start_offset, high_watermark, size_bytes = None, False, 1, 0, 0, 0
    replica_id, doubted, in_sync, lags = "r1", None, (), ()
    leader, base_index, last_index, last_term, commit, applied, epoch = None, 0, 0, 0, 0, 0, 0
    voters, learners = ("r1", "r2"), ()

    def __init__(self, role: str) -> None:
        self.role = role


def test_making_a_topic_says_which_replicas_have_started(caplog: pytest.LogCaptureFixture) -> None:
    replicas = (ReplicaInfo("r1", "b1"), ReplicaInfo("r2", "b2"))
    partitions = tuple(PartitionInfo(number, f"orders-{number}.1", replicas) for number in range(2))
    info = TopicInfo("orders", 1, TopicSettings(partitions=2, replication=2), partitions)
    statuses: dict[tuple[str, str], Any] = {
        (each.group_id, node): _Status("follower") for each in partitions for node in ("r1", "r2")
    }
    statuses["orders-0.1", "r1"] = _Status("leader")
    statuses["orders-1.1", "r2"] = RayQueueError("has no actor now")
    routes: Any = _Slow(caplog, statuses)
    with pytest.raises(TopicNotReadyError):  # what it says: test_topic_readiness
        asyncio.run(admin.Admin(routes, Settings())._until_led(info, partitions, None))
    standing = (
        "1 of 2 partitions of orders have one, 1 of 2 replicas of orders-1 have started (r2 on b2: has no actor now)"
    )
    assert f"waiting for leaders: {standing}" in caplog.text


@pytest.mark.parametrize("terminal", [True, False])
def test_commands_show_it_on_standard_error(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    words = io.StringIO()
    monkeypatch.setattr(common, "progress_console", lambda: Console(file=words, force_terminal=terminal, width=100))
    with common.spinner("making"), telling(lambda: "waiting for [2 of 3] replicas"):
        wait_for(lambda: "waiting for [2 of 3] replicas" in words.getvalue(), "the line", 5.0)
    assert waiting.log.propagate
    assert not waiting.log.handlers
