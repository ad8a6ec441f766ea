"""A group's positions: claiming a partition, committing, and asking what is committed. In the I/O thread.

One commit per partition is under way at a time, so that an older one never
overtakes a newer. A commit that a newer generation has fenced off is reported
to whoever looks after the membership: the partition is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from rayqueue.client.feed import Feed
from rayqueue.client.routing import Routes, ask
from rayqueue.client.subscription import Subscription
from rayqueue.errors import RayQueueError, StaleGenerationError
from rayqueue.protocol.calls import Commit, GetPosition, Pin, Position
from rayqueue.protocol.topics import TopicPartition


class Commits:
    def __init__(self, group: str, subscription: Subscription, routes: Routes) -> None:
        self.group = group
        self.on_stale: Callable[[Feed, StaleGenerationError], None] = lambda feed, error: None
        self._subscription = subscription
        self._routes = routes
        self._turns: dict[TopicPartition, asyncio.Lock] = {}

    async def claim(self, feed: Feed, *, pin: bool = False) -> Position:
        """Fence off whoever read this partition before, and learn where to begin."""
        claim = Commit(group=self.group, generation=feed.generation, offsets={}, seal=feed.seal)
        position: Position = await ask(self._routes, feed.partition, claim, topic_id=feed.topic_id)
        if pin and not position.pinned:
            await self.pin(feed.partition, feed.topic_id)
        return position

    async def pin(self, partition: TopicPartition, topic_id: int) -> None:
        """Let retention wait for this group."""
        await ask(self._routes, partition, Pin(group=self.group), topic_id=topic_id)

    async def position(self, partition: TopicPartition, topic_id: int | None = None) -> Position | None:
        found: Position | None = await ask(self._routes, partition, GetPosition(group=self.group), topic_id=topic_id)
        return found

    async def commit(
        self,
        feed: Feed,
        offsets: Mapping[int, int] | None = None,
        *,
        rewind: bool = False,
        timeout_ms: int | None = None,
    ) -> None:
        """These offsets, or what is due."""
        turn = self._turns.setdefault(feed.partition, asyncio.Lock())
        async with turn:
            with self._subscription.lock:
                vector = dict(offsets) if offsets is not None else feed.due()
                rewind = rewind or (offsets is None and feed.rewind)
                epoch = feed.epoch
            if not vector:
                return
            call = Commit(group=self.group, generation=feed.generation, offsets=vector, rewind=rewind, seal=feed.seal)
            try:
                position: Position = await ask(
                    self._routes, feed.partition, call, topic_id=feed.topic_id, timeout_ms=timeout_ms
                )
            except StaleGenerationError as error:
                self.on_stale(feed, error)
                raise
            with self._subscription.lock:
                feed.committed = dict(position.offsets)
                if offsets is None:
                    feed.sent = vector
                    if feed.epoch == epoch:
                        feed.rewind = False

    async def commit_due(self, feeds: Iterable[Feed], *, timeout_ms: int | None = None) -> list[RayQueueError]:
        """What is due of all these. The errors, of those that failed."""
        with self._subscription.lock:
            due = [feed for feed in feeds if feed.begun and feed.due() is not None]
        done = await asyncio.gather(*(self.commit(feed, timeout_ms=timeout_ms) for feed in due), return_exceptions=True)
        errors: list[RayQueueError] = []
        for outcome in done:
            if isinstance(outcome, RayQueueError):
                errors.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        return errors

    def forget(self, partition: TopicPartition) -> None:
        turn = self._turns.get(partition)
        if turn is not None and not turn.locked():
            del self._turns[partition]
