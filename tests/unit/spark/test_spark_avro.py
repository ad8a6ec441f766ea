"""Avro schemas as columns, and columns as Avro schemas. What Spark does with them is in tests/integration."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    DecimalType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rayqueue.errors import InvalidInputError
from rayqueue.spark.avro import avro_schema, columns_of, decoder, encoder


def record(**fields: Any) -> str:
    listed = [{"name": name, "type": kind} for name, kind in fields.items()]
    return json.dumps({"type": "record", "name": "r", "namespace": "n", "fields": listed})


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("int", "int"),
        (["null", "string"], "string"),
        (["int", "null", "long"], "bigint"),
        ({"type": "long", "logicalType": "timestamp-millis"}, "timestamp"),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, "timestamp_ntz"),
        ({"type": "long", "logicalType": "time-micros"}, "bigint"),
        ({"type": "string", "logicalType": "uuid"}, "string"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, "decimal(9,2)"),
        ({"type": "fixed", "name": "f", "size": 4}, "binary"),
        ({"type": "enum", "name": "e", "symbols": ["A"]}, "string"),
        ({"type": "array", "items": {"type": "map", "values": "double"}}, "array<map<string,double>>"),
    ],
)
def test_a_type_is_a_column(kind: Any, column: str) -> None:
    field = columns_of(record(x=kind))["x"]
    assert field.dataType.simpleString() == column
    assert field.nullable == (isinstance(kind, list) and "null" in kind)


def test_a_name_stands_for_what_it_named() -> None:
    inner = {"type": "record", "name": "point", "fields": [{"name": "y", "type": "int"}]}
    columns = columns_of(record(a=inner, b=["null", "point"]))
    assert columns["b"].dataType == columns["a"].dataType


@pytest.mark.parametrize(
    "schema",
    [
        "not json",
        '"string"',
        record(x="nobody"),
        record(x=["string", "int"]),
        record(x={"type": "array", "items": "r"}),
        record(x={"type": "record", "name": "s", "fields": [{"name": "s", "type": ["null", "s"]}]}),
    ],
)
def test_what_cannot_be_columns_is_refused(schema: str) -> None:
    with pytest.raises(InvalidInputError):
        columns_of(schema)


def test_an_array_of_what_takes_no_bytes_is_refused() -> None:
    """Six bytes of a stranger would be four thousand million rows."""
    nothing = {"type": "record", "name": "e", "fields": []}
    schema = record(x={"type": "array", "items": nothing})
    with pytest.raises(InvalidInputError, match="takes no bytes"):
        decoder(schema, [], columns_of(schema))


@pytest.mark.timeout(20)
def test_a_decimal_is_no_longer_than_its_digits() -> None:
    """fastavro takes two minutes for one of a megabyte."""
    schema = record(x={"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2})
    value = b"\x80\x89\x7a" + b"\x7f" * 1_000_000
    batch = pa.record_batch({"value": pa.array([value], pa.binary())})
    with pytest.raises(InvalidInputError, match="a decimal of 9 digits in 1000000 bytes"):
        next(decoder(schema, [], columns_of(schema))(iter([batch])))


def test_columns_there_and_back() -> None:
    inner = StructType([StructField("c", StringType()), StructField("d", TimestampType())])
    columns = StructType(
        [
            StructField("a", IntegerType(), nullable=False),
            StructField("b", ArrayType(inner)),
            StructField("e", MapType(StringType(), DecimalType(5, 1))),
            StructField("f", DateType()),
            StructField("g", BinaryType()),
        ]
    )
    assert columns_of(avro_schema(columns)) == columns


def test_rows_there_and_back() -> None:
    columns = StructType(
        [
            StructField("at", TimestampType()),
            StructField("price", DecimalType(9, 2)),
            StructField("tags", ArrayType(StringType())),
            StructField("sizes", MapType(StringType(), IntegerType())),
            StructField("inside", StructType([StructField("raw", BinaryType())])),
        ]
    )
    rows = [
        {
            "at": datetime(2026, 11, 16, 6, 0, 0, 123456, tzinfo=timezone.utc),
            "price": Decimal("12.34"),
            "tags": ["a", None],
            "sizes": {"m": 3},
            "inside": {"raw": b"\x00\xff"},
        },
        dict.fromkeys(columns.names),
    ]
    schema = to_arrow_schema(columns, timezone="UTC")
    arrays = [pa.array([row[name] for row in rows], schema.field(name).type) for name in columns.names]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    (packed,) = encoder(columns, None)(iter([batch]))
    (back,) = decoder(avro_schema(columns), [], columns)(iter([packed]))
    assert back.equals(batch)
