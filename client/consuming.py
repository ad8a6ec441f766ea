"""What a consumer keeps running in the I/O thread: fetching, membership, commits by the clock.

Knows nothing of ``Consumer``, so that one that the application has dropped
without closing it can be collected, and then ends this too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal, TypeVar

from rayqueue.client.bell import Bell
from rayqueue.client.commits import Commits
from rayqueue.client.feed import Feed
from rayqueue.client.fetcher import Fetcher, within
from rayqueue.client.member import Activity, Member
from rayqueue.client.pattern import TopicPattern
from rayqueue.client.retry import Retry
from rayqueue.client.routing import Routes, ask
from rayqueue.client.standalone import Standalone
from rayqueue.client.subscription import Subscription
from rayqueue.config import Settings
from rayqueue.errors import ClosedError, NotLeaderError, RayQueueError, TopicError
from rayqueue.protocol.calls import Bounds, FindOffset, GetBounds, GetLag, Lag
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchAnswer, FetchRequest
from rayqueue.protocol.topics import TopicPartition

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_MS = 5000


@dataclass(frozen=True, slots=True)
class Options:
    """How a consumer was asked to be, beyond ``ConsumerSettings``."""

    topics: tuple[str, ...]
    partitions: tuple[TopicPartition, ...] | None
    group: str | None
    instance: str | None
    client: str
    delivery: Literal["at_least_once", "at_most_once"]
    auto_commit: bool
    by_record: bool
    pin: bool
    listened: bool
    pattern: TopicPattern | None = None


class Consuming:
    """Made by any thread; everything that is ``async`` runs in the I/O thread."""

    def __init__(self, routes: Routes, loop: asyncio.AbstractEventLoop, settings: Settings, options: Options) -> None:
        self.options = options
        self.bell = Bell()
        self.subscription = Subscription(settings.consumer, explicit=options.by_record)
        self.activity = Activity(time.monotonic())
        self.started = False
        self.closed = False
        self._routes = routes
        self._loop = loop
        self._settings = settings
        self._rng = Random()  # noqa: S311 - names and jitter, no secrets
        self._fetcher = Fetcher(self.subscription, routes, settings, self._rng, grouped=self.managed)
        self.commits = Commits(options.group, self.subscription, routes) if options.group else None
        self._member: Member | None = None
        self._standalone: Standalone | None = None
        self._timer: asyncio.Task[None] | None = None
        self.subscription.on_data = self.bell.ring
        self.subscription.on_room = self._room

    @property
    def managed(self) -> bool:
        """The group says which partitions are read."""
        return self.options.group is not None and self.options.partitions is None

    @property
    def topics(self) -> tuple[str, ...]:
        """What is meant to be read now."""
        pattern = self.options.pattern
        return self.options.topics if pattern is None else pattern.topics

    @property
    def error(self) -> RayQueueError | None:
        reading = self._member or self._standalone
        return None if reading is None else reading.error

    @property
    def away(self) -> bool:
        return self._member is not None and self._member.away

    def _room(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fetcher.kick)

    # -- life ------------------------------------------------------------------------------

    async def check(self) -> None:
        """``UnknownTopicError`` if a topic is not there. With a pattern, none has to be."""
        if self.options.pattern is not None:
            await self.options.pattern.look(self._routes)
        for name in self.options.topics:
            await self._routes.topic(name)

    async def start(self) -> None:
        if self.started or self.closed:
            return
        self.started = True
        options = self.options
        look = None if options.pattern is None else partial(options.pattern.look, self._routes)
        if self.managed and self.commits is not None:
            self._member = Member(
                self._routes.coordinator,
                self.subscription,
                self._fetcher,
                self.commits,
                self._settings,
                self.activity,
                self.topics,
                rng=self._rng,
                look=look,
                instance=options.instance,
                client=options.client,
                pin=options.pin,
                auto_commit=self._commits_itself,
                listened=options.listened,
            )
            self._member.start()
        else:
            self._standalone = Standalone(
                self._routes,
                self.subscription,
                self._fetcher,
                self.commits,
                self._settings,
                self.topics,
                options.partitions,
                rng=self._rng,
                look=look,
                pin=options.pin,
                listened=options.listened,
            )
            await self._standalone.start()
        if self.commits is not None and self._commits_itself:
            self._timer = asyncio.get_running_loop().create_task(self._commit_by_the_clock())

    @property
    def _commits_itself(self) -> bool:
        return self.options.auto_commit or self.options.delivery == "at_most_once"

    async def close(self, *, commit: bool) -> None:
        """Leave the group and stop. ``commit``: first what is due."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._fetcher.close()
        if commit and self.commits is not None:
            for error in await self.commits.commit_due(self._feeds(), timeout_ms=_CLOSE_TIMEOUT_MS):
                _log.warning("a consumer was closed without its last commit: %s", error)
        if self._member is not None:
            await self._member.close()
        if self._standalone is not None:
            await self._standalone.close()

    async def _commit_by_the_clock(self) -> None:
        while True:
            await asyncio.sleep(self._settings.consumer.auto_commit_ms / 1000)
            self.subscription.settle(current_done=False)
            for error in await self.commit_due():
                _log.warning("commit failed, trying again: %s", error)

    # -- the group ---------------------------------------------------------------------------

    def polled(self) -> None:
        """The application polls again after it was taken for dead. From any thread."""
        if self._member is not None:
            self._loop.call_soon_threadsafe(self._member.polled)

    def released(self, feeds: Iterable[Feed]) -> None:
        """The application is through with these. From any thread."""
        if self._member is not None:
            self._loop.call_soon_threadsafe(self._member.released, tuple(feeds))

    async def begun(self, feed: Feed) -> None:
        if self._standalone is not None:
            await self._standalone.begun(feed)

    # -- commits -----------------------------------------------------------------------------

    async def commit_due(self, feeds: Iterable[Feed] | None = None) -> list[RayQueueError]:
        if self.commits is None:
            return []
        return await self.commits.commit_due(self._feeds() if feeds is None else feeds)

    async def commit(self, offsets: Mapping[Feed, Mapping[int, int]] | None, *, rewind: bool) -> None:
        """What is due, or exactly these."""
        if self.commits is None:
            return
        if offsets is None:
            errors = await self.commits.commit_due(self._feeds())
            if errors:
                raise errors[0]
            return
        commits = self.commits
        await asyncio.gather(*(commits.commit(feed, vector, rewind=rewind) for feed, vector in offsets.items()))

    def _feeds(self) -> list[Feed]:
        with self.subscription.lock:
            return list(self.subscription.feeds.values())

    # -- questions ---------------------------------------------------------------------------

    async def committed(self, partition: TopicPartition) -> dict[int, int] | None:
        if self.commits is None:
            return None
        position = await self.commits.position(partition, self._topic_id(partition))
        return None if position is None or not position.offsets else dict(position.offsets)

    async def lanes(self, topic: str) -> int:
        return (await self._routes.topic(topic)).settings.lanes

    def _topic_id(self, partition: TopicPartition) -> int | None:
        """What this consumer reads under that name, if it does."""
        with self.subscription.lock:
            feed = self.subscription.feeds.get(partition)
        return None if feed is None else feed.topic_id

    async def bounds(self, partition: TopicPartition, topic_id: int) -> Bounds:
        found: Bounds = await ask(self._routes, partition, GetBounds(), topic_id=topic_id)
        return found

    async def find(self, partition: TopicPartition, topic_id: int, timestamp_ms: int) -> int:
        found: int = await ask(self._routes, partition, FindOffset(timestamp_ms=timestamp_ms), topic_id=topic_id)
        return found

    async def topic_id(self, topic: str) -> int:
        """Of the topic that had this name when it was last looked up."""
        return (await self._routes.topic(topic)).topic_id

    async def lag(self) -> dict[TopicPartition, int]:
        partitions = self.options.partitions
        if partitions is None:
            infos = [await self._if_there(self._routes.topic(name)) for name in self.topics]
            partitions = tuple(
                TopicPartition(info.name, each.number) for info in infos if info is not None for each in info.partitions
            )
        found = await asyncio.gather(*(self._if_there(self._lag_of(each)) for each in partitions))
        return {each: lag for each, lag in zip(partitions, found, strict=True) if lag is not None}

    async def _if_there(self, asked: Awaitable[_T]) -> _T | None:
        """None if it is of a topic that was deleted, and that is not to be an error."""
        try:
            return await asked
        except TopicError:
            if self.options.pattern is None and self._settings.consumer.on_topic_deleted == "raise":
                raise
            return None

    async def _lag_of(self, partition: TopicPartition) -> int:
        topic_id = self._topic_id(partition)
        if self.options.group is not None:
            lag: Lag = await ask(self._routes, partition, GetLag(group=self.options.group), topic_id=topic_id)
            return lag.records
        bounds: Bounds = await ask(self._routes, partition, GetBounds(), topic_id=topic_id)
        with self.subscription.lock:
            feed = self.subscription.feeds.get(partition)
            position = min(feed.positions().values(), default=bounds.start) if feed is not None else bounds.start
        return max(0, bounds.end - max(position, bounds.start))

    async def look(self, partition: TopicPartition, topic_id: int, offset: int, max_bytes: int) -> FetchAnswer:
        """Batches from ``offset`` on, in the order of the log."""
        retry = Retry(self._settings.client, self._rng, time.monotonic(), idempotent=True)
        while True:
            route = await self._routes.partition(partition, topic_id)
            try:
                channel = await route.leader()
                asked = channel.fetch(FetchRequest((Cursor(ANY_LANE, offset),), max_bytes))
                return await within(asked, self._settings.client.call_timeout_ms)
            except ClosedError as closed:  # the way there is another one now
                await asyncio.sleep(retry.after(NotLeaderError(str(closed), leader=None), time.monotonic()).seconds)
            except RayQueueError as error:
                wait = retry.after(error, time.monotonic())
                if wait.refresh:
                    route.failed(error)
                await asyncio.sleep(wait.seconds)
