"""Retries of a disk that was full: soon at first, then once per second. Reads no clock."""

from __future__ import annotations

from rayqueue.net.backoff import longest_s

MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
_NEVER = float("inf")


class SyncRetry:
    """The pauses between attempts to write to a full disk."""

    def __init__(self) -> None:
        self.at_s = _NEVER
        """When the next attempt is due; never, unless the last one failed."""
        self._failures = 0

    @property
    def failing(self) -> bool:
        return self.at_s != _NEVER

    def failed(self, now_s: float) -> None:
        self.at_s = now_s + longest_s(1000 * MIN_PAUSE_S, 1000 * MAX_PAUSE_S, self._failures)
        self._failures += 1

    def succeeded(self) -> None:
        self.at_s = _NEVER
        self._failures = 0
