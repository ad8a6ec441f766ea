"""A replica on disk: one LMDB environment in one directory, one process at a time.

Owns the environment, the write transaction behind ``sync()``, the growth of
the map and the life of snapshots. What is written is said in
``rayqueue.log.lmdb_codec``, what is checked on reading in
``rayqueue.log.lmdb_rows``, what is checked before LMDB opens the file in
``rayqueue.log.lmdb_file``.

The promise is that of ``rayqueue.log.store``, and:

- ``sync()`` is one transaction with data and meta page synced. Without the
  latter a power loss may undo the last acknowledged transaction.
- The map is never written through (no ``writemap``): a full disk is an error
  code and not SIGBUS.
- The file is allocated ahead of the map (``rayqueue.log.lmdb_room``), so a full
  disk is noticed before anything is written, and leaves a reserve for a
  ``sync()`` that appends little or nothing. The buffer stays; ``sync()`` may be
  tried again. To let what is small through, drop what was never synced with
  ``truncate_from`` first.
- Any other failure of a write ends writing for good (``StorageError``); what
  a failed fsync left on the disk is unknown. A restart finds the last synced
  state.
- Damage that LMDB itself trips over may end the process (an assertion of
  LMDB's, SIGSEGV or SIGBUS). It never makes the store return wrong bytes.

- ``persist()`` writes a small buffer into the write-ahead file
  (``rayqueue.log.wal``) and leaves the transaction to the next ``sync()``, or
  to the ``persist()`` that finds the file full. ``open`` finds it there.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import lmdb

from rayqueue.errors import (
    DamagedLogError,
    DiskFullError,
    ReplicaClosedError,
    StorageError,
    StoreMissingError,
)
from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.buffer import BufferedStore
from rayqueue.log.lmdb_codec import FILLED_FORMAT, HARD, Identity, TableSum, encode_row, encode_state
from rayqueue.log.lmdb_file import (
    DATA_FILE,
    DirectoryLock,
    allocate_lock,
    check_data_file,
    disk_error,
    is_full,
    make_empty,
    move_into_place,
    read_damaged,
    refuse_unreadable,
    write_damaged,
)
from rayqueue.log.lmdb_identity import Opening, count_spaces, write_empty
from rayqueue.log.lmdb_room import Room
from rayqueue.log.lmdb_rows import STATE_KEY, View, damaged
from rayqueue.log.lmdb_write import RowMemory, write_ops
from rayqueue.log.ops import LogState, Op
from rayqueue.log.place import find_copy, settle
from rayqueue.log.private import FILE_MODE, close_directory
from rayqueue.log.snapshot_gate import SnapshotGate
from rayqueue.log.starts import forget_starts
from rayqueue.log.store import LOG_ONLY, Checkpoint, Entry, Schema, Table
from rayqueue.log.wal import Wal
from rayqueue.log.wal_file import DiskFile
from rayqueue.log.waymark import Waymark, read_waymark, write_waymark

_LMDB_0_9 = 0
_FIRST_MAP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LmdbOptions:
    """The limits of one store.

    As much as the map is large, and ``reserve_bytes`` more, is allocated on the
    disk. It grows by a quarter when it is full, by ``map_step_bytes`` at most."""

    cache_bytes: int = 8 << 20
    map_bytes: int = 8 << 20
    map_step_bytes: int = 64 << 20
    max_bytes: int | None = None
    reserve_bytes: int = 4 << 20
    wal_bytes: int = 256 << 10
    """Of a new store's write-ahead file. Larger: fewer, longer transactions."""
    wal_record_bytes: int = 16 << 10
    """What ``persist`` writes into it at most. More goes to LMDB at once, and so is written only once."""
    max_snapshots: int = 256
    growth_wait_ms: int = 2_000
    close_wait_ms: int = 2_000


