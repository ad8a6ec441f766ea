"""Verified reading of one LMDB read transaction.

``View`` is what the store's writer and its snapshots share: entries and rows
of one transaction, each checked against its checksum, and absences checked
too. A row that is not found is believed only if its neighbours are intact and
lie on either side of it: a flipped key, or a flipped key of a branch page,
makes a row unreachable without changing it.

Everything LMDB itself complains about is ``DamagedLogError``. Not noticed
here: a page that lost its last rows by damage to its header. The store's sums
notice that for the other tables when it is opened; entries and OFFSETS are
dense, so a missing one shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import lmdb

from rayqueue.errors import DamagedLogError
from rayqueue.ids import Index, Term
from rayqueue.log.lmdb_codec import (
    CHECKPOINTS,
    ENTRIES,
    ENTRY_HEADER,
    FORMAT_VERSION,
    HARD,
    StoredState,
    TableSum,
    decode_checkpoint,
    decode_entry,
    decode_entry_header,
    decode_row,
    decode_state,
    encode_row,
    row_crc,
)
from rayqueue.log.ops import MAX_KEY_BYTES, index_key
from rayqueue.log.store import Checkpoint, Entry, Table

Spaces: TypeAlias = dict[bytes, "lmdb._Database"]
"""The named databases of an environment, by name."""

STATE_KEY = b"state"
IDENTITY_KEY = b"identity"


def damaged(error: Exception) -> DamagedLogError:
    return DamagedLogError(f"LMDB cannot read its file: {error}", cause=str(error))


class View:
    """One read transaction (``buffers=True``) over a store's databases. Hands out copies only."""

    def __init__(self, txn: lmdb.Transaction[memoryview], spaces: Spaces) -> None:
        self._txn = txn
        self._spaces = spaces

    # -- the log -------------------------------------------------------------

    def state(self, version: int = FORMAT_VERSION) -> StoredState:
        """The single values; they must have been written by the transaction that is being read."""
        value = self.row(HARD, STATE_KEY)
        if value is None:
            raise DamagedLogError("the store's state is missing")
        stored = decode_state(value, version)
        if stored.txn_id != self._txn.id():
            raise DamagedLogError(
                f"the state is of transaction {stored.txn_id}, the data of {self._txn.id()}",
                state_txn_id=stored.txn_id,
            )
        return stored

    def _stored_entry(self, index: int) -> memoryview:
        try:
            value = self._txn.get(index_key(index), db=self._spaces[ENTRIES])
        except lmdb.Error as error:
            raise damaged(error) from error
        if value is None:
            raise DamagedLogError(f"entry {index} is missing", index=index)
        return value

    def term(self, index: int) -> Term:
        return decode_entry_header(index, self._stored_entry(index))[0]

    def entry(self, index: int) -> Entry:
        return decode_entry(index, self._stored_entry(index))

    def entries(self, first: int, last: int, max_bytes: int) -> list[Entry]:
        """At least one, then while they fit. What does not fit is not read."""
        found: list[Entry] = []
        try:
            with self._txn.cursor(self._spaces[ENTRIES]) as cursor:
                there = cursor.set_key(index_key(first))
                for index in range(first, last + 1):
                    if not there or cursor.key() != index_key(index):
                        raise DamagedLogError(f"entry {index} is missing", index=index)
                    value = cursor.value()
                    max_bytes -= len(value) - ENTRY_HEADER.size
                    if max_bytes < 0 and found:
                        break
                    found.append(decode_entry(index, value))
                    there = cursor.next()
        except lmdb.Error as error:
            raise damaged(error) from error
        return found

    def entry_bounds(self) -> tuple[int, int, int]:
        """First and last index on disk, and how many LMDB counts; (0, 0, 0) without any."""
        try:
            with self._txn.cursor(self._spaces[ENTRIES]) as cursor:
                if not cursor.first():
                    return 0, 0, 0
                first = int.from_bytes(cursor.key(), "big")
                cursor.last()
                last = int.from_bytes(cursor.key(), "big")
                return first, last, self._txn.stat(self._spaces[ENTRIES])["entries"]
        except lmdb.Error as error:
            raise damaged(error) from error

    def checkpoint(self, index: Index) -> Checkpoint:
        value = self.row(CHECKPOINTS, index_key(index))
        if value is None:
            raise DamagedLogError(f"the checkpoint at {index} is missing", index=index)
        return decode_checkpoint(value)

    def checkpoints(self) -> list[Checkpoint]:
        return [decode_checkpoint(value) for _, value in self.rows(CHECKPOINTS)]

    def row_crcs(self, table: Table) -> dict[bytes, int]:
        """The checksum of each row. Reads the whole table."""
        return dict(self._row_crcs(table))

    def row_sum(self, table: Table) -> TableSum:
        """The same, added up."""
        rows = total = 0
        for _, crc in self._row_crcs(table):
            rows += 1
            total += crc
        return TableSum(rows, total % (1 << 64))

    def _row_crcs(self, table: Table) -> Iterator[tuple[bytes, int]]:
        for key, value in self.rows(table.space):
            yield key, row_crc(encode_row(table.space, key, value))

    # -- rows ------------------------------------------------------------------

    def row(self, space: bytes, key: bytes) -> bytes | None:
        if not 0 < len(key) <= MAX_KEY_BYTES:
            return None
        try:
            stored = self._txn.get(key, db=self._spaces[space])
            if stored is not None:
                return decode_row(space, key, stored)
            with self._txn.cursor(self._spaces[space]) as cursor:
                if self._seek(cursor, space, key) and bytes(cursor.key()) == key:
                    raise DamagedLogError(f"a row of {space.decode()} is out of place", key=key.hex())
        except lmdb.Error as error:
            raise damaged(error) from error
        return None

    def rows(
        self, space: bytes, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Verified rows with ``start <= key < stop``. Lazy; the transaction must live as long."""
        try:
            with self._txn.cursor(self._spaces[space]) as cursor:
                there = self._last_before(cursor, space, stop) if reverse else self._first_from(cursor, space, start)
                last: bytes | None = None
                while there:
                    key, value = self._here(cursor, space)
                    if last is not None and (key >= last if reverse else key <= last):
                        raise DamagedLogError(f"the rows of {space.decode()} are out of order", key=key.hex())
                    last = key
                    if (key < start) if reverse else (stop is not None and key >= stop):
                        return
                    if key >= start and (stop is None or key < stop):
                        yield key, value
                    there = cursor.prev() if reverse else cursor.next()
        except lmdb.Error as error:
            raise damaged(error) from error

    def _first_from(self, cursor: lmdb.Cursor[memoryview], space: bytes, start: bytes) -> bool:
        return self._seek(cursor, space, start[:MAX_KEY_BYTES]) if start else cursor.first()

    def _last_before(self, cursor: lmdb.Cursor[memoryview], space: bytes, stop: bytes | None) -> bool:
        if stop is None:
            return cursor.last()
        if not stop:
            return False
        if not self._seek(cursor, space, stop[:MAX_KEY_BYTES]):
            return cursor.last()
        return cursor.prev() if bytes(cursor.key()) >= stop else True

    def _seek(self, cursor: lmdb.Cursor[memoryview], space: bytes, key: bytes) -> bool:
        """Go to the first row at or after ``key``. It and the one before must be intact and on their sides."""
        there = cursor.set_range(key)
        if cursor.prev() if there else cursor.last():
            if self._here(cursor, space)[0] >= key:
                raise DamagedLogError(f"the rows of {space.decode()} are out of order", key=key.hex())
            there = cursor.next()
        elif there:
            there = cursor.first()
        if there and self._here(cursor, space)[0] < key:
            raise DamagedLogError(f"the rows of {space.decode()} are out of order", key=key.hex())
        return there

    def _here(self, cursor: lmdb.Cursor[memoryview], space: bytes) -> tuple[bytes, bytes]:
        key = bytes(cursor.key())
        return key, decode_row(space, key, cursor.value())
