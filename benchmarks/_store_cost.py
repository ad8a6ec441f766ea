"""The cost of one small write to the store by itself: by ``sync``, straight into LMDB, and by ``persist``.

One process, one store, nothing of Raft: an entry and the rows that applying
it changes, made durable, one time after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.log.store import Entry
from rayqueue.partition.tables import OFFSETS, PARTITION, PRODUCERS
from rayqueue.records.checksum import entry_crc

_OFFSET_ROW, _PRODUCER_ROW = bytes(45), bytes(400)


@dataclass(frozen=True, slots=True)
class WriteCost:
    times_ms: list[float]
    cpu_us: float


def small_writes(folder: Path, batch: bytes, seconds: float, harden: Callable[[LmdbStore], None]) -> WriteCost:
    """``harden`` is ``LmdbStore.sync`` or ``LmdbStore.persist``."""
    store = LmdbStore.create(folder, GroupId("bench-0"), ReplicaId("a"), schema=PARTITION)
    clock = time.perf_counter
    times_ms: list[float] = []
    try:
        began, began_cpu = clock(), time.process_time()
        while clock() - began < seconds:
            before = clock()
            index = store.last_index + 1
            store.append([Entry(Index(index), Term(1), batch, entry_crc(index, 1, batch))])
            store.put(OFFSETS, index.to_bytes(8, "big"), _OFFSET_ROW)
            store.put(PRODUCERS, b"producer", _PRODUCER_ROW)
            store.set_applied(Index(index))
            harden(store)
            times_ms.append((clock() - before) * 1000)
        return WriteCost(times_ms, (time.process_time() - began_cpu) / len(times_ms) * 1e6)
    finally:
        store.close()
