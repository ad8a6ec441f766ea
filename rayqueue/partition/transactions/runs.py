"""Runs: neighbouring batches of one transaction in one lane, as long as it is open, and for good if it was aborted.

The index by which readers of committed records find where to stop and what to
jump over. Committed batches are in it no more: they are as any other. A row per
run, however many batches it has, in a table of which a snapshot shows the same
moment as of the batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from rayqueue.ids import Offset
from rayqueue.partition.rows import Rows
from rayqueue.partition.tables import TRANSACTION_RUNS

OPEN = 0
ABORTED = 1

_KEY = Struct(">BQ")
_ROW = Struct("<QQIB")

run_key = _KEY.pack
"""state, first offset"""
pack_run = _ROW.pack
"""end, producer id, epoch, lane"""

_FIRST_OPEN = bytes((OPEN,))
_FIRST_ABORTED = bytes((ABORTED,))
_END = bytes((ABORTED + 1,))


class Run(NamedTuple):
    start: Offset
    end: Offset
    producer_id: int
    epoch: int
    lane: int


def _read(key: bytes, row: bytes) -> Run:
    return Run(_KEY.unpack(key)[1], *_ROW.unpack(row))


def open_runs(rows: Rows) -> Iterator[Run]:
    """In the order of their offsets."""
    for key, row in rows.scan(TRANSACTION_RUNS, _FIRST_OPEN, _FIRST_ABORTED):
        yield _read(key, row)


def first_open(rows: Rows, lane: int | None) -> Offset | None:
    """Where the first open run of the lane begins; of all lanes, without one."""
    return next((run.start for run in open_runs(rows) if lane is None or run.lane == lane), None)


def aborted_at(rows: Rows, offset: int) -> Run | None:
    """The aborted run that holds this offset."""
    found = next(rows.scan(TRANSACTION_RUNS, _FIRST_ABORTED, run_key(ABORTED, offset + 1), reverse=True), None)
    if found is None:
        return None
    run = _read(*found)
    return run if offset < run.end else None


def aborted_from(rows: Rows, offset: int, until: int | None = None) -> Iterator[Run]:
    """Aborted runs that begin there or later, and before ``until``, in order."""
    stop = _END if until is None else run_key(ABORTED, until)
    for key, row in rows.scan(TRANSACTION_RUNS, run_key(ABORTED, offset), stop):
        yield _read(key, row)
