"""Writing a DataFrame, once or as a stream. Tasks stage, the driver publishes.

What a task wrote counts only if the driver has its message, so retried,
speculative and dying tasks leave nothing behind. A stream's micro-batch is
published once whatever happens to the driver (``rayqueue.bridge.publish``).

``delivery=at_least_once`` leaves the staging out: tasks write to the topic, and a
task that is run again writes again.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rayqueue.bridge.connection import Where
from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.publish import DirectWriter, Publisher, publish_once
from rayqueue.bridge.rows import Rows, RowSettings, check_write_columns
from rayqueue.bridge.staging import SHARED, Hold, Piece, StageWriter, ensure_staging
from rayqueue.client.connection import RayQueue
from rayqueue.spark.options import WriteOptions
from rayqueue.spark.worker import connected


@dataclass
class Staged(WriterCommitMessage):
    """What one task has staged."""

    pieces: list[Piece] = field(default_factory=list)


class _Task:
    """What both writers do in a task. Travels to the executors."""

    def __init__(self, options: WriteOptions, staging: str, job: str | None) -> None:
        self.options = options
        self.staging = staging
        self.job = job

    def write(self, batches: Iterable[Any]) -> Staged:
        options = self.options
        rq = connected(options.where)
        topics = Lookup(rq).topics(options.topics)
        context = TaskContext.get()
        number = context.partitionId() if context is not None else 0
        settings = RowSettings(
            topic=options.topic,
            partitioner=options.partitioner,
            compression=options.compression,
            batch_bytes=options.batch_bytes,
            max_batch_bytes=rq.settings.log.max_batch_bytes,
            lane=options.lane,
        )
        rows = Rows(topics, settings, seed=number)
        sink: StageWriter | DirectWriter
        if options.exactly_once:
            stage = number % options.staging_partitions
            before = self._before if self.job is not None else None
            sink = StageWriter(rq, self.staging, stage, before=before, inline_bytes=options.inline_bytes)
        else:
            sink = DirectWriter(rq)
        for batch in batches:
            sink.add(rows.add(batch))
        sink.add(rows.finish())
        return Staged(sink.finish())

    def _before(self, stage: int) -> None:
        """The first thing that is staged of a job that shares its staging topic."""
        rq = connected(self.options.where)
        self.make_staging(rq, shared=True)
        Hold(rq, self.staging, self.job or "").take(stage)

    def make_staging(self, rq: RayQueue, *, shared: bool) -> None:
        infos = Lookup(rq).topics(self.options.topics)
        replication = max(info.settings.replication for info in infos.values())
        ensure_staging(
            rq, self.staging, partitions=self.options.staging_partitions, replication=replication, shared=shared
        )


class TopicWriter(DataSourceArrowWriter):
    """A DataFrame that is written once."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_write_columns(schema.names)
        named = options.writer is not None
        staging = staging_of(options.writer) if options.writer is not None else SHARED
        self._task = _Task(options, staging, None if named else secrets.token_hex(8))
        if named and options.exactly_once:
            self._task.make_staging(connected(options.where), shared=False)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self._task.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        options, task = self._task.options, self._task
        rq = connected(options.where)
        if options.writer is not None and options.batch_id is not None:
            publisher(options.where, task.staging, options.writer).publish(options.batch_id, _pieces(messages))
            return
        pieces = _pieces(messages)
        publish_once(rq, pieces, task.staging)
        self._release(rq, pieces)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._release(connected(self._task.options.where), _pieces(messages))

    def _release(self, rq: RayQueue, pieces: Sequence[Piece]) -> None:
        task = self._task
        if task.job is not None and any(piece.stage >= 0 for piece in pieces):
            Hold(rq, task.staging, task.job).release(task.options.staging_partitions)


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """The micro-batches of a streaming query."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_write_columns(schema.names)
        self._task = _Task(options, staging_of(options.writer or ""), None)
        if options.exactly_once:
            self._task.make_staging(connected(options.where), shared=False)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self._task.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's
        options = self._task.options
        if options.exactly_once and options.writer is not None:
            publisher(options.where, self._task.staging, options.writer).publish(batchId, _pieces(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing: what was staged is trimmed after the next batch."""


def _pieces(messages: Sequence[WriterCommitMessage | None]) -> list[Piece]:
    return [piece for message in messages if isinstance(message, Staged) for piece in message.pieces]


def staging_of(writer: str) -> str:
    """The staging topic of a stream."""
    return f"spark-staging.{hashlib.blake2b(writer.encode(), digest_size=8).hexdigest()}"


_publishers: dict[tuple[Where, str, str], Publisher] = {}


def publisher(where: Where, staging: str, writer: str) -> Publisher:
    """This process's publisher for a stream. It remembers the last decision, so that the next need not look for it."""
    key = (where, staging, writer)
    known = _publishers.get(key)
    if known is None:
        known = _publishers[key] = Publisher(connected(where), staging, writer)
    return known
