"""The rows of jobs that are not simply ready, leased for the first time, or done.

64 ids share one row of LMDB, so that a million delayed jobs are 16,000 of them,
which a checkpoint copies in milliseconds. The blocks that are in use are kept
decoded, a bounded number; changes are written at the end of an entry, each block
once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import IntEnum

import msgspec

from rayqueue.log.store import LogStore
from rayqueue.partition.tables import JOBS

BLOCK = 64
CACHED_BLOCKS = 256
MAX_NOTES = 8
"""Failures that are told of one job: the last ones."""


class State(IntEnum):
    READY = 0
    LEASED = 1
    DELAYED = 2
    DEAD = 3
    CANCELLED = 4
    """It was ready and above the frontier, which passes over it."""


class Kind(IntEnum):
    """Why a delivery ended."""

    NACK = 0
    REJECT = 1
    EXPIRED = 2
    WORKER_GONE = 3
    TTL = 4
    REDRIVEN = 5


KIND_TEXTS = {
    Kind.NACK: "nack",
    Kind.REJECT: "reject",
    Kind.EXPIRED: "lease expired",
    Kind.WORKER_GONE: "worker gone",
    Kind.TTL: "time to live",
    Kind.REDRIVEN: "redriven",
}


class Note(msgspec.Struct, frozen=True, array_like=True):
    """A failure. Its reason and traceback are in the log: which entry, which part of it."""

    time_ms: int
    kind: int
    worker: str
    index: int = 0
    """0: there is no text."""
    at: int = 0
    """Of the settlements of the entry; of its records, if it is a move."""
    nth: int = 0
    """Of the texts that a move has for one record."""


class JobRow(msgspec.Struct, array_like=True):
    """What is known of one job."""

    id: int
    place: int
    """The offset at which its bytes are."""
    state: int
    lane: int
    deliveries: int
    token: int = 0
    """Of the last lease."""
    due_ms: int = 0
    """When a delayed one is ready; when a dead one died."""
    expires_ms: int = 0
    """When its time to live ends; 0: never."""
    key: bytes = b""
    """A hash of its key, in queues by key."""
    want_result: bool = False
    held: bool = False
    """Ready, but an earlier one of its key comes first."""
    forgiven: int = 0
    """Deliveries before it was redriven, which count no more."""
    notes: tuple[Note, ...] = ()

    def note(self, note: Note) -> None:
        self.notes = (*self.notes, note)[-MAX_NOTES:]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[JobRow]).decode


def _key(block: int) -> bytes:
    return block.to_bytes(8, "big")


class JobRows:
    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._blocks: OrderedDict[int, dict[int, JobRow]] = OrderedDict()
        self._changed: set[int] = set()

    def get(self, job_id: int) -> JobRow | None:
        return self._block(job_id // BLOCK).get(job_id)

    def put(self, row: JobRow) -> None:
        """A new row, or one that was changed."""
        block = row.id // BLOCK
        self._block(block)[row.id] = row
        self._changed.add(block)

    def remove(self, job_id: int) -> None:
        block = job_id // BLOCK
        del self._block(block)[job_id]
        self._changed.add(block)

    def flush(self) -> None:
        """At the end of each entry."""
        store, blocks = self._store, self._blocks
        for number in sorted(self._changed):
            rows = blocks[number]
            if rows:
                store.put(JOBS, _key(number), _encode(sorted(rows.values(), key=_by_id)))
            else:
                store.delete(JOBS, _key(number))
        self._changed.clear()
        while len(blocks) > CACHED_BLOCKS:
            blocks.popitem(last=False)

    def scan(self, first: int = 0) -> Iterator[JobRow]:
        """All rows from this id on, in order. Only between entries."""
        for _, encoded in self._store.scan(JOBS, _key(first // BLOCK)):
            for row in _decode(encoded):
                if row.id >= first:
                    yield row

    def clear(self) -> None:
        self._blocks.clear()
        self._changed.clear()

    def _block(self, number: int) -> dict[int, JobRow]:
        known = self._blocks.get(number)
        if known is None:
            encoded = self._store.get(JOBS, _key(number))
            known = {} if encoded is None else {row.id: row for row in _decode(encoded)}
            self._blocks[number] = known
        else:
            self._blocks.move_to_end(number)
        return known


def _by_id(row: JobRow) -> int:
    return row.id
