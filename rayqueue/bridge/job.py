"""A job that writes rows: its tasks write them, its driver lets what counts be seen.

What Spark's writers and Ray Data's sink share. A ``Job`` travels to the tasks; all
of them must be told the same one. Any thread but the I/O thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.publish import abandon, publish
from rayqueue.bridge.rows import Rows, RowSettings
from rayqueue.bridge.task import INLINE_BYTES, TaskWriter, Write, Written, alone, joined
from rayqueue.client.handle import RayQueue


@dataclass(frozen=True, slots=True)
class Job:
    topics: tuple[str, ...]
    """Where rows may go."""
    rows: RowSettings
    writer: str | None = None
    """Whose batch it is. None: the job runs once."""
    batch_id: int | None = None
    staging: str = ""
    """The writer's staging topic in releases that had some."""
    inline_bytes: int = INLINE_BYTES
    direct: bool = False
    """What tasks write counts at once, so that one that is run again writes again."""
    timeout_ms: int | None = None
    """From the first row of a task until all can be seen. None: as long as the cluster allows."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def name(self) -> str:
        """Of the write."""
        if self.writer is not None and self.batch_id is not None:
            return f"{self.writer}/{self.batch_id}"
        return f"job.{self.token}"

    def write(self, rq: RayQueue, batches: Iterable[Any], task: int) -> Written:
        """What one task makes of its ``pyarrow.RecordBatch``es. Nothing counts before it is published."""
        log = rq.settings.log
        settings = replace(self.rows, max_batch_bytes=log.max_batch_bytes, transactional=not self.direct)
        rows = Rows(Lookup(rq).topics(self.topics), settings, seed=task)
        if self.direct:
            sink = TaskWriter(rq, partial(alone, rq), refuse_forgotten=False)
        else:
            sink = TaskWriter(rq, partial(joined, rq, self._write(rq)), inline_bytes=self.inline_bytes)
        with closing(sink):
            for batch in batches:
                sink.add(rows.add(batch))
            sink.add(rows.finish())
            return sink.finish()

    def publish(self, rq: RayQueue, told: Sequence[Written], identity: bytes = b"", *, name: str | None = None) -> bool:
        """Let what these tasks have written be seen. False if it was before. ``name``: as the tasks knew it."""
        return publish(rq, self._write(rq, identity, name), told)

    def abandon(self, rq: RayQueue, *, name: str | None = None) -> None:
        """Nothing that its tasks have written is to be seen. Changes nothing if it is decided that it is."""
        abandon(rq, self._write(rq, name=name))

    def _write(self, rq: RayQueue, identity: bytes = b"", name: str | None = None) -> Write:
        name = name or self.name
        timeout_ms = self.timeout_ms or rq.settings.cluster.max_transaction_timeout_ms
        if self.writer is None or self.batch_id is None:
            return Write(name, self.topics, timeout_ms)
        return Write(name, self.topics, timeout_ms, self.writer, self.batch_id, identity, self.staging)
