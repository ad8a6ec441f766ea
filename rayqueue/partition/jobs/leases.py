"""Leases: who has which jobs until when, and what of those that are settled is remembered.

Owns the LEASES table. All leases that hold jobs are in memory (``max_leased``
bounds them), found by token, by worker and by deadline. Those that hold none any
more are remembered for a while, so that a repeated settlement, or a repeated
request whose answer was lost, is answered as the first time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import msgspec

from rayqueue.log.store import LogStore
from rayqueue.partition.jobs.runs import Run
from rayqueue.partition.tables import LEASES

REMEMBERED = 4096
"""Leases that are remembered, counted from the newest."""
_SLACK = 1000
"""Deadlines of leases that have ended, beside one for each that has not."""
REMEMBERED_RUNS = 64
"""Runs of acknowledged jobs, and of those that were handed back, that are remembered of each: a bound, should a worker
acknowledge every other job."""


class Lease(msgspec.Struct, array_like=True):
    token: int
    worker: str
    attempt: int
    began_ms: int
    until_ms: int
    runs: list[Run]
    """Jobs that are delivered for the first time, and have no row."""
    ids: dict[int, int]
    """Jobs that have one, and where they are."""
    done: list[tuple[int, int]]
    """What was acknowledged: first id, count."""
    back: list[tuple[int, int]] = []
    """What was handed back."""

    @property
    def held(self) -> int:
        return len(self.ids) + sum(run[1] for run in self.runs)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Lease).decode


def _key(token: int) -> bytes:
    return token.to_bytes(8, "big")


class Leases:
    def __init__(self, store: LogStore) -> None:
        self._store = store
        self.clear()

    def clear(self) -> None:
        self._known: dict[int, Lease] = {}  # by token, in order
        self._by_worker: dict[str, dict[int, None]] = {}  # only those that hold jobs
        self._by_attempt: dict[tuple[str, int], int] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._held = 0  # leases
        self._forgotten = 0  # all tokens below it are

    def get(self, token: int) -> Lease | None:
        return self._known.get(token)

    def holding(self) -> Iterator[Lease]:
        """Those that hold jobs."""
        for tokens in self._by_worker.values():
            for token in tokens:
                yield self._known[token]

    def of_worker(self, worker: str) -> list[Lease]:
        return [self._known[token] for token in sorted(self._by_worker.get(worker, ()))]

    def of_attempt(self, worker: str, attempt: int) -> Lease | None:
        """The lease that this request has got already, unless nothing is left of it."""
        token = self._by_attempt.get((worker, attempt))
        lease = None if token is None else self._known[token]
        return lease if lease is not None and lease.held else None

    def workers(self) -> Iterable[str]:
        """Those that hold jobs."""
        return self._by_worker.keys()

    # -- changing -----------------------------------------------------------------

    def add(self, lease: Lease) -> None:
        self._take_in(lease)
        self._write(lease)
        self._forget(lease.token - REMEMBERED)

    def changed(self, lease: Lease) -> None:
        """Its jobs or its deadline."""
        token = lease.token
        if not lease.held:
            lease.done, lease.back = lease.done[-REMEMBERED_RUNS:], lease.back[-REMEMBERED_RUNS:]
            self._let_go(lease)
            if token <= self._forgotten:
                self._drop(lease)
                return
        self._write(lease)

    def extended(self, lease: Lease) -> None:
        self._expect(lease)
        self._write(lease)

    def _expect(self, lease: Lease) -> None:
        """Its deadline. Those of leases that have ended meanwhile stay behind an earlier one: not too many of them."""
        if len(self._deadlines) > 2 * self._held + _SLACK:
            self._deadlines = [(each.until_ms, each.token) for each in self.holding() if each is not lease]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (lease.until_ms, lease.token))

    def next_deadline_ms(self) -> int | None:
        deadlines = self._deadlines
        while deadlines:
            until_ms, token = deadlines[0]
            lease = self._known.get(token)
            if lease is not None and lease.until_ms == until_ms and lease.held:
                return until_ms
            heapq.heappop(deadlines)
        return None

    def pop_expired(self, now_ms: int) -> Lease | None:
        """One whose time is up, the earliest first."""
        until_ms = self.next_deadline_ms()
        if until_ms is None or until_ms > now_ms:
            return None
        return self._known[heapq.heappop(self._deadlines)[1]]

    # -- the table and the checkpoint ---------------------------------------------

    def load(self) -> None:
        self.clear()
        for _, row in self._store.scan(LEASES):
            self._take_in(_decode(row))
        newest = next(reversed(self._known), 0)
        self._forgotten = max(0, newest - REMEMBERED)

    def _take_in(self, lease: Lease) -> None:
        self._known[lease.token] = lease
        self._by_attempt[lease.worker, lease.attempt] = lease.token
        if lease.held:
            self._by_worker.setdefault(lease.worker, {})[lease.token] = None
            self._held += 1
            self._expect(lease)

    def _let_go(self, lease: Lease) -> None:
        tokens = self._by_worker.get(lease.worker)
        if tokens is not None and tokens.pop(lease.token, 0) is None:
            self._held -= 1
            if not tokens:
                del self._by_worker[lease.worker]

    def _write(self, lease: Lease) -> None:
        self._store.put(LEASES, _key(lease.token), _encode(lease))

    def _forget(self, until: int) -> None:
        while self._forgotten < until:
            self._forgotten += 1
            lease = self._known.get(self._forgotten)
            if lease is not None and not lease.held:
                self._drop(lease)

    def _drop(self, lease: Lease) -> None:
        del self._known[lease.token]
        if self._by_attempt.get((lease.worker, lease.attempt)) == lease.token:
            del self._by_attempt[lease.worker, lease.attempt]
        self._store.delete(LEASES, _key(lease.token))
