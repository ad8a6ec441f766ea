"""Staging topics: the rows of tasks wait in them until their job decides that they count.

A task of Spark or Ray Data may run twice, at the same time too, and may die
half way. So it does not write to the topic: it appends its batches to a staging
topic (or, if they are few, puts them into its message to the driver) and tells
the driver where they are. Only what a message that counts tells of is ever
published (``publish.py``); the rest is trimmed with it.

A writer has a staging topic of its own; jobs that run once share one. Either way
each job holds what it stages, by the position of a group that all its tasks
share, from before the first row is staged until the job is done, and whoever
trims leaves what is held. A hold is named ``job.<token>``, or
``batch.<id>.<token>`` where the job is an attempt at a batch of a writer; of one
that is older than a day nobody will come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from rayqueue.bridge.append import Appends
from rayqueue.bridge.rows import Cut
from rayqueue.client.handle import RayQueue
from rayqueue.errors import BridgeError, InvalidInputError, StagedDataLostError, TopicDiffersError, TopicError
from rayqueue.net.interfaces import ask
from rayqueue.protocol.calls import Bounds, Commit, ForgetGroup, GetBounds, GetGroups, GetTopics, Position, Topics, Trim
from rayqueue.protocol.topics import TopicPartition

INLINE_BYTES = 64 * 1024
"""A task whose batches are smaller in all sends them with its message."""

SHARED = "bridge-staging"
_RETENTION_MS = 24 * 3600 * 1000
"""What a job that died has left in a staging topic is deleted after this."""


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
    topic_id: int = 0
    """Of the topic it is for. 0: decided by a release that did not keep it."""
    staging_id: int = 0
    """Of the staging topic it is in, the same."""

    @property
    def place(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class StageWriter:
    """One attempt of one task. Any thread but the I/O thread."""

    def __init__(
        self,
        rq: RayQueue,
        staging: str,
        stage: int,
        *,
        before: Callable[[int], None],
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        """``before`` is called with the stage before anything is staged, if anything is: the topic is there and what
        this task's job stages is held when it returns."""
        self._rq = rq
        self._before = before
        self._where = TopicPartition(staging, stage)
        self._topic_id = 0
        self._inline_bytes = inline_bytes
        self._cuts: list[Cut] = []
        self._size_bytes = 0
        self._appends: Appends | None = None

    def add(self, cuts: Iterable[Cut]) -> None:
        for cut in cuts:
            self._size_bytes += len(cut.payload)
            if self._appends is None and self._size_bytes > self._inline_bytes:
                self._before(self._where.partition)
                self._appends = self._rq.io.call(self._open())
                for number, earlier in enumerate(self._cuts):
                    self._rq.io.call(self._appends.put(earlier.payload))
                    self._cuts[number] = earlier._replace(payload=b"")
            if self._appends is not None:
                self._rq.io.call(self._appends.put(cut.payload))
                cut = cut._replace(payload=b"")
            self._cuts.append(cut)

    def finish(self) -> list[Piece]:
        """What was staged, all of it durable."""
        staged = self._appends is not None
        written = self._rq.io.call(self._appends.finish()) if self._appends is not None else [None] * len(self._cuts)
        return [
            Piece(
                cut.topic,
                cut.partition,
                cut.lane,
                cut.count,
                self._where.partition if staged else -1,
                0 if each is None else each.base_offset or 0,
                payload=cut.payload,
                topic_id=cut.topic_id,
                staging_id=self._topic_id,
            )
            for cut, each in zip(self._cuts, written, strict=True)
        ]

    async def _open(self) -> Appends:
        self._topic_id = (await self._rq.routes.topic(self._where.topic)).topic_id
        way = partial(self._rq.routes.partition, self._where, self._topic_id)
        return Appends(self._where, way, self._rq.settings.client, numbered=False)


# -- the topics ------------------------------------------------------------------------------

_ensured: set[tuple[str, str]] = set()


def ensure_staging(rq: RayQueue, name: str, *, partitions: int, replication: Callable[[], int], shared: bool) -> None:
    """Make the staging topic if it is not there. ``replication`` is asked only then, as far as this process knows."""
    key = (rq.namespace, name)
    if key in _ensured:
        return
    limits: dict[str, Any] = {"retention_ms": _RETENTION_MS} if shared else {}
    with suppress(TopicDiffersError):  # another job made it, or somebody altered it: it serves as it is
        rq.create_topic(
            name,
            if_missing=True,
            partitions=partitions,
            replication=replication(),
            max_record_bytes=64 * 1024 * 1024,
            **limits,
        )
    _ensured.add(key)


def staging_is_gone(rq: RayQueue, name: str) -> None:
    """It was deleted: whoever wants it next makes it again."""
    _ensured.discard((rq.namespace, name))


def staging_ends(rq: RayQueue, name: str) -> tuple[int, ...]:
    """Where each partition of a staging topic ends; () if there is no such topic, and none is made."""

    async def ends() -> tuple[int, ...]:
        found: Topics = await rq.routes.coordinator.call(GetTopics(names=(name,)))
        for info in found.topics:
            places = [TopicPartition(name, part.number) for part in info.partitions]
            bounds: list[Bounds] = [await ask(rq.routes, each, GetBounds(), topic_id=info.topic_id) for each in places]
            return tuple(each.end for each in bounds)
        return ()

    return rq.io.call(ends())


# -- holds -----------------------------------------------------------------------------------


def batch_hold(batch_id: int, token: str) -> str:
    """The name of the hold of one attempt at a batch."""
    return f"batch.{batch_id}.{token}"


def job_hold(token: str) -> str:
    """The name of the hold of a job that runs once."""
    return f"job.{token}"


