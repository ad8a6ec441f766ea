"""The partitions of a consumer that shares them with nobody: by name, or all of its topics. In the I/O thread.

Partitions that are added to a topic later are found by looking again from time
to time, and read from their beginning: they are younger than this consumer.

A topic that was deleted is lost; while none is left, ``error`` says so, unless
``on_topic_deleted`` is "drop" or there is a pattern. One that was made again is
another topic: its partitions are read from their beginning; with
``start="error"`` that is reported instead. With a pattern, topics that match are
looked for from time to time, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random

from rayqueue.client.commits import Commits
from rayqueue.client.feed import Feed
from rayqueue.client.fetcher import Fetcher
from rayqueue.client.routing import Routes
from rayqueue.client.subscription import ChangeKind, Subscription
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError, TopicError, TopicRecreatedError, UnknownPartitionError, UnknownTopicError
from rayqueue.protocol.topics import TopicInfo, TopicPartition

_log = logging.getLogger(__name__)


class Standalone:
    """From ``start`` to ``close``. With ``commits``, positions are those of a group, though nobody assigns."""

    def __init__(
        self,
        routes: Routes,
        subscription: Subscription,
        fetcher: Fetcher,
        commits: Commits | None,
        settings: Settings,
        topics: Sequence[str],
        partitions: Sequence[TopicPartition] | None,
        *,
        rng: Random,
        look: Callable[[], Awaitable[tuple[str, ...]]] | None = None,
        pin: bool = False,
        listened: bool = False,
    ) -> None:
        """``look``: which topics are meant now. Without it they stay the same."""
        self._look = look
        self._drops = look is not None or settings.consumer.on_topic_deleted == "drop"
        self._routes = routes
        self._subscription = subscription
        self._fetcher = fetcher
        self._commits = commits
        self._settings = settings
        self.topics = tuple(topics)
        self._missing: dict[str, TopicError] = {}
        self._partitions = partitions
        self._rng = rng
        self._pin = pin
        self._listened = listened
        self._begun: dict[Feed, asyncio.Task[None]] = {}
        self._refresher: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()
        fetcher.on_topic_gone = self._gone

    @property
    def error(self) -> RayQueueError | None:
        """Why nothing comes: its topics are gone; or one was made again and has not the partition that was named."""
        missing = self._missing
        others = [error for error in missing.values() if not isinstance(error, UnknownTopicError)]
        if others or not missing or self._drops or len(missing) < len(self.topics):
            return others[0] if others else None
        return UnknownTopicError(f"{', '.join(sorted(missing))}: deleted, and not made again", topic=min(missing))

    async def start(self) -> None:
        """``UnknownTopicError`` or ``UnknownPartitionError`` if something is not there."""
        if self._look is not None:
            self.topics = await self._look()
        infos: list[TopicInfo] = []
        for name in self.topics:
            try:
                infos.append(await self._routes.topic(name))
            except UnknownTopicError:
                if self._look is None:
                    raise
        for info in infos:
            for partition in self._wanted(info):
                self._read(partition, info, start=None)
        self._refresher = asyncio.get_running_loop().create_task(self._refresh())

    async def close(self) -> None:
        tasks = [*self._begun.values(), *([self._refresher] if self._refresher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for feed in list(self._begun):
            self._fetcher.stop(feed)
            self._subscription.remove(feed)

    async def begun(self, feed: Feed) -> None:
        """Wait until it is known where this partition is read from, or ``client.call_timeout_ms``."""
        task = self._begun.get(feed)
        if task is not None:
            await asyncio.wait((task,), timeout=self._settings.client.call_timeout_ms / 1000)

    def _wanted(self, info: TopicInfo) -> list[TopicPartition]:
        """``UnknownPartitionError`` if one was named that is not there."""
        if self._partitions is None:
            return [TopicPartition(info.name, each.number) for each in info.partitions]
        wanted = [each for each in self._partitions if each.topic == info.name]
        for partition in wanted:
            if not 0 <= partition.partition < len(info.partitions):
                raise UnknownPartitionError(
                    f"{partition.topic} has partitions 0 to {len(info.partitions) - 1}, not {partition.partition}",
                    topic=partition.topic,
                    partition=partition.partition,
                )
        return wanted

    def _read(self, partition: TopicPartition, info: TopicInfo, *, start: str | None) -> None:
        feed = Feed(partition, info.topic_id, shown=not self._listened)
        self._subscription.add(feed)
        self._begun[feed] = asyncio.get_running_loop().create_task(self._begin(feed, start))

    async def _begin(self, feed: Feed, start: str | None) -> None:
        client = self._settings.client
        failures = 0
        while True:
            try:
                position = None
                if self._commits is not None:
                    position = await self._commits.position(feed.partition, feed.topic_id)
                    if self._pin:
                        await self._commits.pin(feed.partition, feed.topic_id)
                await self._fetcher.begin(feed, position, start=start)
                break
            except TopicError as error:
                self._gone(feed, error)
                return
            except RayQueueError as error:
                if not error.retriable:
                    self._subscription.failed(feed, error)
                    return
                failures += 1
                _log.info("%s cannot be read yet: %s", feed.partition, error)
                wait_ms = min(client.retry_max_ms, client.retry_min_ms * 2 ** min(failures, 16))
                await asyncio.sleep(wait_ms / 1000 * (0.5 + self._rng.random() / 2))
        self._fetcher.start(feed)
        self._subscription.announce(ChangeKind.ASSIGNED, (feed,))

    # -- topics that change --------------------------------------------------------------

    def _gone(self, feed: Feed, error: RayQueueError) -> None:
        """The topic that this feed reads is deleted, or another one has its name."""
        if isinstance(error, TopicRecreatedError) and self._settings.consumer.start == "error":
            self._subscription.failed(feed, error)
        else:
            self._look_now.set()

    async def _refresh(self) -> None:
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), self._settings.consumer.refresh_ms / 1000)
            self._look_now.clear()
            try:
                found = self.topics if self._look is None else await self._look()
            except RayQueueError as error:
                _log.info("topics cannot be looked up at the moment: %s", error)
                continue
            for name in sorted({*self.topics, *found}):
                try:
                    self._follow(await self._routes.topic(name, refresh=True))
                    self._missing.pop(name, None)
                except TopicError as error:
                    self._deleted(name, error)
                except RayQueueError as error:
                    _log.info("topic %s cannot be looked up at the moment: %s", name, error)
            self._missing = {name: error for name, error in self._missing.items() if name in found}
            self.topics = found

    def _deleted(self, topic: str, error: TopicError) -> None:
        """It is not there; or not the partition that was named."""
        if topic in self._missing:
            return
        self._missing[topic] = error
        _log.warning("%s is not read any more: %s", topic, error)
        for feed in self._feeds(topic):
            self._lose(feed, deleted=True)
        if isinstance(error, UnknownTopicError):
            self._subscription.topic_deleted(topic)
        else:
            self._subscription.on_data()

    def _follow(self, info: TopicInfo) -> None:
        """Read what is new: partitions that were added, or all of them if this is another topic of the same name."""
        for feed in self._feeds(info.name):
            if feed.topic_id == info.topic_id:
                continue
            if self._settings.consumer.start == "error":
                return  # the application was told, or will be when this is read next
            _log.warning("%s was deleted and made again: reading it from its beginning", feed.partition)
            self._lose(feed)
        for partition in self._wanted(info):
            if partition not in self._subscription.feeds:
                self._read(partition, info, start="earliest")

    def _feeds(self, topic: str) -> list[Feed]:
        return [feed for feed in self._begun if feed.partition.topic == topic]

    def _lose(self, feed: Feed, *, deleted: bool = False) -> None:
        self._begun.pop(feed).cancel()
        self._fetcher.stop(feed)
        self._subscription.remove(feed)
        if feed.begun:
            self._subscription.announce(ChangeKind.LOST, (feed,), deleted=deleted)
