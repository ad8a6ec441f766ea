"""The part of a store that does not depend on where the bytes end up.

``BufferedStore`` owns the writer's view: the single values, the operations
not yet synced, their overlay over the tables, and the recent entries. It
checks every call against the rules of the log, so that a caller's bug stops
the replica before anything is written (``InvariantBrokenError``).

A subclass owns the durable side: it reads what was synced and makes a list of
operations durable, all or nothing. It never sees a call that breaks a rule.
What ``persist`` writes ahead of it, and when that is outdated or replayed, is
decided here, for every subclass.

Not thread-safe: one writer. Only ``snapshot()`` of the subclasses is for other
threads. The single values (``last_index``, ``hard``, ...) stay readable after
``close()``; everything else then raises ``ReplicaClosedError``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rayqueue.errors import (
    DamagedLogError,
    DiskFullError,
    InvalidInputError,
    InvariantBrokenError,
    ReplicaClosedError,
)
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.ops import (
    EMPTY_STATE,
    MAX_KEY_BYTES,
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
from rayqueue.log.store import MEMBERS, SMALL_BYTES, Checkpoint, Entry, HardState, Schema, Table
from rayqueue.log.wal import Wal, encode_ops
from rayqueue.log.waymark import Waymark

MAX_ENTRIES_PER_READ = 10_000
"""``entries()`` returns no more than this, however small they are."""

_FIRST_CHUNK_ROWS = 4
_MAX_CHUNK_ROWS = 512


class BufferedStore(ABC):
    """A ``LogStore`` without a disk. ``cache_bytes`` bounds the synced payloads that stay in memory."""

    def __init__(
        self,
        group_id: GroupId,
        replica_id: ReplicaId,
        schema: Schema,
        wal: Wal,
        *,
        cache_bytes: int,
        wal_record_bytes: int,
    ) -> None:
        """``wal`` holds what ``persist`` made durable, in records of ``wal_record_bytes`` at most."""
        self._group_id = group_id
        self._node_id = replica_id
        self._schema = schema
        self._wal = wal
        self._wal_record_bytes = wal_record_bytes
        self._cache_bytes = cache_bytes
        self._closed = False
        self._damaged: str | None = None
        self._copied: str | None = None
        self._waymark = Waymark()
        self._full = False
        self.small_bytes = SMALL_BYTES
        self._load(EMPTY_STATE, {})

    def _load(self, state: LogState, checkpoints: dict[Index, Term]) -> None:
        """Start from what is durable, with an empty buffer."""
        self._hard = state.hard
        self._applied = state.applied
        self._base_index, self._base_term = state.base_index, state.base_term
        self._last_index, self._last_term = state.last_index, state.last_term
        self._freed = state.freed
        self._checkpoint_terms = dict(sorted(checkpoints.items()))

        self._ops: list[Op] = []
        self._must_sync = False
        self._cleared = False  # an Install is buffered: nothing on disk counts
        self._kept_ops = 0  # so many of them are durable already, by ``persist``
        self._kept_last = state.last_index  # entries up to here survive a crash
        self._disk_last = state.last_index  # entries up to here can be read from disk
        self._overlay: dict[Table, SortedRows[bytes | None]] = {table: SortedRows() for table in self._schema.tables}
        self._new_checkpoints: dict[Index, Checkpoint] = {}
        self._recent: dict[int, Entry] = {}  # consecutive, ends with last_index
        self._recent_first = state.last_index + 1
        self._recent_bytes = 0

    # -- what a subclass provides ------------------------------------------------

    @abstractmethod
    def _commit(self, ops: Sequence[Op], state: LogState) -> int:
        """Make the operations durable, all or nothing; ``state`` is what they lead to. Returns the transaction's id,
        which is larger than those before it."""

    @abstractmethod
    def _disk_term(self, index: Index) -> Term: ...

    @abstractmethod
    def _disk_entries(self, first: Index, last: Index, max_bytes: int) -> list[Entry]:
        """Verified entries ``first..last``: at least one, then while they fit."""

    @abstractmethod
    def _disk_get(self, table: Table, key: bytes) -> bytes | None: ...

    @abstractmethod
    def _disk_rows(
        self, table: Table, start: bytes, stop: bytes | None, reverse: bool, limit: int
    ) -> list[tuple[bytes, bytes]]: ...

    @abstractmethod
    def _disk_checkpoint(self, index: Index) -> Checkpoint: ...

    @abstractmethod
    def _write_damaged(self, why: str) -> None: ...

    @abstractmethod
    def _settle_here(self) -> None: ...

    @abstractmethod
    def _write_waymark(self, mark: Waymark, durable: bool) -> None: ...

    @abstractmethod
    def look_for_room(self) -> None:
        """Find out again whether the store is ``full``."""

    # -- identity and single values ------------------------------------------------

    @property
    def group_id(self) -> GroupId:
        return self._group_id

    @property
    def replica_id(self) -> ReplicaId:
        return self._node_id

    @property
    def tables(self) -> Sequence[Table]:
        return self._schema.tables

    @property
    def base_index(self) -> Index:
        return self._base_index

    @property
    def base_term(self) -> Term:
        return self._base_term

    @property
    def last_index(self) -> Index:
        return self._last_index

    @property
    def last_term(self) -> Term:
        return self._last_term

    @property
    def hard(self) -> HardState:
        return self._hard

    @property
    def applied(self) -> Index:
        return self._applied

    @property
    def must_sync(self) -> bool:
        return self._must_sync

    @property
    def dirty(self) -> bool:
        return bool(self._ops)

    @property
    def unsynced(self) -> Sequence[Op]:
        """The buffer, for tests and for the simulator. Do not change it."""
        return self._ops

    @property
    def damaged(self) -> str | None:
        return self._damaged

    @property
    def copied(self) -> str | None:
        return self._copied

    def settle_here(self) -> None:
        self._settle_here()
        self._copied = None

    @property
    def waymark(self) -> Waymark:
        return self._waymark

    def set_waymark(self, mark: Waymark, *, durable: bool = False) -> None:
        if mark > self._waymark:
            self._write_waymark(mark, durable)
            self._waymark = mark

    def _find_behind(self, mark: Waymark) -> None:
        """After everything was loaded: an older copy may be in a place that looks like its own."""
        self._waymark = mark
        if self._copied is None and (mark.term, mark.entry) > (self.last_term, self.last_index):
            self._copied = f"the store of {self.replica_id} is older than what it acknowledged"

    @property
    def full(self) -> bool:
        return self._full

    def _new_bytes(self) -> int:
        """The bytes that the buffer appends and that are not durable yet."""
        return sum(len(op.entry.payload) for op in self._ops[self._kept_ops :] if type(op) is Append)

    def _takes_space(self) -> bool:
        """Whether the buffer may not be written with the reserve. What was kept was promised, and may."""
        return self._new_bytes() > self.small_bytes

    def mark_damaged(self, why: str) -> None:
        """Durable at once, by itself; the buffer stays as it is. The first reason is the one that is kept."""
        self._check_open()
        if self._damaged is None:
            self._damaged = why
            self._write_damaged(why)

    # -- the log -----------------------------------------------------------

    def term_at(self, index: Index) -> Term | None:
        recent = self._recent.get(index)
        if recent is not None:
            return recent.term
        if index == self._base_index:
            return self._base_term
        if index == self._last_index:
            return self._last_term
        if not self._base_index < index < self._last_index:
            return None
        self._check_open()
        return self._disk_term(index)

    def entry(self, index: Index) -> Entry:
        self._check_open()
        recent = self._recent.get(index)
        if recent is not None:
            return recent
        if not self._base_index < index <= self._last_index:
            raise KeyError(index)
        return self._disk_entries(index, index, 0)[0]

    def entries(self, first: Index, max_bytes: int) -> list[Entry]:
        """``KeyError`` if ``first`` is before the log. At most ``MAX_ENTRIES_PER_READ``."""
        self._check_open()
        if first <= self._base_index:
            raise KeyError(first)
        last = min(self._last_index, first + MAX_ENTRIES_PER_READ - 1)
        if first > last:
            return []
        found: list[Entry] = []
        if first < self._recent_first:
            until = Index(min(last, self._recent_first - 1))
            found = self._disk_entries(first, until, max_bytes)
            if found[-1].index < until:
                return found
            max_bytes -= sum(len(entry.payload) for entry in found)
        for index in range(first + len(found), last + 1):
            entry = self._recent[index]
            max_bytes -= len(entry.payload)
            if max_bytes < 0 and found:
                break
            found.append(entry)
        return found

    def append(self, entries: Sequence[Entry]) -> None:
        self._check_open()
        index, term = self._last_index, self._last_term
        for entry in entries:
            if entry.index != index + 1 or entry.term < term:
                raise InvariantBrokenError(
                    f"entry {entry.index} of term {entry.term} does not follow entry {index} of term {term}",
                    index=entry.index,
                    last_index=index,
                )
            index, term = entry.index, entry.term
        for entry in entries:
            self._ops.append(Append(entry))
            self._recent[entry.index] = entry
            self._recent_bytes += len(entry.payload)
        if entries:
            self._last_index, self._last_term = index, term
            self._must_sync = True

    def truncate_from(self, index: Index) -> None:
        self._check_open()
        if index <= self._applied or index <= self._base_index:
            raise InvariantBrokenError(
                f"entry {index} is applied or trimmed and cannot be dropped",
                index=index,
                applied=self._applied,
                base_index=self._base_index,
            )
        if index > self._last_index:
            return
        before = Index(index - 1)
        term = self.term_at(before)  # may find damage, so it comes before the first change
        if term is None:
            raise InvariantBrokenError(f"entry {before} should be in the log", index=before)
        for dropped in range(max(index, self._recent_first), self._last_index + 1):
            self._recent_bytes -= len(self._recent.pop(dropped).payload)
        self._recent_first = min(self._recent_first, index)
        if self._last_index > self._kept_last:
            # Entries that were never synced leave no trace, so a full disk can get rid of them.
            self._ops[self._kept_ops :] = [
                op for op in self._ops[self._kept_ops :] if not (type(op) is Append and op.entry.index >= index)
            ]
        if index <= self._kept_last:
            self._ops.append(Truncate(index))
            self._kept_last = before
            self._disk_last = min(self._disk_last, before)
        self._last_index, self._last_term = before, term
        self._must_sync = True

    # -- hard state and tables ----------------------------------------------

    def set_hard(self, hard: HardState) -> None:
        self._check_open()
        old = self._hard
        if hard == old:
            return
        if hard.term < old.term:
            raise InvariantBrokenError(f"term would go back from {old.term} to {hard.term}", old=old.term)
        if hard.term == old.term and old.voted_for is not None and hard.voted_for != old.voted_for:
            raise InvariantBrokenError(f"second vote in term {hard.term}", term=hard.term, first_vote=old.voted_for)
        if (hard.term, hard.voted_for) != (old.term, old.voted_for):
            self._must_sync = True
        self._hard = hard
        self._ops.append(SetHard(hard))

    def set_applied(self, index: Index) -> None:
        self._check_open()
        if index == self._applied:
            return
        if not self._applied < index <= self._last_index:
            raise InvariantBrokenError(
                f"applied would move from {self._applied} to {index}, the log ends at {self._last_index}",
                applied=self._applied,
                index=index,
                last_index=self._last_index,
            )
        self._applied = index
        self._ops.append(SetApplied(index))

    def get(self, table: Table, key: bytes) -> bytes | None:
        self._check_open()
        overlay = self._overlay[table]
        if key in overlay:
            return overlay[key]
        if self._cleared or not 0 < len(key) <= MAX_KEY_BYTES:
            return None
        return self._disk_get(table, key)

    def scan(
        self, table: Table, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Rows in order, read a chunk at a time: a change made meanwhile is seen if its chunk was not read yet."""
        overlay = self._overlay[table]
        limit = _FIRST_CHUNK_ROWS
        while True:
            self._check_open()
            disk = [] if self._cleared else self._disk_rows(table, start, stop, reverse, limit)
            changed = overlay.range(start, stop, reverse, limit)
            edges = [rows[-1][0] for rows in (disk, changed) if len(rows) == limit]
            more = bool(edges)
            edge = (max(edges) if reverse else min(edges)) if more else b""
            if changed:
                merged: dict[bytes, bytes | None] = dict(disk)
                merged.update(changed)
                disk = [(key, row) for key in sorted(merged, reverse=reverse) if (row := merged[key]) is not None]
            if more:  # both are complete up to there
                disk = [row for row in disk if (row[0] >= edge if reverse else row[0] <= edge)]
            yield from disk
            if not more:
                return
            if reverse:
                stop = edge
            else:
                start = edge + b"\0"
            limit = min(limit * 4, _MAX_CHUNK_ROWS)

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        self._check_open()
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise InvalidInputError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}", table=table.name)
        self._overlay[table].put(key, value)
        self._ops.append(Put(table, key, value))

    def delete(self, table: Table, key: bytes) -> None:
        self._check_open()
        if not 0 < len(key) <= MAX_KEY_BYTES:
            return
        self._overlay[table].put(key, None)
        self._ops.append(Delete(table, key))

    # -- checkpoints and trimming ------------------------------------------

    @property
    def checkpoint(self) -> Checkpoint | None:
        if self._base_index == 0:
            return None
        self._check_open()
        new = self._new_checkpoints.get(self._base_index)
        return new if new is not None else self._disk_checkpoint(self._base_index)

    def checkpoints(self) -> list[Index]:
        return list(self._checkpoint_terms)

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._check_open()
        index = checkpoint.index
        if not self._base_index < index <= self._applied or self.term_at(index) != checkpoint.term:
            raise InvariantBrokenError(
                f"no checkpoint can be at entry {index} of term {checkpoint.term}: "
                f"the log starts after {self._base_index}, applied is {self._applied}",
                index=index,
            )
        self._new_checkpoints[index] = checkpoint
        self._checkpoint_terms[index] = checkpoint.term
        self._checkpoint_terms = dict(sorted(self._checkpoint_terms.items()))
        self._ops.append(SaveCheckpoint(checkpoint))

    def trim_to(self, index: Index, max_entries: int) -> bool:
        """With ``index == base_index`` it only goes on freeing."""
        self._check_open()
        if index != self._base_index:
            if index < self._base_index or index not in self._checkpoint_terms:
                raise InvariantBrokenError(f"there is no checkpoint at {index} to trim to", index=index)
            self._base_index, self._base_term = index, self._checkpoint_terms[index]
            self._ops.append(MoveBase(index, self._base_term))
            kept = list(self._checkpoint_terms)
            for old in kept[: bisect_left(kept, index)]:
                del self._checkpoint_terms[old]
                self._new_checkpoints.pop(old, None)
            for dropped in range(self._recent_first, index + 1):
                self._recent_bytes -= len(self._recent.pop(dropped).payload)
            self._recent_first = max(self._recent_first, index + 1)
        until = Index(min(self._base_index, self._freed + max_entries))
        if until > self._freed:
            self._ops.append(Free(self._freed, until))
            self._freed = until
        return self._freed == self._base_index

    def install(self, checkpoint: Checkpoint) -> None:
        self._check_open()
        if checkpoint.index <= 0:
            raise InvariantBrokenError("a checkpoint to install has an index", index=checkpoint.index)
        hard = HardState(self._hard.term, self._hard.voted_for, commit=checkpoint.index)
        ops = [op for op in self._ops if type(op) is SetHard]  # everything else is about to be replaced
        self._load(
            LogState(
                hard=hard,
                applied=checkpoint.index,
                base_index=checkpoint.index,
                base_term=checkpoint.term,
                last_index=checkpoint.index,
                last_term=checkpoint.term,
                freed=checkpoint.index,
            ),
            {checkpoint.index: checkpoint.term},
        )
        self._ops = [*ops, Install(checkpoint)]
        self._must_sync = True
        self._cleared = True
        self._new_checkpoints[checkpoint.index] = checkpoint
        self._overlay[MEMBERS].put(index_key(checkpoint.index), checkpoint.members)

    # -- durability -----------------------------------------------------------

    def persist(self) -> None:
        self._check_open()
        if len(self._ops) == self._kept_ops:
            self._must_sync = False
            return
        if self._keep(self._ops[self._kept_ops :]):
            self._kept_ops = len(self._ops)
            self._kept_last = self._last_index
            self._must_sync = False
        else:
            self.sync()

    def _keep(self, ops: Sequence[Op]) -> bool:
        """Make some operations durable, all or nothing, without committing them. False if that is not possible."""
        data = encode_ops(ops, self._wal_record_bytes)
        return data is not None and self._wal.write(data)

    def _replay(self, txn_id: int) -> None:
        """Take what was persisted after the newest transaction into the buffer, and commit it if there is space."""
        try:
            for ops in self._wal.replay(txn_id, self._schema.by_number):
                self._redo(ops)
        except InvariantBrokenError as error:
            raise DamagedLogError(f"the write-ahead file does not follow the log: {error}") from error
        if self._ops:
            with suppress(DiskFullError):
                self.sync()

    def _redo(self, ops: Sequence[Op]) -> None:
        """Buffer operations that ``_keep`` made durable before a crash."""
        for op in ops:
            match op:
                case Append(entry):
                    self.append([entry])
                case SetHard(hard):
                    self.set_hard(hard)
                case SetApplied(index):
                    self.set_applied(index)
                case Put(table, key, value):
                    self.put(table, key, value)
                case Delete(table, key):
                    self.delete(table, key)
                case _:
                    raise InvariantBrokenError(f"{type(op).__name__} is never kept")
        self._kept_ops = len(self._ops)
        self._kept_last = self._last_index
        self._must_sync = False

    def sync(self) -> None:
        self._check_open()
        if not self._ops:
            self._must_sync = False
            return
        # Only now are the records outdated. Before the commit they are all that a crash would leave.
        self._wal.restart(self._commit(self._ops, self._state()))
        self._ops = []
        self._kept_ops = 0
        self._must_sync = False
        self._cleared = False
        self._kept_last = self._disk_last = self._last_index
        self._new_checkpoints.clear()
        for overlay in self._overlay.values():
            if len(overlay):
                overlay.clear()
        first = self._recent_first
        while self._recent_bytes > self._cache_bytes and first <= self._disk_last:
            self._recent_bytes -= len(self._recent.pop(first).payload)
            first += 1
        self._recent_first = first

    def _state(self) -> LogState:
        return LogState(
            hard=self._hard,
            applied=self._applied,
            base_index=self._base_index,
            base_term=self._base_term,
            last_index=self._last_index,
            last_term=self._last_term,
            freed=self._freed,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ReplicaClosedError(f"the store of {self._node_id} is closed", replica_id=self._node_id)
