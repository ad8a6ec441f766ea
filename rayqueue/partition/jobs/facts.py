"""Facts that a queue remembers beside its jobs: numbers, results, and ids that are not to be put twice.

Owns the RESULTS and DEDUPE tables, and one row of META.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from rayqueue.log.store import LogStore
from rayqueue.partition.jobs.index import Ends, Timer, Times
from rayqueue.partition.tables import DEDUPE, META, RESULTS

QUEUE_KEY = b"queue"
MAX_RESULTS_BYTES = 16 * 1024 * 1024
"""Of all results together, where ``max_results_bytes`` is not set."""
MAX_REASON = 2048
"""Characters of a dead job's reason and traceback that are told to who waits for its result."""

_encode = msgspec.msgpack.Encoder().encode


def digest(of: bytes | str) -> bytes:
    """16 bytes that stand for a key or a dedupe id."""
    return blake2b(of.encode() if isinstance(of, str) else of, digest_size=16).digest()


class Counts(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Single numbers of a queue."""

    next_token: int = 1
    next_turn: int = 1
    ready: int = 0
    leased: int = 0
    delayed: int = 0
    dead: int = 0
    held: int = 0
    """Ready ones that an earlier one of their key holds back."""
    cancelled: int = 0
    """Ahead of the frontier, to be passed over."""
    expired: int = 0
    dropped: int = 0
    deduplicated: int = 0
    result_bytes: int = 0
    frontiers: dict[int, tuple[int, int]] = {}
    """Lane to where its frontier is, and how many jobs are ahead of it that nobody has ever had."""


_decode_counts = msgspec.msgpack.Decoder(Counts).decode


def load_counts(store: LogStore) -> Counts:
    row = store.get(META, QUEUE_KEY)
    return Counts() if row is None else _decode_counts(row)


def save_counts(store: LogStore, counts: Counts) -> None:
    store.put(META, QUEUE_KEY, _encode(counts))


class Result(msgspec.Struct, frozen=True, array_like=True):
    until_ms: int
    state: str
    """``done`` or ``dead``."""
    value: bytes | None = None
    reason: str = ""
    traceback: str = ""


_decode_result = msgspec.msgpack.Decoder(Result).decode


def _id(job_id: int) -> bytes:
    return job_id.to_bytes(8, "big")


class Results:
    """What wanted results have come to.

    If they become too many, those go first that would be kept for the shortest time; where the queue's settings say
    nothing of it, those of the oldest jobs, beyond ``MAX_RESULTS_BYTES``: so did releases that had no such setting, and
    a partition's replicas may be of both.
    """

    def __init__(self, store: LogStore, times: Times, counts: Counts) -> None:
        self._store = store
        self._times = times
        self._counts = counts
        self._ends = Ends(store)
        self.evicted = 0
        """Since this replica's process began. No part of the state."""

    def load(self) -> None:
        """A release that had no order of ends has written these."""
        if self._ends.first() is None:
            for key, row in self._store.scan(RESULTS):
                self._ends.add(_decode_result(row).until_ms, key)

    def add(self, job_id: int, result: Result, most_bytes: int | None) -> None:
        self.remove(_id(job_id))
        row = _encode(result)
        counts = self._counts
        while counts.result_bytes + len(row) > (MAX_RESULTS_BYTES if most_bytes is None else most_bytes):
            first = self._ends.first() if most_bytes is not None else self._oldest_job()
            if first is None:
                break
            self._ends.remove(*first)
            self.evicted += self.remove(first[1], first[0])
        self._store.put(RESULTS, _id(job_id), row)
        self._times.add(result.until_ms, Timer.RESULT, _id(job_id))
        self._ends.add(result.until_ms, _id(job_id))
        counts.result_bytes += len(row)

    def _oldest_job(self) -> tuple[int, bytes] | None:
        for key, row in self._store.scan(RESULTS):
            return _decode_result(row).until_ms, key
        return None

    def get(self, job_id: int) -> Result | None:
        row = self._store.get(RESULTS, _id(job_id))
        return None if row is None else _decode_result(row)

    def remove(self, key: bytes, until_ms: int | None = None) -> bool:
        """If there is one; with ``until_ms``, if it is kept until then and not longer. Whether there was."""
        row = self._store.get(RESULTS, key)
        if row is None:
            return False
        kept_ms = _decode_result(row).until_ms
        found = until_ms is None or kept_ms == until_ms
        if found:
            self._counts.result_bytes -= len(row)
            self._store.delete(RESULTS, key)
            self._times.remove(kept_ms, Timer.RESULT, key)
            self._ends.remove(kept_ms, key)
        return found

    def index(self) -> None:
        """Make the times again."""
        for key, row in self._store.scan(RESULTS):
            until_ms = _decode_result(row).until_ms
            self._times.add(until_ms, Timer.RESULT, key)
            self._ends.add(until_ms, key)


class Dedupes:
    """Jobs by their dedupe ids, within the window."""

    def __init__(self, store: LogStore, times: Times) -> None:
        self._store = store
        self._times = times

    def first(self, dedupe_id: str, now_ms: int) -> int | None:
        """The job that has it."""
        row = self._store.get(DEDUPE, digest(dedupe_id))
        if row is None or int.from_bytes(row[8:], "big") <= now_ms:
            return None
        return int.from_bytes(row[:8], "big")

    def add(self, dedupe_id: str, job_id: int, until_ms: int) -> None:
        key = digest(dedupe_id)
        self.remove(key)
        self._store.put(DEDUPE, key, _id(job_id) + _id(until_ms))
        self._times.add(until_ms, Timer.DEDUPE, key)

    def remove(self, key: bytes) -> None:
        row = self._store.get(DEDUPE, key)
        if row is not None:
            self._store.delete(DEDUPE, key)
            self._times.remove(int.from_bytes(row[8:], "big"), Timer.DEDUPE, key)

    def index(self) -> None:
        """Make the times again."""
        for key, row in self._store.scan(DEDUPE):
            self._times.add(int.from_bytes(row[8:], "big"), Timer.DEDUPE, key)
