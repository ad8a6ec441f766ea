"""Writers that overlap, come in any order, are forgotten, trimmed and torn: no batch is lost, doubled or stuck."""

from __future__ import annotations

from collections import Counter
from itertools import count
from typing import Any

import msgspec
import pytest

from rayqueue.bridge import ledger
from rayqueue.bridge.journal import Decision, producer_id_of
from rayqueue.bridge.publish import publish_once
from rayqueue.bridge.staging import (
    SHARED,
    Hold,
    Piece,
    batch_hold,
    ensure_staging,
    held_batch,
    job_hold,
    staging_ends,
)
from rayqueue.errors import (
    BatchConflictError,
    BatchForgottenError,
    BridgeError,
    StagedDataLostError,
    TopicRecreatedError,
)
from rayqueue.partition import PartitionSettings
from rayqueue.protocol.calls import ForgetGroup, Trim
from rayqueue.protocol.frames import Frame, Kind
from rayqueue.protocol.topics import TopicPartition
from tests.unit.bridge.bridge_jobs import STAGING, found, make_queue, publisher, stage, values_of
from tests.unit.client.queue_in_memory import Killed, MemoryQueue

JOURNAL = TopicPartition(STAGING, 0)


@pytest.fixture
def queue() -> MemoryQueue:
    return make_queue()


def written(*batches: int, run: int = 0) -> Counter[bytes]:
    return Counter(value for batch_id in batches for value in values_of(batch_id, run))


# -- ids --------------------------------------------------------------------------------------


def test_ids_in_any_order_are_all_written(queue: Any) -> None:
    writer = publisher(queue)
    assert [writer.publish(batch_id, stage(queue, values_of(batch_id))) for batch_id in (4, 6, 5, 0)] == [True] * 4
    assert found(queue) == written(4, 6, 5, 0)
    for each in (writer, publisher(queue)):  # and each of them once
        for batch_id in (5, 0, 6, 4):
            assert not each.publish(batch_id, stage(queue, values_of(batch_id, run=1)))
    assert found(queue) == written(4, 6, 5, 0)


def test_an_id_that_stands_for_something_else_is_refused(queue: Any) -> None:
    """A wiped checkpoint, or another one under the same name: its batch 0 is not the batch 0 that was written."""
    publisher(queue).publish(0, stage(queue, values_of(0)), identity=b"checkpoint a")
    assert not publisher(queue).publish(0, [], identity=b"checkpoint a")
    with pytest.raises(BatchConflictError, match="other contents"):
        publisher(queue).publish(0, stage(queue, values_of(0, run=1)), identity=b"checkpoint b")
    assert found(queue) == written(0)


