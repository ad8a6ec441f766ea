"""The scrub: a slow read of everything that a replica has on its disk, so that damage is found without a reader.

A flipped bit in cold data is harmless as long as the other copies are intact,
and fatal once they are lost as well. ``Scrubber`` is what is read and in which
order, a bounded piece at a time: the log's entries from the oldest to the newest,
then the rows of every table. Reading verifies (``rayqueue.log``); what is found
is told like any other damage, and the replica is rebuilt from its peers.

``Scrub`` is the thread that reads, at ``log.scrub_bytes_per_second``, one
snapshot per piece: a long one would keep space from reuse. A pass begins
``log.scrub_every_ms`` after the one before it began, and anew with the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from rayqueue.config import LogSettings
from rayqueue.errors import DamagedLogError, ReplicaClosedError, StorageError
from rayqueue.ids import Index
from rayqueue.log.store import Snapshot, Table
from rayqueue.replica.status import Scrubbed

_log = logging.getLogger(__name__)

_PIECE_BYTES = 256 << 10
_ROW_BYTES = 16
"""Beside key and value: what reading a row costs, so that many small ones are bounded as well."""


class Scrubber:
    """A pass over the log. It may be trimmed and may grow meanwhile: what is new is read by the next pass."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._index = Index(0)
        self._until: Index | None = None
        self._table = 0
        self._key = b""

    def piece(self, snapshot: Snapshot, max_bytes: int) -> tuple[int, bool]:
        """Read about so much more. Gives how much it was, and whether the pass is over; then the next one begins."""
        read = 0
        base, last = snapshot.bounds()
        if self._until is None:
            self._until = last
        self._index = max(self._index, base)
        while self._index < min(self._until, last):
            if read >= max_bytes:
                return read, False
            self._index = Index(self._index + 1)
            read += len(snapshot.entry(self._index).payload) + _ROW_BYTES
        while self._table < len(self._tables):
            for key, value in snapshot.scan(self._tables[self._table], self._key):
                if read >= max_bytes:
                    self._key = key
                    return read, False
                read += len(key) + len(value) + _ROW_BYTES
            self._table, self._key = self._table + 1, b""
        self._index, self._until, self._table = Index(0), None, 0
        return read, True


class Scrub:
    """The thread. ``progress`` may be read by any other."""

    def __init__(
        self,
        name: str,
        tables: Sequence[Table],
        snapshot: Callable[[], AbstractContextManager[Snapshot]],
        settings: LogSettings,
    ) -> None:
        """``snapshot`` tells whoever must know when damage is met."""
        self._name = name
        self._scrubber = Scrubber(tables)
        self._snapshot = snapshot
        self._rate = settings.scrub_bytes_per_second
        self._every_s = settings.scrub_every_ms / 1000
        self._closed = threading.Event()
        self.progress = Scrubbed()
        if self._rate:
            threading.Thread(target=self._main, name=f"scrub {name}", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _main(self) -> None:
        began_s = time.monotonic()
        pause_s = min(1.0, self._every_s)
        while not self._closed.wait(pause_s):
            try:
                with self._snapshot() as snapshot:
                    read, over = self._scrubber.piece(snapshot, min(_PIECE_BYTES, self._rate))
            except ReplicaClosedError:
                return
            except DamagedLogError as error:  # the replica knows it by now, and there is nothing more to find out
                _log.error("%s: the scrub found damage: %s", self._name, error)
                return
            except StorageError as error:
                _log.warning("%s: the scrub waits: %s", self._name, error)
                pause_s = self._every_s
                continue
            self._note(read, over)
            pause_s = read / self._rate
            if over:
                pause_s = max(pause_s, began_s + self._every_s - time.monotonic())
                began_s = time.monotonic() + pause_s

    def _note(self, read: int, over: bool) -> None:
        known = self.progress
        self.progress = Scrubbed(
            bytes=known.bytes + read,
            passes=known.passes + over,
            passed_ms=time.time_ns() // 1_000_000 if over else known.passed_ms,
            pass_bytes=0 if over else known.pass_bytes + read,
        )
