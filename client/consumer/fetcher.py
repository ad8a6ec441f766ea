"""The fetcher: keeps a consumer's memory filled, so that a poll finds its records there. In the I/O thread.

For every partition that is assigned there is a fetch under way whenever there
is room for its answer: one that waits at the partition for records, if there
are none yet. After a failure the same cursors are asked for again, of whoever
leads then: nothing is missed and, because a ``Lane`` takes each record once,
nothing is doubled.

It decides where to begin, and where to go on when retention has deleted what
was to be read (``consumer.start``). What to ask for and how much is
``Subscription``'s and ``AssignedPartition``'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from random import Random

from rayqueue.client.consumer.assigned import AssignedPartition, Plan
from rayqueue.client.consumer.subscription import Subscription
from rayqueue.config import Settings
from rayqueue.errors import (
    InvalidInputError,
    InvariantBrokenError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    RayQueueError,
    TopicError,
)
from rayqueue.net.backoff import Backoff
from rayqueue.net.interfaces import Routes, ask, same_topic
from rayqueue.net.requests import once
from rayqueue.net.scan import fetch
from rayqueue.protocol.calls import Bounds, GetBounds, Position, end_of

_log = logging.getLogger(__name__)

_PATIENCE_MS = 1000
"""How much longer than the fetch may wait its answer may take, before the leader is doubted."""


class Fetcher:
    """``start`` and ``stop`` per partition; ``kick`` when something may be asked for that was not before."""

    def __init__(
        self,
        subscription: Subscription,
        routes: Routes,
        settings: Settings,
        rng: Random,
        *,
        grouped: bool = False,
        committed: bool = False,
    ) -> None:
        self._subscription = subscription
        self._routes = routes
        self._settings = settings
        self._rng = rng
        self._grouped = grouped
        self._committed = committed
        self._tasks: dict[AssignedPartition, set[asyncio.Task[None]]] = {}
        self._failing: dict[AssignedPartition, Backoff] = {}
        self.on_topic_gone: Callable[[AssignedPartition, RayQueueError], None] = subscription.failed
        """What becomes of a partition whose topic is gone, or is another one now, where no group decides it."""

    # -- where to begin ------------------------------------------------------------------

    async def begin(self, assigned: AssignedPartition, position: Position | None, *, start: str | None = None) -> bool:
        """Find where a partition is read from. True if that is now, and not where the group had come to before."""
        await self._routes.partition(
            assigned.partition, assigned.topic_id
        )  # from here on that topic's settings are known
        info = same_topic(await self._routes.topic(assigned.partition.topic), assigned.topic_id)
        lanes = range(info.settings.lanes)
        committed: Mapping[int, int] = {} if position is None else position.offsets
        offsets = {lane: committed[lane] for lane in lanes if lane in committed}
        policy = start or self._settings.consumer.start
        if len(offsets) < len(lanes):
            bounds: Bounds = await ask(self._routes, assigned.partition, GetBounds(), topic_id=assigned.topic_id)
            # A lane without a position beside one that has: the group was here, and must not miss what came since.
            latest = policy == "latest" and not offsets
            offset = end_of(bounds, committed=self._committed) if latest else bounds.start
            offsets = {lane: offsets.get(lane, offset) for lane in lanes}
        self._subscription.begin(assigned, offsets, committed)
        if policy == "error" and not committed:
            self._subscription.failed(
                assigned,
                OffsetOutOfRangeError(
                    f"there is no position to begin at in {assigned.partition}, and start is 'error': seek",
                    topic=assigned.partition.topic,
                    partition=assigned.partition.partition,
                ),
            )
        return not committed

    # -- fetching ------------------------------------------------------------------------

    def start(self, assigned: AssignedPartition) -> None:
        """From now on. It is known where the partition begins."""
        self._tasks.setdefault(assigned, set())
        self._kick(assigned)

    def stop(self, assigned: AssignedPartition) -> None:
        self._failing.pop(assigned, None)
        for task in self._tasks.pop(assigned, ()):
            task.cancel()

    def kick(self) -> None:
        """There may be room, or a lane to ask for."""
        for assigned in list(self._tasks):
            self._kick(assigned)

    def close(self) -> None:
        for assigned in list(self._tasks):
            self.stop(assigned)

    def _kick(self, assigned: AssignedPartition) -> None:
        tasks = self._tasks.get(assigned)
        while tasks is not None:
            plan = self._subscription.plan(assigned)
            if plan is None:
                return
            task = asyncio.get_running_loop().create_task(self._fetch(assigned, plan))
            tasks.add(task)
            task.add_done_callback(partial(self._ended, assigned))

    def _ended(self, assigned: AssignedPartition, task: asyncio.Task[None]) -> None:
        tasks = self._tasks.get(assigned)
        if tasks is None or task not in tasks:
            return  # it was stopped
        tasks.discard(task)
        if task.cancelled():
            self._kick(assigned)  # not by us, and somebody must go on
        elif task.exception() is not None:  # a bug; whoever polls must learn that nothing comes any more
            _log.error("the fetcher of %s has failed", assigned.partition, exc_info=task.exception())
            self._subscription.failed(
                assigned, OutcomeUnknownError(f"{assigned.partition} is not read any more; see the log")
            )

    async def _fetch(self, assigned: AssignedPartition, plan: Plan) -> None:
        try:
            way = partial(self._routes.partition, assigned.partition, assigned.topic_id)
            answer = await once(way, partial(fetch, wanted=plan.request, patience_ms=_PATIENCE_MS))
            if assigned in self._failing:
                del self._failing[assigned]
            self._subscription.received(assigned, plan, answer)
        except OffsetOutOfRangeError as error:
            self._out_of_range(assigned, plan, error)
        except RayQueueError as error:
            await self._failed(assigned, plan, error)
        finally:
            self._subscription.ended(assigned, plan)
        self._kick(assigned)

    async def _failed(self, assigned: AssignedPartition, plan: Plan, error: RayQueueError) -> None:
        # A group takes a partition back whose topic is deleted; until it does, there is nothing to be said about it.
        hopeless = not error.retriable and not (self._grouped and isinstance(error, TopicError))
        if hopeless:
            if isinstance(error, InvariantBrokenError | InvalidInputError):
                _log.error("%s cannot be read: %s", assigned.partition, error)
            if plan.epoch != assigned.epoch:
                return
            told = self.on_topic_gone if isinstance(error, TopicError) else self._subscription.failed
            told(assigned, error)
            if assigned.error is not None:
                return
        backoff = self._failing.get(assigned)
        if backoff is None:
            backoff = self._failing[assigned] = Backoff(self._settings.client, self._rng)
        pause_s = backoff.pause_s()
        level = logging.WARNING if backoff.failures % 20 == 10 else logging.DEBUG
        _log.log(level, "%s cannot be read, attempt %d: %s", assigned.partition, backoff.failures, error)
        await asyncio.sleep(pause_s)

    def _out_of_range(self, assigned: AssignedPartition, plan: Plan, error: OffsetOutOfRangeError) -> None:
        """The next offset is not in the log: go on where ``start`` says."""
        if plan.epoch != assigned.epoch:
            return
        behind = assigned.behind(error, plan)
        start, end = error.details.get("start"), error.details.get("end")
        policy = self._settings.consumer.start
        target = end if policy == "latest" else start
        if policy == "error" or not isinstance(target, int):
            told = OffsetOutOfRangeError(
                f"{assigned.partition} has offsets {start} to {end}, and {min(behind.values())} was to be read next: "
                "seek",
                **{**error.details, "topic": assigned.partition.topic, "partition": assigned.partition.partition},
            )
            self._subscription.failed(assigned, told)
            return
        _log.warning(
            "%s has offsets %s to %s, lanes %s were to be read: going on at %d (%s)",
            *(assigned.partition, start, end, behind, target, policy),
        )
        self._subscription.reset(assigned, dict.fromkeys(behind, target))
