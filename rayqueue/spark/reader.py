"""A bounded read: planned on the driver, one range of offsets per task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.ranges import split
from rayqueue.bridge.scan import read
from rayqueue.errors import InvalidInputError
from rayqueue.net.scan import Range
from rayqueue.spark.filters import Wanted
from rayqueue.spark.options import ReadOptions
from rayqueue.spark.schema import arrow_schema_of
from rayqueue.spark.worker import connected


@dataclass
class RangePartition(InputPartition):
    """The range of one task."""

    range: Range


def read_range(options: ReadOptions, partition: InputPartition, schema: Any) -> Iterator[Any]:
    """The records of one task, in Spark's Arrow types."""
    if isinstance(partition, RangePartition):  # Spark makes one of its own if there is nothing to read
        for batch in read(connected(options.where), partition.range, tuple(schema.names), options.scan):
            try:
                fitting = batch.cast(schema)
            except pa.ArrowInvalid as error:
                raise InvalidInputError(
                    f"{partition.range.topic_partition} has a timestamp that does not fit Spark's, which count "
                    f"microseconds ({error}): read without the column 'timestamp', or from another offset",
                    topic=partition.range.topic,
                    partition=partition.range.partition,
                ) from None
            yield fitting


class TopicReader(DataSourceReader):
    """Without push-down of filters: Spark 4.2 keeps what the last filtered query has planned for every later query of
    the same DataFrame, with or without filters, so that they miss records (ADR 14).
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema_of(schema)
        self._wanted = Wanted(partitions=options.partitions)

    def partitions(self) -> Sequence[InputPartition]:
        options, wanted = self._options, self._wanted
        lookup = Lookup(connected(options.where), committed=options.scan.committed)
        topics = [name for name in options.topics if wanted.topics is None or name in wanted.topics]
        ranges = lookup.ranges(
            topics,
            options.start,
            options.end,
            fail_on_data_loss=options.scan.fail_on_data_loss,
            wanted=wanted.wants,
        )
        parts = [part for whole in ranges for part in wanted.cut(whole)]
        if wanted.min_timestamp_ms is not None and parts:
            found = lookup.find({each.topic_partition: wanted.min_timestamp_ms for each in parts})
            parts = [replace(each, start=max(each.start, found[each.topic_partition])) for each in parts]
        pieces = split(parts, max_records=options.max_records_per_split, at_least=options.min_splits)
        return [RangePartition(each) for each in pieces]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_range(self._options, partition, self._schema)


class FilteredTopicReader(TopicReader):
    """With it, for DataFrames that are used in one query only: option ``pushFilters``."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        return self._wanted.push(filters)
