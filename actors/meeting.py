"""The meeting of a replica with its peers: whom it asks next where they listen, and what it has heard. Pure.

A replica listens on a new port each time it starts, and tells it to those whom it
dials. So of two that restart, the later one finds the earlier one. But one whose
disk is an older copy may not know the other: the other joined since, or took the
place of one that was lost. And the other looks for it where it was. So whoever
is not connected is asked again and again: often, while it has never said where it
listens; more slowly afterwards, since the transport goes on dialling that address.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rayqueue.ids import ReplicaId
from rayqueue.net.backoff import longest_s

Address = tuple[str, int]

_NEVER_HEARD_MS = 100, 1000
_NOT_THERE_MS = 2000, 10_000
_LOOK_EVERY_S = 1.0


@dataclass(slots=True)
class _Asked:
    times: int
    since_s: float


class Meeting:
    """Knows no clock, and asks nobody itself."""

    def __init__(self) -> None:
        self.addresses: dict[ReplicaId, Address] = {}
        """By whoever has said it: where it listened when it was asked last."""
        self._asked: dict[ReplicaId, _Asked] = {}

    def due(self, now_s: float, peers: Collection[ReplicaId], connected: Collection[ReplicaId]) -> list[ReplicaId]:
        """Those of ``peers`` to ask now. They count as asked."""
        missing = set(peers) - set(connected)
        for met in self._asked.keys() - missing:
            del self._asked[met]
        due = []
        for peer in sorted(missing):
            asked = self._asked.setdefault(peer, _Asked(0, now_s))
            if now_s >= self._due_s(peer, asked):
                due.append(peer)
                self._asked[peer] = _Asked(asked.times + 1, now_s)
        return due

    def heard(self, peer: ReplicaId, address: Address) -> bool:
        """What it answered. True if that is news."""
        if self.addresses.get(peer) == address:
            return False
        self.addresses[peer] = address
        self._asked.pop(peer, None)
        return True

    def pause_s(self, now_s: float) -> float:
        """How long until somebody is to be asked; no longer than until it is worth a look who is connected."""
        soonest = min((self._due_s(peer, asked) - now_s for peer, asked in self._asked.items()), default=_LOOK_EVERY_S)
        return min(max(soonest, 0.0), _LOOK_EVERY_S)

    def _due_s(self, peer: ReplicaId, asked: _Asked) -> float:
        if peer in self.addresses:
            return asked.since_s + longest_s(*_NOT_THERE_MS, asked.times)
        return asked.since_s + (longest_s(*_NEVER_HEARD_MS, asked.times - 1) if asked.times else 0.0)
