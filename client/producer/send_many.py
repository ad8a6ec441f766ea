"""A ``send_many`` on its way into the accumulator: its columns by partition, cut into pieces that fit into a batch.

A piece is made when it is its turn, so that columns larger than the buffer are
not copied as a whole. Everything is checked before the first piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from rayqueue.client.producer.accumulator import ANY, BURST, STRIPE, Accumulator, Lack
from rayqueue.client.producer.columns import ArrowColumns, Columns, check_arrow, check_columns, cuts, ends_of, is_arrow
from rayqueue.client.producer.delivery import Part
from rayqueue.client.producer.destination import Target
from rayqueue.errors import InvalidInputError
from rayqueue.records import Compression, RecordBatch

MAX_TIMESTAMP = 2**63

Step = tuple[Callable[[], Part | None], Lack]
"""Adds a piece, or returns None if there is no space now; what it needs."""


class ManyRecords:
    """Of one producer."""

    def __init__(self, accumulator: Accumulator, batch_bytes: int, compression: Compression) -> None:
        self._accumulator = accumulator
        self._batch_bytes = batch_bytes
        self._compression = compression

    def steps(
        self,
        target: Target,
        values: Any,
        keys: Any,
        headers: Any,
        priority: int,
        partition: int | None,
        timestamps_ms: Any,
    ) -> tuple[Iterator[Step], list[int] | None, int]:
        """Check the columns. What to do to accept them, piece by piece; the order this leaves them in; their size."""
        target.check_priority(priority)
        if partition is not None:
            target.check_partition(partition)
        if timestamps_ms is None:
            timestamps_ms = int(time.time() * 1000)
        elif isinstance(timestamps_ms, int) and not -MAX_TIMESTAMP <= timestamps_ms < MAX_TIMESTAMP:
            raise InvalidInputError(f"a timestamp is whole milliseconds since 1970, not {timestamps_ms!r}")
        if is_arrow(values):
            return self._arrow_steps(target, check_arrow(values, keys, headers, timestamps_ms), priority, partition)
        columns = check_columns(values, keys, headers, timestamps_ms)
        sizes = columns.sizes
        if sizes and max(sizes) > target.max_bytes:
            raise target.oversized(max(sizes))
        total_bytes = sum(sizes) + len(sizes) * columns.overhead_bytes
        rows = {partition: range(len(sizes))} if partition is not None else None
        if rows is None:
            rows = target.choose_many(columns.values, columns.keys)  # type: ignore[assignment]
        if rows is None:
            return self._list_steps(target, {ANY: columns}, priority), None, total_bytes
        if len(rows) == 1:
            return self._list_steps(target, dict.fromkeys(rows, columns), priority), None, total_bytes
        parts = {number: columns.take(each) for number, each in rows.items()}
        order = [row for each in rows.values() for row in each]
        return self._list_steps(target, parts, priority), order, total_bytes

    def _list_steps(self, target: Target, parts: dict[int, Columns], lane: int) -> Iterator[Step]:
        extend = self._accumulator.extend
        for number, columns in parts.items():
            most = _most_records(target, number, len(columns.values))
            ends = ends_of(columns.sizes)
            for start, stop, size_bytes in cuts(ends, columns.overhead_bytes, self._batch_bytes, most):
                piece: Any = [None if column is None else column[start:stop] for column in columns[:4]]

                def add(number: int = number, piece: Any = piece, size_bytes: int = size_bytes) -> Part | None:
                    values, keys, headers, stamps = piece
                    return extend(target.buffer, number, lane, values, keys, headers, stamps, size_bytes)

                yield add, Lack(size_bytes, target.buffer, number, stop - start)

    def _arrow_steps(
        self, target: Target, columns: ArrowColumns, lane: int, partition: int | None
    ) -> tuple[Iterator[Step], list[int] | None, int]:
        if columns.max_size > target.max_bytes:
            raise target.oversized(columns.max_size)
        order: list[int] | None = None
        if partition is not None:
            parts = {partition: columns}
        else:
            parts, order = target.choose_arrow(columns)
        count = len(columns.values)
        total_bytes = (columns.ends[count - 1] if count else 0) + count * columns.overhead_bytes
        return self._arrow_pieces(target, parts, lane), order, total_bytes

    def _arrow_pieces(self, target: Target, parts: dict[int, ArrowColumns], lane: int) -> Iterator[Step]:
        put = self._accumulator.put
        for number, columns in parts.items():
            most = _most_records(target, number, len(columns.values))
            for start, stop, _ in cuts(columns.ends, columns.overhead_bytes, self._batch_bytes, most):
                piece = columns.slice(start, stop)
                payload = RecordBatch.encode_arrow(
                    piece.values,
                    piece.keys,
                    piece.headers,
                    timestamps=piece.timestamps,
                    lane=lane,
                    compression=self._compression,
                )
                stamps, count = piece.stamps(), stop - start

                def add(
                    number: int = number, payload: bytes = payload, count: int = count, stamps: Any = stamps
                ) -> Part | None:
                    return put(target.buffer, number, lane, payload, count, stamps)

                yield add, Lack(len(payload), target.buffer, number, count)


def _most_records(target: Target, number: int, count: int) -> int:
    """Of one piece: no more than a bounded partition takes; and if it may be any, its share of a burst."""
    share = -(-count // len(target.buffer.partitions))
    most = count if number != ANY or share > BURST else max(STRIPE, share)
    bound = target.buffer.most_records
    return max(1, most if bound is None else min(most, bound))
