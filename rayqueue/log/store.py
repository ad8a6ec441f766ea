"""A replica's store: what it keeps, and the promise of the disk under it.

A store holds one replica: the Raft log (which is the message log), the term
and vote, and the small tables derived from the log. Which tables there are is
said by the state machine (``Schema``). A store has one writer, the engine's
thread, and any number of readers.

The promise:

- Writes are buffered. ``sync()`` makes all of them durable in one synced
  transaction, or none of them; ``persist()`` does so too, but may leave the
  transaction for later. Nothing may be acknowledged before one of the two.
- The writer's own reads see the buffer; ``snapshot()`` sees only what was
  synced, and may be used from any thread.
- Every entry is verified against its checksum when it comes from disk. Bytes
  that do not match are never returned: ``DamagedLogError``.
- If the disk is full, ``sync()`` raises ``DiskFullError`` and keeps the
  buffer, so that the same ``sync()`` may be tried again; nothing is lost. A
  reserve remains for what appends little (``small_bytes``) or frees space.

``rayqueue.log.lmdb_store`` is the real one, ``rayqueue.log.memory_store`` its
twin for tests and for the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from rayqueue.errors import InvariantBrokenError
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.waymark import Waymark

SMALL_BYTES = 64 << 10
"""What a ``sync()`` may append though the store is full."""


class Table:
    """A small table beside the log. Keys sort as bytes. Declared once, by whoever owns its rows, and known by identity.

    ``name`` is its name on the disk and ``number`` that in the write-ahead file: of one state machine's tables, past
    and present, no two have the same. ``summed``: its rows are counted and summed, so that a missing or an outdated
    one is noticed when the store is opened. A long table whose keys are dense does without: its readers see a gap.
    ``long``: summed, and may have millions of rows. Their checksums are not kept in memory: a row that changes is read
    before.
    """

    __slots__ = ("long", "name", "number", "space", "summed")

    def __init__(self, name: str, number: int, *, summed: bool = True, long: bool = False) -> None:
        self.name = name
        self.number = number
        self.space = name.encode()
        self.summed = summed
        self.long = long

    def __repr__(self) -> str:
        return f"<table {self.name}>"

    def __deepcopy__(self, memo: object) -> Table:
        return self  # a copy would be another table


MEMBERS = Table("members", 4)
"""Raft's own, in every store: index (u64 big-endian) of a membership entry -> who belongs to the group from then on."""


class Schema:
    """A state machine's tables beside the log, as it declares them, and ``MEMBERS``.

    ``version`` is raised when a table is added or a row gets a field: a release that knows less must not touch such a
    store, since it would go on without what it does not know (``StoreFormatError``). One that knows more reads what is
    there, makes the tables that are missing, and takes the default for a field that is.
    """

    __slots__ = ("by_number", "name", "tables", "version")

    def __init__(self, name: str, version: int, *tables: Table) -> None:
        self.name = name
        self.version = version
        self.tables = (*tables, MEMBERS)
        self.by_number = {table.number: table for table in self.tables}
        if not len(self.by_number) == len({table.name for table in self.tables}) == len(self.tables):
            raise InvariantBrokenError(f"two tables of {name} have the same name or number")


LOG_ONLY = Schema("", 0)
"""Of a store that nobody has told what its log means: a replica's data is made so, and gets its tables when it runs."""


class Entry(Struct, frozen=True, gc=False):
    """One entry of the Raft log.

    ``crc`` is ``entry_crc(index, term, payload)``. The leader computes it once;
    it travels and is stored with the entry, and whoever reads the entry from a
    wire or a disk checks it.
    """

    index: Index
    term: Term
    payload: bytes
    crc: int


class HardState(Struct, frozen=True, gc=False):
    """The state that Raft must never forget. ``commit`` is only a hint and may be old."""

    term: Term
    voted_for: ReplicaId | None
    commit: Index


class Checkpoint(Struct, frozen=True, gc=False):
    """The state machine after applying ``index``; what a log whose prefix was trimmed starts from."""

    index: Index
    term: Term
    members: bytes
    state: bytes


