"""The orders in which jobs with rows are found: by time, by lane, by key, by place.

Owns the JOB_INDEX table. The first byte of a key says which order it belongs to:

    T  time, kind, what       due jobs, times to live, results and dedupe ids to be forgotten
    P  place                  -> id: where a job's bytes are, for the trimming of the log
    R  lane, id               ready jobs, first come first served
    F  lane, key, id          ready jobs of a queue that is fair by key
    U  lane, turn             -> key: whose turn it is
    V  lane, key              -> turn: keys that have one
    K  key, id                jobs of a queue that is ordered by key and not dead
    B  key                    -> id: the one of them that is leased
    D  id                     dead jobs
    E  time, id               results, by when they are to be forgotten
    L, G                      runs of jobs without rows (``frontier``)

All but U, V, L and G can be made again from the rows. Searches begin where the last
one found something: rows that were deleted since the last sync would have to be
passed over otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import islice
from struct import Struct

from rayqueue.log.store import LogStore
from rayqueue.partition.jobs.rows import JobRow
from rayqueue.partition.tables import JOB_INDEX

_ID = Struct(">Q")
_TIME = Struct(">cQB")
_PLACE = Struct(">cQ")
_READY = Struct(">cBQ")
_FAIR = Struct(">cB16s")
_AHEAD = 64
_NEVER = 2**63


class Timer(IntEnum):
    DUE = 0
    TTL = 1
    RESULT = 2
    DEDUPE = 3


class Times:
    """What happens when."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._from = b"T"
        self._next_ms: int | None = None  # when something happens next, or _NEVER, if that is known

    def add(self, time_ms: int, timer: Timer, what: bytes) -> None:
        key = _TIME.pack(b"T", time_ms, timer) + what
        self._from = min(self._from, key)
        if self._next_ms is not None and time_ms < self._next_ms:
            self._next_ms = time_ms
        self._store.put(JOB_INDEX, key, b"")

    def remove(self, time_ms: int, timer: Timer, what: bytes) -> None:
        if time_ms == self._next_ms:
            self._next_ms = None
        self._store.delete(JOB_INDEX, _TIME.pack(b"T", time_ms, timer) + what)

    def next_ms(self) -> int | None:
        """When something happens next."""
        if self._next_ms is None:
            first = next(self._store.scan(JOB_INDEX, self._from, b"U"), None)
            self._from = b"U" if first is None else first[0]
            self._next_ms = _NEVER if first is None else int.from_bytes(first[0][1:9], "big")
        return None if self._next_ms == _NEVER else self._next_ms

    def due(self, now_ms: int, limit: int) -> list[tuple[int, Timer, bytes]]:
        """The first that are due. Whoever takes them removes them."""
        stop = _PLACE.pack(b"T", now_ms + 1)
        next_ms = self.next_ms()
        if next_ms is None or next_ms > now_ms:
            return []
        keys = [key for key, _ in islice(self._store.scan(JOB_INDEX, self._from, stop), limit)]
        if keys:
            self._from = keys[-1]
        return [(int.from_bytes(key[1:9], "big"), Timer(key[9]), key[10:]) for key in keys]


