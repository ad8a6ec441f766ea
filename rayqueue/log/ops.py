"""A store's buffer: an ordered list of small operations, and the state they lead to.

Owns the vocabulary that both stores share. ``rayqueue.log.buffer`` produces
the operations; a store's ``sync()`` makes a list of them durable, all or
nothing. Operations are values: they can be inspected, repeated after a full
disk, or partly lost by a test that models a disk that lies.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct

from rayqueue.ids import Index, Term
from rayqueue.log.store import Checkpoint, Entry, HardState, Table

MAX_KEY_BYTES = 511
"""LMDB's limit for a key."""


class Append(Struct, frozen=True, gc=False):
    entry: Entry


class Truncate(Struct, frozen=True, gc=False):
    """Drop this entry and all after it. Only ever about entries that were synced before."""

    first: Index


class SetHard(Struct, frozen=True, gc=False):
    hard: HardState


class SetApplied(Struct, frozen=True, gc=False):
    applied: Index


class Put(Struct, frozen=True, gc=False):
    table: Table
    key: bytes
    value: bytes


class Delete(Struct, frozen=True, gc=False):
    table: Table
    key: bytes


class SaveCheckpoint(Struct, frozen=True, gc=False):
    checkpoint: Checkpoint


class MoveBase(Struct, frozen=True, gc=False):
    """The log starts after this entry from now on; checkpoints before it are gone. Frees no entry."""

    base_index: Index
    base_term: Term


class Free(Struct, frozen=True, gc=False):
    """Delete the entries after ``after`` up to ``until``, which are all before the base."""

    after: Index
    until: Index


class Install(Struct, frozen=True, gc=False):
    """Empty log and tables, start from the checkpoint."""

    checkpoint: Checkpoint


Op: TypeAlias = Append | Truncate | SetHard | SetApplied | Put | Delete | SaveCheckpoint | MoveBase | Free | Install


class LogState(Struct, frozen=True, gc=False):
    """The single values of a store. Entries up to ``freed`` are physically gone; ``freed <= base_index``."""

    hard: HardState
    applied: Index
    base_index: Index
    base_term: Term
    last_index: Index
    last_term: Term
    freed: Index


EMPTY_STATE = LogState(
    hard=HardState(term=Term(0), voted_for=None, commit=Index(0)),
    applied=Index(0),
    base_index=Index(0),
    base_term=Term(0),
    last_index=Index(0),
    last_term=Term(0),
    freed=Index(0),
)


def index_key(index: int) -> bytes:
    """An index as a key that sorts by number."""
    return index.to_bytes(8, "big")


V = TypeVar("V")


class SortedRows(Generic[V]):
    """A dict whose keys can be walked in order. Cheap where keys mostly arrive in order."""

    __slots__ = ("_keys", "_rows")

    def __init__(self) -> None:
        self._rows: dict[bytes, V] = {}
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def __getitem__(self, key: bytes) -> V:
        return self._rows[key]

    def get(self, key: bytes) -> V | None:
        return self._rows.get(key)

    def put(self, key: bytes, value: V) -> None:
        if key not in self._rows:
            keys = self._keys
            if not keys or key > keys[-1]:
                keys.append(key)
            else:
                insort(keys, key)
        self._rows[key] = value

    def remove(self, key: bytes) -> V | None:
        if key not in self._rows:
            return None
        del self._keys[bisect_left(self._keys, key)]
        return self._rows.pop(key)

    def clear(self) -> None:
        self._rows.clear()
        self._keys.clear()

    def copy(self) -> SortedRows[V]:
        twin: SortedRows[V] = SortedRows()
        twin._rows = self._rows.copy()
        twin._keys = self._keys.copy()
        return twin

    def range(
        self, start: bytes, stop: bytes | None, reverse: bool = False, limit: int | None = None
    ) -> list[tuple[bytes, V]]:
        """Up to ``limit`` rows with ``start <= key < stop``."""
        low = bisect_left(self._keys, start) if start else 0
        high = len(self._keys) if stop is None else bisect_left(self._keys, stop)
        if limit is not None and high - low > limit:
            if reverse:
                low = high - limit
            else:
                high = low + limit
        keys = self._keys[low:high]
        if reverse:
            keys.reverse()
        return [(key, self._rows[key]) for key in keys]
