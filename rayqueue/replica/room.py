"""Room on a replica's disk: said once in the log when there is none, and when there is some again."""

from __future__ import annotations

import logging

from rayqueue.log.store import LogStore
from rayqueue.replica.loop import Loop

_log = logging.getLogger(__name__)


class Room:
    def __init__(self, name: str, store: LogStore, loop: Loop) -> None:
        self._name = name
        self._store = store
        self._loop = loop
        self._was_full = False

    @property
    def full(self) -> bool:
        """No records are taken: the reserve is in use, or not even that is left."""
        return self._loop.read_only or self._store.full

    def look(self) -> None:
        """See whether a full disk has space again."""
        if self._store.full:
            self._store.look_for_room()
            self.note()

    def note(self) -> None:
        if self._store.full == self._was_full:
            return
        self._was_full = self._store.full
        if self._was_full:
            _log.error("%s: the disk is full; it takes no records until there is space", self._name)
        else:
            _log.warning("%s: there is space again", self._name)