class LmdbSnapshot:
    """A ``Snapshot`` on a read transaction, valid inside its ``with`` block."""

    def __init__(self, view: View) -> None:
        self._view: View | None = view
        self._state = view.state().state

    def _open_view(self) -> View:
        if self._view is None:
            raise ReplicaClosedError("the snapshot has ended")
        return self._view

    def bounds(self) -> tuple[Index, Index]:
        return self._state.base_index, self._state.last_index

    def entry(self, index: Index) -> Entry:
        view = self._open_view()
        if not self._state.base_index < index <= self._state.last_index:
            raise KeyError(index)
        return view.entry(index)

    def get(self, table: Table, key: bytes) -> bytes | None:
        return self._open_view().row(table.space, key)

    def scan(
        self, table: Table, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        for row in self._open_view().rows(table.space, start, stop, reverse=reverse):
            yield row
            self._open_view()

    def end(self) -> None:
        self._view = None


class LmdbStore(BufferedStore):
    """A ``LogStore`` in a directory. Made by ``create`` or ``open``."""

    def __init__(
        self,
        path: Path,
        group_id: GroupId,
        replica_id: ReplicaId,
        lock: DirectoryLock,
        options: LmdbOptions,
        schema: Schema,
    ) -> None:
        used_bytes = check_data_file(path / DATA_FILE)
        self._path = path
        self._lock = lock
        self._options = options
        self._failed: str | None = None
        self._gate = SnapshotGate(options.max_snapshots)
        self._room = Room(
            path / DATA_FILE,
            reserve_bytes=options.reserve_bytes,
            step_bytes=options.map_step_bytes,
            max_bytes=options.max_bytes,
        )
        self._wanted_bytes = options.reserve_bytes
        self._map_bytes = self._room.first_map(used_bytes, options.map_bytes)
        allocate_lock(path)
        with ExitStack() as undo:
            try:
                self._env = _open_env(path, self._map_bytes, options, schema)
                undo.callback(self._env.close)
                self._env.reader_check()
                self._opening = Opening(self._env, path, group_id, replica_id, schema)
                self._spaces = self._opening.spaces
                identity = self._opening.identity
                wal = Wal(DiskFile(path), identity.salt, filled=identity.format >= FILLED_FORMAT)
                undo.callback(wal.close)
                super().__init__(
                    group_id,
                    replica_id,
                    schema,
                    wal,
                    cache_bytes=options.cache_bytes,
                    wal_record_bytes=options.wal_record_bytes,
                )
                self._page_bytes = self._env.stat()["psize"]
                self._replay(self._read_all())
                if self._opening.outdated:
                    self._upgrade()
                self.look_for_room()
            except lmdb.Error as error:
                raise damaged(error) from error
            undo.pop_all()
        self._damaged = read_damaged(path)

    def _upgrade(self) -> None:
        """Nothing was replayed, so no transaction has done it yet; or there was no space for it, which is an error
        here: a store of an older format is not worked with."""
        if self.dirty:
            self.sync()
        else:
            self._wal.restart(self._commit((), self._state()))

    @classmethod
    def create(
        cls,
        path: str | Path,
        group_id: GroupId,
        replica_id: ReplicaId,
        options: LmdbOptions | None = None,
        schema: Schema = LOG_ONLY,
        *,
        prepare: Callable[[LmdbStore], None] | None = None,
    ) -> LmdbStore:
        """A new store, empty but for what ``prepare`` writes and syncs. ``StoreIdentityError`` if there is anything at
        ``path``. It has its name once it is complete: whoever dies before leaves what ``is_half_made``."""
        path = Path(path)
        with _typed(path):
            return cls._create(path, group_id, replica_id, options or LmdbOptions(), schema, prepare)

    @classmethod
    def _create(
        cls,
        path: Path,
        group_id: GroupId,
        replica_id: ReplicaId,
        options: LmdbOptions,
        schema: Schema,
        prepare: Callable[[LmdbStore], None] | None,
    ) -> LmdbStore:
        making, lock = make_empty(path)
        try:
            _write_empty(making, group_id, replica_id, options, schema)
            if prepare is not None:
                store = cls(making, group_id, replica_id, lock, options, schema)
                try:
                    prepare(store)
                finally:
                    store._abandon()
            close_directory(making)
            move_into_place(making, path)
            return cls(path, group_id, replica_id, lock, options, schema)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(
        cls,
        path: str | Path,
        group_id: GroupId,
        replica_id: ReplicaId,
        options: LmdbOptions | None = None,
        schema: Schema = LOG_ONLY,
        *,
        locked: Callable[[], None] | None = None,
    ) -> LmdbStore:
        """The store at ``path``: ``StoreMissingError`` without one, ``StoreIdentityError`` if it is another
        replica's, ``StorageError`` with ``reason="locked"`` while somebody else has it open, or with ``reason="disk"``
        if the operating system refuses something, ``StoreFormatError`` if a newer release wrote it. One of an older
        release has the schema's tables from now on. One that was ``copied`` says so until ``settle_here``. ``locked``
        is called once nobody else can have it open, and before anything of it is read."""
        path = Path(path)
        with _typed(path):
            return cls._open(path, group_id, replica_id, options or LmdbOptions(), schema, locked)

    @classmethod
    def _open(
        cls,
        path: Path,
        group_id: GroupId,
        replica_id: ReplicaId,
        options: LmdbOptions,
        schema: Schema,
        locked: Callable[[], None] | None,
    ) -> LmdbStore:
        if not (path / DATA_FILE).exists():
            raise StoreMissingError(f"there is no store at {path}", path=str(path))
        lock = DirectoryLock(path)
        try:
            refuse_unreadable(path)
            close_directory(path)
            if locked is not None:
                locked()
            copied = find_copy(path)
            store = cls(path, group_id, replica_id, lock, options, schema)
            try:
                store._copied = copied
                store._find_behind(read_waymark(path))
                if store.copied is None:
                    settle(path)
            except BaseException:
                store._abandon()
                raise
        except BaseException:
            lock.release()
            raise
        return store

    def _read_all(self) -> int:
        """Check what can be checked at once. Returns the id of the newest transaction."""
        with self._env.begin(buffers=True) as txn:
            view = View(txn, self._spaces)
            identity = self._opening.identity
            if self._wal.size_bytes != identity.wal_bytes:
                raise DamagedLogError(
                    f"the write-ahead file has {self._wal.size_bytes} bytes instead of {identity.wal_bytes}"
                )
            stored = view.state(identity.format)
            _check_log(view, stored.state)
            self._rows = RowMemory({}, {})
            for table, expected in self._opening.sums(stored).items():
                self._rows.sums[table] = self._read_sum(view, table, expected)
            checkpoints = {saved.index: saved.term for saved in view.checkpoints()}
            if stored.state.base_index and stored.state.base_index not in checkpoints:
                raise DamagedLogError("the checkpoint that the log starts from is missing")
        self._load(stored.state, checkpoints)
        return stored.txn_id

    def _read_sum(self, view: View, table: Table, expected: TableSum | None) -> TableSum:
        if table.space not in self._spaces:
            found = TableSum()
            self._rows.crcs[table] = {}
        elif table.long:
            found = view.row_sum(table)
        else:
            self._rows.crcs[table] = view.row_crcs(table)
            found = TableSum.of(self._rows.crcs[table].values())
        if expected is not None and expected != found:
            raise DamagedLogError(f"{table.name} has {found.rows} rows, and not the {expected.rows} that were written")
        return found

    # -- writing -----------------------------------------------------------------

    def _keep(self, ops: Sequence[Op]) -> bool:
        if self._failed is not None:
            raise self._writing_ended()
        try:
            return super()._keep(ops)
        except DiskFullError:
            raise
        except StorageError as error:
            self._failed = str(error)
            raise

    def _writing_ended(self) -> StorageError:
        return StorageError(f"writing ended after: {self._failed}", cause=self._failed)

    def _commit(self, ops: Sequence[Op], state: LogState) -> int:
        if self._failed is not None:
            raise self._writing_ended()
        while True:
            try:
                txn_id = self._write(ops, state)
                break
            except lmdb.MapFullError:
                self._grow()
            except lmdb.Error as error:
                raise self._write_error(error) from error
        self.look_for_room()
        return txn_id

    def _write(self, ops: Sequence[Op], state: LogState) -> int:
        if self._opening.identity.format < FILLED_FORMAT:
            self._wal.fill()
        txn = self._env.begin(write=True, buffers=True)
        spaces = self._spaces
        try:
            if self._opening.outdated:
                spaces = self._opening.upgrade(txn)
            written = write_ops(txn, spaces, ops, self._rows)
            txn_id = txn.id()
            stored = encode_state(txn_id, state, written.sums)
            txn.put(STATE_KEY, encode_row(HARD, STATE_KEY, stored), db=spaces[HARD])
        except BaseException:
            # py-lmdb aborts once no thread is inside any call on this environment. Readers that are always inside
            # one keep it waiting for ever, so they have to stand back.
            with self._gate.paused(self._options.growth_wait_ms):
                txn.abort()
            raise
        txn.commit()
        self._rows.take(written)
        if spaces is not self._spaces:
            self._opening.upgraded(spaces)
            self._spaces = spaces
        return txn_id

    def _write_error(self, error: lmdb.Error) -> StorageError:
        if is_full(self._path, error.code, self._new_bytes()):
            self._refuse()
            return DiskFullError(f"no space for the log of {self._node_id}: {error}", path=str(self._path))
        self._failed = str(error)
        if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError):
            return damaged(error)
        return StorageError(f"the log of {self._node_id} cannot be written: {error}", cause=str(error))

    # -- the map -------------------------------------------------------------------

    def _used_bytes(self) -> int:
        return (self._env.info()["last_pgno"] + 1) * self._page_bytes

    def _grow(self) -> None:
        """LMDB has no room for the buffer."""
        size = self._room.larger_map(self._map_bytes, self._used_bytes())
        if size is None and not self._takes_space():
            size = self._room.allocated_bytes  # the reserve is for this
        if size is None or size <= self._map_bytes:
            self._refuse()
            raise DiskFullError(f"no space for the log of {self._node_id}", path=str(self._path))
        if not self._move_map(size, self._options.growth_wait_ms):
            raise DiskFullError(f"a reader kept the map of {self._node_id} from growing", map_bytes=self._map_bytes)

    def _refuse(self) -> None:
        self._full = True
        self._wanted_bytes = max(self._options.reserve_bytes, 2 * self._new_bytes())

    def look_for_room(self) -> None:
        """Before there is none: what is under way when a leader learns that there is none should still fit."""
        used, limit = self._used_bytes(), self._room.limit_bytes
        if self._map_bytes <= limit and self._map_bytes - used >= self._wanted_bytes:
            self._full = False
            return
        size = self._room.larger_map(self._map_bytes, used)
        if size is not None:
            self._move_map(size, wait_ms=0)  # if a reader is inside, later
            self._full = False
            return
        if self._map_bytes > max(limit, used):
            self._move_map(max(limit, used), wait_ms=0)  # what takes space must not find the reserve open
        self._full = max(limit - used, 0) + self._unused_bytes() < self._wanted_bytes

    def _unused_bytes(self) -> int:
        """Pages inside the file that hold nothing any more."""
        with self._env.begin() as txn:
            stats = [self._env.stat(), *(txn.stat(space) for space in self._spaces.values())]
        pages = sum(each["branch_pages"] + each["leaf_pages"] + each["overflow_pages"] for each in stats)
        return self._used_bytes() - pages * self._page_bytes

    def _move_map(self, size: int, wait_ms: int) -> bool:
        with self._gate.paused(wait_ms) as empty:
            if empty:
                self._env.set_mapsize(size)
                self._map_bytes = self._env.info()["map_size"]
            return empty

    # -- reading -------------------------------------------------------------------

    @contextmanager
    def _view(self) -> Iterator[View]:
        """The writer's own look at what is synced. Short: the map may move only between two of them."""
        try:
            with self._env.begin(buffers=True) as txn:
                yield View(txn, self._spaces)
        except lmdb.Error as error:
            raise damaged(error) from error

    def _disk_term(self, index: Index) -> Term:
        with self._view() as view:
            return view.term(index)

    def _disk_entries(self, first: Index, last: Index, max_bytes: int) -> list[Entry]:
        with self._view() as view:
            return view.entries(first, last, max_bytes)

    def _disk_get(self, table: Table, key: bytes) -> bytes | None:
        with self._view() as view:
            return view.row(table.space, key)

    def _disk_rows(
        self, table: Table, start: bytes, stop: bytes | None, reverse: bool, limit: int
    ) -> list[tuple[bytes, bytes]]:
        with self._view() as view:
            return list(islice(view.rows(table.space, start, stop, reverse=reverse), limit))

    def _disk_checkpoint(self, index: Index) -> Checkpoint:
        with self._view() as view:
            return view.checkpoint(index)

    @contextmanager
    def snapshot(self) -> Iterator[LmdbSnapshot]:
        """Waits while ``max_snapshots`` are running or the map moves. Keep it short: it also keeps space from reuse."""
        self._gate.enter()
        try:
            with self._env.begin(buffers=True) as txn:
                snapshot = LmdbSnapshot(View(txn, self._spaces))
                try:
                    yield snapshot
                finally:
                    snapshot.end()
        except lmdb.Error as error:
            raise damaged(error) from error
        finally:
            self._gate.leave()

    # -- the rest --------------------------------------------------------------------

    def _write_damaged(self, why: str) -> None:
        write_damaged(self._path, why)

    def _settle_here(self) -> None:
        with _typed(self._path):
            settle(self._path)

    def _write_waymark(self, mark: Waymark, durable: bool) -> None:
        write_waymark(self._path, mark, durable=durable)

    def size_bytes(self) -> int:
        self._check_open()
        return self._used_bytes() + self._wal.size_bytes

    def close(self) -> None:
        """Waits ``close_wait_ms`` for running snapshots; after that the last of them closes the file."""
        self._closed = True
        self._gate.close(self._options.close_wait_ms, self._release)

    def _release(self) -> None:
        self._abandon()
        forget_starts(self._path)
        self._lock.release()

    def _abandon(self) -> None:
        self._env.close()
        self._wal.close()


