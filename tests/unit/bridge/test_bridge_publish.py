"""Publishing what tasks have written: once, wherever tasks and drivers die and whoever else runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from rayqueue.cluster import ledger
from rayqueue.errors import (
    BatchConflictError,
    BatchForgottenError,
    BridgeError,
    LeadershipLostError,
    NotLeaderError,
    SequenceGapError,
    TopicRecreatedError,
    TransactionAbortedError,
)
from rayqueue.protocol.frames import Frame, Kind
from rayqueue.protocol.topics import TopicPartition
from tests.unit.bridge.bridge_jobs import STAGING, batch, found, job, make_queue, task, values_of, written
from tests.unit.client.queue_in_memory import Killed, MemoryQueue


@pytest.fixture
def queue() -> MemoryQueue:
    return make_queue()


def lent(queue: Any) -> list[str]:
    """Writes whose tasks have transactions."""
    return [row.write for row in queue.cluster_in_memory.machine.transactions.ids.values() if row.write]


@pytest.mark.parametrize("inline_bytes", [0, 1_000_000])
def test_rows_of_all_tasks_are_seen_at_once(queue: Any, inline_bytes: int) -> None:
    work = job(0)
    told = [task(queue, replace(work, inline_bytes=inline_bytes), values_of(0)), task(queue, work, values_of(0, 1))]
    assert not found(queue)
    assert work.publish(queue, told)
    assert found(queue) == Counter(values_of(0) + values_of(0, 1))
    assert lent(queue) == []


def test_rows_of_a_task_keep_their_order_and_lane(queue: Any) -> None:
    keys = pa.array([b"k%d" % (row % 7) for row in range(40)])
    lanes = pa.array([row % 2 for row in range(40)])
    work = job(0)
    work.publish(queue, [task(queue, work, values_of(0), key=keys, lane=lanes)])
    for lane in (0, 1):
        for key in {bytes(k.as_py()) for k in keys}:
            seen = [r.value for r in queue.committed("out") if (r.key, r.lane) == (key, lane)]
            assert seen == sorted(
                v for row, v in enumerate(values_of(0)) if row % 2 == lane and b"k%d" % (row % 7) == key
            )


def test_a_task_that_counts_for_nothing_leaves_nothing(queue: Any) -> None:
    work = job(0)
    task(queue, work, values_of(0, run=7))  # died before its message came
    work.publish(queue, [task(queue, work, values_of(0))])
    assert found(queue) == written(0)
    assert len(queue.records("out")) == 80, "nothing was written by the task that died: this test tests nothing"


def test_a_task_that_goes_on_after_its_write_has_ended(queue: Any) -> None:
    """A zombie: its transaction is over, and belongs to another task now."""
    work = job(0)
    zombie = task(queue, work, values_of(0, run=7))
    assert batch(queue, 0)
    assert batch(queue, 1)
    assert not work.publish(queue, [zombie])
    with pytest.raises(TransactionAbortedError, match="nothing is written"):
        replace(work, batch_id=2).publish(queue, [zombie], name=work.name)
    assert found(queue) == written(0, 1)


def test_a_batch_that_is_run_again_writes_nothing(queue: Any) -> None:
    batch(queue, 0)
    before = len(queue.records("out"))
    assert not batch(queue, 0, run=1)
    assert len(queue.records("out")) == before


def test_a_task_that_begins_after_its_write_has_ended(queue: Any) -> None:
    """It would hold up readers until its time is up."""
    for published in (True, False):
        work = job()
        if published:
            work.publish(queue, [])
        else:
            work.abandon(queue)
        assert task(queue, work, values_of(0)).transaction is None
    assert (lent(queue), queue.records("out")) == ([], [])


def test_readers_need_not_wait_for_tasks_that_do_not_count(queue: Any) -> None:
    """What other attempts have left open is over for every partition when the driver is done."""
    work = job(0)
    task(queue, work, values_of(0, run=7))
    work.publish(queue, [task(queue, work, values_of(0))])
    assert [list(group.partition.transactions) for group in queue.cluster_in_memory.partitions("out", None)] == [[]] * 3


def test_a_repeated_commit_changes_nothing(queue: Any) -> None:
    work = job(0)
    told = [task(queue, work, values_of(0))]
    assert [work.publish(queue, told) for _ in range(2)] == [True, False]
    assert not batch(queue, 0, run=1)  # after a restart, with other rows
    assert found(queue) == written(0)


def test_a_batch_without_rows(queue: Any) -> None:
    assert job(0).publish(queue, [])
    assert not batch(queue, 0)
    assert not found(queue)


@pytest.mark.slow
@pytest.mark.parametrize("inline_bytes", [0, 1_000_000])
@pytest.mark.parametrize("carried_out", [False, True])
def test_a_driver_that_dies_at_any_request(inline_bytes: int, carried_out: bool) -> None:
    """Batch 0 is written; 1 is tried by tasks and a driver that die at the n-th request; the next ones run 1 and 2."""
    fates = set()
    for at in range(1, 100):
        queue: Any = make_queue()
        batch(queue, 0)
        queue.revive()
        queue.kill_at = (at, carried_out)
        try:
            batch(queue, 1, inline_bytes=inline_bytes)
        except Killed:
            died = True
        else:
            died = False
        queue.revive()
        batch(queue, 1, run=1, inline_bytes=inline_bytes)
        batch(queue, 2)
        after = found(queue)
        run = int(values_of(1)[0] not in after)
        fates.add(run)
        assert after == written(0, 2) + written(1, run=run), f"died at {at}"
        assert lent(queue) == []
        if not died:
            break
    assert at > 5
    assert fates == {0, 1}, "drivers died before the decision only, or after it only: this test tests nothing"


def test_a_job_that_runs_once_dies_at_any_request() -> None:
    seen = set()
    for at in range(1, 100):
        queue: Any = make_queue()
        work = job()
        queue.kill_at = (at, at % 2 == 0)
        try:
            work.publish(queue, [task(queue, work, values_of(0)), task(queue, work, values_of(1))])
            died = False
        except Killed:
            died = True
        queue.revive()
        work.abandon(queue)
        assert found(queue) in (Counter(), written(0, 1)), f"died at {at}"
        seen.add(len(found(queue)))
        assert lent(queue) == []
        if not died:
            break
    assert seen == {0, 80}


def test_two_drivers_at_the_same_time(queue: Any) -> None:
    """Both have run the batch. The first decides; what the other has is gone with that."""
    work = job(1)
    first, second = task(queue, work, values_of(1)), task(queue, work, values_of(1, run=1))
    assert work.publish(queue, [second])
    assert not work.publish(queue, [first])
    assert found(queue) == written(1, run=1)


def test_batches_of_one_writer_at_the_same_time(queue: Any) -> None:
    works = [job(batch_id) for batch_id in (7, 8)]
    told = [task(queue, work, values_of(work.batch_id or 0)) for work in works]
    assert [work.publish(queue, [each]) for work, each in zip(works, told, strict=True)] == [True, True]
    assert found(queue) == written(7, 8)


def test_a_job_that_fails_lets_go_at_once(queue: Any) -> None:
    work = job()
    task(queue, work, values_of(0))
    queue.append("out", 0, b"behind")
    assert b"behind" not in found(queue), "readers wait for what is open: this test tests nothing"
    work.abandon(queue)
    assert found(queue) == Counter([b"behind"])


# -- ids --------------------------------------------------------------------------------------


def test_ids_in_any_order_are_all_written(queue: Any) -> None:
    assert [batch(queue, batch_id) for batch_id in (4, 6, 5, 0)] == [True] * 4
    assert [batch(queue, batch_id, run=1) for batch_id in (5, 0, 6, 4)] == [False] * 4
    assert found(queue) == written(4, 6, 5, 0)


def test_an_id_that_stands_for_something_else_is_refused(queue: Any) -> None:
    """A wiped checkpoint, or another one under the same name: its batch 0 is not the batch 0 that was written."""
    batch(queue, 0, identity=b"checkpoint a")
    assert not batch(queue, 0, run=1, identity=b"checkpoint a")
    with pytest.raises(BatchConflictError, match="other contents"):
        batch(queue, 0, run=2, identity=b"checkpoint b")
    assert found(queue) == written(0)
    assert lent(queue) == []


def test_an_id_that_may_be_written_is_refused(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_SPANS", 3)
    for batch_id in (0, 10, 20, 30, 40):
        batch(queue, batch_id)
    before = found(queue)
    for batch_id in (0, 5):
        with pytest.raises(BatchForgottenError, match="Number batches upwards"):
            batch(queue, batch_id, run=1)
    assert found(queue) == before
    batch(queue, 35)
    assert found(queue) == before + written(35)


def test_a_writer_of_a_release_that_staged_is_refused(queue: Any) -> None:
    queue.create_topic(STAGING)
    with pytest.raises(BridgeError, match=f"staged its rows in '{STAGING}'.*delete that topic"):
        batch(queue, 0)
    queue.delete_topic(STAGING)
    assert batch(queue, 0)
    assert found(queue) == written(0)


# -- on the way -------------------------------------------------------------------------------


def test_lost_leaders_on_the_way(queue: Any) -> None:
    for carried_out in (False, True):
        queue.fail_appends = [(LeadershipLostError("gone"), carried_out), (NotLeaderError("not me"), False)]
        batch(queue, int(carried_out))
        queue.fail_appends = []
    assert found(queue) == written(0, 1)


def test_a_partition_that_forgets_a_task(queue: Any) -> None:
    """Nothing is written then: nobody could say what of it is there."""
    queue = make_queue(partitions=1)
    partition = queue.partitions[TopicPartition("out", 0)]
    heard = []

    def listen(frame: Frame) -> None:
        heard.append(frame.kind == Kind.APPEND)
        if sum(heard) == 3:
            partition.forget_producers_here()

    partition.listen(listen)
    with pytest.raises(SequenceGapError):
        batch(queue, 0, batch_bytes=100)
    assert batch(queue, 0, run=1)
    assert found(queue) == written(0, run=1)


def test_a_topic_that_was_made_again_under_a_job(queue: Any) -> None:
    """Rows that were cut for one topic are not written to another one of its name."""
    work = job(0, inline_bytes=1_000_000)
    told = task(queue, work, values_of(0))
    queue.delete_topic("out")
    queue.create_topic("out", partitions=3)
    with pytest.raises(TopicRecreatedError):
        work.publish(queue, [told])
    assert not found(queue)
    assert batch(queue, 0, run=1)
    assert found(queue) == written(0, run=1)


def test_direct_writes_count_at_once(queue: Any) -> None:
    queue.fail_appends = [(LeadershipLostError("gone"), True)]
    task(queue, job(direct=True), values_of(0))
    assert Counter(record.value for record in queue.records("out")) == written(0)
    assert found(queue) == written(0)