def test_an_id_that_may_be_written_is_refused(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_SPANS", 3)
    writer = publisher(queue)
    for batch_id in (0, 10, 20, 30, 40):
        writer.publish(batch_id, stage(queue, values_of(batch_id)))
    before = found(queue)
    for batch_id in (0, 5):
        with pytest.raises(BatchForgottenError, match="Number batches upwards"):
            publisher(queue).publish(batch_id, stage(queue, values_of(batch_id, run=1)))
    assert found(queue) == before
    writer.publish(35, stage(queue, values_of(35)))
    assert found(queue) == before + written(35)


def test_a_journal_of_an_older_release_goes_on(queue: Any) -> None:
    """Decisions of five batches without number and ledger, of which the last was not carried out."""
    producer_id = producer_id_of(queue.infos[STAGING].topic_id, "the checkpoint")
    for number in range(5):
        targets = [["out", 0, 0]] if number == 4 else []
        pieces = [["out", 0, 0, 40, 0, 4]] if number == 4 else []
        if number == 4:
            (staged,) = stage(queue, values_of(14), batch_bytes=10**6, partition=_zeros(40))
            assert staged.offset == 4
        old = msgspec.msgpack.encode([10 + number, b"token%d" % number, targets, pieces])
        queue.append(STAGING, 0, old, producer_id=producer_id, sequence=number)
    writer = publisher(queue)
    assert not writer.publish(14, [], identity=b"any")
    assert found(queue) == written(14)
    with pytest.raises(BatchForgottenError):
        writer.publish(13, [])
    assert writer.publish(15, stage(queue, values_of(15)), identity=b"any")
    assert found(queue) == written(14, 15)


def _zeros(count: int) -> Any:
    import pyarrow as pa

    return pa.array([0] * count, pa.int32())


# -- producers that are forgotten ---------------------------------------------------------------------


@pytest.mark.parametrize("carried_out", [False, True])
def test_a_copy_that_is_torn_and_forgotten_again_and_again(carried_out: bool) -> None:
    """One partition takes all of a batch, in many appends. The driver dies at its n-th request, the partition forgets
    every producer, the next driver dies at its n-th request, and so on."""
    torn = 0
    for at in range(3, 40, 2):
        queue: Any = make_queue(partitions=1)
        publisher(queue).publish(0, stage(queue, values_of(0)))
        pieces = stage(queue, values_of(1), batch_bytes=100)
        for attempt in range(100):
            queue.revive()
            queue.kill_at = (at + attempt, carried_out)
            try:
                publisher(queue).publish(1, pieces)
                break
            except Killed:
                torn += 0 < sum(found(queue).values()) - 40 < 40
            queue.append("out", 0, b"somebody else's", producer_id=9, sequence=0)
            queue.partitions[TopicPartition("out", 0)].forget_producers()
        queue.revive()
        assert not publisher(queue).publish(1, stage(queue, values_of(1, run=1)))
        after = found(queue)
        del after[b"somebody else's"]
        assert after == written(0, 1), f"died at {at}"
    assert torn > 5, "no copy was torn: this test tests nothing"


def test_a_copy_whose_producer_is_forgotten_under_way(queue: Any) -> None:
    """By the partition, while the driver lives."""
    queue = make_queue(partitions=1)
    partition = queue.partitions[TopicPartition("out", 0)]
    forgets = []
    appends = count(1)

    def heard(frame: Frame) -> None:
        if frame.kind == Kind.APPEND and next(appends) in (3, 7, 20):
            partition.forget_producers_here()
            forgets.append(frame.request)

    partition.listen(heard)
    publisher(queue).publish(0, stage(queue, values_of(0), batch_bytes=100))
    assert found(queue) == written(0)
    assert len(forgets) > 1


def test_a_journal_that_has_forgotten_its_writer_goes_on(queue: Any) -> None:
    writer, other = publisher(queue), publisher(queue)
    writer.publish(0, stage(queue, values_of(0)))
    for batch_id in range(1, 9):
        if batch_id % 3:
            queue.partitions[JOURNAL].forget_producers()
        each = (writer, other, publisher(queue))[batch_id % 3]
        each.publish(batch_id, stage(queue, values_of(batch_id)))
        for again in (writer, other, publisher(queue)):
            again.publish(batch_id, stage(queue, values_of(batch_id, run=1)))
    assert found(queue) == written(*range(9))


def test_two_drivers_that_go_on_after_the_journal_has_forgotten(queue: Any) -> None:
    """Both begin an epoch with the same number; the partition forgets in between, so that both records are taken."""
    first, second = publisher(queue), publisher(queue)
    first.publish(0, stage(queue, values_of(0)))
    second.publish(0, [])
    queue.partitions[JOURNAL].forget_producers()
    first.publish(1, stage(queue, values_of(1)))
    queue.partitions[JOURNAL].forget_producers()
    second.publish(1, stage(queue, values_of(1, run=1)))
    second.publish(2, stage(queue, values_of(2)))
    publisher(queue).publish(2, stage(queue, values_of(2, run=1)))
    assert found(queue) == written(0, 1, 2)


def test_a_driver_that_has_seen_an_empty_journal_and_wakes_when_it_is_forgotten(queue: Any) -> None:
    old, new = publisher(queue), publisher(queue)
    queue.io.call(old._journal.load())
    for batch_id in (0, 1):
        new.publish(batch_id, stage(queue, values_of(batch_id)))
    queue.partitions[JOURNAL].forget_producers()
    for batch_id in (0, 1, 2):
        old.publish(batch_id, stage(queue, values_of(batch_id, run=1)))
        queue.partitions[JOURNAL].forget_producers()
    publisher(queue).publish(2, [])
    assert found(queue) == written(0, 1) + written(2, run=1)


def test_a_driver_that_notes_late_what_it_has_done(queue: Any) -> None:
    """What another one has done since stays done, also when nobody could find out whether it is."""
    old, new = publisher(queue), publisher(queue)
    old.publish(0, stage(queue, values_of(0)))
    late = old._journal.last
    assert late is not None
    new.publish(1, stage(queue, values_of(1)))
    queue.io.call(old._journal.note_done(late))
    for number in range(3):
        partition = queue.partitions[TopicPartition("out", number)]
        partition.forget_producers()
        partition.call(Trim(before=partition.log.partition.next_offset))
    assert not publisher(queue).publish(1, [])
    assert publisher(queue).publish(2, stage(queue, values_of(2)))
    assert found(queue) == written(2)


def test_what_is_noted_as_done_is_pinned(queue: Any) -> None:
    """A position that nobody commits for a week expires, and a stream may have nothing to write for longer."""
    writer = trimming(queue)
    for batch_id in range(3):
        writer.publish(batch_id, stage(queue, values_of(batch_id)))
        position = queue.partitions[JOURNAL].log.partition.position("decisions")
        assert position.pinned
    log = queue.partitions[JOURNAL].log.partition
    assert log.next_offset - log.start_offset == 1


# -- overlapping runs ---------------------------------------------------------------------------------


def trimming(queue: Any) -> Any:
    """A publisher that trims after every batch."""
    made = publisher(queue)
    original = made._carry_out

    async def carry_out(*arguments: Any, **named: Any) -> None:
        await original(*arguments, **named)
        made._untrimmed_bytes = 2**40

    made._carry_out = carry_out  # type: ignore[method-assign]
    return made


def test_a_trim_leaves_what_another_run_has_staged(queue: Any) -> None:
    old, new = trimming(queue), trimming(queue)
    staged = stage(queue, values_of(8), batch_id=8, token="new")
    old.publish(7, stage(queue, values_of(7), batch_id=7, token="old"), token="old")
    new.publish(8, staged, token="new")
    assert found(queue) == written(7, 8)
    assert held(queue) == []
    assert queue.partitions[JOURNAL].log.partition.start_offset > 0, "nothing was trimmed: this test tests nothing"


def held(queue: Any, topic: str = STAGING) -> list[str]:
    groups = queue.partitions[TopicPartition(topic, 0)].log.partition.positions()
    return [name for name in groups if name.startswith(("job.", "batch."))]


def test_what_dead_attempts_have_staged_goes_with_their_batch(queue: Any) -> None:
    for attempt in range(3):
        stage(queue, values_of(1, run=attempt), batch_id=1, token=f"dead{attempt}")
    stage(queue, values_of(9), batch_id=9, token="alive")
    writer = trimming(queue)
    writer.publish(1, stage(queue, values_of(1), batch_id=1), token="attempt")
    assert held(queue) == ["batch.9.alive"]


def test_a_batch_is_not_decided_on_pieces_that_are_gone(queue: Any) -> None:
    """Whoever deletes them: nothing is written, and the writer is not stuck with a decision that cannot be kept."""
    pieces = stage(queue, values_of(1))
    publisher(queue).publish(0, stage(queue, values_of(0)))
    partition = queue.partitions[JOURNAL]
    partition.call(Trim(before=partition.log.partition.next_offset - 1))
    for problem in ("is trimmed", "not held any more"):
        with pytest.raises(StagedDataLostError, match=f"{problem}.*Nothing was written"):
            publisher(queue).publish(1, pieces)
        partition.call(ForgetGroup(group=batch_hold(1, "attempt")))
    publisher(queue).publish(1, stage(queue, values_of(1, run=1)))
    assert found(queue) == written(0) + written(1, run=1)


def test_overlapping_runs_that_die_and_trim_anywhere() -> None:
    """Run a has staged batch 8 when run b publishes 7 and 8 with other rows and dies at its n-th request. Then a goes
    on, then b's successor."""
    for at in range(1, 120, 3):
        queue: Any = make_queue(partitions=2)
        a, b = trimming(queue), trimming(queue)
        a.publish(6, stage(queue, values_of(6), batch_id=6))
        of_a = stage(queue, values_of(8), batch_id=8, token="a")
        queue.revive()
        queue.kill_at = (at, at % 2 == 0)
        died = False
        try:
            for batch_id in (7, 8):
                b.publish(batch_id, stage(queue, values_of(batch_id, run=1), batch_id=batch_id, token="b"), token="b")
        except Killed:
            died = True
        queue.revive()
        a.publish(8, of_a, token="a")
        after = trimming(queue)
        for batch_id in (7, 8, 9):
            pieces = stage(queue, values_of(batch_id, run=2), batch_id=batch_id, token="c")
            after.publish(batch_id, pieces, token="c")
        rows = Counter((value or b"").split(b" row ")[0].rsplit(b" run", 1)[0] for value in found(queue).elements())
        assert rows == {b"batch %d" % batch_id: 40 for batch_id in (6, 7, 8, 9)}, f"died at {at}"
        assert set(found(queue).values()) == {1}
        if not died:
            break
    assert not died, "the last run was to live"


# -- jobs that run once --------------------------------------------------------------------------------


def shared(queue: Any) -> Any:
    ensure_staging(queue, SHARED, partitions=1, replication=lambda: 1, shared=True)
    return queue.partitions[TopicPartition(SHARED, 0)].log.partition


def hold(queue: Any, token: str) -> Hold:
    return Hold(queue, SHARED, job_hold(token), staging_ends(queue, SHARED))


def test_a_job_trims_what_nobody_holds(queue: Any) -> None:
    log = shared(queue)
    first = hold(queue, "a")
    first.take(0)
    queue.append(SHARED, 0, b"of a")
    second = hold(queue, "b")
    second.take(0)
    queue.append(SHARED, 0, b"of b")
    first.take(0)  # another task of the first job
    queue.append(SHARED, 0, b"of a")
    first.release(trim=True)
    assert (log.start_offset, log.next_offset) == (1, 3)
    second.release(trim=True)
    assert log.start_offset == log.next_offset == 3
    assert log.positions() == {}


def test_any_number_of_tasks_is_one_hold(queue: Any) -> None:
    """A partition takes a thousand groups. A job has as many tasks as it likes."""
    log = shared(queue)
    assert PartitionSettings().max_groups == 1000
    job = hold(queue, "large")
    for _ in range(1500):
        job.take(0)
    assert list(log.positions()) == ["job.large"]
    job.release(trim=True)
    assert log.positions() == {}


def test_no_more_jobs_than_a_partition_holds(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = shared(queue)
    limit = PartitionSettings().max_groups
    for number in range(limit):
        monkeypatch.setattr("time.time", lambda number=number: 1_000.0 if number < 2 else 2_000_000_000.0)
        hold(queue, f"{number}").take(0)
    hold(queue, "one-more").take(0)  # in place of the two that died long ago
    hold(queue, "another").take(0)
    assert len(log.positions()) == limit
    with pytest.raises(BridgeError, match="1000 jobs stage rows"):
        hold(queue, "too-much").take(0)


def test_a_staging_topic_that_nobody_has_made(queue: Any) -> None:
    assert staging_ends(queue, SHARED) == ()
    hold(queue, "inline rows only").release(trim=True)
    assert SHARED not in queue.infos


def test_a_job_whose_staged_rows_are_gone_writes_nothing(queue: Any) -> None:
    pieces = [*stage(queue, values_of(0), inline_bytes=10**6), *stage(queue, values_of(1))]
    partition = queue.partitions[JOURNAL]
    partition.call(Trim(before=partition.log.partition.next_offset - 1))
    with pytest.raises(StagedDataLostError, match="Nothing was written"):
        publish_once(queue, pieces, STAGING)
    assert not found(queue)


def test_a_staging_topic_that_was_made_again_under_a_job(queue: Any) -> None:
    pieces = stage(queue, values_of(0))
    writer = publisher(queue)
    writer.publish(5, [])
    queue.delete_topic(STAGING)
    queue.create_topic(STAGING, partitions=1)
    queue.append(STAGING, 0, *values_of(7))
    with pytest.raises(StagedDataLostError, match="deleted"):
        publish_once(queue, pieces, STAGING)
    with pytest.raises(TopicRecreatedError):
        writer.publish(6, [])
    writer.publish(6, stage(queue, values_of(6)))
    assert found(queue) == written(6)


def test_a_topic_that_was_made_again_under_a_job(queue: Any) -> None:
    """Rows that were cut for one topic are not written to another one of its name."""
    pieces = stage(queue, values_of(0))
    queue.delete_topic("out")
    queue.create_topic("out", partitions=3)
    for attempt in (lambda: publish_once(queue, pieces, STAGING), lambda: publisher(queue).publish(0, pieces)):
        with pytest.raises(TopicRecreatedError):
            attempt()
    assert not found(queue)
    publisher(queue).publish(0, stage(queue, values_of(0)))
    assert found(queue) == written(0)


def test_names_of_holds() -> None:
    assert [held_batch(batch_hold(number, "t")) for number in (0, 17, -3)] == [0, 17, -3]
    assert [held_batch(name) for name in (job_hold("t"), "decisions", "batch.", "batch.x.t")] == [None] * 4


def test_a_decision_reads_what_an_older_release_wrote() -> None:
    old = msgspec.msgpack.encode([7, b"t", [["out", 1, 5]], [["out", 1, 0, 3, 0, 9, b""]]])
    decision = msgspec.msgpack.decode(old, type=Decision)
    assert (decision.number, decision.ledger, decision.targets[0].topic_id) == (-1, None, 0)
    assert decision.pieces == (Piece("out", 1, 0, 3, 0, 9, b""),)
