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
from rayqueue.ids import GroupId, Offset, ReplicaId
from rayqueue.partition import commit_command, retention_point
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.start import PartitionReplica, create_replica, start_replica
from rayqueue.testing import wait_for
from tests.unit.net.client_net import Cluster, batch

GROUP, NODE = GroupId("close-0"), ReplicaId("n1")
TIMEOUT_S = 10.0


@pytest.fixture
def replica(tmp_path: Path) -> PartitionReplica:
    """The only voter of its group, leading."""
    settings = Settings(transport={"secret": "only for this test"})
    path = tmp_path / "replica"
    create_replica(path, GROUP, NODE, ReplicaSet.of([NODE]), settings)
    replica = start_replica(path, GROUP, NODE, settings, on_fatal=print)
    wait_for(lambda: replica.status.role == "leader", "the only voter to lead", TIMEOUT_S)
    return replica


COMMIT = commit_command("billing", 1, {0: 3})


def test_calls_that_the_thread_never_took_are_refused(replica: PartitionReplica) -> None:
    held, release = threading.Event(), threading.Event()
    answers: SimpleQueue[Any] = SimpleQueue()

    def hold(_: Any) -> None:
        held.set()
        release.wait(TIMEOUT_S)

    replica.inspect(hold)  # its answer is given on the engine's thread, which can do nothing else meanwhile
    assert held.wait(TIMEOUT_S)
    replica.service.command(COMMIT, answers.put)
    replica.confirm_leadership(answers.put)
    replica.inspect(answers.put)
    closing = threading.Thread(target=replica.close)
    closing.start()
    while not replica._inbox.closed:
        closing.join(0.001)
    release.set()
    closing.join(TIMEOUT_S)
    refused = [answers.get(timeout=TIMEOUT_S) for _ in range(3)]
    assert [type(error) for error in refused] == [ReplicaClosedError] * 3


def test_a_call_that_comes_between_looking_and_closing_is_refused(replica: PartitionReplica) -> None:
    replica.close()
    replica._inbox.closed = False  # as it was when the call was let in
    answers: SimpleQueue[Any] = SimpleQueue()
    replica.service.command(COMMIT, answers.put)
    replica.inspect(answers.put)
    assert [type(answers.get(timeout=TIMEOUT_S)) for _ in range(2)] == [ReplicaClosedError] * 2


def test_after_close_every_call_raises(replica: PartitionReplica) -> None:
    replica.close()
    calls: list[Callable[[], Any]] = [
        lambda: replica.service.command(COMMIT, print),
        lambda: replica.confirm_leadership(print),
        lambda: replica.inspect(print),
        lambda: replica.run(lambda: None),
    ]
    for call in calls:
        with pytest.raises(ReplicaClosedError):
            call()


@pytest.mark.slow
def test_closing_in_the_middle_of_retention_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path, log={"retention_bytes": 1})
    replica = cluster.replica
    closing = threading.Thread(target=replica.close)

    def close_now(*arguments: Any, **named: Any) -> Offset:
        point = retention_point(*arguments, **named)
        if point:
            closing.start()
            while not replica._inbox.closed:
                closing.join(0.001)
        return point

    monkeypatch.setattr("rayqueue.partition.machine.retention_point", close_now)

    async def append() -> None:
        channel = await cluster.open()
        for _ in range(2):
            await channel.append(batch())

    cluster.run(append())
    wait_for(lambda: replica._inbox.ended, "the replica to end", TIMEOUT_S)
    closing.join(TIMEOUT_S)
    cluster.close()
