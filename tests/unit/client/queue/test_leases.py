"""Leases are extended after a third of their time, for as long as one of their jobs is in hand."""

from __future__ import annotations

import pytest

from rayqueue.client.queue.leases import Leases


def test_a_lease_is_due_after_a_third_and_again_after_a_third_of_what_it_got() -> None:
    leases = Leases()
    leases.add(1, 30_000, {4, 5}, 100.0)
    assert leases.next_due_s() == pytest.approx(110.0)
    assert leases.due(109.0) == []
    (asked,) = leases.due(110.0)
    assert (asked.kind, asked.token, asked.jobs) == ("extend", 1, ((4, 1),))
    leases.extended(1, 6000, 110.0)
    assert leases.next_due_s() == pytest.approx(112.0)


def test_a_lease_ends_with_its_last_job() -> None:
    leases = Leases()
    leases.add(1, 30_000, {4, 5}, 0.0)
    leases.ended(1, [4])
    assert leases.holds(1, 5)
    assert not leases.holds(1, 4)
    (asked,) = leases.due(20.0)
    assert asked.jobs == ((5, 1),)
    leases.ended(1, [5, 6])
    leases.ended(1, [5, 6])
    assert len(leases) == 0
    assert leases.next_due_s() is None


def test_a_lost_lease_is_asked_about_no_more_and_a_failed_question_soon() -> None:
    leases = Leases()
    leases.add(1, 20_000, {1}, 0.0)
    leases.add(2, 20_000, {2}, 0.0)
    leases.lost(1)
    leases.not_answered(2, 10.0)
    assert leases.next_due_s() == pytest.approx(11.0)
