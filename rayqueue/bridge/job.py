"""A job that writes rows: its tasks stage them, its driver publishes what counts or lets go of it.

What Spark's writers and Ray Data's sink share. A ``Job`` travels to the tasks; all
of them must be told the same one. Any thread but the I/O thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.publish import DirectWriter, Publisher, publish_once
from rayqueue.bridge.rows import Rows, RowSettings
from rayqueue.bridge.staging import (
    INLINE_BYTES,
    SHARED,
    Hold,
    Piece,
    StageWriter,
    batch_hold,
    ensure_staging,
    job_hold,
    staging_ends,
)
from rayqueue.client.handle import RayQueue


@dataclass(frozen=True, slots=True)
class Job:
    topics: tuple[str, ...]
    """Where rows may go."""
    rows: RowSettings
    staging: str = SHARED
    """The staging topic: a writer has its own."""
    stages: int = 1
    """Partitions of the staging topic, if it is made now."""
    inline_bytes: int = INLINE_BYTES
    direct: bool = False
    """Tasks write to the topics themselves, so that one that is run again writes again."""
    batch_id: int | None = None
    """Of the batch of its writer that it is an attempt at. None: the job runs once."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Names the hold of what it stages."""
    floors: tuple[int, ...] = ()
    """Where the stages ended before it began."""

    def begun(self, rq: RayQueue) -> Job:
        """The same with its floors. By the driver, before the first task."""
        if self.staging != SHARED:
            self._make_staging(rq)
        return replace(self, floors=staging_ends(rq, self.staging))

    def write(self, rq: RayQueue, batches: Iterable[Any], task: int) -> list[Piece]:
        """What one task makes of its ``pyarrow.RecordBatch``es. Nothing counts before it is published."""
        settings = replace(self.rows, max_batch_bytes=rq.settings.log.max_batch_bytes)
        rows = Rows(Lookup(rq).topics(self.topics), settings, seed=task)
        sink: StageWriter | DirectWriter
        if self.direct:
            sink = DirectWriter(rq)
        else:
            before = partial(self._before, rq)
            sink = StageWriter(rq, self.staging, task % self.stages, before=before, inline_bytes=self.inline_bytes)
        for batch in batches:
            sink.add(rows.add(batch))
        sink.add(rows.finish())
        return sink.finish()

    def publish(self, rq: RayQueue, pieces: Sequence[Piece], publisher: Publisher | None, identity: bytes) -> None:
        """Make these pieces records, by the publisher of the writer whose batch it is, if it is one. The driver."""
        if publisher is not None and self.batch_id is not None:
            self._make_staging(rq)
            publisher.publish(self.batch_id, pieces, identity=identity, token=self.token)
        else:
            publish_once(rq, pieces, self.staging)
            self.release(rq)

    def release(self, rq: RayQueue) -> None:
        """Let go of what its tasks have staged. Not if it may be decided already: then it is needed."""
        self._hold(rq).release(trim=self.staging == SHARED)

    def _before(self, rq: RayQueue, stage: int) -> None:
        """The first thing that a task stages."""
        self._make_staging(rq)
        self._hold(rq).take(stage)

    def _hold(self, rq: RayQueue) -> Hold:
        name = job_hold(self.token) if self.batch_id is None else batch_hold(self.batch_id, self.token)
        return Hold(rq, self.staging, name, self.floors)

    def _make_staging(self, rq: RayQueue) -> None:
        def replication() -> int:
            return max(info.settings.replication for info in Lookup(rq).topics(self.topics).values())

        shared = self.staging == SHARED
        ensure_staging(rq, self.staging, partitions=self.stages, replication=replication, shared=shared)
