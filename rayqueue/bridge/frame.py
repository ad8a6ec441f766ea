"""Fetched batches as Arrow columns of a table. Nothing is done per record.

A frame has the columns that are asked for, of these:

    topic string, partition int32, offset int64, timestamp, key binary, value binary,
    headers list<struct<name, value>>, lane int32

in the Arrow types that the asker's schema says. Spark insists on its own names
inside lists and on microseconds, so a column is cast where it differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from rayqueue.errors import InvalidInputError
from rayqueue.protocol.data import FetchedBatch
from rayqueue.records import BatchHeader, RecordBatch
from rayqueue.records.arrow import HEADERS

COLUMNS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers", "lane")

SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADERS.type, nullable=False),
        pa.field("lane", pa.int32(), nullable=False),
    ]
)
"""All columns, as Ray Data gets them."""


def check_columns(names: Sequence[str]) -> tuple[str, ...]:
    """``InvalidInputError`` for a column that no record has."""
    for name in names:
        if name not in COLUMNS:
            raise InvalidInputError(f"there is no column {name!r}; there are {', '.join(COLUMNS)}", column=name)
    return tuple(names)


class Frames:
    """Makes record batches of one schema from fetched batches of one partition."""

    def __init__(self, topic: str, partition: int, schema: Any) -> None:
        check_columns(schema.names)
        self._schema = schema
        self._constants = {
            "topic": pa.scalar(topic, pa.string()),
            "partition": pa.scalar(partition, pa.int32()),
        }
        stored = {"timestamp", "key", "value", "headers"}
        self._decodes = bool(stored.intersection(schema.names))

    def make(self, batches: Sequence[FetchedBatch], start: int, end: int) -> Any:
        """A ``pyarrow.RecordBatch`` of the records with ``start <= offset < end``; None if there are none."""
        slices: list[tuple[int, int, int, Any]] = []  # first offset, rows, lane, columns as stored
        rows = 0
        for base, count, payload in batches:
            first, last = max(base, start), min(base + count, end)
            if first >= last:
                continue
            if self._decodes:
                batch = RecordBatch.decode(payload, base_offset=base)
                header, stored = batch.header, batch.arrow()
                if last - first != count:
                    stored = stored.slice(first - base, last - first)
            else:  # what is asked for is in no record: the checksum of what is not used is not computed
                header, stored = BatchHeader.parse(payload), None
            if header.control:
                continue
            slices.append((first, last - first, header.lane, stored))
            rows += last - first
        if not rows:
            return None
        columns = [self._column(field, slices, rows) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, field: Any, slices: list[tuple[int, int, int, Any]], rows: int) -> Any:
        name = field.name
        if name in self._constants:
            column = pa.repeat(self._constants[name], rows)
        elif name == "offset":
            column = _joined([_count_from(first, count) for first, count, _, _ in slices])
        elif name == "lane":
            column = _joined([pa.repeat(pa.scalar(lane, pa.int32()), count) for _, count, lane, _ in slices])
        else:
            column = _joined([_present(name, stored.column(name)) for _, _, _, stored in slices])
        if name == "timestamp":
            column = column.cast(pa.timestamp("ms", tz="UTC"))
        return column if column.type == field.type else _cast(column, field.type)


def _count_from(first: int, count: int) -> Any:
    import numpy as np

    return pa.array(np.arange(first, first + count, dtype=np.int64))


def _present(name: str, column: Any) -> Any:
    if name == "headers" and column.null_count:  # a batch without any: no headers, rather than unknown ones
        offsets = pa.repeat(pa.scalar(0, pa.int32()), len(column) + 1)
        return pa.ListArray.from_arrays(offsets, pa.array([], HEADERS.type.value_type), type=HEADERS.type)
    return column


def _joined(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _cast(column: Any, kind: Any) -> Any:
    if pa.types.is_list(kind):
        # Only names and nullability inside differ, which no cast changes.
        values = column.flatten()
        struct = pa.StructArray.from_arrays(values.flatten(), fields=list(kind.value_type))
        lengths = column.value_lengths()
        import pyarrow.compute as pc

        offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
        return pa.ListArray.from_arrays(offsets, struct, type=kind)
    return column.cast(kind)
