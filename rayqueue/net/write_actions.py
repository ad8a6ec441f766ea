"""The vocabulary of a writer's window: its states, its limits, and the actions that it asks of its driver."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from rayqueue.errors import RayQueueError
from rayqueue.net.outgoing import Outgoing
from rayqueue.protocol.calls import AwaitRoom
from rayqueue.protocol.data import Appended

STALL_DOUBTS = 5
"""A leader that is silent for so many times ``client.doubt_ms`` may have been replaced without our noticing."""


class State(Enum):
    IDLE = "idle"
    """Nothing waits. Whatever comes next asks who leads."""
    CONNECTING = "connecting"
    """The leader is looked for, and the producer id if there is none."""
    OPEN = "open"
    """What is offered goes at once."""
    SETTLING = "settling"
    """Something failed, or a part of the window was sent: nothing more goes until nothing is under way."""
    PAUSING = "pausing"
    """Before the next attempt."""
    WAITING = "waiting"
    """In the line before a full partition."""
    DOUBTING = "doubting"
    """The leader is silent: does another one lead?"""
    CLOSED = "closed"


class Numbering(Enum):
    OWN = "own"
    """By the writer, with its producer id; a new epoch when a batch is given up."""
    FIXED = "fixed"
    """By whoever made the batches. What is behind one that is given up fails with it."""
    GIVEN = "given"
    """By the writer, with the transaction that it was given (``begin``), from 0. What is behind one that is given up
    fails with it, and so does the transaction."""
    NONE = "none"
    """A batch may be in the log twice; the offset of its last copy is reported."""


class Identity(Enum):
    """Which producer id the window needs of the driver."""

    NONE = "none"
    OWN = "own"
    FRESH = "fresh"
    """One that was never used: this producer's was fenced."""


@dataclass(frozen=True, slots=True)
class WriteLimits:
    max_batches: int
    max_bytes: int
    stall_s: float
    delivery_timeout_ms: int
    numbering: Numbering = Numbering.OWN
    acknowledged: bool = True
    """False: nobody answers, and nothing is sent again."""
    may_lose_tail: bool = False
    """One replica alone acknowledges, and its successor may not have it."""
    raises_full: bool = False
    """What finds no room fails at once."""
    refuse_forgotten: bool = False
    """A partition that expects sequence 0 of a producer that is further on has most likely forgotten it: its
    ``SequenceGapError`` is final, for repeating a batch of fixed numbers will not help then."""


# -- actions -----------------------------------------------------------------------------


class Transmit(NamedTuple):
    """Send the batch to the leader; tell ``answered`` with the same attempt."""

    batch: Outgoing
    attempt: int


class Resolve(NamedTuple):
    """The batch's outcome, once for each batch."""

    batch: Outgoing
    outcome: Appended | RayQueueError


class Split(NamedTuple):
    """The batch was cut: these are resolved in its place."""

    batch: Outgoing
    pieces: tuple[Outgoing, Outgoing]


class FailWaiting(NamedTuple):
    """Whatever was not offered yet fails with this."""

    error: RayQueueError


class Connect(NamedTuple):
    """Find the leader; tell ``connected`` or ``not_connected``. ``stale``: why the one that was known is doubtful."""

    stale: RayQueueError | None
    identity: Identity


class AskRoom(NamedTuple):
    """Ask the leader to answer when it takes more; tell ``granted`` or ``not_granted``."""

    call: AwaitRoom


class Doubt(NamedTuple):
    """Look whether another one leads; tell ``confirmed`` or ``replaced``."""

    error: RayQueueError


Action = Transmit | Resolve | Split | FailWaiting | Connect | AskRoom | Doubt
