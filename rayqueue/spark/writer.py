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
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rayqueue.bridge.connection import Where
from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.publish import DirectWriter, Publisher, publish_once
from rayqueue.bridge.rows import Rows, RowSettings, check_write_columns
from rayqueue.bridge.staging import (
    SHARED,
    Hold,
    Piece,
    StageWriter,
    batch_hold,
    ensure_staging,
    job_hold,
    staging_ends,
)
from rayqueue.client.connection import RayQueue
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


class _Task:
    """What both writers do in a task. Travels to the executors."""

    def __init__(self, options: WriteOptions, *, stream: bool, floors: Sequence[int] = ()) -> None:
        self.options = options
        self.stream = stream
        self.floors = floors
        self.token = secrets.token_hex(8)

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
        query = _told(context, _QUERY_ID)
        sink: StageWriter | DirectWriter
        if options.exactly_once:
            staging = staging_of(options, query) if self.stream or options.writer is not None else SHARED
            stage = number % options.staging_partitions
            before = partial(self._before, rq, staging, _told(context, _BATCH_ID))
            sink = StageWriter(rq, staging, stage, before=before, inline_bytes=options.inline_bytes)
        else:
            sink = DirectWriter(rq)
        for batch in batches:
            sink.add(rows.add(batch))
        sink.add(rows.finish())
        return Staged(sink.finish(), query, self.token)

    def hold(self, rq: RayQueue, staging: str, batch_id: str | None) -> Hold:
        """What this job, or this attempt at a micro-batch, has staged."""
        named = batch_id if self.stream else self.options.batch_id
        name = job_hold(self.token) if named is None else batch_hold(int(named), self.token)
        return Hold(rq, staging, name, self.floors)

    def _before(self, rq: RayQueue, staging: str, batch_id: str | None, stage: int) -> None:
        """The first thing that this task stages."""
        make_staging(rq, self.options, staging)
        self.hold(rq, staging, batch_id).take(stage)


class TopicWriter(DataSourceArrowWriter):
    """A DataFrame that is written once."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_write_columns(schema.names)
        self._staging = SHARED if options.writer is None else staging_of(options, None)
        floors: Sequence[int] = ()
        if options.exactly_once:
            rq = connected(options.where)
            if options.writer is not None:
                make_staging(rq, options, self._staging)
            floors = staging_ends(rq, self._staging)
        self._task = _Task(options, stream=False, floors=floors)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self._task.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        options = self._task.options
        rq = connected(options.where)
        if options.writer is not None and options.batch_id is not None:
            _publish(options, self._staging, options.batch_id, messages)
        elif options.exactly_once:
            publish_once(rq, _pieces(messages), self._staging)
            self._release(rq)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """The job has failed: let go of what its tasks have staged, whichever of them have told of it."""
        options = self._task.options
        # Without a message of each task Spark has not called commit; with all of them, the batch may be decided.
        if options.exactly_once and (options.writer is None or None in messages):
            self._release(connected(options.where))

    def _release(self, rq: RayQueue) -> None:
        self._task.hold(rq, self._staging, None).release(trim=self._staging == SHARED)


class TopicStreamWriter(DataSourceStreamArrowWriter):
    """The micro-batches of a streaming query."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_write_columns(schema.names)
        self._task = _Task(options, stream=True)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self._task.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  # Spark's
        options = self._task.options
        if options.exactly_once and messages:
            _publish(options, staging_of(options, _first(messages).query), batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing: what was staged goes with the batch, which the query runs again when it is started again."""


def _publish(
    options: WriteOptions, staging: str, batch_id: int, messages: Sequence[WriterCommitMessage | None]
) -> None:
    if not messages:  # without tasks there are no rows
        return
    # Not by this writer's own token: Spark may have made another one for the commit than for the tasks.
    told = _first(messages)
    make_staging(connected(options.where), options, staging)
    publishing = publisher(options.where, staging, options.writer or told.query or "")
    identity = (told.query or "").encode()
    publishing.publish(batch_id, _pieces(messages), identity=identity, token=told.token)


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


def make_staging(rq: RayQueue, options: WriteOptions, staging: str) -> None:
    def replication() -> int:
        return max(info.settings.replication for info in Lookup(rq).topics(options.topics).values())

    ensure_staging(
        rq, staging, partitions=options.staging_partitions, replication=replication, shared=staging == SHARED
    )


_publishers: dict[tuple[Where, str, str], Publisher] = {}


def publisher(where: Where, staging: str, writer: str) -> Publisher:
    """This process's publisher for a stream. It remembers the last decision, so that the next need not look for it."""
    key = (where, staging, writer)
    known = _publishers.get(key)
    if known is None:
        known = _publishers[key] = Publisher(connected(where), staging, writer)
    return known
