"""A ``send_many`` on its way into the accumulator: its columns by partition, cut into pieces that fit into a batch.

A piece is made when it is its turn, so that columns larger than the buffer are
not copied as a whole. Everything is checked before the first piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rayqueue.client.producer.accumulator import ANY, BURST, STRIPE, Accumulator, Lack
from rayqueue.client.producer.columns import (
    ArrowColumns,
    Columns,
    check_arrow,
    check_columns,
    cuts,
    is_arrow,
    overhead_bytes,
)
from rayqueue.client.producer.delivery import Part
from rayqueue.client.producer.destination import Target
from rayqueue.errors import InvalidInputError
from rayqueue.records import Compression, RecordBatch

MAX_TIMESTAMP = 2**63

Step = tuple[Callable[[], Part | None], Lack]
"""Adds a piece, or returns None if there is no space now; what it needs."""


class ManyRecords:
    """Of one producer."""

    def __init__(
        self, accumulator: Accumulator, batch_bytes: int, compression: Compression, *, transactional: bool = False
    ) -> None:
        self._accumulator = accumulator
        self._batch_bytes = batch_bytes
        self._compression = compression
        self._transactional = transactional

    def steps(
        self,
        of: int,
        target: Target,
        values: Any,
        keys: Any,
        headers: Any,
        priority: int,
        partition: int | None,
        timestamps_ms: Any,
    ) -> tuple[Iterator[Step], list[int] | None, int]:
        """Check the columns, which are for transaction ``of``. What to do to accept them, piece by
        piece; the order this leaves them in; their size."""
        target.check_priority(priority)
        if partition is not None:
            target.check_partition(partition)
        if timestamps_ms is None:
            timestamps_ms = int(time.time() * 1000)
        elif isinstance(timestamps_ms, int) and not -MAX_TIMESTAMP <= timestamps_ms < MAX_TIMESTAMP:
            raise InvalidInputError(f"a timestamp is whole milliseconds since 1970, not {timestamps_ms!r}")
        check = check_arrow if is_arrow(values) else check_columns
        columns: Columns | ArrowColumns = check(values, keys, headers, timestamps_ms)
        if columns.max_size > target.max_bytes:
            raise target.oversized(columns.max_size)
        parts, order = target.spread(columns) if partition is None else ({partition: columns}, None)
        total_bytes = columns.size_bytes + len(columns.values) * overhead_bytes(columns)
        return self._pieces(of, target, parts, priority), order, total_bytes

    def _pieces(
        self, of: int, target: Target, parts: Mapping[int, Columns | ArrowColumns], lane: int
    ) -> Iterator[Step]:
        buffer = target.buffer
        for number, columns in parts.items():
            most = _most_records(target, number, len(columns.values), spread=not self._transactional)
            for start, stop, size_bytes in cuts(columns.ends, overhead_bytes(columns), self._batch_bytes, most):
                piece, count = columns.slice(start, stop), stop - start
                if isinstance(piece, Columns):
                    add = partial(self._accumulator.extend, buffer, number, lane, *piece[:4], size_bytes, of)
                    yield add, Lack(size_bytes, buffer, number, count)
                else:
                    payload = self._encoded(piece, lane)
                    put = partial(self._accumulator.put, buffer, number, lane, payload, count, piece.stamps(), of)
                    yield put, Lack(len(payload), buffer, number, count)

    def _encoded(self, piece: ArrowColumns, lane: int) -> bytes:
        values, keys, headers, timestamps = piece[:4]
        return RecordBatch.encode_arrow(
            values,
            keys,
            headers,
            timestamps=timestamps,
            lane=lane,
            compression=self._compression,
            transactional=self._transactional,
        )


def _most_records(target: Target, number: int, count: int, *, spread: bool) -> int:
    """Of one piece: no more than a bounded partition takes; and if it may be any, its share of a burst."""
    share = -(-count // len(target.buffer.partitions))
    most = count if number != ANY or share > BURST or not spread else max(STRIPE, share)
    bound = target.buffer.most_records
    return max(1, most if bound is None else min(most, bound))
