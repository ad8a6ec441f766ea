"""The columns of a topic as Spark types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rayqueue.bridge.frame import check_columns
from rayqueue.errors import InvalidInputError

HEADERS = ArrayType(
    StructType([StructField("name", StringType(), False), StructField("value", BinaryType(), False)]), False
)

_TYPES: dict[str, tuple[DataType, bool]] = {
    "topic": (StringType(), False),
    "partition": (IntegerType(), False),
    "offset": (LongType(), False),
    "timestamp": (TimestampType(), False),
    "key": (BinaryType(), True),
    "value": (BinaryType(), True),
    "headers": (HEADERS, False),
    "lane": (IntegerType(), False),
}


def schema_of(columns: Sequence[str]) -> StructType:
    return StructType([StructField(name, *_TYPES[name]) for name in check_columns(columns)])


def arrow_schema_of(schema: StructType) -> Any:
    """The Arrow schema that Spark expects for this one, which may leave out columns but not change their types."""
    from pyspark.sql.pandas.types import to_arrow_schema

    check_columns(schema.names)
    for field in schema.fields:
        wanted = _TYPES[field.name][0]
        same = field.dataType.simpleString() == wanted.simpleString()
        if not same:
            raise InvalidInputError(
                f"column {field.name!r} is {wanted.simpleString()}, not {field.dataType.simpleString()}",
                column=field.name,
            )
    return to_arrow_schema(schema, timezone="UTC")
