"""The partitions of a consumer that shares them with nobody: given by name, or all of its topics. In the I/O thread.

Partitions that are added to a topic later are found by looking again from time
to time, and read from their beginning: they are younger than this consumer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from random import Random

from rayqueue.client.commits import Commits
from rayqueue.client.feed import Feed
from rayqueue.client.fetcher import Fetcher
from rayqueue.client.routing import Routes
from rayqueue.client.subscription import ChangeKind, Subscription
from rayqueue.config import Settings
from rayqueue.errors import RayQueueError, UnknownPartitionError
from rayqueue.protocol.topics import TopicPartition

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
        pin: bool = False,
        listened: bool = False,
    ) -> None:
        self.error: RayQueueError | None = None
        self._routes = routes
        self._subscription = subscription
        self._fetcher = fetcher
        self._commits = commits
        self._settings = settings
        self._topics = tuple(topics)
        self._partitions = partitions
        self._rng = rng
        self._pin = pin
        self._listened = listened
        self._begun: dict[Feed, asyncio.Task[None]] = {}
        self._refresher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """``UnknownTopicError`` or ``UnknownPartitionError`` if something is not there."""
        wanted = await self._look() if self._partitions is None else await self._check(self._partitions)
        for partition in wanted:
            self._read(partition, start=None)
        if self._partitions is None:
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
        """Wait until it is known where this partition is read from."""
        task = self._begun.get(feed)
        if task is not None:
            await asyncio.shield(task)

    async def _look(self, *, refresh: bool = False) -> list[TopicPartition]:
        infos = [await self._routes.topic(name, refresh=refresh) for name in self._topics]
        return [TopicPartition(info.name, each.number) for info in infos for each in info.partitions]

    async def _check(self, partitions: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        for partition in partitions:
            info = await self._routes.topic(partition.topic)
            if not 0 <= partition.partition < len(info.partitions):
                raise UnknownPartitionError(
                    f"{partition.topic} has partitions 0 to {len(info.partitions) - 1}, not {partition.partition}",
                    topic=partition.topic,
                    partition=partition.partition,
                )
        return partitions

    def _read(self, partition: TopicPartition, *, start: str | None) -> None:
        feed = Feed(partition, shown=not self._listened)
        self._subscription.add(feed)
        self._begun[feed] = asyncio.get_running_loop().create_task(self._begin(feed, start))

    async def _begin(self, feed: Feed, start: str | None) -> None:
        client = self._settings.client
        failures = 0
        while True:
            try:
                position = None
                if self._commits is not None:
                    position = await self._commits.position(feed.partition)
                    if self._pin:
                        await self._commits.pin(feed.partition)
                await self._fetcher.begin(feed, position, start=start)
                break
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

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._settings.consumer.refresh_ms / 1000)
            try:
                found = await self._look(refresh=True)
            except RayQueueError as error:
                _log.info("topics cannot be looked up at the moment: %s", error)
                continue
            for partition in found:
                if partition not in self._subscription.feeds:
                    self._read(partition, start="earliest")
