"""Patience: which moves get nowhere, for how long each is waited for, and which brokers are left alone then. Pure.

A new replica that cannot be made (its disk is full, or cannot be written), that
does not answer, or whose disk fills while it is copied would be waited for for
ever, because its broker is here. After a while it counts as lost: its move is
undone as that of any lost one (``rayqueue.cluster.moves``), and another broker
is looked for. A move in trouble is none of the ``cluster.moves_at_once``
meanwhile: it copies nothing, and others may be urgent.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from rayqueue.cluster.moves import Move

HELD_UP_S = 10.0
"""A move in trouble for so long is not counted among those that are under way. An election is over sooner."""
FAILS_S = 15.0
"""A replica that cannot be made is tried again about once a second: what lasts so long is no process that died."""
SILENT_S = 60.0
"""One that was made may have copied much, which is worth the time that a restart of its process takes."""
AVOID_S = 120.0
"""After a failure nothing is moved to that broker for so long: by then an operator may have made space. Without a pause
the same move would be begun there again at once."""


class Trouble(Enum):
    """Why a move gets nowhere."""

    LEADERLESS = "nobody leads its group"
    """Then nothing can be decided, nor its end."""
    FAILING = "its new replica cannot be made"
    SILENT = "its new replica does not answer, or has no space"


_BORNE_S = {Trouble.FAILING: FAILS_S, Trouble.SILENT: SILENT_S}
"""The other one is borne for ever."""


class _Since(NamedTuple):
    trouble: Trouble
    since_s: float


class Patience:
    """Belongs to whoever leads the coordinator: another leader counts anew."""

    def __init__(self) -> None:
        self._troubles: dict[tuple[str, str], _Since] = {}
        """By Raft group and new replica."""
        self._avoided: dict[str, float] = {}
        """Brokers, and until when."""

    def forget(self) -> None:
        self._troubles = {}
        self._avoided = {}

    def keep(self, moves: Iterable[Move]) -> None:
        """These are under way, and no others."""
        there = {(move.group_id, move.add) for move in moves}
        self._troubles = {key: since for key, since in self._troubles.items() if key in there}

    def note(self, now_s: float, move: Move, trouble: Trouble | None) -> bool:
        """Whether its new replica counts as lost now. None: it gets on."""
        key = move.group_id, move.add
        if trouble is None:
            self._troubles.pop(key, None)
            return False
        known = self._troubles.get(key)
        if known is None or known.trouble is not trouble:
            known = self._troubles[key] = _Since(trouble, now_s)
        if trouble not in _BORNE_S or now_s - known.since_s < _BORNE_S[trouble]:
            return False
        self._avoided[move.broker] = now_s + AVOID_S
        return True

    def held_up(self, now_s: float) -> set[str]:
        """The Raft groups whose moves wait, and copy nothing."""
        return {group_id for (group_id, _), (_, since_s) in self._troubles.items() if now_s - since_s >= HELD_UP_S}

    def avoided(self, now_s: float) -> set[str]:
        """Brokers that have failed a moment ago."""
        self._avoided = {broker: until_s for broker, until_s in self._avoided.items() if now_s < until_s}
        return set(self._avoided)
