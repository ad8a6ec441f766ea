"""Patience with moves: what is given up, when, and which brokers are left alone after it."""

from __future__ import annotations

from rayqueue.cluster.moves import Move, Reason
from rayqueue.cluster.patience import AVOID_S, FAILS_S, HELD_UP_S, SILENT_S, Patience, Trouble

FIRST = Move("orders-0.1", "r3.1", "b4", "r3", Reason.LOST)
OTHER = Move("orders-1.1", "r3.2", "b5", "r3", Reason.LOST)


def test_a_replica_that_cannot_be_made_is_given_up_and_its_broker_left_alone_for_a_while() -> None:
    patience = Patience()
    assert not patience.note(0.0, FIRST, Trouble.FAILING)
    assert not patience.note(FAILS_S - 1, FIRST, Trouble.FAILING)
    assert patience.avoided(FAILS_S - 1) == set()
    assert patience.note(FAILS_S, FIRST, Trouble.FAILING)
    assert patience.note(FAILS_S + 1, FIRST, Trouble.FAILING), "until its move is over"
    assert patience.avoided(FAILS_S + 2) == {"b4"}
    assert patience.avoided(FAILS_S + 1 + AVOID_S) == set()


def test_time_counts_anew_once_it_gets_on_or_has_another_trouble() -> None:
    patience = Patience()
    patience.note(0.0, FIRST, Trouble.FAILING)
    patience.note(10.0, FIRST, None)
    assert not patience.note(FAILS_S, FIRST, Trouble.FAILING)
    assert not patience.note(FAILS_S + 10, FIRST, Trouble.SILENT)
    assert not patience.note(FAILS_S + 9 + SILENT_S, FIRST, Trouble.SILENT)
    assert patience.note(FAILS_S + 10 + SILENT_S, FIRST, Trouble.SILENT)
    again = Move("orders-0.1", "r3.3", "b4", "r3", Reason.LOST)
    patience.keep([again])
    assert not patience.note(100.0, again, Trouble.FAILING), "another replica"


def test_moves_in_trouble_do_not_count_among_those_at_once() -> None:
    patience = Patience()
    assert not patience.note(0.0, FIRST, Trouble.LEADERLESS)
    patience.note(0.0, OTHER, None)
    assert patience.held_up(HELD_UP_S - 1) == set(), "an election takes a moment"
    assert patience.held_up(HELD_UP_S) == {"orders-0.1"}
    assert not patience.note(10_000.0, FIRST, Trouble.LEADERLESS), "its end could not be decided either"
    patience.keep([OTHER])
    assert patience.held_up(10_000.0) == set()
    patience.note(0.0, FIRST, Trouble.FAILING)
    patience.note(FAILS_S, FIRST, Trouble.FAILING)
    patience.forget()
    assert (patience.held_up(FAILS_S), patience.avoided(FAILS_S)) == (set(), set()), "another leader's matter"
