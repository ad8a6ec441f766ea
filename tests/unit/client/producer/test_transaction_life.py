"""The life of a producer's transactions: which events lead where, and what is asked of whom."""

from __future__ import annotations

import pytest

from rayqueue.client.producer.transactions.life import (
    Accept,
    Action,
    Drop,
    End,
    Finish,
    Flush,
    Init,
    Mark,
    Raise,
    State,
    TransactionLife,
)
from rayqueue.errors import (
    DeliveryTimeoutError,
    InvalidInputError,
    NotLeaderError,
    OutcomeUnknownError,
    ProducerFencedError,
    RayQueueError,
    TransactionAbortedError,
    UnknownTransactionError,
)
from rayqueue.protocol.transactions import Decided, Transaction

FIRST, SECOND = Transaction(7, 0), Transaction(7, 1)


@pytest.fixture
def life() -> TransactionLife:
    """With its first transaction open."""
    life = TransactionLife("billing-1")
    assert life.begin() == [Init(resume=False, anew=True)]
    assert life.initialised(FIRST) == [Accept(FIRST)]
    return life


def asked(actions: list[Action]) -> End:
    (end,) = actions
    assert isinstance(end, End)
    return end


def raised(actions: list[Action]) -> RayQueueError:
    (last,) = [action for action in actions if isinstance(action, Raise)]
    return last.error


def test_a_commit_is_asked_for_once_all_is_acknowledged(life: TransactionLife) -> None:
    life.touched("orders-0")
    assert life.commit() == [Flush()]
    end = asked(life.flushed(["ledger-1", "orders-0"]))
    assert (end.call.commit, end.call.participants, end.call.finished) == (True, ("ledger-1", "orders-0"), ())
    assert life.decided(Decided(True, (b"a", b"b"), SECOND)) == [
        Mark(FIRST, commit=True, seals=(("ledger-1", b"a"), ("orders-0", b"b")))
    ]
    assert life.begin() == [Accept(SECOND)], "while the markers are on their way"
    life.marked(FIRST)
    life.commit()
    assert asked(life.flushed(["orders-0"])).call.finished == (FIRST,)
    life.decided(Decided(True, (b"",), Transaction(7, 2)))
    assert life.closed() == [], "the coordinator has heard of the first, and the second has no markers yet"
    life.marked(SECOND)
    assert life.closed() == [Finish((SECOND,))]


def test_a_transaction_that_touched_nobody_needs_no_decision(life: TransactionLife) -> None:
    life.commit()
    assert life.flushed([]) == []
    assert life.begin() == [Accept(FIRST)], "the pair is as good as new"
    (drop,) = life.abort()
    assert isinstance(drop, Drop)
    assert life.dropped([]) == []


@pytest.mark.parametrize("when", ["before", "while it is flushed"])
def test_what_failed_is_never_committed(life: TransactionLife, when: str) -> None:
    error = DeliveryTimeoutError("not acknowledged")
    if when == "before":
        life.failed(error)
        assert life.state is State.DOOMED
        (drop,) = life.commit()
    else:
        life.commit()
        life.failed(error)
        (drop,) = life.flushed(["orders-0"])
    assert isinstance(drop, Drop)
    assert not asked(life.dropped(["orders-0"])).call.commit
    actions = life.decided(Decided(False, (b"",), SECOND))
    told = raised(actions)
    assert isinstance(told, TransactionAbortedError)
    assert "not acknowledged" in str(told)
    assert life.begin() == [Accept(SECOND)]


def test_an_abort_that_was_asked_for_raises_nothing(life: TransactionLife) -> None:
    life.failed(DeliveryTimeoutError("not acknowledged"))
    life.abort()
    asked(life.dropped(["orders-0"]))
    assert life.decided(Decided(False, (b"s",), SECOND)) == [Mark(FIRST, commit=False, seals=(("orders-0", b"s"),))]


def test_a_silent_coordinator_leaves_a_commit_unsure_and_can_be_asked_again(life: TransactionLife) -> None:
    life.commit()
    end = asked(life.flushed(["orders-0"]))
    told = raised(life.not_decided(NotLeaderError("nobody leads")))
    assert isinstance(told, OutcomeUnknownError), "an earlier attempt may have been decided"
    assert isinstance(raised(life.abort()), OutcomeUnknownError), "a commit never becomes an abort"
    assert life.commit() == [end], "the same words"
    assert life.decided(Decided(True, (b"",), SECOND)) == [Mark(FIRST, commit=True, seals=(("orders-0", b""),))]


def test_the_next_transaction_first_ends_the_one_that_is_unsure(life: TransactionLife) -> None:
    life.commit()
    end = asked(life.flushed(["orders-0"]))
    life.not_decided(OutcomeUnknownError("no answer"))
    assert life.begin() == [end]
    assert isinstance(raised(life.not_decided(OutcomeUnknownError("no answer"))), OutcomeUnknownError)
    assert life.begin() == [end]
    assert life.decided(Decided(True, (b"",), SECOND)) == [
        Mark(FIRST, commit=True, seals=(("orders-0", b""),)),
        Accept(SECOND),
    ]


