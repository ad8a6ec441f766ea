"""Between batches and pyarrow.

The only module of the package that loads Arrow, and itself loaded only when it
is needed. What it hands to Arrow's parser has passed ``message.py`` before,
and what comes out is validated in full (3 µs for 1,000 records), because
Arrow's own readers trust their input.
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
        columns.append(pa.nulls(count, HEADERS.type))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


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
    value_array = _array("values", values, VALUE.type)
    count = len(value_array)
    if not count:
        raise InvalidInputError("a batch must hold at least one record")
    flags = 0
    arrays: list[Any] = []
    if isinstance(timestamps, int):
        timestamps = pa.repeat(pa.scalar(timestamps, pa.int64()), count)
    elif isinstance(timestamps, (pa.Array, pa.ChunkedArray)) and pa.types.is_timestamp(timestamps.type):
        timestamps = timestamps.cast(pa.timestamp("ms"))
    arrays.append(_array("timestamps", timestamps, TIMESTAMP.type, count=count, nullable=False))
    if keys is not None:
        key_array = _array("keys", keys, KEY.type, count=count)
        if key_array.null_count < count:
            flags |= HAS_KEYS
            arrays.append(key_array)
    arrays.append(value_array)
    if headers is not None:
        header_array = _header_array(headers, count)
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


def _array(name: str, column: Any, kind: Any, *, count: int | None = None, nullable: bool = True) -> Any:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not isinstance(column, pa.Array):
        raise InvalidInputError(f"{name} must be an Arrow array, not {type(column).__name__}")
    if count is not None and len(column) != count:
        raise InvalidInputError(f"{len(column)} {name} for {count} values")
    if column.type != kind:
        try:
            column = column.cast(kind)
        except pa.ArrowException as error:
            raise InvalidInputError(f"{name} cannot be read as {kind}: {error}") from None
    if column.null_count and not nullable:
        raise InvalidInputError(f"{name} must not be null")
    return column


def _header_array(headers: Any, count: int) -> Any:
    array = _array("headers", headers, HEADERS.type, count=count)
    if array.null_count:
        array = pa.array([pairs or [] for pairs in array.to_pylist()], HEADERS.type)
    pairs = array.flatten()
    if pairs.null_count or any(child.null_count for child in pairs.flatten()):
        raise InvalidInputError("names and values of headers must not be null")
    return array


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
