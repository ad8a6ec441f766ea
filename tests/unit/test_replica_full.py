"""A replica whose disk is full: it tries again now and then, and in between it does nothing."""

from __future__ import annotations

import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rayqueue.errors import DiskFullError, LeadershipLostError
from rayqueue.replica.retry import MAX_PAUSE_S, SyncRetry
from rayqueue.testing import wait_for
from tests.unit.client_net import TIMEOUT_S, Cluster, batch


def test_a_full_disk_is_tried_ever_more_rarely_and_at_once_again_after_a_success() -> None:
    retry = SyncRetry()
    assert not retry.failing
    now_s, attempts = 100.0, 0
    while now_s < 160:
        retry.failed(now_s)
        attempts += 1
        assert 0 < retry.at_s - now_s < MAX_PAUSE_S + 1e-6
        now_s = retry.at_s
    assert attempts < 70
    retry.succeeded()
    assert not retry.failing
    retry.failed(200.0)
    assert retry.at_s < 200.1


def test_the_engines_thread_does_not_spin_on_a_full_disk(tmp_path: Path) -> None:
    """It attempted 59,000 writes per second: its election was due, and nothing could be done about it."""
    cluster = Cluster(tmp_path, 1, raft={"election_timeout_min_ms": 200, "election_timeout_max_ms": 250})
    replica = cluster.replica
    attempts, turns, full = [0], [0], [True]
    store: Any = replica._store
    keep, commit, turn = store._keep, store._commit, replica._turn

    def refuse(work: Any) -> Any:
        def attempt(*arguments: Any) -> Any:
            attempts[0] += 1
            if full[0]:
                raise DiskFullError("no space")
            return work(*arguments)

        return attempt

    def counted() -> None:
        turns[0] += 1
        turn()

    store._keep, store._commit, replica._turn = refuse(keep), refuse(commit), counted  # type: ignore[method-assign]
    answers: SimpleQueue[Any] = SimpleQueue()
    replica.append(batch(), answers.put)
    assert isinstance(answers.get(timeout=TIMEOUT_S), LeadershipLostError)
    attempts[0] = turns[0] = 0
    time.sleep(1)
    assert attempts[0] < 25
    assert turns[0] < 100
    full[0] = False
    wait_for(lambda: replica.status.role == "leader", "the disk to be tried again", TIMEOUT_S)
    replica.append(batch(), answers.put)
    assert answers.get(timeout=TIMEOUT_S).count == 1
    cluster.close()
