"""The plan of takes: in turn, shared, parked where there is nothing, and no partition forgotten."""

from __future__ import annotations

from collections import Counter

import pytest

from rayqueue.client.queue.takes import AHEAD_S, LOOK_AGAIN_S, MAX_AHEAD, SHARE, Ahead, Ask, Takes


def test_what_is_wanted_is_shared_among_partitions_that_may_have_it() -> None:
    takes = Takes(4)
    asks = takes.plan(10 * SHARE, 0.0)
    assert [ask.partition for ask in asks] == [0, 1, 2, 3]
    assert sum(ask.count for ask in asks) == 10 * SHARE
    assert not any(ask.parked for ask in asks)


def test_a_few_jobs_are_not_divided_into_fewer() -> None:
    takes = Takes(4)
    assert takes.plan(SHARE + 5, 0.0) == [Ask(0, SHARE, False), Ask(1, 5, False)]
    assert takes.plan(2 * SHARE, 0.0) == [Ask(2, SHARE - 5, False)]  # the others are under way


def test_one_take_is_no_larger_than_the_bytes_of_an_answer() -> None:
    takes = Takes(2)
    assert takes.plan(1000, 0.0, most=7) == [Ask(0, 7, False), Ask(1, 7, False)]
    for number in range(2):
        takes.answered(number, 0, 0.0)
    assert takes.plan(1000, 0.0, most=7) == [Ask(0, 7, True), Ask(1, 7, True)]


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
    many = 2 * SHARE
    assert takes.plan(many, 0.0) == [Ask(0, SHARE, False), Ask(1, SHARE, False)]
    takes.failed(0)
    takes.answered(1, 1, 0.0)
    assert takes.plan(many, 0.0) == [Ask(1, many, False)]
    takes.resumed(0)
    takes.answered(1, 1, 0.0)
    assert {ask.partition for ask in takes.plan(many, 0.0)} == {0, 1}


def test_a_queue_that_grows_gets_its_new_partitions_asked() -> None:
    takes = Takes(1)
    takes.plan(1, 0.0)
    takes.answered(0, 0, 0.0)
    takes.grow(2)
    assert takes.plan(1, 0.0) == [Ask(1, 1, False)]


def _busy(ahead: Ahead, jobs: int, took_s: float, times: int = 30, now_s: float = 0.0) -> float:
    for _ in range(times):
        ahead.asked(now_s)
        ahead.gave(jobs, now_s)
        now_s += took_s
    return now_s


def test_a_worker_gets_ahead_what_it_does_in_a_while_and_a_slow_one_nothing() -> None:
    ahead = Ahead()
    now_s = _busy(ahead, 1, 0.001)
    assert ahead.count == pytest.approx(AHEAD_S / 0.001, abs=2)
    assert ahead.soon(now_s, 0.2) == 2 * ahead.count
    assert ahead.soon(now_s + 0.3, 0.2) == 0
    assert ahead.soon(now_s + 0.3, 2.0) == 2 * ahead.count  # it waits for an answer
    ahead.goes_on(now_s + 0.3)  # and has got it
    assert ahead.soon(now_s + 0.3, 0.2) == 2 * ahead.count
    now_s = _busy(ahead, 1, 0.001, now_s=now_s + 0.3)
    ahead.unused()
    assert ahead.count == pytest.approx(AHEAD_S / 0.002, abs=2)
    now_s = _busy(ahead, 100, 0.001, now_s=now_s)
    assert ahead.count == MAX_AHEAD
    _busy(ahead, 100, 0.09, times=2, now_s=now_s)  # one slow batch is enough
    assert ahead.count < 100
    _busy(ahead, 1, 1.0, now_s=now_s)
    assert ahead.count == 0


def test_what_is_taken_ahead_is_bounded_in_bytes() -> None:
    ahead = Ahead(most_bytes=1_000_000)
    assert ahead.at_once(1000) == 1000  # nothing is known of their size
    ahead.received(10, 1_000_000)
    _busy(ahead, 100, 0.001)
    assert ahead.count == 9
    assert ahead.at_once(1000) == 1
