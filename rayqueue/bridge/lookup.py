"""What the cluster says of topics: partitions, bounds, where a time is. Many partitions are asked at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rayqueue.bridge.places import Places, resolve
from rayqueue.bridge.ranges import Range, check_end, clip
from rayqueue.client.connection import RayQueue
from rayqueue.errors import InvalidInputError
from rayqueue.protocol.calls import Bounds, Call, Commit, FindOffset, GetBounds, GetPosition, GetStatus, Pin, Position
from rayqueue.protocol.topics import TopicInfo, TopicPartition

_K = TypeVar("_K")
_T = TypeVar("_T")
_AT_ONCE = 64


class Lookup:
    """Questions about topics. Any thread but the I/O thread."""

    def __init__(self, rq: RayQueue) -> None:
        self._rq = rq

    def topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        """As they are now. ``UnknownTopicError``."""
        routes = self._rq.routes
        return self._many({name: routes.topic(name, refresh=True) for name in names})

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Bounds]:
        return self._ask({each: GetBounds() for each in partitions})

    def find(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """The first record that is not older, in each."""
        return self._ask({each: FindOffset(timestamp_ms=time_ms) for each, time_ms in times.items()})

    def record_bytes(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, float]:
        """What a record takes on average, as stored; 0 where nobody knows yet."""
        found = self._ask({each: GetStatus() for each in partitions})
        return {
            each: status.size_bytes / max(1, status.high_watermark - status.start_offset)
            for each, status in found.items()
        }

    def positions(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Position | None]:
        return self._ask({each: GetPosition(group=group) for each in partitions})

    def commit(self, group: str, offsets: Mapping[TopicPartition, int], lanes: Mapping[str, int]) -> None:
        """Let a group without members continue there, in every lane."""
        self._ask(
            {
                each: Commit(group=group, generation=0, offsets=dict.fromkeys(range(lanes[each.topic]), offset))
                for each, offset in offsets.items()
            }
        )

    def pin(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        self._ask({each: Pin(group=group) for each in partitions})

    def resolve(self, places: Places, bounds: Mapping[TopicPartition, Bounds]) -> dict[TopicPartition, int]:
        """An offset for every partition."""
        found = self.find(places.instants(list(bounds)))
        return {each: resolve(places.of(each), limits, found.get(each)) for each, limits in bounds.items()}

    def ranges(
        self,
        topics: Sequence[str],
        start: Places,
        end: Places,
        *,
        fail_on_data_loss: bool = True,
        wanted: Callable[[str, int], bool] | None = None,
    ) -> list[Range]:
        """One range for each partition of these topics, or for those of them that are wanted."""
        infos = self.topics(topics)
        places = [
            TopicPartition(name, part.number)
            for name, info in infos.items()
            for part in info.partitions
            if wanted is None or wanted(name, part.number)
        ]
        for named in (*start.partitions, *end.partitions):
            if named.topic in infos and named.partition >= len(infos[named.topic].partitions):
                raise InvalidInputError(f"there is no partition {named}", partition=named.partition)
        bounds = self.bounds(places)
        starts, ends = self.resolve(start, bounds), self.resolve(end, bounds)
        ranges = []
        for each in places:
            check_end(each, ends[each], bounds[each])
            whole = Range(each.topic, infos[each.topic].topic_id, each.partition, starts[each], ends[each])
            ranges.append(clip(whole, bounds[each], fail_on_data_loss=fail_on_data_loss))
        return ranges

    def _ask(self, calls: Mapping[TopicPartition, Call]) -> dict[TopicPartition, Any]:
        return self._many({each: self._one(each, call) for each, call in calls.items()})

    async def _one(self, partition: TopicPartition, call: Call) -> Any:
        return await (await self._rq.routes.partition(partition)).call(call)

    def _many(self, questions: Mapping[_K, Coroutine[Any, Any, _T]]) -> dict[_K, _T]:
        if not questions:
            return {}

        async def gather() -> list[_T]:
            gate = asyncio.Semaphore(_AT_ONCE)

            async def asked(question: Coroutine[Any, Any, _T]) -> _T:
                async with gate:
                    return await question

            return await asyncio.gather(*map(asked, questions.values()))

        return dict(zip(questions, self._rq.io.call(gather()), strict=True))
