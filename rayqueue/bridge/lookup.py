"""Questions to the cluster about topics: partitions, bounds, where a time is. Many partitions are asked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rayqueue.bridge.places import Places, resolve
from rayqueue.bridge.ranges import check_end, clip
from rayqueue.client.handle import RayQueue
from rayqueue.errors import InvalidInputError
from rayqueue.net.interfaces import ask, same_topic
from rayqueue.net.requests import gathered
from rayqueue.net.scan import Range
from rayqueue.protocol.calls import (
    Bounds,
    Call,
    Commit,
    FindOffset,
    GetBounds,
    GetPosition,
    GetStatus,
    Pin,
    Position,
    end_of,
)
from rayqueue.protocol.topics import TopicInfo, TopicPartition


class Lookup:
    """Questions about topics. Any thread but the I/O thread.

    Once ``topics`` was asked for a name, every later question is about that topic, and is answered by
    ``TopicRecreatedError`` if it was deleted and another one has the name.
    """

    def __init__(self, rq: RayQueue, *, committed: bool = False) -> None:
        """``committed``: for a reader of committed records, whose log ends at the last stable offset."""
        self._rq = rq
        self._committed = committed
        self._ids: dict[str, int] = {}

    def topics(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        """As they are now. ``UnknownTopicError``; ``TopicRecreatedError`` if one is not what it was the last time."""
        routes = self._rq.routes
        infos = self._rq.io.call(gathered(lambda name: routes.topic(name, refresh=True), names))
        found = dict(zip(names, infos, strict=True))
        for name, info in found.items():
            self._ids[name] = same_topic(info, self._ids.get(name)).topic_id
        return found

    def bounds(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Bounds]:
        found: dict[TopicPartition, Bounds] = self.ask({each: GetBounds() for each in partitions})
        return {each: Bounds(limits.start, end_of(limits, committed=self._committed)) for each, limits in found.items()}

    def find(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """The first record that is not older, in each."""
        return self.ask({each: FindOffset(timestamp_ms=time_ms) for each, time_ms in times.items()})

    def record_bytes(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, float]:
        """What a record takes on average, as stored; 0 where nobody knows yet."""
        found = self.ask({each: GetStatus() for each in partitions})
        return {
            each: status.size_bytes / max(1, status.high_watermark - status.start_offset)
            for each, status in found.items()
        }

    def positions(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Position | None]:
        return self.ask({each: GetPosition(group=group) for each in partitions})

    def commit(self, group: str, offsets: Mapping[TopicPartition, int], lanes: Mapping[str, int]) -> None:
        """Let a group without members continue there, in every lane."""
        self.ask(
            {
                each: Commit(group=group, generation=0, offsets=dict.fromkeys(range(lanes[each.topic]), offset))
                for each, offset in offsets.items()
            }
        )

    def pin(self, group: str, partitions: Iterable[TopicPartition]) -> None:
        self.ask({each: Pin(group=group) for each in partitions})

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

    def ask(self, calls: Mapping[TopicPartition, Call]) -> dict[TopicPartition, Any]:
        """What the leaders of these partitions answer."""

        async def one(each: TopicPartition) -> Any:
            return await ask(self._rq.routes, each, calls[each], topic_id=self._ids.get(each.topic))

        return dict(zip(calls, self._rq.io.call(gathered(one, calls)), strict=True)) if calls else {}
