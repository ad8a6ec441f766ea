"""A queue's part of a checkpoint.

Rows are copied as they are; orders that can be made again from them are not in
it. The runs ahead of the frontiers are: a replica that begins with the checkpoint
has no batches to read them from. So are those that were handed back.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rayqueue.errors import UnknownFormatError
from rayqueue.log.store import LogStore, Table
from rayqueue.partition.jobs.facts import QUEUE_KEY
from rayqueue.partition.jobs.index import FairReady, Timer
from rayqueue.partition.jobs.queue import JobQueue
from rayqueue.partition.jobs.rows import State
from rayqueue.partition.jobs.states import OUTLIVED
from rayqueue.partition.tables import DEDUPE, JOB_INDEX, JOBS, LEASES, META, RESULTS
from rayqueue.protocol.unpacking import unpack

_TABLES = (JOBS, LEASES, RESULTS, DEDUPE)

Rows = list[tuple[bytes, bytes]]


class _Dump(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    counts: bytes
    tables: list[Rows]
    turns: Rows
    runs: dict[int, list[tuple[int, int]]]
    back: Rows = []


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Dump)


def dump(queue: JobQueue, store: LogStore) -> bytes:
    tables = [list(store.scan(table)) for table in _TABLES]
    turns = queue.ready.turns() if isinstance(queue.ready, FairReady) else []
    runs = {lane: _joined(front.fresh_runs()) for lane, front in sorted(queue.frontiers.items()) if front.fresh}
    back = list(store.scan(JOB_INDEX, b"G", b"H"))
    return _encode(_Dump(store.get(META, QUEUE_KEY) or b"", tables, turns, runs, back))


def write(dumped: bytes, store: LogStore) -> dict[int, list[tuple[int, int]]]:
    """Write the rows into the tables, which are empty. What is ahead of the frontiers."""
    found = unpack(_decoder, dumped, lambda why: UnknownFormatError(f"a checkpoint's jobs cannot be read: {why}"))
    if found.counts:
        store.put(META, QUEUE_KEY, found.counts)
    pairs: list[tuple[Table, Rows]] = [*zip(_TABLES, found.tables, strict=True), (JOB_INDEX, found.turns + found.back)]
    for table, rows in pairs:
        for key, row in rows:
            store.put(table, key, row)
    return found.runs


def index(queue: JobQueue) -> None:
    """Make the orders again, from the rows."""
    fair = queue.ready
    next_turn = fair.next_turn if isinstance(fair, FairReady) else 0
    for row in queue.rows.scan():
        if row.state == State.CANCELLED:
            continue
        queue.places.add(row)
        if row.state == State.DEAD:
            queue.dead.add(row)
            continue
        key = row.id.to_bytes(8, "big")
        if row.expires_ms > OUTLIVED:
            queue.times.add(row.expires_ms, Timer.TTL, key)
        if row.state == State.DELAYED:
            queue.times.add(row.due_ms, Timer.DUE, key)
        elif row.state == State.READY and not row.held:
            queue.ready.add(row)
        queue.index_key(row)
    queue.results.index()
    queue.dedupes.index()
    if isinstance(fair, FairReady):
        fair.next_turn = next_turn


def _joined(runs: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined
