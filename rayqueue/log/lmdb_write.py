"""How a list of operations becomes LMDB writes.

Owns the order and the form of the writes inside one transaction; begins and
commits nothing. Rows are gathered first, so that a row that changed many
times is written once, and written in key order; keys past the end of their
table are appended, which fills pages instead of halving them.
"""

from __future__ import annotations

from collections.abc import Sequence

import lmdb

from rayqueue.errors import DamagedLogError
from rayqueue.log.lmdb_codec import (
    CHECKPOINTS,
    ENTRIES,
    SUMMED_TABLES,
    TableSum,
    encode_checkpoint,
    encode_entry,
    encode_row,
    row_crc,
)
from rayqueue.log.lmdb_rows import Spaces
from rayqueue.log.ops import Append, Delete, Free, Install, MoveBase, Op, Put, SaveCheckpoint, Truncate, index_key
from rayqueue.log.store import Checkpoint, Entry, Table


def write_ops(
    txn: lmdb.Transaction[memoryview], spaces: Spaces, ops: Sequence[Op], sums: dict[Table, TableSum]
) -> dict[Table, TableSum]:
    """Write everything but the single values; returns the tables' new sums."""
    sums = dict(sums)
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
                run, rows = [], {Table.MEMBERS: {index_key(checkpoint.index): checkpoint.members}}
                sums = {table: TableSum() for table in SUMMED_TABLES}
                for name in (ENTRIES, CHECKPOINTS, *(table.value for table in Table)):
                    txn.drop(spaces[name], delete=False)
                _put_checkpoint(txn, spaces, checkpoint)
            case _:
                pass  # the single values are one row, written by the caller
    _append(txn, spaces, run)
    for table, changes in rows.items():
        if table in sums:
            sums[table] = _write_summed(txn, spaces, table, changes, sums[table])
        else:
            _write_rows(txn, spaces, table, changes)
    return sums


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
    txn: lmdb.Transaction[memoryview], spaces: Spaces, table: Table, changes: dict[bytes, bytes | None]
) -> None:
    name, space = table.value, spaces[table.value]
    with txn.cursor(space) as cursor:
        end = bytes(cursor.key()) if cursor.last() else b""
        new = []
        for key in sorted(changes):
            value = changes[key]
            if value is None:
                txn.delete(key, db=space)
            elif key > end:
                new.append((key, encode_row(name, key, value)))
            else:
                txn.put(key, encode_row(name, key, value), db=space)
    if new:
        with txn.cursor(space) as cursor:
            cursor.putmulti(new, append=True)


def _write_summed(
    txn: lmdb.Transaction[memoryview],
    spaces: Spaces,
    table: Table,
    changes: dict[bytes, bytes | None],
    total: TableSum,
) -> TableSum:
    name, space = table.value, spaces[table.value]
    for key in sorted(changes):
        old, value = txn.get(key, db=space), changes[key]
        old_crc = None if old is None else row_crc(old)
        if value is not None:
            stored = encode_row(name, key, value)
            total = total.changed(old_crc, row_crc(stored))
            txn.put(key, stored, db=space)
        elif old is not None:
            total = total.changed(old_crc, None)
            txn.delete(key, db=space)
    return total
