"""The in-memory twin of the LMDB store, for tests and for the simulator.

Owns a ``MemoryDisk``, which holds exactly what is durable and outlives the
store: the tables as of the last transaction, and the bytes of the write-ahead
file (``rayqueue.log.wal``, the same code as over LMDB). A crash is
``store = store.reopen()``: the buffer is lost, the disk stays. It keeps the
promise of ``rayqueue.log.store``, errors included, except that nothing
survives the process.

For the simulator, on the disk:

- ``before_commit`` runs inside ``sync()`` before anything is durable. What it
  raises leaves the disk and the buffer alone (``DiskFullError``: a full disk;
  an exception of the simulator's own: a crash that lost the transaction).
- ``after_commit`` runs when the tables are durable but the write-ahead file
  is not outdated yet. What it raises is a crash that nobody was told about.
- ``wal.before_write`` is the same for the write-ahead file; to tear a write,
  it puts some of the sectors into ``content`` and raises.
- ``rot_entry`` and ``rot_row`` flip a bit of what is stored, below the checksums
  of ``rayqueue.log.lmdb_codec``, which then find it as they do for LMDB.
- ``MemoryDisk.apply`` applies one operation, ``store.unsynced`` lists those
  that a crash would lose; so a test can model a disk that keeps some of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from msgspec.structs import replace

from rayqueue.errors import DamagedLogError, DiskFullError, ReplicaClosedError
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.buffer import BufferedStore
from rayqueue.log.lmdb_codec import (
    ENTRIES,
    decode_entry,
    decode_entry_header,
    decode_row,
    encode_entry,
    encode_row,
)
from rayqueue.log.ops import (
    EMPTY_STATE,
    Append,
    Delete,
    Free,
    Install,
    LogState,
    MoveBase,
    Op,
    Put,
    SaveCheckpoint,
    SetApplied,
    SetHard,
    SortedRows,
    Truncate,
    index_key,
)
from rayqueue.log.store import LOG_ONLY, MEMBERS, Checkpoint, Entry, HardState, Schema, Table
from rayqueue.log.wal import SECTOR_BYTES, Wal, blank_sector
from rayqueue.log.waymark import Waymark
from rayqueue.records.checksum import entry_crc

_ROW_OVERHEAD_BYTES = 32
_CACHE_BYTES = 1 << 20
_WAL_BYTES = 16 << 10
_WAL_RECORD_BYTES = 16 << 10
_RESERVE_BYTES = 64 << 10


class MemoryFile:
    """A ``WalFile`` in memory. ``before_write`` sees each write first."""

    name = "the write-ahead file"

    def __init__(self, size_bytes: int) -> None:
        self.content = bytearray(blank_sector(0) * max(1, size_bytes // SECTOR_BYTES))
        self.writes = 0
        self.before_write: Callable[[int, bytes], None] | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def copy(self) -> MemoryFile:
        twin = MemoryFile(0)
        twin.content = self.content.copy()
        return twin

    def read(self) -> bytes:
        return bytes(self.content)

    def write(self, at: int, sectors: bytes) -> None:
        if self.before_write is not None:
            self.before_write(at, sectors)
        self.content[at : at + len(sectors)] = sectors
        self.writes += 1

    def close(self) -> None:
        pass


class MemoryDisk:
    """The synced part of a store. Entries are shared with the store, never copied."""

    def __init__(self, wal_bytes: int = _WAL_BYTES) -> None:
        self.entries: dict[Index, Entry] = {}
        self.tables: dict[Table, SortedRows[bytes]] = {}
        self.checkpoints: dict[Index, Checkpoint] = {}
        self.hard: HardState = EMPTY_STATE.hard
        self.applied = Index(0)
        self.base_index = Index(0)
        self.base_term = Term(0)
        self.last_index = Index(0)
        self.freed = Index(0)
        self.damaged: str | None = None
        self.copied: str | None = None
        """Set by whoever puts an older ``copy`` in the place of a disk."""
        self.waymark = Waymark()
        """Beside the disk: no copy takes it along."""
        self.payload_bytes = 0
        self.txn_id = 0
        self.wal = MemoryFile(wal_bytes)
        self.before_commit: Callable[[], None] | None = None
        self.after_commit: Callable[[], None] | None = None
        self.before_mark: Callable[[], None] | None = None
        """Before a mark that must be durable."""
        self.readers = 0
        self._rotten: dict[tuple[bytes, bytes], bytes] = {}
        self.limit_bytes: int | None = None
        """A full disk: so many bytes of entries fit, and ``reserve_bytes`` more of small ones."""
        self.reserve_bytes = _RESERVE_BYTES

    def make_tables(self, schema: Schema) -> None:
        """Those that are not there yet."""
        for table in schema.tables:
            self.tables.setdefault(table, SortedRows())

    def copy(self) -> MemoryDisk:
        """An image of its own, for a test."""
        twin = self.next_version()
        twin.waymark = Waymark()
        twin.wal = self.wal.copy()
        return twin

    def next_version(self) -> MemoryDisk:
        """The copy for the next transaction, while snapshots keep this one. The write-ahead file is the same."""
        twin = MemoryDisk(0)
        twin.wal, twin.txn_id = self.wal, self.txn_id
        twin.before_commit, twin.after_commit = self.before_commit, self.after_commit
        twin.before_mark, twin.waymark = self.before_mark, self.waymark
        twin._rotten = self._rotten.copy()
        twin.limit_bytes, twin.reserve_bytes = self.limit_bytes, self.reserve_bytes
        twin.entries = self.entries.copy()
        twin.tables = {table: rows.copy() for table, rows in self.tables.items()}
        twin.checkpoints = self.checkpoints.copy()
        twin.hard, twin.applied = self.hard, self.applied
        twin.base_index, twin.base_term = self.base_index, self.base_term
        twin.last_index, twin.freed = self.last_index, self.freed
        twin.damaged, twin.copied, twin.payload_bytes = self.damaged, self.copied, self.payload_bytes
        return twin

    def state(self) -> LogState:
        empty = self.last_index == self.base_index
        return LogState(
            hard=self.hard,
            applied=self.applied,
            base_index=self.base_index,
            base_term=self.base_term,
            last_index=self.last_index,
            last_term=self.base_term if empty else self.read_term(self.last_index),
            freed=self.freed,
        )

    def apply(self, op: Op) -> None:
        """Make one operation durable."""
        match op:
            case Append(entry):
                self._drop(entry.index)
                self.entries[entry.index] = entry
                self.payload_bytes += len(entry.payload)
                self.last_index = max(self.last_index, entry.index)
            case Truncate(first):
                for index in range(first, self.last_index + 1):
                    self._drop(Index(index))
                self.last_index = Index(min(self.last_index, first - 1))
            case SetHard(hard):
                self.hard = hard
            case SetApplied(index):
                self.applied = index
            case Put(table, key, value):
                self.tables[table].put(key, value)
                self._rotten.pop((table.space, key), None)
            case Delete(table, key):
                self.tables[table].remove(key)
                self._rotten.pop((table.space, key), None)
            case SaveCheckpoint(checkpoint):
                self.checkpoints[checkpoint.index] = checkpoint
            case MoveBase(index, term):
                self.base_index, self.base_term = index, term
                self.checkpoints = {at: kept for at, kept in self.checkpoints.items() if at >= index}
            case Free(after, until):
                for index in range(after + 1, until + 1):
                    self._drop(Index(index))
                self.freed = until
            case Install(checkpoint):
                self._install(checkpoint)

    def _install(self, checkpoint: Checkpoint) -> None:
        self.entries = {}
        self._rotten = {}
        self.payload_bytes = 0
        self.tables = {table: SortedRows() for table in self.tables}
        self.tables[MEMBERS].put(index_key(checkpoint.index), checkpoint.members)
        self.checkpoints = {checkpoint.index: checkpoint}
        self.hard = replace(self.hard, commit=checkpoint.index)
        self.applied = self.base_index = self.last_index = self.freed = checkpoint.index
        self.base_term = checkpoint.term

    def _drop(self, index: Index) -> None:
        entry = self.entries.pop(index, None)
        if entry is not None:
            self.payload_bytes -= len(entry.payload)
            self._rotten.pop((ENTRIES, index_key(index)), None)

    @property
    def rotten(self) -> bool:
        """A bit of what is stored has flipped, and was not written again since."""
        return bool(self._rotten)

    # -- bits that flip, as on the LMDB store's disk ------------------------------------------

    def rot_entry(self, index: Index, bit: int) -> None:
        """Flip one bit of a stored entry: of what the LMDB store would have written."""
        self._rot(ENTRIES, index_key(index), encode_entry(self.entries[index]), bit)

    def rot_row(self, table: Table, key: bytes, bit: int) -> None:
        self._rot(table.space, key, encode_row(table.space, key, self.tables[table][key]), bit)

    def _rot(self, space: bytes, key: bytes, stored: bytes, bit: int) -> None:
        flipped = bytearray(self._rotten.get((space, key), stored))
        flipped[bit // 8 % len(flipped)] ^= 1 << bit % 8
        self._rotten[space, key] = bytes(flipped)

    # -- reading --------------------------------------------------------------------------------

    def read_row(self, table: Table, key: bytes) -> bytes | None:
        rotten = self._rotten.get((table.space, key)) if self._rotten else None
        return self.tables[table].get(key) if rotten is None else decode_row(table.space, key, memoryview(rotten))

    def read_rows(
        self, table: Table, start: bytes, stop: bytes | None, reverse: bool, limit: int | None = None
    ) -> list[tuple[bytes, bytes]]:
        rows = self.tables[table].range(start, stop, reverse, limit)
        if self._rotten:
            for key, _ in rows:
                self.read_row(table, key)
        return rows

    def read_term(self, index: Index) -> Term:
        """An entry's term, without a look at its payload."""
        rotten = self._rotten.get((ENTRIES, index_key(index))) if self._rotten else None
        if rotten is not None:
            return decode_entry_header(index, memoryview(rotten))[0]
        entry = self.entries.get(index)
        if entry is None:
            raise DamagedLogError(f"entry {index} is missing", index=index)
        return entry.term

    def read_entry(self, index: Index) -> Entry:
        """The verified entry of the log."""
        if not self.base_index < index <= self.last_index:
            raise KeyError(index)
        rotten = self._rotten.get((ENTRIES, index_key(index))) if self._rotten else None
        if rotten is not None:
            return decode_entry(index, memoryview(rotten))
        entry = self.entries.get(index)
        if entry is None:
            raise DamagedLogError(f"entry {index} is missing", index=index)
        if entry.index != index or entry_crc(index, entry.term, entry.payload) != entry.crc:
            raise DamagedLogError(f"entry {index} does not match its checksum", index=index)
        return entry


