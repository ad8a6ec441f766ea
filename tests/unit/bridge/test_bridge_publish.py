"""Publishing a stream's batches: once, wherever the driver dies and whoever else runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from rayqueue.bridge.journal import producer_id_of
from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.publish import DirectWriter, publish_once
from rayqueue.bridge.rows import Rows, RowSettings
from rayqueue.bridge.staging import Piece
from rayqueue.errors import BridgeError, LeadershipLostError, NotLeaderError, StagedDataLostError, StaleWriterError
from rayqueue.protocol.calls import Trim
from rayqueue.protocol.topics import TopicPartition
from tests.unit.bridge.bridge_jobs import STAGING, found, make_queue, publisher, stage, values_of
from tests.unit.client.queue_in_memory import Killed, MemoryQueue


@pytest.fixture
def queue() -> MemoryQueue:
    return make_queue()


def torn_queue() -> Any:
    """A queue whose driver died in the middle of copying batch 1, after batch 0."""
    for at in range(1, 100):
        queue: Any = make_queue()
        writer = publisher(queue)
        writer.publish(0, stage(queue, values_of(0)))
        pieces = stage(queue, values_of(1))
        queue.revive()
        queue.kill_at = (at, True)
        with pytest.raises(Killed):
            writer.publish(1, pieces)
        queue.revive()
        if 40 < sum(found(queue).values()) < 80:
            return queue
    raise AssertionError("no copy was torn")


@pytest.mark.parametrize("inline_bytes", [0, 1_000_000])
def test_rows_of_all_tasks_arrive_once(queue: Any, inline_bytes: int) -> None:
    pieces = stage(queue, values_of(0), inline_bytes=inline_bytes) + stage(queue, values_of(0, 1))
    publisher(queue).publish(0, pieces)
    assert found(queue) == Counter(values_of(0) + values_of(0, 1))


def test_rows_of_a_task_keep_their_order_and_lane(queue: Any) -> None:
    keys = pa.array([b"k%d" % (row % 7) for row in range(40)])
    lanes = pa.array([row % 2 for row in range(40)])
    publisher(queue).publish(0, stage(queue, values_of(0), key=keys, lane=lanes))
    for lane in (0, 1):
        for key in {bytes(k.as_py()) for k in keys}:
            seen = [r.value for r in queue.records("out") if (r.key, r.lane) == (key, lane)]
            assert seen == sorted(
                v for row, v in enumerate(values_of(0)) if row % 2 == lane and b"k%d" % (row % 7) == key
            )


def test_a_task_that_counts_for_nothing_leaves_nothing(queue: Any) -> None:
    stage(queue, values_of(0, run=7))  # died before its message came
    publisher(queue).publish(0, stage(queue, values_of(0)))
    assert found(queue) == Counter(values_of(0))


def test_a_repeated_commit_changes_nothing(queue: Any) -> None:
    writer = publisher(queue)
    pieces = stage(queue, values_of(0))
    writer.publish(0, pieces)
    writer.publish(0, pieces)
    publisher(queue).publish(0, stage(queue, values_of(0, run=1)))  # after a restart, with other rows
    assert found(queue) == Counter(values_of(0))


def test_a_batch_without_rows(queue: Any) -> None:
    writer = publisher(queue)
    for batch_id in range(3):
        writer.publish(batch_id, [] if batch_id == 1 else stage(queue, values_of(batch_id)))
    assert found(queue) == Counter(values_of(0) + values_of(2))


@pytest.mark.parametrize("inline_bytes", [0, 1_000_000])
@pytest.mark.parametrize("carried_out", [False, True])
def test_a_driver_that_dies_at_any_request(inline_bytes: int, carried_out: bool) -> None:
    """Batches 0 and 1 are written; 2 is tried by a driver that dies at its n-th request; the next one runs 2 and 3."""
    at = 0
    torn = 0
    while True:
        at += 1
        queue: Any = make_queue()
        writer = publisher(queue)
        for batch_id in (0, 1):
            writer.publish(batch_id, stage(queue, values_of(batch_id)))
        pieces = stage(queue, values_of(2), inline_bytes=inline_bytes)
        queue.revive()
        queue.kill_at = (at, carried_out)
        try:
            (writer if at % 2 else publisher(queue)).publish(2, pieces)
        except Killed:
            died = True
        else:
            died = False
        queue.revive()
        before = found(queue)
        torn += 0 < sum(before.values()) - 80 < 40
        again = publisher(queue)
        again.publish(2, stage(queue, values_of(2, run=1), inline_bytes=inline_bytes))
        again.publish(3, stage(queue, values_of(3)))
        after = found(queue)
        run = int(values_of(2)[0] not in after)
        assert after == Counter(values_of(0) + values_of(1) + values_of(2, run) + values_of(3)), f"died at {at}"
        if not died:
            break
    assert at > 5
    assert torn, "no driver died in the middle of a copy: this test tests nothing"


def test_a_torn_copy_is_finished_though_the_partition_forgot_its_producer() -> None:
    queue = torn_queue()
    for number in range(3):
        queue.append("out", number, b"somebody else's")
        queue.partitions[TopicPartition("out", number)].forget_producers()
    publisher(queue).publish(1, stage(queue, values_of(1, run=1)))
    assert found(queue) == Counter(values_of(0) + values_of(1) + [b"somebody else's"] * 3)


def test_what_cannot_be_known_is_an_error() -> None:
    queue = torn_queue()
    for number in range(3):
        partition = queue.partitions[TopicPartition("out", number)]
        queue.append("out", number, b"x")
        partition.forget_producers()
        partition.call(Trim(before=partition.log.partition.next_offset))
    with pytest.raises(BridgeError, match="cannot be known"):
        publisher(queue).publish(1, [])


def test_two_drivers_at_the_same_time_follow_one_decision(queue: Any) -> None:
    old, new = publisher(queue), publisher(queue)
    for each in (old, new):
        each.publish(0, [])
    new.publish(1, stage(queue, values_of(1)))
    old.publish(1, stage(queue, values_of(1, run=1)))  # decided by the other one
    assert found(queue) == Counter(values_of(1))
    new.publish(2, stage(queue, values_of(2)))
    old.publish(2, stage(queue, values_of(2, run=1)))
    assert found(queue) == Counter(values_of(1) + values_of(2))


def test_batches_that_are_committed_by_changing_processes(queue: Any) -> None:
    """Spark commits in whichever of its Python processes is free."""
    processes = [publisher(queue) for _ in range(3)]
    for batch_id in range(50):
        process = processes[batch_id * 7 % 3 if batch_id < 40 else 0]
        process.publish(batch_id, stage(queue, values_of(batch_id, count=5)))
    processes[1].publish(50, stage(queue, values_of(50, count=5)))  # far behind
    assert found(queue) == Counter(value for batch_id in range(51) for value in values_of(batch_id, count=5))


def test_a_driver_that_was_overtaken_changes_nothing(queue: Any) -> None:
    old, new = publisher(queue), publisher(queue)
    old.publish(0, stage(queue, values_of(0)))
    for batch_id in (0, 1, 2):
        new.publish(batch_id, stage(queue, values_of(batch_id, run=1)))
    for batch_id in (1, 2):
        old.publish(batch_id, stage(queue, values_of(batch_id)))
    assert found(queue) == Counter(values_of(0) + values_of(1, 1) + values_of(2, 1))


def test_a_copy_by_a_driver_that_was_overtaken_is_refused(queue: Any) -> None:
    old, new = publisher(queue), publisher(queue)
    old.publish(0, stage(queue, values_of(0)))
    stuck = old._journal.last
    assert stuck is not None
    for batch_id in (0, 1):
        new.publish(batch_id, stage(queue, values_of(batch_id, run=1)))
    before = found(queue)
    with pytest.raises(StaleWriterError):  # it was paused in the middle of batch 0's copy, and wakes up now
        queue.io.call(old._carry_out(stuck, resume=True))
    assert found(queue) == before


def test_lost_leaders_on_the_way(queue: Any) -> None:
    for carried_out in (False, True):
        queue.fail_appends = [(LeadershipLostError("gone"), carried_out), (NotLeaderError("not me"), False)]
        batch_id = int(carried_out)
        publisher(queue).publish(batch_id, stage(queue, values_of(batch_id)))
        queue.fail_appends = []
    assert found(queue) == Counter(values_of(0) + values_of(1))


def test_unknown_outcomes_in_the_middle_of_a_copy(queue: Any) -> None:
    writer = publisher(queue)
    writer.publish(-1, [])
    pieces = stage(queue, values_of(0))
    queue.fail_appends = [(LeadershipLostError("gone"), True)] * 9
    writer.publish(0, pieces)
    assert found(queue) == Counter(values_of(0))


def test_staged_rows_do_not_pile_up(queue: Any) -> None:
    writer = publisher(queue)
    writer._untrimmed_bytes = 0
    for batch_id in range(10):
        writer._untrimmed_bytes = 2**40
        writer.publish(batch_id, stage(queue, values_of(batch_id)))
    log = queue.partitions[TopicPartition(STAGING, 0)].log.partition
    assert log.next_offset - log.start_offset == 1  # the last decision


def test_a_staging_topic_made_again_is_another_writer() -> None:
    assert producer_id_of("q", 1) != producer_id_of("q", 2) != producer_id_of("r", 2)
    assert all(producer_id_of("q", number) >= 2**63 for number in range(9))


# -- jobs that run once ---------------------------------------------------------------------


def test_a_job_that_runs_once(queue: Any) -> None:
    publish_once(queue, stage(queue, values_of(0)) + stage(queue, values_of(1), inline_bytes=9999), STAGING)
    assert found(queue) == Counter(values_of(0) + values_of(1))


def test_direct_writes(queue: Any) -> None:
    rows = Rows(Lookup(queue).topics(["out"]), RowSettings(topic="out", batch_bytes=300))
    writer = DirectWriter(queue)
    queue.fail_appends = [(LeadershipLostError("gone"), True)]
    writer.add(rows.add(pa.record_batch({"value": pa.array(values_of(0))})))
    writer.add(rows.finish())
    assert writer.finish() == []
    assert found(queue) == Counter(values_of(0))


def test_a_staged_batch_that_is_gone_is_an_error(queue: Any) -> None:
    queue.append(STAGING, 0, b"x", b"y")
    with pytest.raises(StagedDataLostError, match="not in"):
        publish_once(queue, [Piece("out", 0, 0, 1, 0, 1)], STAGING)
