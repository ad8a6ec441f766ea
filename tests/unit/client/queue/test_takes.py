"""The plan of takes: in turn, shared, parked where there is nothing, and no partition forgotten."""

from __future__ import annotations

from collections import Counter

from rayqueue.client.queue.takes import LOOK_AGAIN_S, Ahead, Ask, Takes


def test_what_is_wanted_is_shared_among_partitions_that_may_have_it() -> None:
    takes = Takes(4)
    asks = takes.plan(10, 0.0)
    assert [ask.partition for ask in asks] == [0, 1, 2, 3]
    assert sum(ask.count for ask in asks) == 10
    assert not any(ask.parked for ask in asks)


def test_one_job_is_asked_of_one_partition_at_a_time() -> None:
    takes = Takes(3, first=1)
    assert takes.plan(1, 0.0) == [Ask(1, 1, False)]
    assert takes.plan(1, 0.0) == []  # it is under way
    takes.answered(1, 0, 0.0)
    assert takes.plan(1, 0.0) == [Ask(2, 1, False)]


def test_takes_are_parked_everywhere_once_nobody_has_jobs() -> None:
    takes = Takes(3)
    for _ in range(3):
        (ask,) = takes.plan(1, 0.0)
        takes.answered(ask.partition, 0, 0.0)
    assert takes.plan(1, 0.1) == [Ask(0, 1, True), Ask(1, 1, True), Ask(2, 1, True)]
    assert takes.under_way == [0, 1, 2]
    assert takes.plan(1, 5.0) == []  # an idle worker asks nothing more


def test_a_busy_partition_does_not_hide_the_others() -> None:
    takes = Takes(8)
    asked: Counter[int] = Counter()
    now_s = 0.0
    for _ in range(400):  # partition 3 always has more, all others have nothing
        now_s += 0.01
        for ask in takes.plan(1, now_s):
            asked[ask.partition] += 1
            takes.answered(ask.partition, int(ask.partition == 3), now_s)
    seconds = now_s / LOOK_AGAIN_S
    for other in set(range(8)) - {3}:
        assert 2 <= asked[other] <= seconds + 2
    assert asked[3] > 300


def test_a_failed_partition_is_asked_again_only_when_it_is_resumed() -> None:
    takes = Takes(2)
    assert takes.plan(2, 0.0) == [Ask(0, 1, False), Ask(1, 1, False)]
    takes.failed(0)
    takes.answered(1, 1, 0.0)
    assert takes.plan(2, 0.0) == [Ask(1, 2, False)]
    takes.resumed(0)
    takes.answered(1, 1, 0.0)
    assert {ask.partition for ask in takes.plan(2, 0.0)} == {0, 1}


def test_a_queue_that_grows_gets_its_new_partitions_asked() -> None:
    takes = Takes(1)
    takes.plan(1, 0.0)
    takes.answered(0, 0, 0.0)
    takes.grow(2)
    assert takes.plan(1, 0.0) == [Ask(1, 1, False)]


def test_quick_workers_get_jobs_ahead_and_slow_ones_none() -> None:
    ahead = Ahead(most=100)
    now_s = 0.0
    for _ in range(20):
        ahead.asked(1, False, now_s)
        ahead.gave(now_s)
        now_s += 0.001
    assert ahead.count == 100
    ahead.unused()
    assert ahead.count == 50
    slow = Ahead()
    for _ in range(20):
        slow.asked(1, False, now_s)
        slow.gave(now_s)
        now_s += 1.0
    assert slow.count == 0
