"""Positions of groups pass what was aborted at the end of a partition, in a queue in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayqueue import RayQueue
from rayqueue.errors import NotLeaderError
from rayqueue.testing import memory, wait_for


@pytest.fixture
def rq() -> Iterator[RayQueue]:
    with memory.connect() as queue:
        queue.create_topic("orders", lanes=2)
        yield queue


def feed(rq: RayQueue, *fates: bool) -> None:
    """Transactions with records in both lanes that are committed, or aborted."""
    with rq.producer(transactional_id="t") as producer:
        for keep in fates:
            tx = producer.transaction()
            tx.begin()
            tx.send_many("orders", [b"%d" % each for each in range(10)], priority=1)
            tx.send_many("orders", [b"%d" % each for each in range(10)])
            producer.flush()
            (tx.commit if keep else tx.abort)()


def caught_up(rq: RayQueue, group: str) -> bool:
    partitions = rq.group(group).partitions
    return bool(partitions) and all(part.committed and part.lag == 0 for part in partitions)


def polled(consumer: Any) -> int:
    return len(consumer.poll(timeout_ms=100))


def polled_arrow(consumer: Any) -> int:
    return int(consumer.poll_arrow(timeout_ms=100).num_rows)


@pytest.mark.parametrize("poll", [polled, polled_arrow])
@pytest.mark.parametrize("auto_commit", [True, False])
def test_a_group_has_no_lag_behind_what_was_aborted_at_the_end(
    rq: RayQueue, poll: Callable[[Any], int], auto_commit: bool
) -> None:
    feed(rq, True, False)
    options: dict[str, Any] = {"isolation": "read_committed", "auto_commit_ms": 20, "fetch_wait_ms": 50}
    with rq.consumer("orders", group="g", auto_commit=auto_commit, **options) as consumer:
        found = 0

        def done() -> bool:
            nonlocal found
            found += poll(consumer)
            if not auto_commit:
                consumer.commit()
            return caught_up(rq, "g")

        wait_for(done, "no lag")
        assert found == 20


@pytest.mark.parametrize("committed_before", [True, False])
def test_nor_one_that_commits_by_transactions(rq: RayQueue, committed_before: bool) -> None:
    feed(rq, committed_before)
    options: dict[str, Any] = {"delivery": "exactly_once", "auto_commit_ms": 20, "fetch_wait_ms": 50}
    with (
        rq.consumer("orders", group="g", **options) as consumer,
        rq.producer(transactional_id="p") as producer,
    ):
        found = 0

        def done() -> bool:
            nonlocal found
            records = consumer.poll(timeout_ms=100)
            found += len(records)
            if records:
                with producer.transaction() as tx:
                    tx.commit_offsets(consumer)
            return caught_up(rq, "g")

        wait_for(done, "no lag")
        feed(rq, False)
        assert not caught_up(rq, "g"), "and then some that are aborted, and nothing else"
        wait_for(done, "no lag again")
        assert found == 20 * committed_before


def test_what_was_polled_and_is_in_no_transaction_is_not_passed(rq: RayQueue) -> None:
    feed(rq, True, False)
    options: dict[str, Any] = {"delivery": "exactly_once", "auto_commit_ms": 20, "fetch_wait_ms": 50}
    with rq.consumer("orders", group="g", **options) as consumer:
        records = wait_for(lambda: consumer.poll(timeout_ms=100), "records")
        while len(records) < 20:
            records += consumer.poll(timeout_ms=100)
        assigned = next(iter(consumer._sub.assigned.values()))
        wait_for(lambda: assigned.positions() == {0: 40, 1: 30}, "the cursors are behind what was aborted")
        assert assigned.passed() is None
        consumer.rewind()
        again = wait_for(lambda: consumer.poll(timeout_ms=100), "the same")
        assert again[0].offset == records[0].offset
    assert not any(part.committed for part in rq.group("g").partitions)


@pytest.mark.parametrize("by_abort", [True, False])
def test_a_reader_that_went_back_once_passes_what_is_aborted_later(rq: RayQueue, by_abort: bool) -> None:
    rq.create_topic("bounded", max_backlog_records=10)
    options: dict[str, Any] = {"delivery": "exactly_once", "auto_commit_ms": 20, "fetch_wait_ms": 50}
    with (
        rq.consumer("bounded", group="g", **options) as consumer,
        rq.producer(transactional_id="p") as producer,
        rq.producer(delivery_timeout_ms=5000) as plain,
    ):
        plain.send("bounded", b"a").result(timeout_ms=5000)
        wait_for(lambda: consumer.poll(timeout_ms=100), "a record")
        if by_abort:
            tx = producer.transaction()
            tx.begin()
            tx.commit_offsets(consumer)
            tx.abort()
        else:
            consumer.rewind()
        wait_for(lambda: consumer.poll(timeout_ms=100), "the same")
        with producer.transaction() as tx:
            tx.commit_offsets(consumer)
        with pytest.raises(ZeroDivisionError), producer.transaction() as tx:  # noqa: PT012
            tx.send_many("bounded", [b"never"] * 10).result(timeout_ms=5000)
            raise ZeroDivisionError
        wait_for(lambda: [consumer.poll(timeout_ms=50), caught_up(rq, "g")][1], "no lag")
        plain.send("bounded", b"there is room").result(timeout_ms=5000)


def test_a_reader_that_seeks_back_takes_its_group_along_with_its_next_transaction(rq: RayQueue) -> None:
    """Else, after a crash half way, nobody would read the rest again."""
    rq.create_topic("flat")
    with rq.producer() as plain:
        plain.send_many("flat", [b"%d" % each for each in range(10)])
    options: dict[str, Any] = {"delivery": "exactly_once", "auto_commit_ms": 20, "fetch_wait_ms": 50}
    with rq.consumer("flat", group="g", **options) as consumer, rq.producer(transactional_id="p") as producer:

        def read(count: int) -> None:
            found = 0
            while found < count:
                found += len(consumer.poll(max_records=count - found, timeout_ms=100))
            with producer.transaction() as tx:
                tx.commit_offsets(consumer)

        read(10)
        assert consumer.committed(("flat", 0)) == 10
        consumer.seek(("flat", 0), 2)
        read(3)
        assert consumer.committed(("flat", 0)) == 5
        read(5)
        assert consumer.committed(("flat", 0)) == 10


def test_a_partition_that_cannot_be_committed_holds_up_no_other(rq: RayQueue) -> None:
    rq.create_topic("two", partitions=2)
    options: dict[str, Any] = {"delivery": "exactly_once", "auto_commit_ms": 20, "fetch_wait_ms": 50}
    with rq.consumer("two", group="g", **options) as consumer, rq.producer(transactional_id="p") as producer:
        wait_for(lambda: [consumer.poll(timeout_ms=50), len(consumer.assignment()) == 2][1], "both partitions")
        commits = consumer._core.commits
        assert commits is not None
        original, refused = commits.commit, []

        async def commit(assigned: Any, *args: Any, **options: Any) -> None:
            if assigned.partition.partition == min(each.partition for each in consumer.assignment()):
                refused.append(assigned)
                raise NotLeaderError("nobody leads it", leader=None)
            await original(assigned, *args, **options)

        commits.commit = commit  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError), producer.transaction() as tx:  # noqa: PT012
            for number in range(2):
                tx.send("two", b"never", partition=number).result(timeout_ms=5000)
            raise ZeroDivisionError

        def passed() -> bool:
            consumer.poll(timeout_ms=50)
            return bool(refused) and consumer.committed(("two", 1)) == 1

        wait_for(passed, "the other one")
        assert consumer.committed(("two", 0)) is None