class Snapshot(Protocol):
    """A consistent view of what was synced. Usable from one thread at a time."""

    def bounds(self) -> tuple[Index, Index]:
        """The entry before the first one kept, and the last one."""

    def entry(self, index: Index) -> Entry:
        """The verified entry. ``KeyError`` if it is not there, ``DamagedLogError`` if it is wrong."""

    def get(self, table: Table, key: bytes) -> bytes | None: ...

    def scan(
        self, table: Table, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows with ``start <= key < stop`` in key order, or in reverse order. Lazy."""


class LogStore(Protocol):
    """One replica's disk. See the module's text for the promise."""

    @property
    def group_id(self) -> GroupId: ...
    @property
    def replica_id(self) -> ReplicaId: ...

    @property
    def tables(self) -> Sequence[Table]:
        """All that its schema declares."""

    # -- the log -----------------------------------------------------------

    @property
    def base_index(self) -> Index:
        """The entry before the first one kept: 0, or the index of the checkpoint the log was trimmed to."""

    @property
    def base_term(self) -> Term: ...
    @property
    def last_index(self) -> Index: ...
    @property
    def last_term(self) -> Term: ...

    def term_at(self, index: Index) -> Term | None:
        """Term of an entry, or of the base; None outside the log. Cheap for recent entries."""

    def entry(self, index: Index) -> Entry:
        """The verified entry. ``KeyError`` outside the log."""

    def entries(self, first: Index, max_bytes: int) -> list[Entry]:
        """Consecutive verified entries from ``first``: at least one, then while they fit. [] past the end."""

    def append(self, entries: Sequence[Entry]) -> None:
        """Append; the first must follow ``last_index``. Does not copy payloads."""

    def truncate_from(self, index: Index) -> None:
        """Drop this entry and all after it."""

    # -- hard state and tables ----------------------------------------------

    @property
    def hard(self) -> HardState: ...
    def set_hard(self, hard: HardState) -> None: ...

    @property
    def applied(self) -> Index:
        """Last index whose effects are in the tables. Synced together with them, so nothing applies twice."""

    def set_applied(self, index: Index) -> None: ...

    def get(self, table: Table, key: bytes) -> bytes | None: ...
    def scan(
        self, table: Table, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]: ...
    def put(self, table: Table, key: bytes, value: bytes) -> None: ...
    def delete(self, table: Table, key: bytes) -> None: ...

    # -- checkpoints and trimming ------------------------------------------

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint the log starts from (index == base_index), or None while base_index is 0."""

    def checkpoints(self) -> list[Index]:
        """Indexes of all saved checkpoints, ascending; the first is the base's if there is one."""

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Remember a point that the log may later be trimmed to."""

    def trim_to(self, index: Index, max_entries: int) -> bool:
        """Make the saved checkpoint at ``index`` the base and delete what is before it.

        The base moves at once; the entries' space is freed a bounded number at
        a time, over this and later calls. True once nothing is left to free.
        """

    def install(self, checkpoint: Checkpoint) -> None:
        """Replace log and tables by a checkpoint received from the leader: the log is empty after it,
        ``base_index == last_index == applied == checkpoint.index``, all tables are empty except MEMBERS
        (one row: ``checkpoint.members`` at ``checkpoint.index``). The hard state's term and vote stay.
        The state machine then restores its tables from ``checkpoint.state`` by ``put``.
        """

    # -- durability -----------------------------------------------------------

    @property
    def must_sync(self) -> bool:
        """True if the buffer holds something that a promise to a peer depends on (log, term, vote)."""

    @property
    def dirty(self) -> bool:
        """True if the buffer holds anything."""

    def sync(self) -> None:
        """Make the buffer durable: one transaction, all or nothing. Snapshots see it."""

    def persist(self) -> None:
        """Make the buffer durable, all or nothing, in whatever way is cheapest: it survives a crash as after ``sync``,
        but may stay in the buffer (``dirty``), and snapshots may see it only after the next ``sync``."""

    def snapshot(self) -> AbstractContextManager[Snapshot]: ...

    @property
    def damaged(self) -> str | None:
        """Why this replica must be rebuilt, or None. Survives restarts."""

    def mark_damaged(self, why: str) -> None:
        """Remember that this replica must be rebuilt from its peers."""

    @property
    def copied(self) -> str | None:
        """Why this may be an older copy of the replica's store, or None (``rayqueue.log.place``)."""

    def settle_here(self) -> None:
        """Nothing that was promised is missing any more: from now on the store belongs where it is."""

    @property
    def waymark(self) -> Waymark:
        """The least that this store had acknowledged, as remembered beside it (``rayqueue.log.waymark``)."""

    def set_waymark(self, mark: Waymark, *, durable: bool = False) -> None:
        """Remember it, where an older copy of the store leaves it; never less than before. Cheap: it is not synced.
        ``durable``: it is, or ``StorageError`` (``DiskFullError``) says that it is not remembered."""

    @property
    def full(self) -> bool:
        """True while there is no room but the reserve: records should be refused, small entries still fit."""

    small_bytes: int
    """What entries of one ``sync`` may have together to be written with the reserve."""

    def look_for_room(self) -> None:
        """Find out again whether the store is ``full``. Cheap; once per second is enough."""

    def size_bytes(self) -> int:
        """Bytes the store uses; its file may be allocated a little ahead."""

    def close(self) -> None:
        """Release everything. What was not synced is gone, as after a crash."""
