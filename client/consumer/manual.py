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
from contextlib import suppress
from functools import partial
from random import Random

from rayqueue.client.consumer.assigned import AssignedPartition
from rayqueue.client.consumer.commits import Commits
from rayqueue.client.consumer.fetcher import Fetcher
from rayqueue.client.consumer.subscription import ChangeKind, Subscription
from rayqueue.client.consumer.wanted import Options
from rayqueue.config import Settings
from rayqueue.errors import OutcomeUnknownError, RayQueueError, TopicError, TopicRecreatedError, UnknownTopicError
from rayqueue.net.backoff import Backoff
from rayqueue.net.interfaces import Routes
from rayqueue.net.lasting import lasting
from rayqueue.net.requests import in_time, repeated
from rayqueue.protocol.topics import TopicInfo, TopicPartition

_log = logging.getLogger(__name__)


class ManualPartitions:
    """From ``start`` to ``close``. With ``commits``, positions are those of a group, though nobody assigns."""

    def __init__(
        self,
        routes: Routes,
        subscription: Subscription,
        fetcher: Fetcher,
        commits: Commits | None,
        settings: Settings,
        options: Options,
        *,
        rng: Random,
    ) -> None:
        self._options = options
        self._routes = routes
        self._subscription = subscription
        self._fetcher = fetcher
        self._commits = commits
        self._settings = settings
        self.topics: tuple[str, ...] = ()
        self._missing: dict[str, TopicError] = {}
        self._rng = rng
        self._begun: dict[AssignedPartition, asyncio.Task[None]] = {}
        self._refresher: asyncio.Task[None] | None = None
        self._look_now = asyncio.Event()
        fetcher.on_topic_gone = self._gone

    @property
    def error(self) -> RayQueueError | None:
        """Why nothing comes: its topics are gone; or one was made again and has not the partition that was named."""
        missing = self._missing
        others = [error for error in missing.values() if not isinstance(error, UnknownTopicError)]
        if others or not missing:
            return others[0] if others else None
        return self._options.gone(missing, self._settings.consumer)

    async def start(self) -> None:
        """``UnknownTopicError`` or ``UnknownPartitionError`` if something is not there."""
        self.topics = await self._options.look(self._routes)
        infos: list[TopicInfo] = []
        for name in self.topics:
            try:
                infos.append(await self._routes.topic(name))
            except UnknownTopicError:
                if self._options.pattern is None:
                    raise
        for info in infos:
            for partition in self._wanted(info):
                self._read(partition, info, start=None)
        self._refresher = asyncio.get_running_loop().create_task(lasting(self._refresh, "looking topics up"))

    async def close(self) -> None:
        tasks = [*self._begun.values(), *([self._refresher] if self._refresher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for assigned in list(self._begun):
            self._fetcher.stop(assigned)
            self._subscription.remove(assigned)

    async def begun(self, assigned: AssignedPartition) -> None:
        """Wait until it is known where this partition is read from, or ``client.call_timeout_ms``."""
        task = self._begun.get(assigned)
        if task is not None:
            await asyncio.wait((task,), timeout=self._settings.client.call_timeout_ms / 1000)

    def _wanted(self, info: TopicInfo) -> list[TopicPartition]:
        """``UnknownPartitionError`` if one was named that is not there."""
        if self._options.partitions is None:
            return [TopicPartition(info.name, each.number) for each in info.partitions]
        wanted = [each for each in self._options.partitions if each.topic == info.name]
        for each in wanted:
            info.partition(each.partition)
        return wanted

    def _read(self, partition: TopicPartition, info: TopicInfo, *, start: str | None) -> None:
        assigned = AssignedPartition(partition, info.topic_id, shown=not self._options.listened)
        self._subscription.add(assigned)
        beginning = self._begun[assigned] = asyncio.get_running_loop().create_task(self._begin(assigned, start))
        beginning.add_done_callback(partial(self._ended, assigned))

    def _ended(self, assigned: AssignedPartition, beginning: asyncio.Task[None]) -> None:
        if not beginning.cancelled() and beginning.exception() is not None:  # a bug; whoever polls must learn of it
            _log.error("%s was not begun", assigned.partition, exc_info=beginning.exception())
            self._subscription.failed(assigned, OutcomeUnknownError(f"{assigned.partition} is not read; see the log"))

    async def _begin(self, assigned: AssignedPartition, start: str | None) -> None:
        async def attempt() -> None:
            position = None
            if self._commits is not None:
                position = await self._commits.position(assigned.partition, assigned.topic_id)
                if self._options.pin:
                    await self._commits.pin(assigned.partition, assigned.topic_id)
            await self._fetcher.begin(assigned, position, start=start)

        backoff = Backoff(self._settings.client, self._rng)

        def after(error: RayQueueError, _: float) -> float:
            if not error.retriable or isinstance(error, TopicError):
                raise error
            _log.info("%s cannot be read yet: %s", assigned.partition, error)
            return backoff.pause_s()

        try:
            await repeated(attempt, after)
        except TopicError as error:
            self._gone(assigned, error)
        except RayQueueError as error:
            self._subscription.failed(assigned, error)
        else:
            self._fetcher.start(assigned)
            self._subscription.announce(ChangeKind.ASSIGNED, (assigned,))

    # -- topics that change --------------------------------------------------------------

    def _gone(self, assigned: AssignedPartition, error: RayQueueError) -> None:
        """The topic that this partition is of is deleted, or another one has its name."""
        if isinstance(error, TopicRecreatedError) and self._settings.consumer.start == "error":
            self._subscription.failed(assigned, error)
        else:
            self._look_now.set()

    async def _refresh(self) -> None:
        while True:
            with suppress(asyncio.TimeoutError):
                await in_time(self._look_now.wait(), self._settings.consumer.refresh_ms / 1000)
            self._look_now.clear()
            try:
                found = await self._options.look(self._routes)
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
        for assigned in self._of_topic(topic):
            self._lose(assigned, deleted=True)
        if isinstance(error, UnknownTopicError):
            self._subscription.topic_deleted(topic)
        else:
            self._subscription.on_data()

    def _follow(self, info: TopicInfo) -> None:
        """Read what is new: partitions that were added, or all of them if this is another topic of the same name."""
        for assigned in self._of_topic(info.name):
            if assigned.topic_id == info.topic_id:
                continue
            if self._settings.consumer.start == "error":
                return  # the application was told, or will be when this is read next
            _log.warning("%s was deleted and made again: reading it from its beginning", assigned.partition)
            self._lose(assigned)
        for partition in self._wanted(info):
            if partition not in self._subscription.assigned:
                self._read(partition, info, start="earliest")

    def _of_topic(self, topic: str) -> list[AssignedPartition]:
        return [assigned for assigned in self._begun if assigned.partition.topic == topic]

    def _lose(self, assigned: AssignedPartition, *, deleted: bool = False) -> None:
        self._begun.pop(assigned).cancel()
        self._fetcher.stop(assigned)
        self._subscription.remove(assigned)
        if assigned.begun:
            self._subscription.announce(ChangeKind.LOST, (assigned,), deleted=deleted)
