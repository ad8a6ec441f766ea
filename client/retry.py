"""The one retry policy. It reads the errors: ``retriable``, ``refresh_metadata``, and whether the outcome is known.

Owns when to repeat a call, and how long to wait first. No I/O, no clock, no
dice of its own: the loops around it sleep and ask who leads.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from rayqueue.config import ClientSettings
from rayqueue.errors import OutcomeUnknownError, RayQueueError


class Wait(NamedTuple):
    """Repeat the call after ``seconds``; ``refresh``: first ask who leads."""

    seconds: float
    refresh: bool


class Retry:
    """The attempts at one call, or at a stream of calls that makes progress."""

    def __init__(self, settings: ClientSettings, rng: Random, now_s: float, *, idempotent: bool) -> None:
        self._settings = settings
        self._rng = rng
        self._idempotent = idempotent
        self._failures = 0
        self.deadline_s = now_s + settings.call_timeout_ms / 1000

    def progress(self, now_s: float) -> None:
        """Something succeeded: patience starts anew."""
        self._failures = 0
        self.deadline_s = now_s + self._settings.call_timeout_ms / 1000

    def after(self, error: RayQueueError, now_s: float) -> Wait:
        """What to do about an error. Raises it if repeating the call cannot help, must not be, or took too long."""
        unsure = isinstance(error, OutcomeUnknownError)
        if not error.retriable or (unsure and not self._idempotent):
            raise error
        settings = self._settings
        seconds = min(settings.retry_max_ms, settings.retry_min_ms * 2 ** min(self._failures, 16)) / 1000
        seconds *= 0.5 + self._rng.random() / 2
        if now_s + seconds > self.deadline_s:
            raise error
        self._failures += 1
        return Wait(seconds, error.refresh_metadata)
