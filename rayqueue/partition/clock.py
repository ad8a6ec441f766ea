"""The partition's clock: what time it was, as far as the log tells.

A state machine has no clock: all replicas must decide the same, whenever they
apply an entry. So the leader writes its own time into the log (``PassTime``),
before an entry that is stamped with it, unless it did so within ``TICK_MS``;
an idle partition writes nothing. The clock is the largest time seen. It never
goes back, so a new leader whose own clock is behind goes on from there; one
that was far ahead makes things expire early, as it would in any queue.

What was written before there was a clock counts from its first time on.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from rayqueue.log.store import LogStore
from rayqueue.partition.rows import CLOCK_KEY
from rayqueue.partition.tables import META

TICK_MS = 60_000
"""A stamp is at most so much older than the moment in which its entry was proposed."""

_ROW = Struct("<QQ")


class Times(NamedTuple):
    first_ms: int = 0
    """The first that was ever written; 0 if there was none."""
    now_ms: int = 0

    def encode(self) -> bytes:
        return _ROW.pack(*self)


class Clock:
    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._times = Times()

    @property
    def times(self) -> Times:
        return self._times

    @property
    def now_ms(self) -> int:
        """0 until the log has told a time."""
        return self._times.now_ms

    def age_ms(self, stamp_ms: int) -> int:
        """The age of a stamp. 0 is a stamp of before there was a clock."""
        return self._times.now_ms - (stamp_ms or self._times.first_ms)

    def pass_to(self, now_ms: int) -> None:
        if now_ms > self._times.now_ms:
            self.restore(Times(self._times.first_ms or now_ms, now_ms))

    def load(self) -> None:
        row = self._store.get(META, CLOCK_KEY)
        self._times = Times() if row is None else Times._make(_ROW.unpack(row))

    def restore(self, times: Times) -> None:
        self._times = times
        self._store.put(META, CLOCK_KEY, times.encode())
