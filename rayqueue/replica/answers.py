"""Answers: calls that wait for their outcome, and the way to those who wait.

An answer for the engine's thread itself is given at once; those for other
threads are handed over together (``flush``). Belongs to the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayqueue.errors import AppendTimeoutError, DamagedLogError, OutcomeUnknownError, RayQueueError

Answer = Callable[[Any], None]
"""Takes a result, or a ``RayQueueError`` that says why there is none. Called once."""

Deliver = Callable[[list[tuple[Answer, Any]]], None]

OUTCOME_TIMEOUT_S = 10.0
"""After so long without a majority an outcome is unknown."""


@dataclass(slots=True)
class Pending:
    """A call that waits for its outcome."""

    answer: Answer
    deadline_s: float
    inside: bool
    """The answer is for the engine's thread itself, and given at once."""
    answered: bool = False


class Answers:
    """``damaged`` is told of damage that an answer reports, or that whoever takes it meets."""

    def __init__(self, deliver: Deliver, damaged: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._deliver = deliver
        self._damaged = damaged
        self._clock = clock
        self._waiting: deque[Pending] = deque()
        self._out: list[tuple[Answer, Any]] = []

    def pending(self, answer: Answer, *, inside: bool) -> Pending:
        return Pending(answer, self._clock() + OUTCOME_TIMEOUT_S, inside)

    def wait(self, pending: Pending) -> None:
        """Its outcome will come by ``give``, or its time is up some day."""
        self._waiting.append(pending)

    def attempt(self, action: Callable[[Pending], None], pending: Pending) -> None:
        """Begin it. What it raises is its answer."""
        try:
            action(pending)
        except RayQueueError as error:
            self.give(pending, error)
        else:
            self._waiting.append(pending)

    def give(self, pending: Pending, result: Any) -> None:
        """Unless it has its answer."""
        if pending.answered:
            return
        pending.answered = True
        if type(result) is DamagedLogError:
            self._damaged(str(result))
        if not pending.inside:
            self._out.append((pending.answer, result))
            return
        try:
            pending.answer(result)
        except DamagedLogError as error:
            self._damaged(str(error))

    def tell(self, answer: Answer, result: Any) -> None:
        """An answer for another thread, which nothing waits for in here."""
        self._out.append((answer, result))

    def expire(self, now_s: float) -> None:
        """Those whose time is up, in the order in which they came."""
        waiting = self._waiting
        while waiting and (waiting[0].answered or waiting[0].deadline_s < now_s):
            pending = waiting.popleft()
            if not pending.answered:
                text = f"no majority confirmed it within {OUTCOME_TIMEOUT_S} s; outcome unknown"
                self.give(pending, AppendTimeoutError(text))

    def give_all(self, unknown: OutcomeUnknownError) -> None:
        """The replica ends."""
        for pending in self._waiting:
            self.give(pending, unknown)

    def flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._deliver(out)


def call_each(answers: list[tuple[Answer, Any]]) -> None:
    """Deliver on the engine's thread."""
    for answer, result in answers:
        answer(result)
