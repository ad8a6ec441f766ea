"""Writing a Dataset to a topic: all of it or nothing, each row once.

Tasks write, each in a transaction of its own, as Spark's do (``rayqueue.bridge``), and
the driver lets what the tasks that counted have written be seen.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ray.data.block import Block, BlockAccessor
from ray.data.datasource import Datasink, WriteResult

from rayqueue.bridge.connection import connected, where
from rayqueue.bridge.job import Job
from rayqueue.bridge.rows import WRITE_COLUMNS, RowSettings
from rayqueue.bridge.task import Written
from rayqueue.client.handle import RayQueue
from rayqueue.data.follow import Part
from rayqueue.errors import InvalidInputError, RayQueueError
from rayqueue.protocol.topics import MAX_NAME, check_name
from rayqueue.records import Compression

_log = logging.getLogger(__name__)

_STAGING = "data-staging."
_MAX_WRITER = MAX_NAME - len(_STAGING)


class TopicSink(Datasink):  # type: ignore[type-arg]
    """Rows with columns value, key, headers, topic, partition, timestamp, lane go to a topic.

    With ``part``, the part of ``follow_topic`` of which the rows are made, it is written once, whatever happens to this
    process and however often it is run again. So is, with ``writer`` and ``batch_id``, an id of your own. An id is
    skipped only if it is known to be written; if that is forgotten (``BatchForgottenError``), or it was written for
    other contents (``BatchConflictError``), nothing is written.

    Whoever reads what is committed (``isolation="read_committed"``) sees all rows at once, or none.
    """

    def __init__(
        self,
        rq: RayQueue,
        topic: str,
        *,
        columns: Iterable[str] | None = None,
        partitioner: str = "consistent",
        compression: str = "none",
        writer: str | None = None,
        batch_id: int | None = None,
        part: Part | None = None,
        timeout_ms: int | None = None,
    ) -> None:
        """``columns``: those to write; the others are left out. Without it, any other column is an error.

        The writer of parts is their checkpoint, as far as it writes to this topic, unless ``writer`` names another:
        it must be one of its own for each thing that is made of the same parts. ``timeout_ms``: how long it may take
        from the first row that a task writes; without it, as long as the cluster allows.
        """
        if part is not None:
            if batch_id is not None:
                raise InvalidInputError("a part has an id: give part or batch_id, not both")
            writer, batch_id = writer or writer_of(part.checkpoint, topic), part.id
        if (writer is None) != (batch_id is None):
            raise InvalidInputError("writer and batch_id belong together: the same pair is written once")
        self._where = where(rq)
        self._columns = None if columns is None else [name for name in columns if name in WRITE_COLUMNS]
        if writer is not None:
            check_name("writer", writer)
        self._identity = b"" if part is None else part.identity
        self._job = Job(
            (check_name("topic", topic),),
            RowSettings(topic=topic, partitioner=partitioner, compression=Compression[compression.upper()]),
            writer=None if writer is None else f"data.{writer}",
            batch_id=batch_id,
            staging="" if writer is None else f"{_STAGING}{writer}",
            timeout_ms=timeout_ms,
        )

    def get_name(self) -> str:
        return "RayQueue"

    def on_write_start(self, schema: Any = None) -> None:
        """Another run of the same sink is another write."""
        self._job = replace(self._job, token=secrets.token_hex(8))

    def write(self, blocks: Iterable[Block], ctx: Any) -> Written:
        return self._job.write(connected(self._where), self._batches(blocks), ctx.task_idx)

    def on_write_complete(self, write_result: WriteResult[Written]) -> None:
        self._job.publish(connected(self._where), write_result.write_returns, self._identity)

    def on_write_failed(self, error: Exception) -> None:
        """Let go of what the tasks have written, so that readers need not wait for it."""
        try:
            self._job.abandon(connected(self._where))
        except RayQueueError as problem:  # what the job failed of is what its caller should see
            _log.warning("what a failed job has written is open until its time is up: %s", problem)

    def _batches(self, blocks: Iterable[Block]) -> Iterator[Any]:
        for block in blocks:
            table = BlockAccessor.for_block(block).to_arrow()
            if self._columns is not None:
                table = table.select([name for name in self._columns if name in table.column_names])
            yield from table.to_batches(max_chunksize=20_000)


def writer_of(checkpoint: str, topic: str) -> str:
    """The writer of what is made of a checkpoint's parts for a topic."""
    name = f"{checkpoint}.{topic}"
    if len(name) <= _MAX_WRITER:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return f"{name[: _MAX_WRITER - len(digest) - 1]}.{digest}"
