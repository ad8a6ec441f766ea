"""Writing a DataFrame, once or as a stream. Tasks write, the driver lets it be seen.

What a task wrote counts only if the driver has its message, so retried,
speculative and dying tasks leave nothing that a reader of committed records sees.
A stream's micro-batch is written once, and seen at once, whatever happens to the
driver (``rayqueue.bridge.publish``).

The writer of a stream is its query: the id that Spark draws for a new checkpoint
and keeps in it. Another checkpoint at the same place is another writer. Only
tasks are told the id, so it comes to the driver with their messages.

``delivery=at_least_once`` leaves transactions out: what tasks write counts at once,
and a task that is run again writes again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rayqueue.bridge.job import Job
from rayqueue.bridge.rows import RowSettings, check_write_columns
from rayqueue.bridge.task import Written
from rayqueue.errors import BridgeError
from rayqueue.protocol.topics import check_name
from rayqueue.spark.options import WriteOptions
from rayqueue.spark.worker import connected

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"
"""What Spark tells the tasks of a micro-batch. The id of the query is the one in its checkpoint."""


@dataclass
class Done(WriterCommitMessage):
    """The report of one task."""

    written: Written = field(default_factory=Written)
    query: str | None = None
    """The id of the query whose micro-batch it is, also inside of ``foreachBatch``."""
    name: str = ""
    """Of the write that it has joined: Spark may have made another writer for the commit than for the tasks."""


def _write(options: WriteOptions, job: Job, batches: Iterable[Any]) -> Done:
    """The work of one task, of either writer."""
    context = TaskContext.get()
    number = 0 if context is None else context.partitionId()
    return Done(job.write(connected(options.where), batches, number), _told(context, _QUERY_ID), job.name)


def _job(options: WriteOptions) -> Job:
    rows = RowSettings(options.topic, options.partitioner, options.compression, options.batch_bytes, lane=options.lane)
    return Job(
        options.topics,
        rows,
        inline_bytes=options.inline_bytes,
        direct=not options.exactly_once,
        timeout_ms=options.timeout_ms,
    )


class TopicWriter(DataSourceArrowWriter):
    """A DataFrame that is written once."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_write_columns(schema.names)
        self._options = options
        self._job = _job(options)
        if options.writer is not None:
            self._job = _of_writer(self._job, options, None, options.batch_id)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _write(self._options, self._job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _publish(self._options, self._job, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The job has failed: let go of what its tasks have written, whichever of them have told of it."""
        if self._options.exactly_once:
            name = next((each.name for each in messages if isinstance(each, Done)), None)
            self._job.abandon(connected(self._options.where), name=name)


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
            number = None if batch_id is None else int(batch_id)
            job = _of_writer(job, self._options, _told(context, _QUERY_ID), number)
        return _write(self._options, job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's
        if self._options.exactly_once and messages:
            job = _of_writer(self._job, self._options, _first(messages).query, batchId)
            _publish(self._options, job, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Let go, if a task has told of it. The rest goes with the batch, which the query runs again when it is started
        again, or when its time is up."""
        told = [each for each in messages if isinstance(each, Done)]
        if self._options.exactly_once and told:
            self._job.abandon(connected(self._options.where), name=told[0].name)


def _publish(options: WriteOptions, job: Job, messages: Sequence[WriterCommitMessage | None]) -> None:
    if not messages or not options.exactly_once:  # without tasks there are no rows
        return
    told = _first(messages)
    written = [each.written for each in messages if isinstance(each, Done)]
    job.publish(connected(options.where), written, (told.query or "").encode(), name=told.name)


def _first(messages: Sequence[WriterCommitMessage | None]) -> Done:
    """One of them: what they say of their query and attempt they all say."""
    for message in messages:
        if isinstance(message, Done):
            return message
    raise BridgeError("Spark commits without a message of any task")


def _told(context: TaskContext | None, name: str) -> str | None:
    return None if context is None else context.getLocalProperty(name)


def _of_writer(job: Job, options: WriteOptions, query: str | None, batch_id: int | None) -> Job:
    """The same for a batch of its writer. ``BridgeError`` if it cannot be known who that is."""
    if options.writer is not None:
        name = hashlib.blake2b(options.writer.encode(), digest_size=8).hexdigest()
    elif query is not None:
        name = check_name("topic", query)
    else:
        raise BridgeError(
            f"Spark does not tell its tasks which query they belong to ({_QUERY_ID}), so a repeated micro-batch cannot "
            "be told from a new one. Set writerId, another one for each checkpoint, or delivery=at_least_once",
            option="writerId",
        )
    return replace(job, writer=f"spark.{name}", batch_id=batch_id, staging=f"spark-staging.{name}")
