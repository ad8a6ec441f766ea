"""One-liners between topics and DataFrames."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from rayqueue.bridge.connection import where
from rayqueue.bridge.task import INLINE_BYTES
from rayqueue.client.handle import RayQueue
from rayqueue.config import MIB
from rayqueue.errors import InvalidInputError
from rayqueue.spark.schema import schema_of
from rayqueue.spark.values import ValueFormat, decode_values, encode_values

OWN = frozenset({"spark", "columns", "value_schema", "value_format", "key"})
"""Arguments that are no options of format "rayqueue"."""


def to_dataframe(
    rq: RayQueue,
    topic: str | Sequence[str],
    *,
    spark: SparkSession | None = None,
    columns: Sequence[str] | None = None,
    value_schema: str | StructType | None = None,
    value_format: ValueFormat = "json",
    startingOffsets: str = "earliest",
    endingOffsets: str = "latest",
    startingTimestamp: str | int | None = None,
    endingTimestamp: str | int | None = None,
    partitions: str | int | None = None,
    maxRecordsPerSplit: int | None = None,
    minPartitions: int = 0,
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
    failOnDataLoss: bool = True,
    onCorrupt: Literal["raise", "skip"] = "raise",
    readFrom: Literal["closest", "leader"] = "closest",
    fetchBytes: int = 4 * MIB,
    pushFilters: bool = False,
) -> DataFrame:
    """The records of a topic, as of now. The options are those of format "rayqueue" (``docs/spark.md``).

    With ``value_schema`` the fields inside the values are columns beside the record's own.
    """
    options = _options(rq, topic, to_dataframe, locals())
    reader = _session(spark).read.format("rayqueue").options(**options)
    frame = reader.schema(schema_of(columns)).load() if columns is not None else reader.load()
    return frame if value_schema is None else decode_values(frame, value_schema, value_format)


def stream_dataframe(
    rq: RayQueue,
    topic: str | Sequence[str],
    *,
    spark: SparkSession | None = None,
    columns: Sequence[str] | None = None,
    value_schema: str | StructType | None = None,
    value_format: ValueFormat = "json",
    startingOffsets: str = "latest",
    startingTimestamp: str | int | None = None,
    partitions: str | int | None = None,
    maxRecordsPerSplit: int | None = None,
    minPartitions: int = 0,
    maxRecordsPerTrigger: int | None = None,
    maxBytesPerTrigger: int | None = None,
    group: str | None = None,
    pin: bool = False,
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed",
    failOnDataLoss: bool = True,
    onCorrupt: Literal["raise", "skip"] = "raise",
    readFrom: Literal["closest", "leader"] = "closest",
    fetchBytes: int = 4 * MIB,
    pushFilters: bool = False,
) -> DataFrame:
    """The records of a topic from now on, or from where ``startingOffsets`` says, as a streaming DataFrame."""
    options = _options(rq, topic, stream_dataframe, locals())
    reader = _session(spark).readStream.format("rayqueue").options(**options)
    frame = reader.schema(schema_of(columns)).load() if columns is not None else reader.load()
    return frame if value_schema is None else decode_values(frame, value_schema, value_format)


def from_dataframe(
    rq: RayQueue,
    df: DataFrame,
    topic: str,
    *,
    key: str | None = None,
    value_format: ValueFormat | None = None,
    topics: str | None = None,
    delivery: Literal["exactly_once", "at_least_once"] = "exactly_once",
    writerId: str | None = None,
    batchId: int | None = None,
    partitioner: Literal["consistent", "murmur2"] = "consistent",
    compression: Literal["none", "lz4", "zstd"] = "none",
    lane: int = 0,
    batchBytes: int = MIB // 2,
    inlineBytes: int = INLINE_BYTES,
    transactionTimeoutMs: int | None = None,
) -> None:
    """Write a DataFrame to a topic: its columns value, key, headers and so on. The options are those of format
    "rayqueue" (``docs/spark.md``).

    With ``value_format`` all columns are packed into values, and the one named by ``key`` is the key too.
    """
    options = _options(rq, topic, from_dataframe, locals())
    if value_format is not None:
        df = encode_values(df, value_format, key=key)
    elif key is not None:
        raise InvalidInputError("key names a column that is packed: say value_format, or rename it to 'key'")
    df.write.format("rayqueue").options(**options).mode("append").save()


def options_of(call: Callable[..., Any]) -> dict[str, Any]:
    """The options of format "rayqueue" among its arguments, with their defaults."""
    named = inspect.signature(call).parameters.values()
    return {each.name: each.default for each in named if each.kind is each.KEYWORD_ONLY and each.name not in OWN}


def _session(spark: SparkSession | None) -> SparkSession:
    active = spark if spark is not None else SparkSession.getActiveSession()
    if active is None:
        raise InvalidInputError("there is no Spark session: start one by rayqueue.spark.session(rq)")
    return active


def _options(
    rq: RayQueue, topic: str | Sequence[str], call: Callable[..., Any], given: Mapping[str, Any]
) -> dict[str, str]:
    """Those that are not left as they are: some exclude one another."""
    place = where(rq)
    names = topic if isinstance(topic, str) else ",".join(topic)
    chosen = {name: text_of(given[name]) for name, default in options_of(call).items() if given[name] != default}
    return {"address": place.address or "", "namespace": place.namespace or "", "topic": names, **chosen}


def text_of(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
