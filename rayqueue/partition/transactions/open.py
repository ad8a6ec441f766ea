"""The transactions of a partition: what is open, and how it ends.

Owns the TRANSACTIONS and TRANSACTION_RUNS tables. A transaction is told by its
producer id and epoch. It is open from the first batch or stage of it that is
applied until its marker (``end``), the first one; after that its producer's
epoch is one higher here, so nothing of it is taken any more (``producers``).

What is open is in memory too, ``max_transactions`` at most, and where the first
open batch of each lane is costs nothing to ask. Batches are not changed by the
end of their transaction: runs of an aborted one stay in the index, those of a
committed one leave it.

What a marker has to do is bounded (``max_transaction_runs``), so that no entry
holds up the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from struct import Struct
from typing import TypeVar

import msgspec

from rayqueue.errors import (
    TooManyTransactionsError,
    TransactionError,
    TransactionPendingError,
    TransactionTooLargeError,
    UnknownFormatError,
)
from rayqueue.ids import Offset
from rayqueue.log.store import LogStore
from rayqueue.partition.clock import Clock
from rayqueue.partition.settings import PartitionSettings
from rayqueue.partition.tables import TRANSACTION_RUNS, TRANSACTIONS
from rayqueue.partition.transactions.runs import ABORTED, OPEN, open_runs, pack_run, run_key
from rayqueue.protocol.transactions import OpenTransaction
from rayqueue.protocol.unpacking import unpack

_N = TypeVar("_N")
_V = TypeVar("_V")
Key = tuple[int, int]
"""Producer id, epoch."""

_KEY = Struct(">QI")
MAX_STAGED_GROUPS = 100
"""Groups whose positions one transaction may stage in a partition."""


class StagedPosition(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a group continues once the transaction is committed."""

    generation: int
    offsets: dict[int, int]
    metadata: bytes = b""


class StagedJobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Jobs that are done once the transaction is committed. Each has a row, and is in no lease."""

    worker: str
    token: int
    jobs: tuple[tuple[int, int], ...]


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    opened_ms: int
    groups: dict[str, StagedPosition] = {}
    jobs: list[StagedJobs] = []


_encode = msgspec.msgpack.Encoder().encode
_row_decoder = msgspec.msgpack.Decoder(_Row)


class Opened:
    """One that is open."""

    __slots__ = ("groups", "jobs", "key", "last", "opened_ms", "records", "runs")

    def __init__(self, key: Key, row: _Row) -> None:
        self.key = key
        self.opened_ms = row.opened_ms
        self.groups = row.groups
        self.jobs = row.jobs
        self.runs: dict[Offset, tuple[Offset, int]] = {}
        """First offset to the end, and the lane; in order."""
        self.last: Offset | None = None
        """Where the last run begins."""
        self.records = 0

    def encode(self) -> bytes:
        return _encode(_Row(self.opened_ms, self.groups, self.jobs))

    def extends(self, base_offset: int, lane: int) -> bool:
        """Whether a batch there belongs to its last run."""
        return self.last is not None and self.runs[self.last] == (base_offset, lane)

    @property
    def job_count(self) -> int:
        return sum(count for each in self.jobs for _, count in each.jobs)

    def add_run(self, start: Offset, end: Offset, lane: int, records: int) -> None:
        """Or make the last one longer, by so many records."""
        self.runs[start] = (end, lane)
        self.last = start
        self.records += records


class _Dump(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What is open, as in a checkpoint: keys, rows, and the runs of each. Runs that were aborted are not in it: whoever
    begins with the checkpoint has no batch from before it."""

    open: list[tuple[int, int, _Row, list[tuple[int, int, int]]]]


_dump_decoder = msgspec.msgpack.Decoder(_Dump)


