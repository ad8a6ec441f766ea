"""Operations of a store as LMDB writes.

Owns the order and the form of the writes inside one transaction; begins and
commits nothing. Rows are gathered first, so that a row that changed many
times is written once, and written in key order; keys past the end of their
table are appended, which fills pages instead of halving them.

Every call into LMDB lets go of the interpreter's lock, and busy readers may
take their time to give it back. So what the writer must know about the tables
(the checksums of the summed ones, the last key of the others) is kept in
memory, in ``RowMemory``, and a transaction consists of little but its writes.
Long tables are the exception: their sums are kept, their checksums are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import lmdb

from rayqueue.errors import DamagedLogError
from rayqueue.log.lmdb_codec import (
    CHECKPOINTS,
    ENTRIES,
    HARD,
    TableSum,
    encode_checkpoint,
    encode_entry,
    encode_row,
    row_crc,
)
from rayqueue.log.lmdb_rows import Spaces
from rayqueue.log.ops import Append, Delete, Free, Install, MoveBase, Op, Put, SaveCheckpoint, Truncate, index_key
from rayqueue.log.store import MEMBERS, Checkpoint, Entry, Table


@dataclass(slots=True)
class RowMemory:
    """A memory of the rows on disk, to be asked without reading them."""

    crcs: dict[Table, dict[bytes, int]]
    """Of every summed table that is not long."""
    sums: dict[Table, TableSum]
    """Of every summed table."""
    ends: dict[Table, bytes] = field(default_factory=dict)
    """The last key of a table that is not summed, or long, where known; empty for an empty table."""

    def take(self, written: Written) -> None:
        """The transaction is committed."""
        for table, changes in written.crcs.items():
            if table.long:
                continue
            known = {} if written.installed else self.crcs[table]
            for key, crc in changes.items():
                if crc is None:
                    known.pop(key, None)
                else:
                    known[key] = crc
            self.crcs[table] = known
        self.sums, self.ends = written.sums, written.ends


@dataclass(slots=True)
class Written:
    """The changes of a transaction, which count once it is committed."""

    sums: dict[Table, TableSum]
    ends: dict[Table, bytes]
    crcs: dict[Table, dict[bytes, int | None]]
    installed: bool = False

    @classmethod
    def after(cls, memory: RowMemory) -> Written:
        return cls(dict(memory.sums), dict(memory.ends), {table: {} for table in memory.sums})

    @classmethod
    def from_scratch(cls, memory: RowMemory) -> Written:
        """All tables are empty."""
        sums = {table: TableSum() for table in memory.sums}
        return cls(sums, {}, {table: {} for table in sums}, installed=True)


def write_ops(txn: lmdb.Transaction[memoryview], spaces: Spaces, ops: Sequence[Op], memory: RowMemory) -> Written:
    """Write everything but the single values."""
    written = Written.after(memory)
    rows: dict[Table, dict[bytes, bytes | None]] = {}
    run: list[Entry] = []  # appended, not written yet
    for op in ops:
        match op:
            case Append(entry):
                run.append(entry)
            case Put(table, key, value):
                rows.setdefault(table, {})[key] = value
            case Delete(table, key):
                rows.setdefault(table, {})[key] = None
            case Truncate(first):
                _append(txn, spaces, run)
                _delete_entries(txn, spaces, first, None)
                run = []
            case Free(after, until):
                _append(txn, spaces, run)
                _delete_entries(txn, spaces, after + 1, until)
                run = []
            case SaveCheckpoint(checkpoint):
                _put_checkpoint(txn, spaces, checkpoint)
            case MoveBase(base_index, _):
                _delete_checkpoints(txn, spaces, base_index)
            case Install(checkpoint):
                for name, space in spaces.items():
                    if name != HARD:
                        txn.drop(space, delete=False)
                _put_checkpoint(txn, spaces, checkpoint)
                run, rows = [], {MEMBERS: {index_key(checkpoint.index): checkpoint.members}}
                written = Written.from_scratch(memory)
            case _:
                pass  # the single values are one row, written by the caller
    _append(txn, spaces, run)
    for table, changes in rows.items():
        if table in written.sums and not table.long:
            _write_summed(txn, spaces, table, changes, memory, written)
        else:
            _write_rows(txn, spaces, table, changes, written)
    return written


def _append(txn: lmdb.Transaction[memoryview], spaces: Spaces, entries: list[Entry]) -> None:
    if not entries:
        return
    with txn.cursor(spaces[ENTRIES]) as cursor:
        items = [(index_key(entry.index), encode_entry(entry)) for entry in entries]
        _, added = cursor.putmulti(items, append=True)
    if added != len(items):
        raise DamagedLogError(f"entry {entries[0].index} is not past the end of the log on disk")


def _delete_entries(txn: lmdb.Transaction[memoryview], spaces: Spaces, first: int, last: int | None) -> None:
    stop = None if last is None else index_key(last)
    with txn.cursor(spaces[ENTRIES]) as cursor:
        there = cursor.set_range(index_key(first))
        while there and (stop is None or bytes(cursor.key()) <= stop):
            cursor.delete()
            there = len(cursor.key()) > 0


def _put_checkpoint(txn: lmdb.Transaction[memoryview], spaces: Spaces, checkpoint: Checkpoint) -> None:
    key = index_key(checkpoint.index)
    txn.put(key, encode_row(CHECKPOINTS, key, encode_checkpoint(checkpoint)), db=spaces[CHECKPOINTS])


def _delete_checkpoints(txn: lmdb.Transaction[memoryview], spaces: Spaces, before: int) -> None:
    with txn.cursor(spaces[CHECKPOINTS]) as cursor:
        while cursor.first() and int.from_bytes(cursor.key(), "big") < before:
            cursor.delete()


def _write_rows(
    txn: lmdb.Transaction[memoryview],
    spaces: Spaces,
    table: Table,
    changes: dict[bytes, bytes | None],
    written: Written,
) -> None:
    """Of a table whose checksums are not known; its sum is, if it has one."""
    name, space = table.space, spaces[table.space]
    total = written.sums.get(table)

    def replaced(key: bytes, new_crc: int | None) -> None:
        nonlocal total
        if total is not None:
            old = txn.get(key, db=space)
            total = total.changed(None if old is None else row_crc(old), new_crc)

    with txn.cursor(space) as cursor:
        end = written.ends.pop(table, None)
        if end is None:
            end = bytes(cursor.key()) if cursor.last() else b""
        new: list[tuple[bytes, bytes]] = []
        end_deleted = False
        for key in sorted(changes):
            value = changes[key]
            if value is None:
                if key <= end:
                    replaced(key, None)
                    txn.delete(key, db=space)
                    end_deleted |= key == end
                continue
            stored = encode_row(name, key, value)
            if key > end:
                new.append((key, stored))
            else:
                replaced(key, row_crc(stored))
                txn.put(key, stored, db=space)
    if new:
        with txn.cursor(space) as cursor:
            cursor.putmulti(new, append=True)
        written.ends[table] = new[-1][0]
    elif not end_deleted:
        written.ends[table] = end
    if total is not None:
        for _, stored in new:
            total = total.changed(None, row_crc(stored))
        written.sums[table] = total


def _write_summed(
    txn: lmdb.Transaction[memoryview],
    spaces: Spaces,
    table: Table,
    changes: dict[bytes, bytes | None],
    memory: RowMemory,
    written: Written,
) -> None:
    name, space = table.space, spaces[table.space]
    known = {} if written.installed else memory.crcs[table]
    total, crcs = written.sums[table], written.crcs[table]
    for key in sorted(changes):
        old_crc, value = known.get(key), changes[key]
        if value is not None:
            stored = encode_row(name, key, value)
            crcs[key] = row_crc(stored)
            total = total.changed(old_crc, crcs[key])
            txn.put(key, stored, db=space)
        elif old_crc is not None:
            crcs[key] = None
            total = total.changed(old_crc, None)
            txn.delete(key, db=space)
    written.sums[table] = total
