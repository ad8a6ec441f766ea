"""Where the rows of tasks wait until their job decides that they count.

A task of Spark or Ray Data may run twice, at the same time too, and may die
half way. So it does not write to the topic: it appends its batches to a staging
topic (or, if they are few, puts them into its message to the driver) and tells
the driver where they are. Only what a message that counts tells of is ever
published (``publish.py``); the rest is trimmed with it.

A stream has a staging topic of its own. Jobs that run once share one: each of
their tasks holds what it stages by a group's position, until the job is done,
and whoever is done trims what nobody holds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from rayqueue.bridge.append import Appends
from rayqueue.bridge.rows import Cut
from rayqueue.client.connection import RayQueue
from rayqueue.protocol.calls import Bounds, Commit, ForgetGroup, GetBounds, GetGroups, Position, Trim
from rayqueue.protocol.topics import TopicPartition

INLINE_BYTES = 64 * 1024
"""A task whose batches are smaller in all sends them with its message."""

SHARED = "bridge-staging"
_RETENTION_MS = 24 * 3600 * 1000
"""What a job that died has left in the shared topic is deleted after this."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A staged batch."""

    topic: str
    partition: int
    lane: int
    count: int
    stage: int = -1
    """Partition of the staging topic, or -1: the batch is here."""
    offset: int = 0
    payload: bytes = b""


class StageWriter:
    """One attempt of one task. Any thread but the I/O thread."""

    def __init__(
        self,
        rq: RayQueue,
        staging: str,
        stage: int,
        *,
        before: Callable[[int], None] | None = None,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        """``before`` is called with the stage before anything is staged, if anything is."""
        self._rq = rq
        self._before = before
        self._where = TopicPartition(staging, stage)
        self._inline_bytes = inline_bytes
        self._cuts: list[Cut] = []
        self._size_bytes = 0
        self._appends: Appends | None = None

    def add(self, cuts: Iterable[Cut]) -> None:
        for cut in cuts:
            self._size_bytes += len(cut.payload)
            if self._appends is None and self._size_bytes > self._inline_bytes:
                if self._before is not None:
                    self._before(self._where.partition)
                self._appends = self._rq.io.call(self._open())
                for earlier in self._cuts:
                    self._rq.io.call(self._appends.put(earlier.payload))
            if self._appends is not None:
                self._rq.io.call(self._appends.put(cut.payload))
                cut = cut._replace(payload=b"")
            self._cuts.append(cut)

    def finish(self) -> list[Piece]:
        """What was staged, all of it durable."""
        if self._appends is None:
            return [Piece(cut.topic, cut.partition, cut.lane, cut.count, payload=cut.payload) for cut in self._cuts]
        written = self._rq.io.call(self._appends.finish())
        stage = self._where.partition
        return [
            Piece(cut.topic, cut.partition, cut.lane, cut.count, stage, each.base_offset or 0)
            for cut, each in zip(self._cuts, written, strict=True)
        ]

    async def _open(self) -> Appends:
        return Appends(await self._rq.routes.partition(self._where), self._rq.settings.client)


def ensure_staging(rq: RayQueue, name: str, *, partitions: int, replication: int, shared: bool) -> None:
    """Make the staging topic if it is not there."""
    key = (rq.namespace, name)
    if key in _ensured:
        return
    limits: dict[str, Any] = {"retention_ms": _RETENTION_MS} if shared else {}
    rq.create_topic(
        name,
        if_missing=True,
        partitions=partitions,
        replication=replication,
        max_record_bytes=64 * 1024 * 1024,
        **limits,
    )
    _ensured.add(key)


_ensured: set[tuple[str, str]] = set()


class Hold:
    """What a job that runs once keeps in the shared staging topic until it is done."""

    def __init__(self, rq: RayQueue, staging: str, job: str) -> None:
        self._rq = rq
        self._staging = staging
        self._prefix = f"job.{job}."

    def take(self, stage: int) -> None:
        """From here on. By each task, before it stages anything."""
        bounds: Bounds = self._ask(stage, GetBounds())
        now_ms = str(int(time.time() * 1000)).encode()
        group = self._prefix + secrets.token_hex(8)
        self._ask(stage, Commit(group=group, generation=0, offsets={0: bounds.end}, metadata=now_ms))

    def release(self, stages: int) -> None:
        """The job is done, one way or the other: delete what nobody holds."""
        oldest_ms = int(time.time() * 1000) - _RETENTION_MS
        for stage in range(stages):
            # In this order: whoever begins to hold after the end was read needs nothing before it.
            bounds: Bounds = self._ask(stage, GetBounds())
            groups: dict[str, Position] = self._ask(stage, GetGroups())
            held = [bounds.end]
            for name, position in groups.items():
                if name.startswith(self._prefix) or _left(name, position, oldest_ms):
                    self._ask(stage, ForgetGroup(group=name))
                else:
                    held.append(position.offsets.get(0, 0))
            if min(held) > bounds.start:
                self._ask(stage, Trim(before=min(held)))

    def _ask(self, stage: int, call: Any) -> Any:
        async def ask() -> Any:
            return await (await self._rq.routes.partition(TopicPartition(self._staging, stage))).call(call)

        return self._rq.io.call(ask())


def _left(name: str, position: Position, oldest_ms: int) -> bool:
    """Whether this is the hold of a job that died long ago."""
    return name.startswith("job.") and position.metadata.isdigit() and int(position.metadata) < oldest_ms
