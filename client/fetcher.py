"""Keeps a consumer's memory filled, so that a poll finds its records there. In the I/O thread.

For every partition that is assigned there is a fetch under way whenever there
is room for its answer: one that waits at the partition for records, if there
are none yet. After a failure the same cursors are asked for again, of whoever
leads then: nothing is missed and, because a ``Lane`` takes each record once,
nothing is doubled.

It decides where to begin, and where to go on when retention has deleted what
was to be read (``consumer.start``). What to ask for and how much is
``Subscription``'s and ``Feed``'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from rayqueue.client.feed import Feed, Plan
from rayqueue.client.routing import Routes, ask, same_topic
from rayqueue.client.subscription import Subscription
from rayqueue.config import Settings
from rayqueue.errors import (
    ClosedError,
    InvalidInputError,
    InvariantBrokenError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    RayQueueError,
    TopicError,
)
from rayqueue.protocol.calls import Bounds, GetBounds, Position
from rayqueue.protocol.data import FetchAnswer

_log = logging.getLogger(__name__)

_PATIENCE_MS = 1000
"""How much longer than the fetch may wait its answer may take, before the leader is doubted."""


class Fetcher:
    """``start`` and ``stop`` per partition; ``kick`` when something may be asked for that was not before."""

    def __init__(
        self, subscription: Subscription, routes: Routes, settings: Settings, rng: Random, *, grouped: bool = False
    ) -> None:
        self._subscription = subscription
        self._routes = routes
        self._settings = settings
        self._rng = rng
        self._grouped = grouped
        self._tasks: dict[Feed, set[asyncio.Task[None]]] = {}
        self._failures: dict[Feed, int] = {}
        self.on_topic_gone: Callable[[Feed, RayQueueError], None] = subscription.failed
        """What becomes of a partition whose topic is gone, or is another one now, where no group decides it."""

    # -- where to begin ------------------------------------------------------------------

    async def begin(self, feed: Feed, position: Position | None, *, start: str | None = None) -> bool:
        """Find where a partition is read from. True if that is now, and not where the group had come to before."""
        await self._routes.partition(feed.partition, feed.topic_id)  # from here on that topic's settings are known
        info = same_topic(await self._routes.topic(feed.partition.topic), feed.topic_id)
        lanes = range(info.settings.lanes)
        committed: Mapping[int, int] = {} if position is None else position.offsets
        offsets = {lane: committed[lane] for lane in lanes if lane in committed}
        policy = start or self._settings.consumer.start
        if len(offsets) < len(lanes):
            bounds: Bounds = await ask(self._routes, feed.partition, GetBounds(), topic_id=feed.topic_id)
            # A lane without a position beside one that has: the group was here, and must not miss what came since.
            offset = bounds.end if policy == "latest" and not offsets else bounds.start
            offsets = {lane: offsets.get(lane, offset) for lane in lanes}
        self._subscription.begin(feed, offsets, committed)
        if policy == "error" and not committed:
            self._subscription.failed(
                feed,
                OffsetOutOfRangeError(
                    f"there is no position to begin at in {feed.partition}, and start is 'error': seek",
                    topic=feed.partition.topic,
                    partition=feed.partition.partition,
                ),
            )
        return not committed

    # -- fetching ------------------------------------------------------------------------

    def start(self, feed: Feed) -> None:
        """From now on. The feed has begun."""
        self._tasks.setdefault(feed, set())
        self._kick(feed)

    def stop(self, feed: Feed) -> None:
        self._failures.pop(feed, None)
        for task in self._tasks.pop(feed, ()):
            task.cancel()

    def kick(self) -> None:
        """There may be room, or a lane to ask for."""
        for feed in list(self._tasks):
            self._kick(feed)

    def close(self) -> None:
        for feed in list(self._tasks):
            self.stop(feed)

    def _kick(self, feed: Feed) -> None:
        tasks = self._tasks.get(feed)
        while tasks is not None:
            plan = self._subscription.plan(feed)
            if plan is None:
                return
            task = asyncio.get_running_loop().create_task(self._fetch(feed, plan))
            tasks.add(task)
            task.add_done_callback(partial(self._ended, feed))

    def _ended(self, feed: Feed, task: asyncio.Task[None]) -> None:
        tasks = self._tasks.get(feed)
        if tasks is None or task not in tasks:
            return  # it was stopped
        tasks.discard(task)
        if task.cancelled():
            self._kick(feed)  # not by us, and somebody must go on
        elif task.exception() is not None:  # a bug; whoever polls must learn that nothing comes any more
            _log.error("the fetcher of %s has failed", feed.partition, exc_info=task.exception())
            self._subscription.failed(feed, OutcomeUnknownError(f"{feed.partition} is not read any more; see the log"))

    async def _fetch(self, feed: Feed, plan: Plan) -> None:
        try:
            route = await self._routes.partition(feed.partition, feed.topic_id)
            try:
                channel = route.leader_channel or await route.leader()
                answer = await within(channel.fetch(plan.request), plan.request.max_wait_ms + _PATIENCE_MS)
            except ClosedError as closed:  # the way there is another one now; if there is none, asking for it says so
                raise NotLeaderError(str(closed), leader=None) from None
            except RayQueueError as error:
                if error.refresh_metadata:
                    route.failed(error)
                raise
            if feed in self._failures:
                del self._failures[feed]
            self._subscription.received(feed, plan, answer)
        except OffsetOutOfRangeError as error:
            self._out_of_range(feed, plan, error)
        except RayQueueError as error:
            await self._failed(feed, plan, error)
        finally:
            self._subscription.ended(feed, plan)
        self._kick(feed)

    async def _failed(self, feed: Feed, plan: Plan, error: RayQueueError) -> None:
        # A group takes a partition back whose topic is deleted; until it does, there is nothing to be said about it.
        hopeless = not error.retriable and not (self._grouped and isinstance(error, TopicError))
        if hopeless:
            if isinstance(error, InvariantBrokenError | InvalidInputError):
                _log.error("%s cannot be read: %s", feed.partition, error)
            if plan.epoch != feed.epoch:
                return
            told = self.on_topic_gone if isinstance(error, TopicError) else self._subscription.failed
            told(feed, error)
            if feed.error is not None:
                return
        failures = self._failures[feed] = self._failures.get(feed, 0) + 1
        client = self._settings.client
        wait_ms = min(client.retry_max_ms, client.retry_min_ms * 2 ** min(failures - 1, 16))
        _log.log(
            logging.WARNING if failures % 20 == 10 else logging.DEBUG,
            "%s cannot be read at the moment, attempt %d: %s",
            feed.partition,
            failures,
            error,
        )
        await asyncio.sleep(wait_ms / 1000 * (0.5 + self._rng.random() / 2))

    def _out_of_range(self, feed: Feed, plan: Plan, error: OffsetOutOfRangeError) -> None:
        """What was to be read next is not in the log: go on where ``start`` says."""
        if plan.epoch != feed.epoch:
            return
        behind = feed.behind(error, plan)
        start, end = error.details.get("start"), error.details.get("end")
        policy = self._settings.consumer.start
        target = end if policy == "latest" else start
        if policy == "error" or not isinstance(target, int):
            told = OffsetOutOfRangeError(
                f"{feed.partition} has offsets {start} to {end}, and {min(behind.values())} was to be read next: seek",
                **{**error.details, "topic": feed.partition.topic, "partition": feed.partition.partition},
            )
            self._subscription.failed(feed, told)
            return
        _log.warning(
            "%s has offsets %s to %s, lanes %s were to be read: going on at %d (%s)",
            *(feed.partition, start, end, behind, target, policy),
        )
        self._subscription.reset(feed, dict.fromkeys(behind, target))


async def within(answer: asyncio.Future[FetchAnswer], timeout_ms: int) -> FetchAnswer:
    """The answer, or ``OutcomeUnknownError``: the replica may hang, with its connection open."""
    late = False

    def give_up() -> None:
        nonlocal late
        late = True
        answer.cancel()

    timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, give_up)
    try:
        return await answer
    except asyncio.CancelledError:
        if late:
            raise OutcomeUnknownError(f"no answer to a fetch within {timeout_ms} ms") from None
        raise
    finally:
        timer.cancel()
