"""`rayqueue rebalance` on a queue in memory: the plan, the question, and Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from rayqueue.cli import app, brokers, rebalancing
from rayqueue.testing import memory

run = CliRunner().invoke


@pytest.fixture
def rq(monkeypatch: pytest.MonkeyPatch) -> Iterator[memory.MemoryQueue]:
    """Three topics more on each of three brokers than on the first."""
    with memory.connect(brokers=4) as queue:
        for each in range(12):
            queue.create_topic(f"t{each}", replication=1)
        first = queue.cluster().brokers[0].broker
        for info in queue.topics():
            if info.partitions[0].replicas[0].broker == first:
                queue.delete_topic(info.name)

        @contextmanager
        def connected(*_: object) -> Iterator[memory.MemoryQueue]:
            yield queue

        monkeypatch.setattr(rebalancing, "connected", connected)
        monkeypatch.setattr(brokers, "connected", connected)
        yield queue


def interrupted(_: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_the_plan_is_shown_and_nothing_begins_without_a_yes(rq: memory.MemoryQueue) -> None:
    told = run(app, ["rebalance", "--dry-run"])
    assert told.exit_code == 0
    assert "replicas now" in told.output
    plan = json.loads(run(app, ["rebalance", "--dry-run", "--json"]).output)
    assert [each["target"] for each in plan["moves"]] == ["b1", "b1"]
    assert run(app, ["rebalance"], input="n\n").exit_code == 1
    assert rq.rebalance_progress() is None


@pytest.mark.slow
def test_an_interrupt_stops_it_and_running_it_again_continues(
    rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayqueue.cli.rebalancing.time.sleep", interrupted)
    stopped = run(app, ["rebalance", "--yes"])
    assert stopped.exit_code == 130
    assert "Stopped with 2 moves left" in stopped.output
    assert rq.rebalance_progress() is None
    assert run(app, ["rebalance", "--yes", "--no-wait"]).exit_code == 0
    begun = rq.rebalance_progress()
    assert begun is not None
    assert begun.moves_left == 2
    assert "2 (" in run(app, ["brokers", "join-status"]).output
    again = run(app, ["rebalance", "--yes"])
    assert "A rebalance is under way" in again.output, "it goes on with that one"
    assert again.exit_code == 130
    assert "No rebalance is under way" in run(app, ["rebalance", "--stop"]).output
