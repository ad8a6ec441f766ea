"""The two kinds of disk the store tests run on, and small things to put on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.lmdb_store import LmdbOptions, LmdbStore
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Entry, LogStore
from rayqueue.partition.tables import PARTITION
from rayqueue.records.checksum import entry_crc

GROUP = GroupId("orders-3")
NODE = ReplicaId("orders-3-a")

SMALL = LmdbOptions(
    cache_bytes=300, map_bytes=1 << 20, map_step_bytes=256 << 10, reserve_bytes=256 << 10, wal_bytes=16 << 10
)
"""Little memory, so that tests read from disk, and a small map, so that it has to grow, and
a small write-ahead file, so that it is full soon."""


class TestDisk(ABC):
    """Something a store can be opened on, and opened on again."""

    __test__ = False

    def __init__(self) -> None:
        self._store: LogStore | None = None

    @abstractmethod
    def create(self) -> LogStore: ...

    @abstractmethod
    def open(self) -> LogStore: ...

    @property
    def store(self) -> LogStore:
        if self._store is None:
            self._store = self.create()
        return self._store

    def reopen(self) -> LogStore:
        """As after a kill: whatever was not synced is gone."""
        self.store.close()
        self._store = self.open()
        return self._store

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class MemoryTestDisk(TestDisk):
    def create(self) -> MemoryStore:
        self._memory = MemoryStore(GROUP, NODE, PARTITION, cache_bytes=300)
        return self._memory

    def open(self) -> MemoryStore:
        self._memory = self._memory.reopen()
        return self._memory


class LmdbTestDisk(TestDisk):
    def __init__(self, path: Path, options: LmdbOptions = SMALL) -> None:
        super().__init__()
        self.path = path
        self.options = options

    def create(self) -> LmdbStore:
        return LmdbStore.create(self.path, GROUP, NODE, self.options, schema=PARTITION)

    def open(self) -> LmdbStore:
        return LmdbStore.open(self.path, GROUP, NODE, self.options, schema=PARTITION)


def entry(index: int, term: int = 1, payload: bytes | None = None) -> Entry:
    if payload is None:
        payload = b"%d/%d " % (index, term) * 10
    return Entry(Index(index), Term(term), payload, entry_crc(index, term, payload))


def fill(store: LogStore, last: int, term: int = 1) -> None:
    """Append up to ``last``."""
    store.append([entry(index, term) for index in range(store.last_index + 1, last + 1)])


def indexes(entries: list[Entry]) -> list[int]:
    return [each.index for each in entries]


__all__ = [
    "GROUP",
    "NODE",
    "SMALL",
    "LmdbTestDisk",
    "MemoryTestDisk",
    "TestDisk",
    "entry",
    "fill",
    "indexes",
]