@contextmanager
def _typed(path: Path) -> Iterator[None]:
    """What the operating system refuses is a ``StorageError`` like everything else."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


def _open_env(path: Path, map_bytes: int, options: LmdbOptions, schema: Schema) -> lmdb.Environment:
    try:
        return lmdb.open(
            str(path),
            map_size=map_bytes,
            max_dbs=count_spaces(schema),
            max_readers=options.max_snapshots + 8,
            max_spare_txns=1,
            sync=True,
            metasync=True,
            writemap=False,
            mode=FILE_MODE,
            lib_version=_LMDB_0_9,
        )
    except lmdb.Error as error:
        if error.code > 0 and error.code != errno.EINVAL:  # LMDB's own are negative, and it calls a wrong file invalid
            raise disk_error(path, error) from error
        raise


def _write_empty(path: Path, group_id: GroupId, replica_id: ReplicaId, options: LmdbOptions, schema: Schema) -> None:
    salt = Identity.of(group_id, replica_id, 0, schema).salt
    wal_bytes = DiskFile.create(path, options.wal_bytes, salt)
    allocate_lock(path)
    env = _open_env(path, max(options.map_bytes, _FIRST_MAP_BYTES), options, schema)
    try:
        write_empty(env, group_id, replica_id, wal_bytes, schema)
    except lmdb.Error as error:
        if is_full(path, error.code, 0):
            raise DiskFullError(f"no space for a new store at {path}", path=str(path)) from error
        raise StorageError(f"no store can be made at {path}: {error}", path=str(path)) from error
    finally:
        env.close()


def _check_log(view: View, state: LogState) -> None:
    first, last, count = view.entry_bounds()
    expected = (state.freed + 1, state.last_index, state.last_index - state.freed)
    if (first, last, count) != (expected if expected[2] else (0, 0, 0)):
        raise DamagedLogError(f"the log has entries {first} to {last}, {count} in number; expected {expected}")
    if state.last_index > state.base_index and view.term(state.last_index) != state.last_term:
        raise DamagedLogError(f"entry {state.last_index} is not of term {state.last_term}", index=state.last_index)
