"""Parts of the partition's tests: a log that is applied as it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rayqueue.ids import GroupId, Index, Offset, ReplicaId, Term
from rayqueue.log.memory_store import MemoryStore
from rayqueue.log.store import Checkpoint, Entry, Snapshot
from rayqueue.partition import Appended, Committed, Group, Partition, PartitionSettings
from rayqueue.partition.tables import PARTITION
from rayqueue.records import RecordBatch
from rayqueue.records.checksum import entry_crc
from tests.unit.log.store_disks import TestDisk

TERM = Term(1)


def batch(count: int = 1, *, timestamps: int = 1_000, **fields: Any) -> bytes:
    return RecordBatch.encode([b"value"] * count, timestamps=timestamps, **fields)


def appended(base_offset: int, count: int, *, duplicate: bool = False) -> Appended:
    return Appended(Offset(base_offset), count, duplicate)


def committed(generation: int, offsets: dict[int, int], metadata: bytes = b"", pinned: bool = False) -> Committed:
    return Committed(generation, {lane: Offset(offset) for lane, offset in offsets.items()}, metadata, pinned)


def group(generation: int, offsets: dict[int, int], metadata: bytes = b"") -> Group:
    return Group(generation, {lane: Offset(offset) for lane, offset in offsets.items()}, metadata)


class Log:
    """One replica without Raft: every payload is committed at once."""

    def __init__(self, settings: PartitionSettings | None = None, disk: TestDisk | None = None) -> None:
        self.settings = settings or PartitionSettings()
        self.disk = disk
        self.store: Any = MemoryStore(GroupId("orders-0"), ReplicaId("n1"), PARTITION) if disk is None else disk.store
        self.partition = Partition(self.store, self.settings)
        self.store.sync()  # the settings of a partition are durable before its first entry is
        self.payloads: list[bytes] = []  # the payload of index 1 is the first

    def apply(self, payload: bytes) -> Any:
        self.payloads.append(payload)
        return self._apply(len(self.payloads))

    def _apply(self, index: int) -> Any:
        payload = self.payloads[index - 1]
        self.store.append([Entry(Index(index), TERM, payload, entry_crc(index, TERM, payload))])
        answer = self.partition.apply(Index(index), payload)
        self.store.set_applied(Index(index))
        return answer

    def crash(self) -> None:
        """Lose what was not synced, start again, and catch up with the committed log."""
        self.store = self.store.reopen() if self.disk is None else self.disk.reopen()
        # Settings of a later release: what counts is what the partition was made with.
        self.partition = Partition(self.store, PartitionSettings(dedupe_window=999, max_producers=999))
        self.catch_up()

    def catch_up(self) -> None:
        for index in range(self.store.applied + 1, len(self.payloads) + 1):
            self._apply(index)

    def twin_from_checkpoint(self, checkpoint: Checkpoint) -> Log:
        """A new replica that gets this checkpoint and then the log after it."""
        twin = Log(PartitionSettings(dedupe_window=999, max_producers=999))
        twin.payloads = self.payloads
        twin.store.install(checkpoint)
        twin.partition.restore(checkpoint.state)
        twin.catch_up()
        return twin

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(Index(len(self.payloads)), TERM, b"", self.partition.checkpoint())

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        self.store.sync()
        with self.store.snapshot() as snapshot:
            yield snapshot