class Transactions:
    def __init__(self, store: LogStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._clear()

    def _clear(self) -> None:
        self._open: dict[Key, Opened] = {}  # in the order in which they were opened
        self._firsts: dict[int, dict[Key, Offset]] = {}  # by lane, in the order of the offsets
        self._staged: dict[str, dict[Key, int]] = {}  # by group, to the generation

    # -- what others ask ----------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Opened]:
        return iter(self._open.values())

    def get(self, key: Key) -> Opened | None:
        return self._open.get(key)

    def first_open(self, lane: int | None = None) -> Offset | None:
        """Where the first batch of the lane, or of any, is whose transaction is open."""
        if lane is not None:
            return next(iter(self._firsts.get(lane, {}).values()), None)
        return min([next(iter(firsts.values())) for firsts in self._firsts.values()], default=None)

    def infos(self, now_ms: int) -> tuple[OpenTransaction, ...]:
        """The oldest first."""
        now_ms = max(now_ms, self._clock.now_ms)
        return tuple(
            [
                OpenTransaction(
                    *each.key,
                    max(0, now_ms - each.opened_ms),
                    each.records,
                    min(each.runs, default=None),
                    tuple(sorted(each.groups)),
                    each.job_count,
                )
                for each in self
            ]
        )

    def pending(self, group: str, generation: int) -> TransactionPendingError | None:
        """What a commit of this generation is refused with as long as one of an older generation may still count."""
        for key, staged in self._staged.get(group, {}).items():
            if staged < generation:
                return TransactionPendingError(
                    f"transaction {key[1]} of producer {key[0]} has staged positions of group {group!r} with "
                    f"generation {staged}; generation {generation} can go on once it has ended",
                    group=group,
                    generation=staged,
                    producer_id=key[0],
                    epoch=key[1],
                )
        return None

    # -- judging --------------------------------------------------------------------------

    def refusal(
        self,
        key: Key,
        settings: PartitionSettings,
        *,
        batch: tuple[int, int] | None = None,
        jobs: int = 0,
        group: str = "",
    ) -> TransactionError | None:
        """Why a batch (base offset, lane) or a stage has no room; None if it has. ``jobs``: that are put or staged."""
        known, most = self._open.get(key), settings.max_transaction_runs
        if known is None:
            if len(self._open) >= settings.max_transactions:
                return TooManyTransactionsError(
                    f"{len(self._open)} transactions are open in this partition, which is the limit",
                    limit=len(self._open),
                )
            return _too_large(key, f"more than {most} jobs") if jobs > most else None
        if batch is not None and len(known.runs) >= most and not known.extends(*batch):
            return _too_large(key, f"{most} runs of batches")
        if jobs and known.job_count + known.records + jobs > most:
            return _too_large(key, f"{most} jobs and acknowledgements")
        if group and group not in known.groups and len(known.groups) >= MAX_STAGED_GROUPS:
            return _too_large(key, f"positions of {MAX_STAGED_GROUPS} groups")
        return None

    # -- changing -------------------------------------------------------------------------

    def append(self, key: Key, base_offset: Offset, count: int, lane: int) -> None:
        """A batch of it is in the log."""
        opened = self._opened(key)
        end = Offset(base_offset + count)
        start = opened.last if opened.last is not None and opened.extends(base_offset, lane) else base_offset
        if start == base_offset:
            self._firsts.setdefault(lane, {}).setdefault(key, base_offset)
        opened.add_run(start, end, lane, count)
        self._store.put(TRANSACTION_RUNS, run_key(OPEN, start), pack_run(end, *key, lane))

    def stage_position(self, key: Key, group: str, position: StagedPosition) -> None:
        opened = self._opened(key)
        opened.groups[group] = position
        self._staged.setdefault(group, {})[key] = position.generation
        self._write(opened)

    def stage_jobs(self, key: Key, jobs: StagedJobs) -> None:
        opened = self._opened(key)
        if jobs.jobs:
            opened.jobs.append(jobs)
        self._write(opened)

    def end(self, key: Key, *, commit: bool) -> Opened | None:
        """It is open no more; None if it was not."""
        opened = self._open.pop(key, None)
        if opened is None:
            return None
        store = self._store
        store.delete(TRANSACTIONS, _KEY.pack(*key))
        for start, (end, lane) in opened.runs.items():
            store.delete(TRANSACTION_RUNS, run_key(OPEN, start))
            if not commit:
                store.put(TRANSACTION_RUNS, run_key(ABORTED, start), pack_run(end, *key, lane))
        for lane in {lane for _, lane in opened.runs.values()}:
            _discard(self._firsts, lane, key)
        for group in opened.groups:
            _discard(self._staged, group, key)
        return opened

    def sweep(self, start_offset: Offset, most: int) -> None:
        """Forget aborted runs that were trimmed, a bounded number."""
        rows = self._store.scan(TRANSACTION_RUNS, run_key(ABORTED, 0), run_key(ABORTED, start_offset))
        for key, row in list(islice(rows, most)):
            if int.from_bytes(row[:8], "little") <= start_offset:
                self._store.delete(TRANSACTION_RUNS, key)

    def _opened(self, key: Key) -> Opened:
        known = self._open.get(key)
        if known is None:
            known = self._open[key] = Opened(key, _Row(self._clock.now_ms, {}, []))
            self._write(known)
        return known

    def _write(self, opened: Opened) -> None:
        self._store.put(TRANSACTIONS, _KEY.pack(*opened.key), opened.encode())

    # -- the tables and the checkpoint -------------------------------------------------------

    def load(self) -> None:
        self._clear()
        rows = [(_KEY.unpack(key), _decode_row(row)) for key, row in self._store.scan(TRANSACTIONS)]
        runs: dict[Key, list[tuple[int, int, int]]] = {}
        for run in open_runs(self._store):
            runs.setdefault((run.producer_id, run.epoch), []).append((run.start, run.end, run.lane))
        self._take_in([(*key, row, runs.get(key, [])) for key, row in rows])

    def dump(self) -> bytes:
        """Nothing, if nothing is open."""
        if not self._open:
            return b""
        return _encode(
            _Dump(
                [
                    (
                        *each.key,
                        _Row(each.opened_ms, each.groups, each.jobs),
                        [(start, end, lane) for start, (end, lane) in each.runs.items()],
                    )
                    for each in sorted(self, key=lambda each: each.key)
                ]
            )
        )

    def restore(self, dumped: bytes) -> None:
        """Take over a dump; the tables are empty."""
        self._clear()
        if not dumped:
            return
        found = unpack(
            _dump_decoder, dumped, lambda why: UnknownFormatError(f"a checkpoint's transactions cannot be read: {why}")
        )
        self._take_in(found.open)
        for opened in self:
            self._write(opened)
            for start, (end, lane) in opened.runs.items():
                self._store.put(TRANSACTION_RUNS, run_key(OPEN, start), pack_run(end, *opened.key, lane))

    def _take_in(self, found: Iterable[tuple[int, int, _Row, list[tuple[int, int, int]]]]) -> None:
        first: list[tuple[Offset, int, Key]] = []
        for producer_id, epoch, row, runs in sorted(found, key=lambda each: (each[2].opened_ms, each[:2])):
            key = (producer_id, epoch)
            opened = self._open[key] = Opened(key, row)
            for start, end, lane in sorted(runs):
                opened.add_run(Offset(start), Offset(end), lane, end - start)
                first.append((Offset(start), lane, key))
            for group, staged in opened.groups.items():
                self._staged.setdefault(group, {})[key] = staged.generation
        for start, lane, key in sorted(first):
            self._firsts.setdefault(lane, {}).setdefault(key, start)


def _decode_row(row: bytes) -> _Row:
    return unpack(_row_decoder, row, lambda why: UnknownFormatError(f"an open transaction cannot be read: {why}"))


def _discard(index: dict[_N, dict[Key, _V]], name: _N, key: Key) -> None:
    found = index.get(name)
    if found is not None:
        found.pop(key, None)
        if not found:
            del index[name]


def _too_large(key: Key, what: str) -> TransactionTooLargeError:
    return TransactionTooLargeError(
        f"transaction {key[1]} of producer {key[0]} has {what} in this partition, which is the limit: abort it, and "
        "make smaller ones",
        producer_id=key[0],
        epoch=key[1],
    )