def test_an_abort_without_an_answer_is_still_an_abort(life: TransactionLife) -> None:
    life.abort()
    end = asked(life.dropped(["orders-0"]))
    assert life.not_decided(OutcomeUnknownError("no answer")) == []
    assert life.begin() == [end], "but its pair must be over before another one begins"


def test_aborted_by_timeout_goes_on_as_the_same_producer(life: TransactionLife) -> None:
    life.commit()
    asked(life.flushed(["orders-0"]))
    assert isinstance(raised(life.not_decided(TransactionAbortedError("it took too long"))), TransactionAbortedError)
    assert life.begin() == [Init(resume=True, anew=False)]
    assert life.initialised(SECOND) == [Accept(SECOND)]


def test_a_forgotten_id_is_taken_anew(life: TransactionLife) -> None:
    life.commit()
    asked(life.flushed(["orders-0"]))
    assert isinstance(raised(life.not_decided(UnknownTransactionError("who?"))), TransactionAbortedError)
    assert life.begin() == [Init(resume=False, anew=True)]


def test_resuming_what_is_forgotten_begins_anew(life: TransactionLife) -> None:
    life.commit()
    asked(life.flushed(["orders-0"]))
    life.not_decided(TransactionAbortedError("it took too long"))
    assert life.begin() == [Init(resume=True, anew=False)]
    assert life.not_initialised(UnknownTransactionError("who?")) == [Init(resume=False, anew=True)]


def test_fenced_is_for_ever(life: TransactionLife) -> None:
    life.commit()
    asked(life.flushed(["orders-0"]))
    assert isinstance(raised(life.not_decided(ProducerFencedError("newer"))), ProducerFencedError)
    assert isinstance(raised(life.begin()), ProducerFencedError)
    with pytest.raises(ProducerFencedError):
        life.commit()
    assert life.closed() == []


@pytest.mark.parametrize("later", [ProducerFencedError("newer"), UnknownTransactionError("who?")])
@pytest.mark.parametrize("earlier", ["at once", "by the application"])
def test_a_lost_answer_is_not_an_abort_whatever_comes_after_it(
    life: TransactionLife, earlier: str, later: RayQueueError
) -> None:
    """It was told as aborted, though the first attempt may have been decided before the id went to another."""
    life.commit()
    end = asked(life.flushed(["orders-0"]))
    if earlier == "at once":
        life.unanswered()
    else:
        life.not_decided(OutcomeUnknownError("no answer"))
        assert life.commit() == [end]
    told = raised(life.not_decided(later))
    assert isinstance(told, OutcomeUnknownError)
    assert "all of it, or nothing" in str(told)
    if isinstance(later, ProducerFencedError):
        with pytest.raises(ProducerFencedError):
            life.commit()
        assert isinstance(raised(life.begin()), ProducerFencedError)
    else:
        for _ in range(2):
            assert isinstance(raised(life.commit()), UnknownTransactionError), "who asks again is told: no use"
        assert life.begin() == [Init(resume=False, anew=True)]
        life.initialised(SECOND)
        life.commit()
        assert life.flushed([]) == [], "and that is about the last one only"


def test_a_commit_that_a_newer_producer_came_after_is_a_commit(life: TransactionLife) -> None:
    life.commit()
    asked(life.flushed(["orders-0"]))
    life.unanswered()
    assert life.not_decided(ProducerFencedError("newer", committed=True)) == []
    assert isinstance(raised(life.begin()), ProducerFencedError)


def test_a_lost_answer_of_one_transaction_says_nothing_of_the_next(life: TransactionLife) -> None:
    life.commit()
    asked(life.flushed(["orders-0"]))
    life.unanswered()
    life.decided(Decided(True, (b"",), SECOND))
    life.begin()
    life.commit()
    asked(life.flushed(["orders-0"]))
    assert isinstance(raised(life.not_decided(ProducerFencedError("newer"))), ProducerFencedError)


def test_whoever_was_aborted_by_a_newer_one_learns_it_from_the_coordinator(life: TransactionLife) -> None:
    life.failed(ProducerFencedError("a partition says so: fenced, or aborted by its timeout"))
    life.commit()
    asked(life.dropped(["orders-0"]))
    assert isinstance(raised(life.not_decided(ProducerFencedError("newer"))), ProducerFencedError)


def test_one_at_a_time(life: TransactionLife) -> None:
    assert isinstance(raised(life.begin()), InvalidInputError)
    life.commit()
    assert isinstance(raised(life.begin()), InvalidInputError)
    with pytest.raises(InvalidInputError):
        life.commit()
    asked(life.flushed(["orders-0"]))
    life.decided(Decided(True, (b"",), SECOND))
    with pytest.raises(InvalidInputError):
        life.commit()
    with pytest.raises(InvalidInputError):
        life.abort()


def test_a_start_that_fails_can_be_tried_again() -> None:
    life = TransactionLife("billing-1")
    life.begin()
    assert isinstance(raised(life.not_initialised(NotLeaderError("nobody leads"))), NotLeaderError)
    assert life.begin() == [Init(resume=False, anew=True)]