class Places:
    """Where the bytes of jobs are that have rows."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._from = b"P"

    def add(self, row: JobRow) -> None:
        key = _PLACE.pack(b"P", row.place)
        self._from = min(self._from, key)
        self._store.put(JOB_INDEX, key, _ID.pack(row.id))

    def remove(self, row: JobRow) -> None:
        self._store.delete(JOB_INDEX, _PLACE.pack(b"P", row.place))

    def first(self) -> int | None:
        for key, _ in self._store.scan(JOB_INDEX, self._from, b"Q"):
            self._from = key
            return int.from_bytes(key[1:], "big")
        self._from = b"Q"
        return None

    def lowest(self, count: int, below: int) -> list[tuple[int, int]]:
        """Places and ids."""
        rows = self._store.scan(JOB_INDEX, self._from, _PLACE.pack(b"P", below)) if self._from < b"Q" else ()
        return [(int.from_bytes(key[1:], "big"), _ID.unpack(row)[0]) for key, row in islice(rows, count)]

    def forget(self) -> None:
        self._from = b"P"


class Dead:
    """Dead jobs, by id."""

    def __init__(self, store: LogStore) -> None:
        self._store = store

    def add(self, row: JobRow) -> None:
        self._store.put(JOB_INDEX, _PLACE.pack(b"D", row.id), b"")

    def remove(self, row: JobRow) -> None:
        self._store.delete(JOB_INDEX, _PLACE.pack(b"D", row.id))

    def ids(self, first: int, count: int) -> list[int]:
        rows = islice(self._store.scan(JOB_INDEX, _PLACE.pack(b"D", first), b"E"), count)
        return [int.from_bytes(key[1:], "big") for key, _ in rows]


class Ends:
    """Results in the order in which they are to be forgotten."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._from = b"E"

    def add(self, until_ms: int, what: bytes) -> None:
        key = _PLACE.pack(b"E", until_ms) + what
        self._from = min(self._from, key)
        self._store.put(JOB_INDEX, key, b"")

    def remove(self, until_ms: int, what: bytes) -> None:
        self._store.delete(JOB_INDEX, _PLACE.pack(b"E", until_ms) + what)

    def first(self) -> tuple[int, bytes] | None:
        """When, and what."""
        for key, _ in self._store.scan(JOB_INDEX, self._from, b"F"):
            self._from = key
            return int.from_bytes(key[1:9], "big"), key[9:]
        self._from = b"F"
        return None


class FifoReady:
    """Ready jobs that have rows, in the order of their ids, lane by lane."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._ahead: dict[int, list[int]] = {}  # the next ones of a lane, the last one first
        self._from: dict[int, int] = {}

    def add(self, row: JobRow) -> None:
        lane = row.lane
        self._store.put(JOB_INDEX, _READY.pack(b"R", lane, row.id), b"")
        ahead = self._ahead.get(lane)
        if not ahead or row.id < ahead[0]:
            self._ahead.pop(lane, None)
        self._from[lane] = min(self._from.get(lane, 0), row.id)

    def remove(self, row: JobRow) -> None:
        lane = row.lane
        self._store.delete(JOB_INDEX, _READY.pack(b"R", lane, row.id))
        ahead = self._ahead.get(lane)
        if ahead and ahead[-1] == row.id:
            ahead.pop()
        elif ahead and row.id <= ahead[0]:
            del self._ahead[lane]
        if not ahead:
            self._ahead.pop(lane, None)

    def first(self, lane: int) -> int | None:
        """The next one's id."""
        ahead = self._ahead.get(lane)
        if ahead is None:
            start, stop = _READY.pack(b"R", lane, self._from.get(lane, 0)), _READY.pack(b"R", lane, 2**64 - 1)
            ids = [
                int.from_bytes(key[2:], "big") for key, _ in islice(self._store.scan(JOB_INDEX, start, stop), _AHEAD)
            ]
            self._from[lane] = ids[0] if ids else 2**64 - 1
            ahead = self._ahead[lane] = ids[::-1]
        return ahead[-1] if ahead else None

    def in_order(self, lane: int, count: int) -> Iterator[int]:
        """For whoever only looks."""
        rows = self._store.scan(JOB_INDEX, _READY.pack(b"R", lane, 0), _READY.pack(b"R", lane, 2**64 - 1))
        return (int.from_bytes(key[2:], "big") for key, _ in islice(rows, count))

    def forget(self) -> None:
        self._ahead.clear()
        self._from.clear()


