"""Writing a DataFrame, once or as a stream. Tasks stage, the driver publishes.

What a task wrote counts only if the driver has its message, so retried,
speculative and dying tasks leave nothing behind. A stream's micro-batch is
published once whatever happens to the driver (``rayqueue.bridge.publish``).

The writer of a stream is its query: the id that Spark draws for a new checkpoint
and keeps in it. Another checkpoint at the same place is another writer. Only
tasks are told the id, so it comes to the driver with their messages.

``delivery=at_least_once`` leaves the staging out: tasks write to the topic, and a
task that is run again writes again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rayqueue.bridge.connection import Where
from rayqueue.bridge.job import Job
from rayqueue.bridge.publish import Publisher
from rayqueue.bridge.rows import RowSettings, check_write_columns
from rayqueue.bridge.staging import SHARED, Piece
from rayqueue.errors import BridgeError
from rayqueue.protocol.topics import check_name
from rayqueue.spark.options import WriteOptions
from rayqueue.spark.worker import connected

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
"""What Spark tells the tasks of a micro-batch. The id of the query is the one in its checkpoint."""


@dataclass
class Staged(WriterCommitMessage):
    """What one task has staged."""

    pieces: list[Piece] = field(default_factory=list)
    query: str | None = None
    """The id of the query whose micro-batch it is, also inside of ``foreachBatch``."""
    token: str = ""
    """Of the hold of this attempt at the micro-batch."""


def _write(options: WriteOptions, job: Job, batches: Iterable[Any]) -> Staged:
    """What a task does, of either writer."""
    context = TaskContext.get()
    number = 0 if context is None else context.partitionId()
    query = _told(context, _QUERY_ID)
    return Staged(job.write(connected(options.where), batches, number), query, job.token)


def _job(options: WriteOptions, staging: str = SHARED) -> Job:
    rows = RowSettings(options.topic, options.partitioner, options.compression, options.batch_bytes, lane=options.lane)
    return Job(
        options.topics,
        rows,
        staging,
        stages=options.staging_partitions,
        inline_bytes=options.inline_bytes,
        direct=not options.exactly_once,
        batch_id=options.batch_id,
    )


class TopicWriter(DataSourceArrowWriter):
    """A DataFrame that is written once."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_write_columns(schema.names)
        self._options = options
        staging = SHARED if options.writer is None else staging_of(options, None)
        self._job = _job(options, staging)
        if options.exactly_once:
            self._job = self._job.begun(connected(options.where))

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _write(self._options, self._job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        if self._options.writer is not None:
            _publish(self._options, self._job, messages)
        elif self._options.exactly_once:
            self._job.publish(connected(self._options.where), _pieces(messages), None, b"")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The job has failed: let go of what its tasks have staged, whichever of them have told of it."""
        # Without a message of each task Spark has not called commit; with all of them, the batch may be decided.
        if self._options.exactly_once and (self._options.writer is None or None in messages):
            self._job.release(connected(self._options.where))


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """The micro-batches of a streaming query."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_write_columns(schema.names)
        self._options = options
        self._job = _job(options)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        job, context = self._job, TaskContext.get()
        if self._options.exactly_once:
            batch_id = _told(context, _BATCH_ID)
            staging = staging_of(self._options, _told(context, _QUERY_ID))
            job = replace(job, staging=staging, batch_id=None if batch_id is None else int(batch_id))
        return _write(self._options, job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's
        if self._options.exactly_once and messages:
            staging = staging_of(self._options, _first(messages).query)
            _publish(self._options, replace(self._job, staging=staging, batch_id=batchId), messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing: what was staged goes with the batch, which the query runs again when it is started again."""


def _publish(options: WriteOptions, job: Job, messages: Sequence[WriterCommitMessage | None]) -> None:
    if not messages:  # without tasks there are no rows
        return
    # Not by this writer's own token: Spark may have made another one for the commit than for the tasks.
    told = _first(messages)
    publishing = publisher(options.where, job.staging, options.writer or told.query or "")
    identity = (told.query or "").encode()
    replace(job, token=told.token).publish(connected(options.where), _pieces(messages), publishing, identity)


def _first(messages: Sequence[WriterCommitMessage | None]) -> Staged:
    """One of them: what they say of their query and attempt they all say."""
    for message in messages:
        if isinstance(message, Staged):
            return message
    raise BridgeError("Spark commits without a message of any task")


def _told(context: TaskContext | None, name: str) -> str | None:
    return None if context is None else context.getLocalProperty(name)


def _pieces(messages: Sequence[WriterCommitMessage | None]) -> list[Piece]:
    return [piece for message in messages if isinstance(message, Staged) for piece in message.pieces]


def staging_of(options: WriteOptions, query: str | None) -> str:
    """The staging topic of a writer. ``BridgeError`` if it cannot be known who that is."""
    if options.writer is not None:
        return f"spark-staging.{hashlib.blake2b(options.writer.encode(), digest_size=8).hexdigest()}"
    if query is None:
        raise BridgeError(
            f"Spark does not tell its tasks which query they belong to ({_QUERY_ID}), so a repeated micro-batch cannot "
            "be told from a new one. Set writerId, another one for each checkpoint, or delivery=at_least_once",
            option="writerId",
        )
    return f"spark-staging.{check_name('topic', query)}"


_publishers: dict[tuple[Where, str, str], Publisher] = {}


def publisher(where: Where, staging: str, writer: str) -> Publisher:
    """This process's publisher for a stream. It remembers the last decision, so that the next need not look for it."""
    key = (where, staging, writer)
    known = _publishers.get(key)
    if known is None:
        known = _publishers[key] = Publisher(connected(where), staging, writer)
    return known
