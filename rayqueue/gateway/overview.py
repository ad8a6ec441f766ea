"""Overview: one look at everything, for pages that show the cluster live; and how far groups are behind in time.

A look is shared: however many pages look, the cluster is asked once in
``_FRESH_S``. What a caller may not see is left out for him.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rayqueue.client.admin.admin import GroupDescription, PartitionLag, TopicDescription
from rayqueue.client.handle import RayQueue
from rayqueue.config import Effective, GatewaySettings, effective
from rayqueue.errors import RayQueueError
from rayqueue.gateway.principals import Caller
from rayqueue.protocol.calls import ClusterInfo, GroupInfo
from rayqueue.protocol.topics import TopicInfo, check_name

_FRESH_S = 1.0
_AT_ONCE = 8
_TREND_S = 60.0
_TREND_LEAST = 3
_MAX_GROUPS = 10_000
_PEEK_RECORDS = 100
_PEEK_S = 2.0
_PATIENCE_S = 3.0
"""How long one topic, or one group, may keep all others from being shown."""

_A = TypeVar("_A")
_B = TypeVar("_B")


class Trends:
    """How fast lags grow, per second, over the last minute in which somebody looked. No I/O; the clock is handed in."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, deque[tuple[float, int]]] = OrderedDict()

    def add(self, group: str, at_s: float, lag: int) -> None:
        points = self._known.setdefault(group, deque())
        self._known.move_to_end(group)
        if not points or at_s > points[-1][0]:
            points.append((at_s, lag))
        while points[0][0] < at_s - _TREND_S:
            points.popleft()
        if len(self._known) > _MAX_GROUPS:
            self._known.popitem(last=False)

    def of(self, group: str) -> float | None:
        """By least squares; None until it can be said."""
        points = self._known.get(group, ())
        if len(points) < _TREND_LEAST:
            return None
        mean_s = sum(at_s for at_s, _ in points) / len(points)
        mean = sum(lag for _, lag in points) / len(points)
        spread = sum((at_s - mean_s) ** 2 for at_s, _ in points)
        return None if spread == 0 else sum((at_s - mean_s) * (lag - mean) for at_s, lag in points) / spread


class GroupLook(NamedTuple):
    info: GroupInfo
    lag: int | None
    """None: not known now."""
    trend_per_s: float | None
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Look:
    now_ms: int
    cluster: ClusterInfo
    topics: Sequence[TopicDescription]
    groups: Sequence[GroupLook]