def held_batch(name: str) -> int | None:
    """The batch that a hold is an attempt at, if it is one."""
    kind, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if kind == "batch" and number.removeprefix("-").isdigit() else None


class Hold:
    """What a job keeps in a staging topic until it is done."""

    def __init__(self, rq: RayQueue, staging: str, name: str, floors: Sequence[int] = ()) -> None:
        """``floors``: where the stages ended before the job began. All its tasks must be told the same: the first
        position counts, and one that is further on would let go of what another task has staged."""
        self._rq = rq
        self._staging = staging
        self.name = name
        self._floors = floors
        self._topic_id: int | None = None

    def take(self, stage: int) -> None:
        """By each task, before it stages anything. Any thread but the I/O thread."""
        self._rq.io.call(self.taken(stage))

    async def taken(self, stage: int) -> None:
        floor = self._floors[stage] if stage < len(self._floors) else 0
        call = Commit(group=self.name, generation=0, offsets={0: floor}, metadata=_now())
        try:
            await self._ask(stage, call)
        except InvalidInputError as error:
            if "limit" not in error.details:
                raise
            await self._forget(stage, lambda name: False)  # those of jobs that died long ago
            try:
                await self._ask(stage, call)
            except InvalidInputError:
                raise BridgeError(
                    f"{error.details['limit']} jobs stage rows in {self._staging!r} at the same time, or died in the "
                    "last 24 hours: no more can be held. Wait for some to end, or delete the topic when none runs",
                    topic=self._staging,
                    limit=error.details["limit"],
                ) from error

    async def renewed(self, stage: int) -> None:
        """Before a decision on what was staged: from now on it is held for another day. ``StagedDataLostError`` if it
        is not held any more, so that some of it may be trimmed."""
        position: Position = await self._ask(stage, Commit(group=self.name, generation=0, offsets={}, metadata=_now()))
        if not position.offsets:  # there was no such group before this call
            await self.dropped(stage)
            raise StagedDataLostError(
                f"what was staged in {self._staging!r} is not held any more: the job took more than a day, or another "
                "run has decided the batch. Nothing was written; run the job again",
                topic=self._staging,
                hold=self.name,
            )

    def release(self, *, trim: bool) -> None:
        """The job is done, one way or the other. Any thread but the I/O thread.

        ``trim``: delete what nobody holds. Not in a writer's topic, whose journal only its publisher may trim.
        """

        async def release() -> None:
            found: Topics = await self._rq.routes.coordinator.call(GetTopics(names=(self._staging,)))
            for stage in [part.number for info in found.topics for part in info.partitions]:
                await self.dropped(stage)
                if trim:
                    await self.trimmed(stage)

        self._rq.io.call(release())

    async def dropped(self, stage: int) -> None:
        """Let go, and leave the rest to whoever trims."""
        await self._ask(stage, ForgetGroup(group=self.name))

    async def trimmed(
        self, stage: int, *, before: int | None = None, drop: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Forget the holds to drop and those that are long dead, then delete what nobody holds, up to ``before``."""
        # In this order: whoever begins to hold after the end was read stages nothing before it.
        bounds: Bounds = await self._ask(stage, GetBounds())
        held = await self._forget(stage, drop)
        end = min(bounds.end if before is None else before, bounds.end, *held)
        if end > bounds.start:
            await self._ask(stage, Trim(before=end))

    async def _forget(self, stage: int, drop: Callable[[str], bool]) -> list[int]:
        """Forget holds. Where the others begin."""
        oldest_ms = int(time.time() * 1000) - _RETENTION_MS
        groups: dict[str, Position] = await self._ask(stage, GetGroups())
        held = []
        for name, position in groups.items():
            if not name.startswith(("job.", "batch.")):
                continue
            if drop(name) or _left(position, oldest_ms):
                await self._ask(stage, ForgetGroup(group=name))
            else:
                held.append(position.offsets.get(0, 0))
        return held

    async def _ask(self, stage: int, call: Any) -> Any:
        try:
            if self._topic_id is None:
                self._topic_id = (await self._rq.routes.topic(self._staging)).topic_id
            return await ask(self._rq.routes, TopicPartition(self._staging, stage), call, topic_id=self._topic_id)
        except TopicError:
            staging_is_gone(self._rq, self._staging)
            raise


def _now() -> bytes:
    """The metadata of a hold: when it was taken."""
    return str(int(time.time() * 1000)).encode()


def _left(position: Position, oldest_ms: int) -> bool:
    """Whether this is the hold of a job that died long ago."""
    return position.metadata.isdigit() and int(position.metadata) < oldest_ms


async def check_staged(rq: RayQueue, staging: str, topic_id: int, pieces: Iterable[Piece]) -> None:
    """``StagedDataLostError`` if a piece is not there any more."""
    first: dict[int, int] = {}
    for piece in pieces:
        if piece.stage >= 0:
            if piece.staging_id not in (0, topic_id):
                raise StagedDataLostError(
                    f"staging topic {staging!r} was deleted while tasks wrote to it. Nothing was written; run the job "
                    "again",
                    topic=staging,
                )
            first[piece.stage] = min(first.get(piece.stage, piece.offset), piece.offset)
    for stage, offset in first.items():
        bounds: Bounds = await ask(rq.routes, TopicPartition(staging, stage), GetBounds(), topic_id=topic_id)
        if offset < bounds.start:
            raise StagedDataLostError(
                f"what was staged at {offset} of {staging!r} is trimmed: the job took more than a day, or the staging "
                "topic was written to by others. Nothing was written; run the job again",
                topic=staging,
                offset=offset,
                start=bounds.start,
            )
