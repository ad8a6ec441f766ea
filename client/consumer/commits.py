"""A group's positions: claiming a partition, committing, and asking what is committed. In the I/O thread.

One commit per partition is under way at a time, so that an older one never
overtakes a newer. A commit that a newer generation has fenced off is reported
to whoever looks after the membership: the partition is lost.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from typing import Any

from rayqueue.client.arguments import seconds_of
from rayqueue.client.consumer.assigned import AssignedPartition
from rayqueue.client.consumer.subscription import Subscription
from rayqueue.client.forks import forked
from rayqueue.errors import RayQueueError, StaleGenerationError
from rayqueue.net.interfaces import Routes, ask
from rayqueue.protocol.calls import Commit, GetPosition, Pin, Position
from rayqueue.protocol.topics import TopicPartition


class Commits:
    def __init__(self, group: str, subscription: Subscription, routes: Routes) -> None:
        self.group = group
        self.on_stale: Callable[[AssignedPartition, StaleGenerationError], None] = lambda assigned, error: None
        self._subscription = subscription
        self._routes = routes
        self._turns: dict[TopicPartition, asyncio.Lock] = {}

    async def claim(self, assigned: AssignedPartition, *, pin: bool = False) -> Position:
        """Fence off whoever read this partition before, and learn where to begin."""
        claim = Commit(group=self.group, generation=assigned.generation, offsets={}, seal=assigned.seal)
        position: Position = await ask(self._routes, assigned.partition, claim, topic_id=assigned.topic_id)
        if pin and not position.pinned:
            await self.pin(assigned.partition, assigned.topic_id)
        return position

    async def pin(self, partition: TopicPartition, topic_id: int) -> None:
        """Let retention wait for this group."""
        await ask(self._routes, partition, Pin(group=self.group), topic_id=topic_id)

    async def position(self, partition: TopicPartition, topic_id: int | None = None) -> Position | None:
        found: Position | None = await ask(self._routes, partition, GetPosition(group=self.group), topic_id=topic_id)
        return found

    async def commit(
        self,
        assigned: AssignedPartition,
        offsets: Mapping[int, int] | None = None,
        *,
        rewind: bool = False,
        timeout_ms: int | None = None,
    ) -> None:
        """These offsets, or what is due."""
        turn = self._turns.setdefault(assigned.partition, asyncio.Lock())
        async with turn:
            with self._subscription.lock:
                vector = dict(offsets) if offsets is not None else assigned.due()
                rewind = rewind or (offsets is None and assigned.rewind)
                epoch = assigned.epoch
            if not vector:
                return
            call = Commit(
                group=self.group, generation=assigned.generation, offsets=vector, rewind=rewind, seal=assigned.seal
            )
            try:
                await ask(self._routes, assigned.partition, call, topic_id=assigned.topic_id, timeout_ms=timeout_ms)
            except StaleGenerationError as error:
                self.on_stale(assigned, error)
                raise
            if offsets is None:
                with self._subscription.lock:
                    assigned.sent = vector
                    if assigned.epoch == epoch:
                        assigned.rewind = False

    async def commit_due(
        self, partitions: Iterable[AssignedPartition], *, timeout_ms: int | None = None
    ) -> list[RayQueueError]:
        """Commit all that is due in these. The errors, of those that failed."""
        with self._subscription.lock:
            due = [assigned for assigned in partitions if assigned.begun and assigned.due() is not None]
        return await _errors_of(self.commit(assigned, timeout_ms=timeout_ms) for assigned in due)

    async def commit_passed(
        self, partitions: Iterable[AssignedPartition], *, timeout_ms: int | None = None
    ) -> list[RayQueueError]:
        """Of readers that commit by transactions: what was passed over. The errors, of those that failed."""

        async def one(assigned: AssignedPartition) -> None:
            with self._subscription.lock:
                offsets, epoch = assigned.passed() if assigned.begun else None, assigned.epoch
            if offsets is not None:
                await self.commit(assigned, offsets, timeout_ms=timeout_ms)
                with self._subscription.lock:
                    assigned.passed_over(epoch, offsets)

        return await _errors_of(map(one, partitions))

    async def commit_gone_back(self, partitions: Iterable[AssignedPartition]) -> None:
        """Of readers that commit by transactions, which move positions forward only: where they went back to."""
        for assigned in partitions:
            with self._subscription.lock:
                back = {} if assigned.letting_go else assigned.gone_back()
            if back:
                await self.commit(assigned, back, rewind=True)
                with self._subscription.lock:
                    assigned.sent = {**assigned.sent, **back}

    def forget(self, partition: TopicPartition) -> None:
        turn = self._turns.get(partition)
        if turn is not None and not turn.locked():
            del self._turns[partition]


async def _errors_of(commits: Iterable[Awaitable[None]]) -> list[RayQueueError]:
    """Of those that fail, all being under way at once: none waits for another."""
    errors: list[RayQueueError] = []
    for outcome in await asyncio.gather(*commits, return_exceptions=True):
        if isinstance(outcome, RayQueueError):
            errors.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
    return errors


class PendingCommit:
    """A commit under way in the I/O thread: ``await`` it, or ask for its ``result``."""

    __slots__ = ("_future", "_pid")

    def __init__(self, future: concurrent.futures.Future[None]) -> None:
        self._future = future
        self._pid = os.getpid()

    @property
    def _forked(self) -> bool:
        return self._pid != os.getpid()

    def done(self) -> bool:
        return self._forked or self._future.done()

    def result(self, timeout: float | None = None, *, timeout_ms: int | None = None) -> None:
        """Wait for it, for ``timeout`` seconds or ``timeout_ms``. ``TimeoutError``: it is still under way."""
        self._refuse_in_child()
        timeout_s = seconds_of(timeout, timeout_ms)
        try:
            self._future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"not done within {timeout_s} s") from None

    def __await__(self) -> Generator[Any, None, None]:
        """The commit goes on if this is cancelled."""
        self._refuse_in_child()
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def _refuse_in_child(self) -> None:
        """``ForkedError`` in a child: its parent goes on with what was under way, and only there its end is known."""
        if self._forked:
            raise forked("this call")
