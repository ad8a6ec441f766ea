"""The one schema in which applications get records, and batches in its columns."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from rayqueue.errors import InvalidInputError
from rayqueue.records import RecordBatch
from rayqueue.records.table import COLUMNS, SCHEMA, needs_records, rows_of, schema_of


def rows(start: int, stop: int, columns: tuple[str, ...] = COLUMNS, **fields: Any) -> Any:
    """Of a batch at offset 10."""
    batch = RecordBatch.decode(RecordBatch.encode(**{"timestamps": 1000, **fields}))
    stored = batch.arrow().slice(start - 10, stop - start) if needs_records(columns) else None
    return rows_of(stored, start, stop, topic="t", partition=3, lane=batch.header.lane, columns=columns)


def test_the_schema_is_the_one_that_the_docs_state() -> None:
    assert {field.name: (str(field.type), field.nullable) for field in SCHEMA} == {
        "topic": ("string", False),
        "partition": ("int32", False),
        "offset": ("int64", False),
        "timestamp": ("timestamp[ms, tz=UTC]", False),
        "key": ("binary", True),
        "value": ("binary", True),
        "headers": ("list<item: struct<name: string not null, value: binary not null> not null>", False),
        "lane": ("int32", False),
    }


@pytest.mark.parametrize("columns", [COLUMNS, ("value",), ("offset",), ("lane", "topic"), ("headers", "key")])
def test_only_the_columns_that_are_asked_for(columns: tuple[str, ...]) -> None:
    made = rows(
        11,
        13,
        columns,
        values=[b"a", None, b"c", b"d"],
        keys=[b"k", None, b"l", b"m"],
        headers=[[], [("h", b"1")], [], []],
        timestamps=[1, 2, 3, 4],
        lane=254,
    )
    assert made.schema == schema_of(columns)
    made.validate(full=True)
    moments = [datetime(1970, 1, 1, 0, 0, 0, milli * 1000, tzinfo=timezone.utc) for milli in (2, 3)]
    place = {"topic": "t", "partition": 3, "lane": 254}
    whole: list[dict[str, Any]] = [
        {**place, "offset": 11, "timestamp": moments[0], "key": None, "value": None},
        {**place, "offset": 12, "timestamp": moments[1], "key": b"l", "value": b"c", "headers": []},
    ]
    whole[0]["headers"] = [{"name": "h", "value": b"1"}]
    assert made.to_pylist() == [{name: row[name] for name in columns} for row in whole]


def test_a_batch_without_keys_and_headers_has_no_keys_and_empty_headers() -> None:
    made = rows(10, 12, ("key", "headers"), values=[b"a", b"b"])
    made.validate(full=True)
    assert made.to_pylist() == [{"key": None, "headers": []}] * 2
    assert not made.column("headers").null_count


def test_stored_columns_are_not_copied() -> None:
    batch = RecordBatch.decode(RecordBatch.encode([b"a" * 100] * 50, timestamps=1))
    stored = batch.arrow()
    made = rows_of(stored, 0, 50, topic="t", partition=0, lane=0)
    for name in ("value", "timestamp"):
        assert made.column(name).buffers()[-1].address == stored.column(name).buffers()[-1].address


def test_batches_of_one_partition_join() -> None:
    joined = pa.concat_batches(
        [rows(10, 12, values=[b"a", b"b"]), rows(10, 11, values=[b"c"], headers=[[("h", b"1")]])]
    )
    assert joined.column("value").to_pylist() == [b"a", b"b", b"c"]
    assert [len(each) for each in joined.column("headers").to_pylist()] == [0, 0, 1]


def test_a_column_that_no_record_has() -> None:
    with pytest.raises(InvalidInputError, match="no column 'price'"):
        schema_of(("value", "price"))
