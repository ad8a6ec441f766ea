"""Leases that a worker holds, and when each is to be extended.

No I/O, no clock. A lease covers the jobs that came with one answer; it is
extended while any of them is in hand: waiting in the worker's buffer, or in use
by the application. A job object that the application lets go without ending it
is in nobody's hand any more.

A lease is extended when a third of it is over (``EXTEND_AFTER``). The thread that
does it needs the interpreter's lock for an instant: whatever holds that lock,
such as a call into a library that does not let it go, may do so for the
remaining two thirds, minus the time a call takes, before the lease is lost.
With the default of 30 s that is about 20 s at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from rayqueue.protocol.jobs import Settlement

EXTEND_AFTER = 1 / 3
_LEAST_S = 0.05
"""Leases that ``max_lease_ms`` ends soon are not asked about more often."""


class Lease:
    __slots__ = ("due_s", "lease_s", "offsets", "token")

    def __init__(self, token: int, lease_ms: int, offsets: set[int], now_s: float) -> None:
        self.token = token
        self.offsets = offsets
        """Jobs in hand."""
        self.lease_s = lease_ms / 1000
        self.due_s = 0.0
        self.lasts(lease_ms, now_s)

    def lasts(self, lease_ms: int, now_s: float) -> None:
        """From now."""
        self.due_s = now_s + max(_LEAST_S, lease_ms / 1000 * EXTEND_AFTER)


class Leases:
    """Of one worker in one partition."""

    def __init__(self) -> None:
        self._by_token: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def add(self, token: int, lease_ms: int, offsets: set[int], now_s: float) -> None:
        # A repeated request is answered with the lease that there is.
        self._by_token[token] = Lease(token, lease_ms, offsets, now_s)

    def ended(self, token: int, offsets: Iterable[int]) -> None:
        """These jobs are in hand no more."""
        lease = self._by_token.get(token)
        if lease is not None:
            lease.offsets.difference_update(offsets)
            if not lease.offsets:
                del self._by_token[token]

    def holds(self, token: int, offset: int) -> bool:
        lease = self._by_token.get(token)
        return lease is not None and offset in lease.offsets

    def due(self, now_s: float) -> list[Settlement]:
        """The extensions to ask for now."""
        return [
            Settlement(kind="extend", token=each.token, jobs=((min(each.offsets), 1),))
            for each in self._by_token.values()
            if each.due_s <= now_s
        ]

    def next_due_s(self) -> float | None:
        return min((each.due_s for each in self._by_token.values()), default=None)

    def extended(self, token: int, lease_ms: int, now_s: float) -> None:
        lease = self._by_token.get(token)
        if lease is not None:
            lease.lasts(lease_ms, now_s)

    def lost(self, token: int) -> None:
        """It is over: nothing of it is extended any more."""
        self._by_token.pop(token, None)

    def not_answered(self, token: int, now_s: float) -> None:
        """An extension failed; it is asked for again soon."""
        lease = self._by_token.get(token)
        if lease is not None:
            lease.due_s = now_s + max(_LEAST_S, lease.lease_s / 20)
