"""The budget of a learner: how much of the log it may be sent, so that copying leaves room for those who write.

So many bytes per second, and as much again as is written meanwhile: a learner
that gets no more than the bound would never catch up with producers who write faster.
An entry counts for more than its bytes, because a log of tiny ones costs the
learner's processor what a log of large ones costs its disk.
"""

from __future__ import annotations

from collections.abc import Iterable

from rayqueue.log.store import Entry

_ENTRY_BYTES = 1024
"""What an entry costs besides its payload."""
_BURST_S = 0.25
"""What may be saved up: the leader looks at every heartbeat, and when something comes."""


class Budget:
    __slots__ = ("_at_s", "_bytes_per_s", "_left_bytes")

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._left_bytes = 0.0
        self._at_s: float | None = None

    def is_open(self, now_s: float) -> bool:
        """Whether something may be sent now: once, however large, for the rest is waited for afterwards."""
        gained = 1.0 if self._at_s is None else (now_s - self._at_s) * self._bytes_per_s
        self._at_s = now_s
        self._left_bytes = min(self._left_bytes + gained, max(self._left_bytes, self._bytes_per_s * _BURST_S))
        return self._left_bytes > 0

    def spend(self, entries: Iterable[Entry]) -> None:
        self._left_bytes -= _cost(entries)

    def grant(self, entries: Iterable[Entry]) -> None:
        """These were written, which are not to be copied but to be followed."""
        self._left_bytes += _cost(entries)


def _cost(entries: Iterable[Entry]) -> int:
    return sum(_ENTRY_BYTES + len(entry.payload) for entry in entries)
