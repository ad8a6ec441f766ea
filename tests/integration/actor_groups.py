"""Groups of replica actors under test: reading them, killing them, and what must be there afterwards."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import ray

from rayqueue.actors.replica import Fetch
from rayqueue.ids import NodeId, Offset
from rayqueue.partition import Appended, Fetched
from rayqueue.records import RecordBatch
from rayqueue.testing import wait_for
from rayqueue.testing.ray_group import ReplicaGroup
from tests.integration.history import RECORDS_PER_BATCH, numbered

_producers = iter(range(1, 1_000_000))


def new_producer() -> int:
    return next(_producers)


def end_of(group: ReplicaGroup) -> Offset:
    return group.fetch(0).high_watermark


def followers(group: ReplicaGroup) -> list[NodeId]:
    leader = group.leader()
    return [node for node in group.nodes if node != leader]


def read_all(fetch: Any, offset: int = 0) -> list[Fetched]:
    """By ``fetch(offset)``, up to the high watermark of its first answer."""
    found: list[Fetched] = []
    end = None
    while end is None or offset < end:
        answer: Fetch = fetch(offset)
        end = answer.high_watermark if end is None else end
        found += answer.batches
        offset = answer.batches[-1].base_offset + answer.batches[-1].count if answer.batches else offset
    return found


def fetch_by(group: ReplicaGroup, node: NodeId) -> Any:
    return lambda offset: ray.get(group.handle(node).fetch.remote(offset, 1 << 20))


def wait_for_end(group: ReplicaGroup, end: int, *, replicas: int = 3, timeout_s: float = 30.0) -> None:
    def reached() -> bool:
        statuses = group.statuses().values()
        return len(statuses) >= replicas and all(status.high_watermark >= end for status in statuses)

    wait_for(reached, f"{replicas} replicas at offset {end}", timeout_s)


def kill(group: ReplicaGroup, *nodes: NodeId) -> None:
    pids = [group.process(node).pid for node in nodes]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


class Writing:
    """Numbered batches, in a thread, until its ``with`` block ends; then all of them are acknowledged."""

    def __init__(self, group: ReplicaGroup) -> None:
        self.producer = new_producer()
        self.answers: list[Appended] = []
        self._pipeline = group.pipeline()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Writing:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        self._thread.join(60)
        if error is None:
            self.finish()

    def finish(self) -> None:
        """Stop, and wait until all that was sent is acknowledged."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.check()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def wait_for(self, more: int, timeout_s: float = 30.0) -> None:
        """Until so many more batches are acknowledged."""
        goal = len(self.answers) + more

        def reached() -> bool:
            self.check()
            return len(self.answers) >= goal

        wait_for(reached, f"{goal} acknowledged batches", timeout_s)

    def _run(self) -> None:
        try:
            number = 0
            while not self._stop.is_set():
                self._pipeline.send(numbered(self.producer, number * RECORDS_PER_BATCH), self.answers.append)
                number += 1
            self._pipeline.flush()
        except BaseException as error:  # noqa: BLE001  # raised again where the test sees it
            self._error = error


def check_history(group: ReplicaGroup, writing: Writing, *, replicas: int = 3) -> None:
    """Every replica has every acknowledged batch where its answer says, once, in order, and nothing else of it."""
    last = writing.answers[-1]
    wait_for_end(group, last.base_offset + last.count, replicas=replicas)
    logs = [read_all(fetch_by(group, node)) for node in group.statuses()]
    assert len(logs) == replicas
    assert all(log == logs[0] for log in logs)
    mine = [
        (batch.base_offset, batch.payload)
        for batch in logs[0]
        if RecordBatch.decode(batch.payload).header.producer_id == writing.producer
    ]
    expected = [
        (answer.base_offset, numbered(writing.producer, number * RECORDS_PER_BATCH))
        for number, answer in enumerate(writing.answers)
    ]
    assert mine == expected
