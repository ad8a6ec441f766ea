"""The gate before the memory map: readers pass it, and the map moves only while none is inside.

Owns the count of running snapshots. Growing the map and closing the store
pull the map away under a reader, so both wait here until no snapshot runs,
and new snapshots wait for them. All waits of the writer are bounded: a reader
that never ends delays the writer once and cannot stop it for good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayqueue.errors import ReplicaClosedError


class SnapshotGate:
    """``max_snapshots`` may be inside at a time; the next one waits its turn."""

    def __init__(self, max_snapshots: int) -> None:
        self._max_snapshots = max_snapshots
        self._changed = threading.Condition()
        self._inside = 0
        self._paused = False
        self._on_empty: Callable[[], None] | None = None
        self._closed = False

    def enter(self) -> None:
        with self._changed:
            while not self._closed and (self._paused or self._inside >= self._max_snapshots):
                self._changed.wait()
            if self._closed:
                raise ReplicaClosedError("the store is closed")
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
            finish = self._on_empty if self._inside == 0 else None
            if finish is not None:
                self._on_empty = None
                finish()

    @contextmanager
    def paused(self, wait_ms: int) -> Iterator[bool]:
        """Nobody is inside during the block if it gets True; otherwise somebody did not leave in time."""
        with self._changed:
            self._paused = True
            empty = self._changed.wait_for(lambda: self._inside == 0, wait_ms / 1000)
        try:
            yield empty
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def close(self, wait_ms: int, finish: Callable[[], None]) -> None:
        """Let nobody in any more. ``finish`` runs once nobody is inside: here, or in the last one to leave."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            if self._changed.wait_for(lambda: self._inside == 0, wait_ms / 1000):
                finish()
            else:
                self._on_empty = finish
