"""The one back-off, and the retry policy on top of it, which reads the errors: ``retriable``, and what is unknown.

``Backoff`` says how long to wait before the next attempt, ``Retry`` also whether
there is to be one. No I/O, no clock, no dice of their own: the loops around
them sleep and ask who leads (``rayqueue.net.requests``).
"""

from __future__ import annotations

from random import Random

from rayqueue.config import ClientSettings
from rayqueue.errors import OutcomeUnknownError, RayQueueError

FOREVER_S = float("inf")


def longest_s(min_ms: float, max_ms: float, failures: int) -> float:
    """The longest pause after so many failures in a row: twice as long after each."""
    return min(max_ms, min_ms * 2.0 ** min(failures, 16)) / 1000


class Backoff:
    """Pauses that double from ``client.retry_min_ms`` to ``client.retry_max_ms``, or to ``max_ms`` if that is less.

    Each is shortened at random by up to a half, so that clients which failed together do not come back together.
    """

    __slots__ = ("_max_ms", "_min_ms", "_rng", "failures")

    def __init__(
        self, settings: ClientSettings, rng: Random, *, max_ms: float | None = None, failures: int = 0
    ) -> None:
        self._min_ms = settings.retry_min_ms
        self._max_ms = settings.retry_max_ms if max_ms is None else min(max_ms, settings.retry_max_ms)
        self._rng = rng
        self.failures = failures
        """In a row, so far."""

    def peek_s(self) -> float:
        """The longest that the next pause may be."""
        return longest_s(self._min_ms, self._max_ms, self.failures)

    def pause_s(self) -> float:
        """One more failure; how long to wait after it."""
        pause_s = self.peek_s() * (0.5 + self._rng.random() / 2)
        self.failures += 1
        return pause_s

    def reset(self) -> None:
        """Something succeeded."""
        self.failures = 0


class Retry:
    """The attempts at one call, for ``client.call_timeout_ms`` unless ``within_s`` says otherwise."""

    def __init__(
        self,
        settings: ClientSettings,
        rng: Random,
        now_s: float,
        *,
        idempotent: bool = True,
        within_s: float | None = None,
    ) -> None:
        self._backoff = Backoff(settings, rng)
        self._idempotent = idempotent
        self.deadline_s = now_s + (settings.call_timeout_ms / 1000 if within_s is None else within_s)

    def after(self, error: RayQueueError, now_s: float) -> float:
        """The pause before the next attempt. Raises the error if that cannot help, must not be, or took too long."""
        unsure = isinstance(error, OutcomeUnknownError)
        if not error.retriable or (unsure and not self._idempotent):
            raise error
        pause_s = self._backoff.pause_s()
        if now_s + pause_s > self.deadline_s:
            raise error
        return pause_s
