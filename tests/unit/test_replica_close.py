"""Closing a running replica: whoever waits is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from rayqueue.config import Settings
from rayqueue.errors import ReplicaClosedError
from rayqueue.ids import GroupId, NodeId, Offset
from rayqueue.partition import retention_point
from rayqueue.raft.members import Members
from rayqueue.records import RecordBatch
from rayqueue.replica import PartitionReplica, create_replica, start_replica
from rayqueue.testing import wait_for

GROUP, NODE = GroupId("close-0"), NodeId("n1")
TIMEOUT_S = 10.0


def start(tmp_path: Path, on_fatal: Callable[[BaseException], None] = print, **log: int) -> PartitionReplica:
    """The only voter of its group, leading."""
    settings = Settings(transport={"secret": "only for this test"}, log=log)
    path = tmp_path / "replica"
    create_replica(path, GROUP, NODE, Members.of([NODE]), settings)
    replica = start_replica(path, GROUP, NODE, settings, on_fatal=on_fatal)
    wait_for(lambda: replica.status.role == "leader", "the only voter to lead", TIMEOUT_S)
    return replica


@pytest.fixture
def replica(tmp_path: Path) -> PartitionReplica:
    return start(tmp_path)


def batch() -> bytes:
    return RecordBatch.encode([b"value"], timestamps=1)


def test_calls_that_the_thread_never_took_are_refused(replica: PartitionReplica) -> None:
    held, release = threading.Event(), threading.Event()
    answers: SimpleQueue[Any] = SimpleQueue()

    def hold(_: Any) -> None:
        held.set()
        release.wait(TIMEOUT_S)

    replica.inspect(hold)  # its answer is given on the engine's thread, which can do nothing else meanwhile
    assert held.wait(TIMEOUT_S)
    replica.append(batch(), answers.put)
    replica.confirm_leadership(answers.put)
    replica.inspect(answers.put)
    closing = threading.Thread(target=replica.close)
    closing.start()
    while not replica._closing:
        closing.join(0.001)
    release.set()
    closing.join(TIMEOUT_S)
    refused = [answers.get(timeout=TIMEOUT_S) for _ in range(3)]
    assert [type(error) for error in refused] == [ReplicaClosedError] * 3


def test_a_call_that_comes_between_looking_and_closing_is_refused(replica: PartitionReplica) -> None:
    replica.close()
    replica._closing = False  # as it was when the call was let in
    answers: SimpleQueue[Any] = SimpleQueue()
    replica.append(batch(), answers.put)
    replica.inspect(answers.put)
    assert [type(answers.get(timeout=TIMEOUT_S)) for _ in range(2)] == [ReplicaClosedError] * 2


def test_after_close_every_call_raises(replica: PartitionReplica) -> None:
    replica.close()
    calls: list[Callable[[], Any]] = [
        lambda: replica.append(batch(), print),
        lambda: replica.confirm_leadership(print),
        lambda: replica.inspect(print),
        lambda: replica.read_tail(0, 1000),
        lambda: replica.read_disk(0, 1000),
    ]
    for call in calls:
        with pytest.raises(ReplicaClosedError):
            call()


def test_closing_in_the_middle_of_retention_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fatal: list[BaseException] = []
    replica = start(tmp_path, fatal.append, retention_bytes=1)
    closing = threading.Thread(target=replica.close)

    def close_now(*arguments: Any, **named: Any) -> Offset:
        point = retention_point(*arguments, **named)
        if point:
            closing.start()
            while not replica._closing:
                closing.join(0.001)
        return point

    monkeypatch.setattr("rayqueue.partition.machine.retention_point", close_now)
    answers: SimpleQueue[Any] = SimpleQueue()
    for _ in range(2):
        replica.append(batch(), answers.put)
        answers.get(timeout=TIMEOUT_S)
    wait_for(lambda: replica._ended, "the replica to end", TIMEOUT_S)
    closing.join(TIMEOUT_S)
    assert fatal == []
