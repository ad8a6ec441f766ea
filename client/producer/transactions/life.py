"""The life of a producer's transactions, one after the other. A state machine: events in, actions out.

No loop, no clock: ``rayqueue.client.producer.transactions.tasks`` has them. A
transaction is told by its (producer id, epoch), which the coordinator gives: the
first one when it is asked (``Init``), each next one with the end of the one
before (``End``). ADR 38 says who asks whom.

    NEW ──begin──> STARTING ──initialised──> OPEN ──commit──> FLUSHING ──flushed──> ENDING ──decided──> READY
     ^                                       ^ │ failed           │ failed           ^  │ no answer        │
     │                                       │ v                  v                  │  v                  │
     │  aborted by timeout, forgotten        │ DOOMED ──abort──> DROPPING ──dropped──┘  UNSURE             │
     └───────────────────────────────────────┼─────────────────────────────────────────────────────────────┤
                                             └──────────────────────────begin──────────────────────────────┘

- Everything of a transaction is acknowledged before its end is asked for. What failed, or may have, dooms it.
- ``UNSURE``: the coordinator has not answered. Asking again, with the same words, gives the outcome; the next ``begin``
  asks first. A commit that is unsure is never turned into an abort.
- ``FENCED``: another producer has the id. Nothing leads out of it. If an earlier attempt at the same commit was not
  answered, that does not say that it was aborted: it may have been decided before the other one came.
- Markers are on their way while the next transaction is open already. A commit of which all have arrived is told to
  the coordinator with the next ``End``, or at the end (``Finish``).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from rayqueue.errors import (
    InvalidInputError,
    InvariantBrokenError,
    OutcomeUnknownError,
    ProducerFencedError,
    RayQueueError,
    TransactionAbortedError,
    UnknownTransactionError,
)
from rayqueue.protocol.transactions import MAX_AT_ONCE, Decided, EndTransaction, Transaction


class State(Enum):
    NEW = "new"
    """No transaction is known to come next."""
    STARTING = "starting"
    READY = "ready"
    """The next transaction is known."""
    OPEN = "open"
    DOOMED = "doomed"
    """Something of it has failed. It can only be aborted."""
    FLUSHING = "flushing"
    DROPPING = "dropping"
    ENDING = "ending"
    UNSURE = "unsure"
    FENCED = "fenced"


BUSY = (State.OPEN, State.DOOMED, State.FLUSHING, State.DROPPING, State.ENDING)


# -- actions -----------------------------------------------------------------------------


class Init(NamedTuple):
    """Ask for a transaction; tell ``initialised`` or ``not_initialised``. ``anew``: as a producer that was never seen;
    else ``resume``: as the one that this is."""

    resume: bool
    anew: bool


class Accept(NamedTuple):
    """Take what is sent from now on, as this transaction's."""

    transaction: Transaction


class Flush(NamedTuple):
    """Take nothing more, and wait until all is acknowledged; tell ``flushed``."""


class Drop(NamedTuple):
    """Take nothing more, and let go of what is not acknowledged; tell ``dropped``."""

    error: RayQueueError


class End(NamedTuple):
    """Ask the coordinator to decide; tell ``decided`` or ``not_decided``."""

    call: EndTransaction


class Mark(NamedTuple):
    """Show the decision to the participants; tell ``marked`` once all have it. Nobody has to wait for that."""

    transaction: Transaction
    commit: bool
    seals: tuple[tuple[str, bytes], ...]
    """By participant."""


class Finish(NamedTuple):
    """Tell the coordinator that these have all their markers."""

    transactions: tuple[Transaction, ...]


class Raise(NamedTuple):
    """Whoever has asked for the end gets this, once all else is done."""

    error: RayQueueError


Action = Init | Accept | Flush | Drop | End | Mark | Finish | Raise