class Looking:
    """Of one gateway. Belongs to its event loop."""

    def __init__(self, rq: RayQueue, settings: GatewaySettings) -> None:
        self._rq = rq
        self._settings = settings
        self.trends = Trends()
        self._last: tuple[float, Look] | None = None
        self._under_way: asyncio.Task[Look] | None = None

    async def look(self, caller: Caller) -> Look:
        caller.check("describe", "cluster", "brokers")
        found = await self._shared()
        return Look(
            found.now_ms,
            found.cluster,
            [each for each in found.topics if _sees(caller, each)],
            [each for each in found.groups if caller.may("describe", "group", each.info.group)],
        )

    async def _shared(self) -> Look:
        if self._last is not None and time.monotonic() - self._last[0] < _FRESH_S:
            return self._last[1]
        if self._under_way is None:
            self._under_way = asyncio.get_running_loop().create_task(self._look())
            self._under_way.add_done_callback(self._looked)
        return await asyncio.shield(self._under_way)

    def _looked(self, task: asyncio.Task[Look]) -> None:
        self._under_way = None
        if not task.cancelled() and task.exception() is None:
            self._last = time.monotonic(), task.result()

    async def _look(self) -> Look:
        cluster, infos, groups = await asyncio.gather(
            self._rq.cluster_async(), self._rq.topics_async(), self._rq.groups_async()
        )
        topics = await _some(infos, self._topic)
        looks = await _some(groups, self._group)
        return Look(int(time.time() * 1000), cluster, [each for each in topics if each is not None], looks)

    async def _topic(self, info: TopicInfo) -> TopicDescription | None:
        try:
            found: TopicDescription = await asyncio.wait_for(self._rq.topic_async(info.name), _PATIENCE_S)
        except asyncio.TimeoutError:
            before = () if self._last is None else self._last[1].topics
            return next((each for each in before if each.topic_id == info.topic_id), None)
        except RayQueueError:
            return None  # deleted meanwhile
        return found

    async def _group(self, info: GroupInfo) -> GroupLook:
        try:
            found = await asyncio.wait_for(self._rq.group_async(info.group), _PATIENCE_S)
        except (RayQueueError, asyncio.TimeoutError):  # a partition without a leader, or it was deleted meanwhile
            return GroupLook(info, None, self.trends.of(info.group), ())
        self.trends.add(info.group, time.monotonic(), found.lag)
        topics = tuple(dict.fromkeys(each.topic for each in found.partitions))
        return GroupLook(info, found.lag, self.trends.of(info.group), topics)

    # -- lag in time --------------------------------------------------------------------------------

    async def group(self, caller: Caller, name: str) -> tuple[GroupDescription, list[int | None], float | None]:
        """A group, for each of its partitions when the first record was written that is not read, and its trend."""
        caller.check("describe", "group", check_name("group", name))
        found = await self._rq.group_async(name)
        self.trends.add(name, time.monotonic(), found.lag)
        return found, await self._oldest(found.partitions), self.trends.of(name)

    async def _oldest(self, partitions: Sequence[PartitionLag]) -> list[int | None]:
        behind = [(each.topic, each.partition) for each in partitions if each.lag > 0]
        if not behind:
            return [None] * len(partitions)
        try:
            consumer: Any = await self._rq.consumer_async(partitions=behind, start="latest", prefetch_bytes=0)
        except RayQueueError:
            return [None] * len(partitions)

        async def one(lag: PartitionLag) -> int | None:
            if lag.lag <= 0:
                return None
            try:
                return await asyncio.wait_for(_first_unread(consumer, lag), _PEEK_S)
            except (RayQueueError, asyncio.TimeoutError):
                return None  # no leader now, or what is there cannot be read

        try:
            return await _some(partitions, one)
        finally:
            await consumer.close_async()

    # -- settings -----------------------------------------------------------------------------------

    def settings(self, caller: Caller) -> list[Effective]:
        """Those of this gateway's process, secrets masked; its own section is the one that it was started with."""
        caller.check("describe", "cluster", "settings")
        mine = self._settings.model_dump()
        told = []
        for each in effective(self._rq.settings):
            section, _, key = each.key.partition(".")
            if section == "gateway" and mine[key] != getattr(self._rq.settings.gateway, key):
                value = mine[key]
                each = Effective(each.key, value if isinstance(value, int | None) else str(value), "argument")
            told.append(each)
        return told


async def _first_unread(consumer: Any, lag: PartitionLag) -> int | None:
    """When it was written. A lane that was read further than another is passed over."""
    offset = min(lag.committed.values(), default=None)
    if len(lag.committed) <= 1:
        found = await consumer.peek_async(lag.topic, lag.partition, offset=offset, max_records=1)
    else:
        some = await consumer.peek_async(lag.topic, lag.partition, offset=offset, max_records=_PEEK_RECORDS)
        found = [each for each in some if each.offset >= lag.committed.get(each.lane, 0)]
    return found[0].timestamp if found else None


def _sees(caller: Caller, topic: TopicDescription) -> bool:
    if caller.may("describe", "topic", topic.name):
        return True
    return topic.settings.queue and caller.may("describe", "queue", topic.name)


async def _some(items: Iterable[_A], of: Callable[[_A], Awaitable[_B]]) -> list[_B]:
    """Of each, in order; a few at a time."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(item: _A) -> _B:
        async with turn:
            return await of(item)

    return list(await asyncio.gather(*map(one, items)))
