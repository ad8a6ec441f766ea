"""The columns of a topic (``rayqueue.records.table``) as Spark types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from rayqueue.errors import InvalidInputError
from rayqueue.records import table


def schema_of(columns: Sequence[str]) -> StructType:
    return from_arrow_schema(table.schema_of(tuple(columns)), prefer_timestamp_ntz=False)


def arrow_schema_of(schema: StructType) -> Any:
    """The Arrow schema that Spark expects for this one, which may leave out columns but not change their types.

    It differs from the topic's own: Spark counts microseconds, and has its own names inside lists.
    """
    for field, known in zip(schema.fields, schema_of(schema.names).fields, strict=True):
        wanted, given = known.dataType.simpleString(), field.dataType.simpleString()
        if given != wanted:
            raise InvalidInputError(f"column {field.name!r} is {wanted}, not {given}", column=field.name)
    return to_arrow_schema(schema, timezone="UTC")
