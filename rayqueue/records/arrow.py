"""Batches as Arrow arrays, and Arrow arrays as the columns of batches.

Loads Arrow, and is itself loaded only when it is needed. What it hands to
Arrow's parser has passed ``message.py`` before, and what comes out is validated
in full (3 µs for 1,000 records), because Arrow's own readers trust their input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from rayqueue.errors import CorruptBatchError, InvalidInputError
from rayqueue.records.header import HAS_HEADERS, HAS_KEYS, Bytes
from rayqueue.records.message import BinaryColumn

TIMESTAMP = pa.field("timestamp", pa.int64(), nullable=False)
KEY = pa.field("key", pa.binary())
VALUE = pa.field("value", pa.binary())
HEADERS = pa.field(
    "headers",
    pa.list_(
        pa.field(
            "item",
            pa.struct([pa.field("name", pa.string(), nullable=False), pa.field("value", pa.binary(), nullable=False)]),
            nullable=False,
        )
    ),
)
SCHEMA = pa.schema([TIMESTAMP, KEY, VALUE, HEADERS])
"""What ``RecordBatch.arrow()`` returns, whichever of the columns the batch has."""

_NO_PAIRS = pa.array([], HEADERS.type.value_type)

_STORED = {
    flags: pa.schema(
        [TIMESTAMP, *([KEY] if flags & HAS_KEYS else []), VALUE, *([HEADERS] if flags & HAS_HEADERS else [])]
    )
    for flags in (0, HAS_KEYS, HAS_HEADERS, HAS_KEYS | HAS_HEADERS)
}


def view(message: memoryview, flags: int, count: int) -> Any:
    """The message as a ``pyarrow.RecordBatch`` of ``SCHEMA`` over the same memory."""
    try:
        stored = pyarrow.ipc.read_record_batch(pa.py_buffer(message), _STORED[flags & (HAS_KEYS | HAS_HEADERS)])
        stored.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise CorruptBatchError(f"Arrow refuses the batch: {error}") from None
    if stored.num_columns == len(SCHEMA):
        return stored
    columns = stored.columns
    if not flags & HAS_KEYS:
        columns.insert(1, pa.nulls(count, KEY.type))
    if not flags & HAS_HEADERS:
        columns.append(_no_headers(count))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _no_headers(count: int) -> Any:
    """An empty list per record: no headers, rather than unknown ones."""
    offsets = pa.py_buffer(bytes(4 * (count + 1)))
    return pa.Array.from_buffers(HEADERS.type, count, [None, offsets], null_count=0, children=[_NO_PAIRS])


def read_binary(name: str, message: memoryview, rows: int, column: BinaryColumn) -> list[bytes | None]:
    """A binary column as a list; for many rows five times faster than slicing in Python."""
    validity = pa.py_buffer(message[column.validity]) if column.nulls else None
    buffers = [validity, pa.py_buffer(message[column.offsets]), pa.py_buffer(message[column.data])]
    try:
        array = pa.Array.from_buffers(KEY.type, rows, buffers, null_count=column.nulls)
        array.validate(full=True)
    except pa.ArrowException as error:
        raise CorruptBatchError(f"Arrow refuses column {name!r}: {error}", column=name) from None
    items: list[bytes | None] = array.to_pylist()
    return items


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns ready to become a message."""

    count: int
    flags: int
    nodes: list[int]
    buffers: list[Bytes]
    min_timestamp: int
    max_timestamp: int


def columns_of(values: Any, keys: Any, headers: Any, timestamps: Any) -> Columns:
    """Columns given as Arrow arrays (or chunked arrays) in the form that ``message.py`` writes."""
    value_array = stored("values", values, VALUE.type)
    count = len(value_array)
    if not count:
        raise InvalidInputError("a batch must hold at least one record")
    flags = 0
    if isinstance(timestamps, int):
        timestamps = pa.repeat(pa.scalar(timestamps, pa.int64()), count)
    arrays = [stored("timestamps", timestamps, TIMESTAMP.type, count=count, nullable=False)]
    if keys is not None:
        key_array = stored("keys", keys, KEY.type, count=count)
        if key_array.null_count < count:
            flags |= HAS_KEYS
            arrays.append(key_array)
    arrays.append(value_array)
    if headers is not None:
        header_array = stored_headers(headers, count=count)
        if len(header_array.flatten()):  # not .values, which ignores that the array may be a slice
            flags |= HAS_HEADERS
            arrays.append(header_array)
    # Arrow's writer cuts slices to size and rebases their offsets; reading it back gives plain buffers.
    written = pa.RecordBatch.from_arrays(arrays, schema=_STORED[flags]).serialize()
    plain = pyarrow.ipc.read_record_batch(written, _STORED[flags])
    nodes: list[int] = []
    buffers: list[Bytes] = []
    for column in plain.columns:
        _flatten(column, nodes, buffers)
    stamps = memoryview(buffers[1]).cast("B").cast("q").tolist()
    return Columns(count, flags, nodes, buffers, min(stamps), max(stamps))


