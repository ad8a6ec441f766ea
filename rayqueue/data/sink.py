"""Writing a Dataset to a topic: all of it or nothing, each row once.

Tasks stage, as Spark's do (``rayqueue.bridge.staging``), and the driver publishes
what the tasks that counted have staged. A task that is retried leaves nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from ray.data.block import Block, BlockAccessor
from ray.data.datasource import Datasink, WriteResult

from rayqueue.bridge.connection import connected, where
from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.publish import Publisher, publish_once
from rayqueue.bridge.rows import WRITE_COLUMNS, Rows, RowSettings
from rayqueue.bridge.staging import SHARED, Hold, Piece, StageWriter, ensure_staging
from rayqueue.client.connection import RayQueue
from rayqueue.errors import InvalidInputError
from rayqueue.protocol.topics import check_name
from rayqueue.records import Compression


class TopicSink(Datasink):  # type: ignore[type-arg]
    """Rows with columns value, key, headers, topic, partition, timestamp, lane go to a topic.

    With ``writer`` and ``batch_id`` the same pair is written once, whatever happens to this process and however often
    it is run again: a pipeline that crashed may be started again from its checkpoint. Without, a job that dies while
    it publishes may leave some of its rows.
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
    ) -> None:
        """``columns``: those to write; the others are left out. Without it, any other column is an error."""
        if (writer is None) != (batch_id is None):
            raise InvalidInputError("writer and batch_id belong together: the same pair is written once")
        self._where = where(rq)
        self._topic = check_name("topic", topic)
        self._columns = None if columns is None else [name for name in columns if name in WRITE_COLUMNS]
        self._settings = RowSettings(
            topic=topic,
            partitioner=partitioner,
            compression=Compression[compression.upper()],
            max_batch_bytes=rq.settings.log.max_batch_bytes,
        )
        self._writer = None if writer is None else check_name("writer", writer)
        self._batch_id = batch_id
        self._staging = SHARED if writer is None else f"data-staging.{writer}"
        self._job = secrets.token_hex(8)

    def get_name(self) -> str:
        return "RayQueue"

    def on_write_start(self, schema: Any = None) -> None:
        if self._writer is not None:
            self._make_staging(connected(self._where), shared=False)

    def write(self, blocks: Iterable[Block], ctx: Any) -> list[Piece]:
        rq = connected(self._where)
        rows = Rows(Lookup(rq).topics([self._topic]), self._settings, seed=ctx.task_idx)
        before = self._before if self._writer is None else None
        staged = StageWriter(rq, self._staging, 0, before=before)
        for block in blocks:
            table = BlockAccessor.for_block(block).to_arrow()
            if self._columns is not None:
                table = table.select([name for name in self._columns if name in table.column_names])
            for batch in table.to_batches(max_chunksize=20_000):
                staged.add(rows.add(batch))
        staged.add(rows.finish())
        return staged.finish()

    def on_write_complete(self, write_result: WriteResult[list[Piece]]) -> None:
        rq = connected(self._where)
        pieces = [piece for told in write_result.write_returns for piece in told]
        if self._writer is not None and self._batch_id is not None:
            Publisher(rq, self._staging, self._writer).publish(self._batch_id, pieces)
            return
        publish_once(rq, pieces, self._staging)
        self._release(rq, pieces)

    def _before(self, stage: int) -> None:
        rq = connected(self._where)
        self._make_staging(rq, shared=True)
        Hold(rq, self._staging, self._job).take(stage)

    def _make_staging(self, rq: RayQueue, *, shared: bool) -> None:
        replication = Lookup(rq).topics([self._topic])[self._topic].settings.replication
        ensure_staging(rq, self._staging, partitions=1, replication=replication, shared=shared)

    def _release(self, rq: RayQueue, pieces: list[Piece]) -> None:
        if any(piece.stage >= 0 for piece in pieces):
            Hold(rq, self._staging, self._job).release(1)
