"""Records as Arrow tables: the one schema in which applications get them, and a batch in its columns.

``poll_arrow``, Ray Data and Spark all hand out these columns in these types.
There is no unsigned type among them, because Spark has none. Key, value,
headers and timestamp are the batch's own memory; what is the same for a whole
batch is cut from longer columns that are made once. Nothing is done per record.

Loads Arrow; imported when somebody asks for Arrow.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import pyarrow as pa

from rayqueue.errors import InvalidInputError
from rayqueue.records.arrow import HEADERS, KEY, VALUE

SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
        KEY,
        VALUE,
        HEADERS.with_nullable(False),
        pa.field("lane", pa.int32(), nullable=False),
    ]
)
COLUMNS = tuple(SCHEMA.names)

_TIMESTAMP = SCHEMA.field("timestamp").type
_BLOCK_ROWS = 4096


@lru_cache
def schema_of(columns: tuple[str, ...]) -> Any:
    """The schema of these columns. ``InvalidInputError`` for one that no record has."""
    fields = []
    for name in columns:
        if name not in COLUMNS:
            raise InvalidInputError(f"there is no column {name!r}; there are {', '.join(COLUMNS)}", column=name)
        fields.append(SCHEMA.field(name))
    return pa.schema(fields)


def needs_records(columns: Iterable[str]) -> bool:
    """Whether some of these columns are in the records themselves, so that batches must be decoded for them."""
    return not {"timestamp", "key", "value", "headers"}.isdisjoint(columns)


def rows_of(
    stored: Any,
    start: int,
    stop: int,
    *,
    topic: str,
    partition: int,
    lane: int,
    columns: tuple[str, ...] = COLUMNS,
) -> Any:
    """A stretch of one batch, offsets ``start`` to ``stop``, as a ``pyarrow.RecordBatch`` of these columns.

    ``stored`` are the same records as ``RecordBatch.arrow()`` gives them; None unless ``needs_records``.
    """
    same: dict[str, str | int] = {"topic": topic, "partition": partition, "lane": lane}
    arrays = []
    for name in columns:
        if name in same:
            array = _same(name, same[name], stop - start)
        elif name == "offset":
            array = pa.arange(start, stop)
        elif name == "timestamp":
            array = stored.column(name).view(_TIMESTAMP)
        else:
            array = stored.column(name)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema_of(columns))


def _same(name: str, value: str | int, rows: int) -> Any:
    return _block(name, value, -(-rows // _BLOCK_ROWS)).slice(0, rows)


@lru_cache(maxsize=256)
def _block(name: str, value: str | int, blocks: int) -> Any:
    return pa.repeat(pa.scalar(value, SCHEMA.field(name).type), blocks * _BLOCK_ROWS)