def stored(name: str, column: Any, kind: Any, *, count: int | None = None, nullable: bool = True) -> Any:
    """A column in the type in which batches have it: strings as bytes, times as milliseconds.

    ``InvalidInputError`` if it is no Arrow array, or its values cannot be read so.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not isinstance(column, pa.Array):
        raise InvalidInputError(f"{name} must be an Arrow array, not {type(column).__name__}")
    if count is not None and len(column) != count:
        raise InvalidInputError(f"{len(column)} {name} for {count} values")
    if column.type != kind:
        try:
            if pa.types.is_timestamp(column.type) and kind == TIMESTAMP.type:
                column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
            column = column.cast(kind)
        except pa.ArrowException as error:
            raise InvalidInputError(f"{name} cannot be read as {kind}: {error}") from None
    if column.null_count and not nullable:
        raise InvalidInputError(f"{name} must not be null")
    return column


def stored_headers(column: Any, *, count: int | None = None) -> Any:
    """The same of headers, given as maps or as lists of (name, value). Null: none."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not isinstance(column, pa.Array):
        raise InvalidInputError(f"headers must be an Arrow array, not {type(column).__name__}")
    kind = column.type
    if pa.types.is_map(kind):
        pair = pa.struct([pa.field("name", kind.key_type, nullable=False), pa.field("value", kind.item_type)])
        column = column.cast(pa.list_(pair))
        kind = column.type
    if not (pa.types.is_list(kind) and pa.types.is_struct(kind.value_type) and kind.value_type.num_fields == 2):
        raise InvalidInputError(f"headers must be maps, or lists of (name, value), not {kind}")
    if count is not None and len(column) != count:
        raise InvalidInputError(f"{len(column)} headers for {count} values")
    item = HEADERS.type.value_type
    names, values = column.flatten().flatten()
    if names.null_count or values.null_count:
        raise InvalidInputError("names and values of headers must not be null")
    if kind == HEADERS.type and not column.null_count:
        return column
    import pyarrow.compute as pc

    names, values = stored("names of headers", names, item[0].type), stored("values of headers", values, item[1].type)
    lengths = pc.fill_null(column.value_lengths(), 0).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    pairs = pa.StructArray.from_arrays([names, values], fields=list(item))
    return pa.ListArray.from_arrays(offsets, pairs, type=HEADERS.type)


def _flatten(column: Any, nodes: list[int], buffers: list[Bytes]) -> None:
    """Append the nodes and the buffers, cut to size, of a column and its children, depth first."""
    rows, nulls = len(column), column.null_count
    nodes += (rows, nulls)
    validity, *rest = column.buffers()
    buffers.append(_validity(validity, rows) if nulls else b"")
    if pa.types.is_struct(column.type):
        for field in range(column.type.num_fields):
            _flatten(column.field(field), nodes, buffers)
    elif pa.types.is_list(column.type):
        buffers.append(memoryview(rest[0])[: 4 * (rows + 1)])
        _flatten(column.values, nodes, buffers)
    elif pa.types.is_int64(column.type):
        buffers.append(memoryview(rest[0])[: 8 * rows])
    else:
        offsets = memoryview(rest[0])[: 4 * (rows + 1)]
        buffers.append(offsets)
        stop = int.from_bytes(offsets[-4:], "little")
        buffers.append(memoryview(rest[1])[:stop] if stop else b"")


def _validity(bitmap: Any, rows: int) -> bytes:
    """The bits of the rows and nothing behind them."""
    bits = int.from_bytes(memoryview(bitmap), "little") & ((1 << rows) - 1)
    return bits.to_bytes((rows + 7) >> 3, "little")
