"""Format "rayqueue", as Spark knows it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from rayqueue.bridge.connection import Where
from rayqueue.spark.options import columns_option, read_options, stream_options, write_options
from rayqueue.spark.reader import FilteredTopicReader, TopicReader
from rayqueue.spark.schema import schema_of
from rayqueue.spark.stream import TopicStreamReader
from rayqueue.spark.worker import settle
from rayqueue.spark.writer import TopicStreamWriter, TopicWriter


class RayQueueDataSource(DataSource):
    defaults: ClassVar[Mapping[str, str]] = {}
    """Options that need not be given: where the session's queue is."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        settle()
        self._options: dict[str, str] = {**self.defaults, **{name.lower(): value for name, value in options.items()}}

    @classmethod
    def name(cls) -> str:
        return "rayqueue"

    def schema(self) -> StructType:
        return schema_of(columns_option(self._options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = read_options(self._options)
        return FilteredTopicReader(options, schema) if options.push_filters else TopicReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's names
        return TopicStreamReader(stream_options(self._options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        _no_overwrite(overwrite)
        return TopicWriter(write_options(self._options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        _no_overwrite(overwrite)
        return TopicStreamWriter(write_options(self._options, stream=True), schema)


def _no_overwrite(overwrite: bool) -> None:
    if overwrite:
        from rayqueue.errors import InvalidInputError

        raise InvalidInputError("a topic is a log: use mode('append') or outputMode('append' or 'update')")


def source_for(where: Where) -> type[RayQueueDataSource]:
    """The format with the place of a queue built in.

    A class of its own per queue, which travels to Spark's workers with its attributes.
    """
    defaults = {"address": where.address or "", "namespace": where.namespace or ""}
    return type("SessionRayQueueDataSource", (RayQueueDataSource,), {"defaults": defaults})
