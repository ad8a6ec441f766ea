"""The tasks of a consumer in the I/O thread: fetching, membership, commits by the clock, and answers to questions.

Knows nothing of ``Consumer``, so that one that the application has dropped
without closing it can be collected, and then ends this too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from random import Random
from typing import Literal, TypeVar

from rayqueue.client.consumer.assigned import AssignedPartition
from rayqueue.client.consumer.commits import Commits
from rayqueue.client.consumer.fetcher import Fetcher
from rayqueue.client.consumer.group import GroupMembership, LastPoll
from rayqueue.client.consumer.manual import ManualPartitions
from rayqueue.client.consumer.staging import Staging
from rayqueue.client.consumer.subscription import Subscription
from rayqueue.client.consumer.wanted import Options
from rayqueue.client.wakeup import Wakeup
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError, TopicError, TopicRecreatedError
from rayqueue.net.backoff import Retry
from rayqueue.net.interfaces import Routes, ask
from rayqueue.net.lasting import lasting
from rayqueue.net.requests import request
from rayqueue.net.scan import fetch
from rayqueue.protocol.calls import Bounds, FindOffset, GetBounds, GetLag, Lag, end_of
from rayqueue.protocol.data import ANY_LANE, READ_COMMITTED, Cursor, FetchAnswer, FetchRequest
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record, RecordBatch
from rayqueue.records.room import Room

_A = TypeVar("_A")
_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_MS = 5000


class ConsumerTasks:
    """Made by any thread; everything that is ``async`` runs in the I/O thread."""

    def __init__(self, routes: Routes, loop: asyncio.AbstractEventLoop, settings: Settings, options: Options) -> None:
        self.options = options
        self.wakeup = Wakeup()
        self.subscription = Subscription(
            settings.consumer, explicit=options.by_record, committed=options.reads_committed
        )
        self.last_poll = LastPoll(time.monotonic())
        self.started = False
        self.closed = False
        self._routes = routes
        self._loop = loop
        self._settings = settings
        self._rng = Random()  # noqa: S311 - names and jitter, no secrets
        self._fetcher = Fetcher(
            self.subscription, routes, settings, self._rng, grouped=self.managed, committed=options.reads_committed
        )
        self.commits = Commits(options.group, self.subscription, routes) if options.group else None
        self._membership: GroupMembership | None = None
        self._manual: ManualPartitions | None = None
        self._timer: asyncio.Task[None] | None = None
        self.subscription.on_data = self.wakeup.ring
        self.subscription.on_room = self._room

    @property
    def managed(self) -> bool:
        """The group says which partitions are read."""
        return self.options.group is not None and self.options.partitions is None

    @property
    def error(self) -> RayQueueError | None:
        reading = self._membership or self._manual
        return None if reading is None else reading.error

    @property
    def away(self) -> bool:
        return self._membership is not None and self._membership.away

    def _room(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fetcher.kick)

    # -- life ------------------------------------------------------------------------------

    async def check(self) -> None:
        """``UnknownTopicError`` if a topic is not there. With a pattern, none has to be."""
        await self.options.look(self._routes)
        for name in self.options.named:
            await self._routes.topic(name)

    async def start(self) -> None:
        if self.started or self.closed:
            return
        self.started = True
        parts = (self._routes, self.subscription, self._fetcher)
        if self.managed and self.commits is not None:
            self._membership = GroupMembership(
                *parts, self.commits, self._settings, self.options, self.last_poll, rng=self._rng
            )
            self._membership.start()
        else:
            self._manual = ManualPartitions(*parts, self.commits, self._settings, self.options, rng=self._rng)
            await self._manual.start()
        if self.commits is not None and (self.options.commits_itself or self.options.exactly_once):
            self._timer = asyncio.get_running_loop().create_task(lasting(self._commit_by_the_clock, "committing"))

    async def close(self, *, commit: bool) -> None:
        """Leave the group and stop. ``commit``: first what is due."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._fetcher.close()
        if commit and self.commits is not None:
            for error in await self.commits.commit_due(self._assigned(), timeout_ms=_CLOSE_TIMEOUT_MS):
                _log.warning("a consumer was closed without its last commit: %s", error)
        await self._commit_passed(timeout_ms=_CLOSE_TIMEOUT_MS)
        if self._membership is not None:
            await self._membership.close()
        if self._manual is not None:
            await self._manual.close()

    async def _commit_by_the_clock(self) -> None:
        while not self.closed:
            await asyncio.sleep(self._settings.consumer.auto_commit_ms / 1000)
            if self.options.exactly_once:
                await self._commit_passed()
                continue
            self.subscription.settle(current_done=False)
            for error in await self.commit_due():
                _log.warning("commit failed, trying again: %s", error)

    async def _commit_passed(self, *, timeout_ms: int | None = None) -> None:
        if self.commits is None or not self.options.exactly_once:
            return
        for error in await self.commits.commit_passed(self._assigned(), timeout_ms=timeout_ms):
            _log.info("a position has not passed what was aborted yet: %s", error)

    # -- the group ---------------------------------------------------------------------------

    def polled(self) -> None:
        """The application polls again after it was taken for dead. From any thread."""
        if self._membership is not None:
            self._loop.call_soon_threadsafe(self._membership.polled)

    def released(self, partitions: Iterable[AssignedPartition]) -> None:
        """The application is through with these. From any thread."""
        if self._membership is not None:
            self._loop.call_soon_threadsafe(self._membership.released, tuple(partitions))

    async def begun(self, assigned: AssignedPartition) -> None:
        if self._manual is not None:
            await self._manual.begun(assigned)

    # -- commits -----------------------------------------------------------------------------

    async def commit_due(self, partitions: Iterable[AssignedPartition] | None = None) -> list[RayQueueError]:
        if self.commits is None:
            return []
        return await self.commits.commit_due(self._assigned() if partitions is None else partitions)

    async def commit(self, offsets: Mapping[AssignedPartition, Mapping[int, int]], *, rewind: bool) -> None:
        """Exactly these."""
        commits = self.commits
        if commits is None:
            return
        await asyncio.gather(*(commits.commit(assigned, vector, rewind=rewind) for assigned, vector in offsets.items()))

    # -- transactions ------------------------------------------------------------------------

    async def staging(self) -> Staging:
        """The positions that a transaction is to commit: behind all that was handed out."""
        assert self.options.group is not None  # noqa: S101  # exactly_once has one
        assert self.commits is not None  # noqa: S101  # as it has a group
        await self.commits.commit_gone_back(self._assigned())
        return Staging(self.options.group, self.subscription)

    def rewind(self) -> None:
        """A transaction was aborted: what it has read comes again."""
        self.subscription.rewind()

    def _assigned(self) -> list[AssignedPartition]:
        with self.subscription.lock:
            return list(self.subscription.assigned.values())

    # -- questions ---------------------------------------------------------------------------

    async def committed(self, partition: TopicPartition) -> dict[int, int] | None:
        if self.commits is None:
            return None
        position = await self.commits.position(partition, self._topic_id(partition))
        return None if position is None or not position.offsets else dict(position.offsets)

    def _topic_id(self, partition: TopicPartition) -> int | None:
        """The id of the topic that this consumer reads under that name, if it does."""
        with self.subscription.lock:
            assigned = self.subscription.assigned.get(partition)
        return None if assigned is None else assigned.topic_id

    async def offset_of(self, place: Literal["start", "end"] | int, assigned: AssignedPartition) -> int:
        """The offset of the log's beginning or end, or of the first record that is not older than this time."""
        if not isinstance(place, str):
            return await self._find(assigned.partition, assigned.topic_id, place)
        bounds = await self._bounds(assigned.partition, assigned.topic_id)
        return bounds.start if place == "start" else self._end(bounds)

    def _end(self, bounds: Bounds) -> int:
        return end_of(bounds, committed=self.options.reads_committed)

    async def _bounds(self, partition: TopicPartition, topic_id: int | None) -> Bounds:
        found: Bounds = await ask(self._routes, partition, GetBounds(), topic_id=topic_id)
        return found

    async def _find(self, partition: TopicPartition, topic_id: int, timestamp_ms: int) -> int:
        found: int = await ask(self._routes, partition, FindOffset(timestamp_ms=timestamp_ms), topic_id=topic_id)
        return found

    async def lag(self) -> dict[TopicPartition, int]:
        partitions = self.options.partitions
        if partitions is None:
            infos = [await self._if_there(self._routes.topic, name) for name in self.options.topics]
            partitions = tuple(
                TopicPartition(info.name, each.number) for info in infos if info is not None for each in info.partitions
            )
        found = await asyncio.gather(*(self._if_there(self._lag_of, each) for each in partitions))
        return {each: lag for each, lag in zip(partitions, found, strict=True) if lag is not None}

    async def _if_there(self, ask: Callable[[_A], Awaitable[_T]], what: _A) -> _T | None:
        """None if it is of a topic that was deleted, and that is not to be an error."""
        try:
            return await ask(what)
        except TopicError:
            if self.options.pattern is None and self._settings.consumer.on_topic_deleted == "raise":
                raise
            return None

    async def _lag_of(self, partition: TopicPartition) -> int:
        topic_id = self._topic_id(partition)
        if self.options.group is not None:
            lag: Lag = await ask(self._routes, partition, GetLag(group=self.options.group), topic_id=topic_id)
            return lag.records - (lag.unstable if self.options.reads_committed else 0)
        bounds = await self._bounds(partition, topic_id)
        with self.subscription.lock:
            assigned = self.subscription.assigned.get(partition)
            position = (
                min(assigned.positions().values(), default=bounds.start) if assigned is not None else bounds.start
            )
        return max(0, self._end(bounds) - max(position, bounds.start))

    async def peek(
        self,
        partition: TopicPartition,
        offset: int | None,
        timestamp_ms: int | None,
        most: int,
        room: Room | None = None,
    ) -> list[Record]:
        """From this offset, or this time, or the beginning on, in the order of the log: so many, as far as there is
        room."""
        topic_id = (await self._routes.topic(partition.topic)).topic_id
        try:
            return await self._peek(topic_id, partition, offset, timestamp_ms, most, room)
        except TopicRecreatedError:  # what was known of this name was old, and the topic that has it now is meant
            topic_id = (await self._routes.topic(partition.topic)).topic_id
            return await self._peek(topic_id, partition, offset, timestamp_ms, most, room)

    async def _peek(
        self,
        topic_id: int,
        partition: TopicPartition,
        offset: int | None,
        timestamp_ms: int | None,
        most: int,
        room: Room | None,
    ) -> list[Record]:
        if offset is None and timestamp_ms is not None:
            offset = await self._find(partition, topic_id, timestamp_ms)
        elif offset is None:
            offset = (await self._bounds(partition, topic_id)).start
        found: list[Record] = []
        while len(found) < most:
            answer = await self._batches(partition, topic_id, offset)
            behind = max((cursor.offset for cursor in answer.cursors), default=offset)
            if not answer.batches and behind <= offset:
                break
            for base, count, payload in answer.batches:
                records = RecordBatch.decode(payload, base_offset=base).records(partition.topic, partition.partition)
                first = max(0, offset - base)
                records = records[first : first + most - len(found)]
                count = len(records) if room is None else room.cut(records)
                found += records[:count]
                if count < len(records):
                    return found
                offset = base + count
                if len(found) >= most:
                    break
            offset = max(offset, behind)
        return found

    async def _batches(self, partition: TopicPartition, topic_id: int, offset: int) -> FetchAnswer:
        """Batches from ``offset`` on, in the order of the log."""
        client = self._settings.client
        flags = READ_COMMITTED if self.options.reads_committed else 0
        wanted = FetchRequest((Cursor(ANY_LANE, offset),), self._settings.consumer.fetch_bytes, flags=flags)
        attempt = partial(fetch, wanted=wanted, patience_ms=client.call_timeout_ms)
        retry = Retry(client, self._rng, asyncio.get_running_loop().time())
        return await request(partial(self._routes.partition, partition, topic_id), attempt, retry)