class FairReady:
    """Ready jobs of a queue in which keys take turns. A key has one turn, for as long as it has ready jobs.

    ``next_turn`` is part of the queue's state: restored replicas must give the same turns."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._from: dict[int, bytes] = {}
        self.next_turn = 1

    def add(self, row: JobRow) -> None:
        store, tenant = self._store, _FAIR.pack(b"V", row.lane, row.key)
        store.put(JOB_INDEX, _FAIR.pack(b"F", row.lane, row.key) + _ID.pack(row.id), b"")
        if store.get(JOB_INDEX, tenant) is None:
            self._give_turn(row.lane, row.key)

    def remove(self, row: JobRow) -> None:
        """If it was the next one of its key, that was the key's turn."""
        store, lane, prefix = self._store, row.lane, _FAIR.pack(b"F", row.lane, row.key)
        store.delete(JOB_INDEX, prefix + _ID.pack(row.id))
        more = next(store.scan(JOB_INDEX, prefix, _after(prefix)), None) is not None
        tenant = _FAIR.pack(b"V", lane, row.key)
        turn = store.get(JOB_INDEX, tenant)
        if turn is not None:
            store.delete(JOB_INDEX, _turn_key(lane, turn))
            store.delete(JOB_INDEX, tenant)
        if more:
            self._give_turn(lane, row.key)

    def first(self, lane: int) -> int | None:
        for job_id in self.in_order(lane, 1):
            return job_id
        return None

    def in_order(self, lane: int, count: int) -> Iterator[int]:
        """One job of each key whose turn it is."""
        stop = bytes((ord("U"), lane)) + b"\xff" * 8
        turns = self._store.scan(JOB_INDEX, self._from.get(lane, bytes((ord("U"), lane))), stop)
        for number, (turn, key) in enumerate(islice(turns, count)):
            if not number:
                self._from[lane] = turn
            prefix = _FAIR.pack(b"F", lane, key)
            for ready, _ in self._store.scan(JOB_INDEX, prefix, _after(prefix)):
                yield int.from_bytes(ready[-8:], "big")
                break

    def _give_turn(self, lane: int, key: bytes) -> None:
        turn = _ID.pack(self.next_turn)
        self.next_turn += 1
        self._store.put(JOB_INDEX, _turn_key(lane, turn), key)
        self._store.put(JOB_INDEX, _FAIR.pack(b"V", lane, key), turn)

    def turns(self) -> list[tuple[bytes, bytes]]:
        """For a checkpoint: the rows that cannot be made again."""
        return list(self._store.scan(JOB_INDEX, b"U", b"W"))

    def forget(self) -> None:
        self._from.clear()


class Keys:
    """Jobs of each key, in order, of a queue that is ordered by key; and which of them is leased."""

    def __init__(self, store: LogStore) -> None:
        self._store = store

    def add(self, row: JobRow) -> None:
        self._store.put(JOB_INDEX, b"K" + row.key + _ID.pack(row.id), b"")

    def remove(self, row: JobRow) -> None:
        self._store.delete(JOB_INDEX, b"K" + row.key + _ID.pack(row.id))

    def first(self, key: bytes, count: int = 1) -> list[int]:
        """The first ids of a key."""
        prefix = b"K" + key
        rows = islice(self._store.scan(JOB_INDEX, prefix, _after(prefix)), count)
        return [int.from_bytes(each[-8:], "big") for each, _ in rows]

    def lease(self, row: JobRow) -> None:
        self._store.put(JOB_INDEX, b"B" + row.key, _ID.pack(row.id))

    def end_lease(self, row: JobRow) -> None:
        self._store.delete(JOB_INDEX, b"B" + row.key)

    def is_leased(self, key: bytes) -> bool:
        return self._store.get(JOB_INDEX, b"B" + key) is not None


def _turn_key(lane: int, turn: bytes) -> bytes:
    return bytes((ord("U"), lane)) + turn


def _after(prefix: bytes) -> bytes:
    """What all keys with this prefix are below: ids never have all bits."""
    return prefix + b"\xff" * 8
