"""Columns inside values: JSON, Avro, Arrow.

- ``json``: a value is an object; fields that are missing are null.
- ``avro``: a value is one Avro record without container; the schema is Avro's own JSON (``avro.py``).
- ``arrow``: a value is an Arrow IPC stream of any number of rows, so a record becomes many rows.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Literal

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it
from pyspark.sql.types import StructField, StructType

from rayqueue.errors import InvalidInputError
from rayqueue.spark.avro import columns_of, decoder, encoder

ValueFormat = Literal["json", "avro", "arrow"]
_FORMATS = ("json", "avro", "arrow")
_PACKED = "_rayqueue_value"


def decode_values(df: DataFrame, schema: str | StructType, value_format: ValueFormat = "json") -> DataFrame:
    """The DataFrame with the fields of its values as columns, in place of ``value``. Null values have null fields."""
    _check(value_format)
    own = [name for name in df.columns if name != "value"]
    if value_format == "arrow":
        return _decode_arrow(df, schema, own)
    if value_format == "avro":
        return _decode_avro(df, schema, own)
    fields = df.withColumn(_PACKED, F.from_json(F.col("value").cast("string"), schema))
    _check_names(own, fields.select(f"{_PACKED}.*").columns)
    return fields.select(*own, f"{_PACKED}.*")


def encode_values(df: DataFrame, value_format: ValueFormat = "json", *, key: str | None = None) -> DataFrame:
    """The DataFrame packed into ``value``, with ``key`` from one of its columns. Arrow: many rows in one value."""
    _check(value_format)
    if value_format == "arrow":
        if key is not None:
            raise InvalidInputError("a value in Arrow has many rows, so none of them can be the key")
        return df.mapInArrow(_pack_arrow, "value binary")
    keys = [] if key is None else [F.col(key).cast("string").alias("key")]
    if value_format == "avro":
        keyed = df if key is None else df.withColumn(_PACKED, F.col(key).cast("string"))
        pack = encoder(df.schema, None if key is None else _PACKED)
        return keyed.mapInArrow(pack, "value binary" if key is None else "value binary, key string")
    return df.select(F.to_json(F.struct(*[F.col(name) for name in df.columns])).alias("value"), *keys)


def _check(value_format: str) -> None:
    if value_format not in _FORMATS:
        raise InvalidInputError(f"values are {', '.join(_FORMATS)}, not {value_format!r}", option="value_format")


def _check_names(own: list[str], inside: list[str]) -> None:
    for name in inside:
        if name in own:
            raise InvalidInputError(
                f"field {name!r} is in the values and a column of records: select fewer columns, or rename it",
                column=name,
            )


def _decode_avro(df: DataFrame, schema: str | StructType, own: list[str]) -> DataFrame:
    if not isinstance(schema, str):
        raise InvalidInputError("the schema of Avro values is Avro's own, as JSON text", option="value_schema")
    fields = columns_of(schema)
    _check_names(own, fields.names)
    kept = [StructField(name, df.schema[name].dataType, df.schema[name].nullable) for name in own]
    # A record without value has no fields, whatever the schema says.
    found = [StructField(field.name, field.dataType, True) for field in fields.fields]
    whole = StructType([*kept, *found])
    return df.mapInArrow(decoder(schema, own, whole), whole)


def _pack_arrow(batches: Iterator[Any]) -> Iterator[Any]:
    import pyarrow as pa

    for batch in batches:
        if batch.num_rows:
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, batch.schema) as stream:
                stream.write_batch(batch)
            yield pa.record_batch({"value": pa.array([sink.getvalue()], pa.binary())})


def _decode_arrow(df: DataFrame, schema: str | StructType, own: list[str]) -> DataFrame:
    fields = schema if isinstance(schema, StructType) else StructType.fromDDL(schema)
    if not isinstance(fields, StructType):
        raise InvalidInputError(f"values have fields, as in 'id long, name string'; {schema!r} has none")
    kept = StructType([StructField(name, df.schema[name].dataType) for name in own])
    whole = StructType([*kept.fields, *fields.fields])

    def unpack(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        target = to_arrow_schema(whole, timezone="UTC")
        inside = to_arrow_schema(fields, timezone="UTC")
        for batch in batches:
            values = batch.column("value")
            for row in range(batch.num_rows):
                if not values[row].is_valid:
                    continue
                with pa.ipc.open_stream(values[row].as_buffer()) as stream:
                    table = stream.read_all().select(inside.names).cast(inside)
                if not table.num_rows:
                    continue
                around = [pa.repeat(batch.column(name)[row], table.num_rows) for name in own]
                columns = [*around, *(column.combine_chunks() for column in table.columns)]
                arrays = [
                    column.cast(field.type) if column.type != field.type else column
                    for column, field in zip(columns, target, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=target)

    return df.mapInArrow(unpack, whole)
