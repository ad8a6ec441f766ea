"""One-liners between topics and DataFrames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from rayqueue.bridge.connection import where
from rayqueue.client.handle import RayQueue
from rayqueue.errors import InvalidInputError
from rayqueue.spark.schema import schema_of
from rayqueue.spark.values import ValueFormat, decode_values, encode_values


def to_dataframe(
    rq: RayQueue,
    topic: str | Sequence[str],
    *,
    spark: SparkSession | None = None,
    columns: Sequence[str] | None = None,
    value_schema: str | StructType | None = None,
    value_format: ValueFormat = "json",
    **options: Any,
) -> DataFrame:
    """The records of a topic, as of now. ``options`` are those of format "rayqueue", and more by name:
    ``startingOffsets="latest"``.

    With ``value_schema`` the fields inside the values are columns beside the record's own.
    """
    spark = _session(spark)
    reader = spark.read.format("rayqueue").options(**_options(rq, topic, options))
    frame = reader.schema(schema_of(columns)).load() if columns is not None else reader.load()
    return frame if value_schema is None else decode_values(frame, value_schema, value_format)


def stream_dataframe(
    rq: RayQueue,
    topic: str | Sequence[str],
    *,
    spark: SparkSession | None = None,
    value_schema: str | StructType | None = None,
    value_format: ValueFormat = "json",
    **options: Any,
) -> DataFrame:
    """The records of a topic from now on, or from where ``startingOffsets`` says, as a streaming DataFrame."""
    spark = _session(spark)
    frame = spark.readStream.format("rayqueue").options(**_options(rq, topic, options)).load()
    return frame if value_schema is None else decode_values(frame, value_schema, value_format)


def from_dataframe(
    rq: RayQueue,
    df: DataFrame,
    topic: str,
    *,
    key: str | None = None,
    value_format: ValueFormat | None = None,
    **options: Any,
) -> None:
    """Write a DataFrame to a topic: its columns value, key, headers and so on.

    With ``value_format`` all columns are packed into values, and the one named by ``key`` is the key too.
    """
    if value_format is not None:
        df = encode_values(df, value_format, key=key)
    elif key is not None:
        raise InvalidInputError("key names a column that is packed: say value_format, or rename it to 'key'")
    df.write.format("rayqueue").options(**_options(rq, topic, options)).mode("append").save()


def _session(spark: SparkSession | None) -> SparkSession:
    active = spark if spark is not None else SparkSession.getActiveSession()
    if active is None:
        raise InvalidInputError("there is no Spark session: start one by rayqueue.spark.session(rq)")
    return active


def _options(rq: RayQueue, topic: str | Sequence[str], options: dict[str, Any]) -> dict[str, str]:
    place = where(rq)
    names = topic if isinstance(topic, str) else ",".join(topic)
    named = {"address": place.address or "", "namespace": place.namespace or "", "topic": names}
    return {**named, **{name: _text(value) for name, value in options.items()}}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