class MemorySnapshot:
    """A ``Snapshot`` of a ``MemoryDisk``, valid inside its ``with`` block."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk: MemoryDisk | None = disk

    def _open_disk(self) -> MemoryDisk:
        if self._disk is None:
            raise ReplicaClosedError("the snapshot has ended")
        return self._disk

    def bounds(self) -> tuple[Index, Index]:
        disk = self._open_disk()
        return disk.base_index, disk.last_index

    def entry(self, index: Index) -> Entry:
        return self._open_disk().read_entry(index)

    def get(self, table: Table, key: bytes) -> bytes | None:
        return self._open_disk().read_row(table, key)

    def scan(
        self, table: Table, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        for row in self._open_disk().read_rows(table, start, stop, reverse):
            self._open_disk()
            yield row

    def end(self) -> None:
        self._disk = None


_S = TypeVar("_S", bound="MemoryStore")


class MemoryStore(BufferedStore):
    """A ``LogStore`` on a ``MemoryDisk``; a new, empty disk unless one is given."""

    def __init__(
        self,
        group_id: GroupId,
        replica_id: ReplicaId,
        schema: Schema = LOG_ONLY,
        *,
        disk: MemoryDisk | None = None,
        cache_bytes: int = _CACHE_BYTES,
        wal_record_bytes: int = _WAL_RECORD_BYTES,
    ) -> None:
        self.disk = MemoryDisk() if disk is None else disk
        super().__init__(
            group_id,
            replica_id,
            schema,
            Wal(self.disk.wal, filled=True),
            cache_bytes=cache_bytes,
            wal_record_bytes=wal_record_bytes,
        )
        self.disk.make_tables(schema)
        self._snapshots = threading.Lock()
        self._wanted_bytes = 0
        self._damaged = self.disk.damaged
        self._copied = self.disk.copied
        self._load(self.disk.state(), {index: saved.term for index, saved in self.disk.checkpoints.items()})
        self._replay(self.disk.txn_id)
        self._find_behind(self.disk.waymark)

    def reopen(self: _S) -> _S:
        """A restart: a new store on the same disk. This one is closed, its buffer is lost."""
        self.close()
        return type(self)(
            self.group_id,
            self.replica_id,
            self._schema,
            disk=self.disk,
            cache_bytes=self._cache_bytes,
            wal_record_bytes=self._wal_record_bytes,
        )

    def _commit(self, ops: Sequence[Op], state: LogState) -> int:
        if self.disk.before_commit is not None:
            self.disk.before_commit()
        self._check_room(sum(len(op.entry.payload) for op in ops if type(op) is Append))
        with self._snapshots:
            if self.disk.readers:
                self.disk = self.disk.next_version()
            for op in ops:
                self.disk.apply(op)
            self.disk.txn_id += 1
        if self.disk.after_commit is not None:
            self.disk.after_commit()
        return self.disk.txn_id

    def _check_room(self, new_bytes: int) -> None:
        limit = self.disk.limit_bytes
        if limit is None:
            return
        if not self._takes_space():
            limit += self.disk.reserve_bytes
        if self.disk.payload_bytes + new_bytes > limit:
            self._full, self._wanted_bytes = True, new_bytes
            raise DiskFullError(f"no space for {new_bytes} bytes on a disk of {limit}")

    def look_for_room(self) -> None:
        limit = self.disk.limit_bytes
        self._full = limit is not None and self.disk.payload_bytes + self._wanted_bytes > limit

    def _disk_term(self, index: Index) -> Term:
        return self.disk.read_term(index)

    def _disk_entries(self, first: Index, last: Index, max_bytes: int) -> list[Entry]:
        found: list[Entry] = []
        for index in range(first, last + 1):
            entry = self.disk.read_entry(Index(index))
            max_bytes -= len(entry.payload)
            if max_bytes < 0 and found:
                break
            found.append(entry)
        return found

    def _disk_get(self, table: Table, key: bytes) -> bytes | None:
        return self.disk.read_row(table, key)

    def _disk_rows(
        self, table: Table, start: bytes, stop: bytes | None, reverse: bool, limit: int
    ) -> list[tuple[bytes, bytes]]:
        return self.disk.read_rows(table, start, stop, reverse, limit)

    def _disk_checkpoint(self, index: Index) -> Checkpoint:
        return self.disk.checkpoints[index]

    def _write_damaged(self, why: str) -> None:
        self.disk.damaged = why

    def _settle_here(self) -> None:
        self.disk.copied = None

    def _write_waymark(self, mark: Waymark, durable: bool) -> None:
        if durable and self.disk.before_mark is not None:
            self.disk.before_mark()
        self.disk.waymark = mark

    @contextmanager
    def snapshot(self) -> Iterator[MemorySnapshot]:
        with self._snapshots:
            self._check_open()
            disk = self.disk
            disk.readers += 1
        snapshot = MemorySnapshot(disk)
        try:
            yield snapshot
        finally:
            snapshot.end()
            with self._snapshots:
                disk.readers -= 1

    def size_bytes(self) -> int:
        self._check_open()
        rows = sum(len(rows) for rows in self.disk.tables.values()) + len(self.disk.entries)
        return self.disk.payload_bytes + rows * _ROW_OVERHEAD_BYTES

    def close(self) -> None:
        with self._snapshots:
            self._closed = True
