"""`rayqueue queues` and `rayqueue dlq`, on the queue in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from rayqueue.cli import app, queues
from rayqueue.errors import InvalidInputError, TopicKindError, UnknownJobError
from rayqueue.testing import memory

runner = CliRunner()


@pytest.fixture
def rq(monkeypatch: pytest.MonkeyPatch) -> Iterator[memory.MemoryQueue]:
    with memory.connect() as made:

        @contextmanager
        def connected(*_: object) -> Iterator[memory.MemoryQueue]:
            yield made

        monkeypatch.setattr(queues, "connected", connected)
        yield made


def told(*words: str, stdin: str | None = None) -> Any:
    return json.loads(runner.invoke(app, [*words, "--json"], input=stdin, catch_exceptions=False).output)


def shown(*words: str) -> str:
    return runner.invoke(app, list(words), catch_exceptions=False).output


@pytest.mark.slow
def test_jobs_are_put_seen_and_taken(rq: memory.MemoryQueue) -> None:
    assert "There is no queue" in shown("queues", "list")
    told("queues", "create", "emails", "--max-deliveries", "1", "--lanes", "2")
    assert told("queues", "put", "emails", "one", "two", "--priority", "1") == ["0-0", "0-1"]
    assert told("queues", "put", "emails", stdin="three\nfour\n") == ["0-2", "0-3"]
    assert told("queues", "put", "emails", "again", "--dedupe-id", "a") == ["0-4"]
    assert told("queues", "put", "emails", "again", "--dedupe-id", "a") == ["0-4"]
    with pytest.raises(InvalidInputError):
        shown("queues", "put", "emails", "1", "2", "--dedupe-id", "a")
    assert [job["value"] for job in told("queues", "peek", "emails")] == ["one", "two", "three", "four", "again"]
    assert [job["value"] for job in told("queues", "get", "emails", "--max", "2")] == ["one", "two"]
    (row,) = told("queues", "list")
    assert (row["name"], row["ready"], row["leased"]) == ("emails", 3, 0)
    assert told("queues", "describe", "emails")["sizes"]["ready"] == 3
    assert "next: 0-2" in shown("queues", "describe", "emails")
    assert "emails" in shown("queues", "list")
    rq.create_topic("log")
    assert len(told("queues", "list")) == 1
    with pytest.raises(TopicKindError):
        shown("queues", "peek", "log")


@pytest.mark.slow
def test_dead_letters(rq: memory.MemoryQueue) -> None:
    queue = rq.queue("q", max_deliveries=1)
    assert "no dead letters" in shown("dlq", "list", "q")
    queue.put_many([b"bad", b"worse"], headers=[{"h": b"1"}, None])
    for job in queue.get(2):
        job.reject("cannot", traceback="Traceback of it")
    assert [(each["id"], each["value"], each["reason"]) for each in told("dlq", "list", "q")] == [
        ("0-0", "bad", "cannot"),
        ("0-1", "worse", "cannot"),
    ]
    assert "--after 0-0" in shown("dlq", "list", "q", "--max", "1")
    assert [each["id"] for each in told("dlq", "list", "q", "--after", "0-0")] == ["0-1"]
    assert told("dlq", "show", "q", "0-0")["headers"] == {"h": "1"}
    page = shown("dlq", "show", "q", "0-0")
    assert "reject by" in page
    assert "Traceback of it" in page
    with pytest.raises(InvalidInputError, match="--all"):
        shown("dlq", "redrive", "q")
    with pytest.raises(InvalidInputError, match="--all"):
        shown("dlq", "purge", "q", "0-0", "--all")
    assert told("dlq", "redrive", "q", "0-0") == {"redriven": 1}
    assert told("dlq", "purge", "q", "--all") == {"purged": 1}
    with pytest.raises(UnknownJobError):
        shown("dlq", "show", "q", "0-1")
    assert told("queues", "get", "q")[0]["value"] == "bad"
