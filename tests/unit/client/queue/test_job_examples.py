"""The examples of docs/jobs.md and of the docstrings of work queues, run on the queue in memory."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import rayqueue
from rayqueue.client.factories import Factories
from rayqueue.client.queue import drop_in
from rayqueue.client.queue.dead import DeadLetters
from rayqueue.client.queue.handles import JobHandle
from rayqueue.client.queue.job import Job
from rayqueue.client.queue.queue import JobQueue
from rayqueue.testing import memory
from tests.integration.test_docs import examples


@pytest.fixture
def rq() -> Iterator[memory.MemoryQueue]:
    with memory.connect() as made:
        yield made


@pytest.mark.slow
def test_the_examples_of_the_page(rq: memory.MemoryQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    code = examples("docs/jobs.md")
    assert code.count("tasks.") > 15
    monkeypatch.setattr(rayqueue, "connect", lambda: rq)
    exec(compile(code, "docs/jobs.md", "exec"), {})


@pytest.mark.parametrize("documented", [Factories.queue, drop_in.Queue], ids=["rq.queue", "Queue"])
def test_the_examples_of_docstrings(rq: memory.MemoryQueue, documented: Any) -> None:
    names = {"rq": rq, "Queue": partial(drop_in.Queue, rq=rq)}
    (test,) = [
        each for each in doctest.DocTestFinder(recurse=False).find(documented, "example", globs=names) if each.examples
    ]
    assert doctest.DocTestRunner().run(test).failed == 0


WITHOUT_TWIN: dict[type, set[str]] = {
    JobQueue: {"ask_partition", "find_first", "open", "partition_count"},  # which are coroutines
    Job: set(),
    JobHandle: set(),
    DeadLetters: set(),
    drop_in.Queue: {
        *("size", "qsize", "empty", "full", "shutdown"),  # as in ray.util.queue
        *("put_nowait", "get_nowait", "put_nowait_batch", "get_nowait_batch"),
    },
}


@pytest.mark.parametrize("kind", WITHOUT_TWIN)
def test_every_call_that_waits_has_a_twin(kind: type) -> None:
    methods = {name for name, _ in inspect.getmembers(kind, inspect.isroutine) if not name.startswith("_")}
    alone = {name for name in methods if not name.endswith("_async") and f"{name}_async" not in methods}
    assert alone == WITHOUT_TWIN[kind]
    assert all(name.removesuffix("_async") in methods for name in methods)
