"""Retries of a disk that was full: soon at first, then once per second. Reads no clock."""

from __future__ import annotations

MIN_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
_NEVER = float("inf")


class SyncRetry:
    """The pauses between attempts to write to a full disk."""

    def __init__(self) -> None:
        self.at_s = _NEVER
        """When the next attempt is due; never, unless the last one failed."""
        self._pause_s = MIN_PAUSE_S

    @property
    def failing(self) -> bool:
        return self.at_s != _NEVER

    def failed(self, now_s: float) -> None:
        self.at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def succeeded(self) -> None:
        self.at_s = _NEVER
        self._pause_s = MIN_PAUSE_S