class TransactionLife:
    """Of one producer."""

    def __init__(self, transactional_id: str) -> None:
        self.state = State.NEW
        self.transaction: Transaction | None = None
        """The one that is open, or comes next."""
        self._id = transactional_id
        self._anew = True
        self._doom: RayQueueError | None = None
        self._wanted = True
        """It is to be committed."""
        self._beginning = False
        """Another one is to begin once this one has ended."""
        self._participants: set[str] = set()
        self._call: EndTransaction | None = None
        self._unanswered = False
        """It was asked for before, and may have been decided then."""
        self._forgotten: UnknownTransactionError | None = None
        """The coordinator cannot say any more how the last one has ended."""
        self._finished: list[Transaction] = []

    @property
    def current(self) -> Transaction:
        assert self.transaction is not None  # noqa: S101  # it is open
        return self.transaction

    # -- events: the application -----------------------------------------------------------

    def begin(self) -> list[Action]:
        """Open the next one. ``InvalidInputError`` if one is open."""
        if self.state is State.FENCED:
            return [Raise(self._fenced(None))]
        if self.state in BUSY:
            return [
                Raise(
                    InvalidInputError(
                        f"a transaction of {self._id!r} is open: a producer has one at a time; commit or abort it first"
                    )
                )
            ]
        if self.state is State.UNSURE:  # how it has ended, nobody wants to know any more; but it must have
            self._beginning = True
            return self._ask_again()
        if self.state is State.NEW:
            self.state = State.STARTING
            return [Init(resume=not self._anew, anew=self._anew)]
        self._take(State.READY)
        return self._open()

    def commit(self) -> list[Action]:
        """End it: all of it is to be seen."""
        if self.state is State.UNSURE and self._wanted:
            return self._ask_again()
        if self.state is State.DOOMED:
            return self._drop(commit=True)
        if self.state is State.NEW and self._forgotten is not None:
            return [Raise(self._forgotten)]
        self._take(State.OPEN)
        self._wanted = True
        self.state = State.FLUSHING
        return [Flush()]

    def abort(self) -> list[Action]:
        """End it: nothing of it is ever to be seen."""
        if self.state is State.UNSURE:
            if self._wanted:
                return [Raise(self._unsure())]
            return self._ask_again()
        self._take(State.OPEN, State.DOOMED)
        return self._drop(commit=False)

    # -- events: what becomes of it ----------------------------------------------------------

    def initialised(self, transaction: Transaction) -> list[Action]:
        self._take(State.STARTING)
        self.transaction, self._anew = transaction, False
        return self._open()

    def not_initialised(self, error: RayQueueError) -> list[Action]:
        self._take(State.STARTING)
        self.state = State.NEW
        if isinstance(error, ProducerFencedError):
            return self._fence(error)
        if isinstance(error, UnknownTransactionError):  # it was to resume, and there is nothing to resume
            self._anew = True
            return self.begin()
        return [Raise(error)]

    def touched(self, participant: str) -> None:
        """This partition may have something of it."""
        self._participants.add(participant)

    def failed(self, error: RayQueueError) -> None:
        """A send, or a stage, was given up."""
        if self.state in (State.OPEN, State.FLUSHING):
            self._doom = self._doom or error
            self.state = State.DOOMED if self.state is State.OPEN else State.FLUSHING

    def doomed(self) -> TransactionAbortedError | None:
        """Why nothing more can be added to it, if something of it has failed."""
        return None if self._doom is None else self.aborted(self._doom)

    def flushed(self, participants: Iterable[str]) -> list[Action]:
        """Nothing is under way any more."""
        self._take(State.FLUSHING)
        self._participants.update(participants)
        if self._doom is not None:
            self.state = State.DOOMED
            return self._drop(commit=True)
        return self._end(commit=True)

    def dropped(self, participants: Iterable[str]) -> list[Action]:
        self._take(State.DROPPING)
        self._participants.update(participants)
        return self._end(commit=False)

    def decided(self, decided: Decided) -> list[Action]:
        self._take(State.ENDING)
        call, self._call = self._call, None
        assert call is not None  # noqa: S101  # it was asked for
        self._finished = [each for each in self._finished if each not in call.finished]
        seals = tuple(zip(call.participants, decided.seals, strict=True))
        actions: list[Action] = [Mark(Transaction(call.producer_id, call.epoch), decided.committed, seals)]
        self.transaction = decided.next
        self.state = State.READY
        if decided.committed is not call.commit:  # the coordinator decides once; this is not how it answers
            actions.append(Raise(InvariantBrokenError(f"the coordinator has not decided of {self._id!r} as asked")))
        return actions + self._ended()

    def unanswered(self) -> None:
        """The coordinator was asked, may have decided, and is asked again."""
        self._take(State.ENDING)
        self._unanswered = True

    def not_decided(self, error: RayQueueError) -> list[Action]:
        self._take(State.ENDING)
        call = self._call
        assert call is not None  # noqa: S101  # it was asked for
        if error.retriable or isinstance(error, OutcomeUnknownError):
            self.state = State.UNSURE
            self._unanswered = True
            if self._beginning:
                self._beginning = False
                return [Raise(error)]
            if call.commit:
                return [Raise(self._unsure(error))]
            return self._told()  # never committed; the coordinator aborts it when its time is up
        self._call = None
        told = call.commit and not self._beginning  # somebody wants to know how it has ended
        if isinstance(error, ProducerFencedError):
            fenced = self._fence(error)
            if told and error.details.get("committed"):
                return []
            return [Raise(self._never_known(error))] if told and self._unanswered else fenced
        self.state, self.transaction = State.NEW, None
        self._anew = not isinstance(error, TransactionAbortedError)
        if told and self._unanswered and isinstance(error, UnknownTransactionError):
            self._forgotten = UnknownTransactionError(
                f"whether the transaction of {self._id!r} is committed will not be known: to ask again is no use. Go "
                "on where the positions of its group are, or read what it would have written",
                transactional_id=self._id,
            )
            return [Raise(self._never_known(error))]
        if call.commit:
            self._doom = self._doom or error
        return self._ended()

    def marked(self, transaction: Transaction) -> None:
        """All participants of a commit have answered."""
        self._finished.append(transaction)
        del self._finished[:-MAX_AT_ONCE]

    def closed(self) -> list[Action]:
        """There will be no other one."""
        finished, self._finished = tuple(self._finished), []
        return [Finish(finished)] if finished and self.state is not State.FENCED else []

    # -- transitions ---------------------------------------------------------------------------

    def _take(self, *states: State) -> None:
        if self.state not in states:
            if self.state is State.FENCED:
                raise self._fenced(None)
            raise InvalidInputError(f"the transaction of {self._id!r} is {self.state.value}, not {states[0].value}")

    def _open(self) -> list[Action]:
        self.state = State.OPEN
        self._forgotten = None
        self._beginning = False
        self._doom = None
        self._participants = set()
        return [Accept(self.current)]

    def _drop(self, *, commit: bool) -> list[Action]:
        """``commit``: it was to be committed, and whoever wanted that is told why it is not."""
        self._wanted = commit
        self.state = State.DROPPING
        return [Drop(self.aborted(self._doom) if commit else aborted(self._id))]

    def _end(self, *, commit: bool) -> list[Action]:
        if not self._participants:  # nobody has anything of it: the pair is as good as new
            self.state = State.READY
            return self._ended()
        self.state = State.ENDING
        self._unanswered = False
        self._call = EndTransaction(
            transactional_id=self._id,
            producer_id=self.current.producer_id,
            epoch=self.current.epoch,
            commit=commit,
            participants=tuple(sorted(self._participants)),
            finished=tuple(self._finished),
        )
        return [End(self._call)]

    def _ask_again(self) -> list[Action]:
        assert self._call is not None  # noqa: S101  # it was asked for
        self.state = State.ENDING
        return [End(self._call)]

    def _ended(self) -> list[Action]:
        """It has; another one begins if that is what this was for."""
        if self._beginning:
            self._beginning = False
            self._doom = None
            return self.begin()
        return self._told()

    def _told(self) -> list[Action]:
        doom = self.aborted(self._doom) if self._doom is not None and self._wanted else None
        self._doom = None
        return [] if doom is None else [Raise(doom)]

    def _fence(self, error: RayQueueError) -> list[Action]:
        self.state, self.transaction = State.FENCED, None
        return [Raise(self._fenced(error))]

    # -- errors ----------------------------------------------------------------------------------

    def _fenced(self, error: RayQueueError | None) -> ProducerFencedError:
        return ProducerFencedError(
            f"another producer has taken the transactional id {self._id!r}: this one must stop; nothing that it has "
            f"not committed will be seen{'' if error is None else f' ({error})'}",
            transactional_id=self._id,
        )

    def aborted(self, why: RayQueueError | None) -> TransactionAbortedError:
        """Its cause is the reason."""
        if isinstance(why, TransactionAbortedError):
            return why
        error = TransactionAbortedError(
            f"the transaction of {self._id!r} was aborted, and nothing of it will be seen: {why}; do it again",
            transactional_id=self._id,
        )
        error.__cause__ = why
        return error

    def _unsure(self, error: RayQueueError | None = None) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"whether the transaction of {self._id!r} is committed is not known: the coordinator has not answered. "
            f"commit() again asks again{'' if error is None else f' ({error})'}",
            transactional_id=self._id,
        )

    def _never_known(self, error: RayQueueError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"whether the transaction of {self._id!r} is committed is not known, and the coordinator cannot say it any "
            f"more: an earlier answer was lost, and then {error}. Readers see all of it, or nothing",
            transactional_id=self._id,
        )


def aborted(transactional_id: str) -> TransactionAbortedError:
    """Of what was sent in a transaction that its own producer has aborted."""
    return TransactionAbortedError(
        f"the transaction of {transactional_id!r} was aborted: nothing of it will be seen",
        transactional_id=transactional_id,
    )
