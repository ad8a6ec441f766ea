"""Reading a topic part by part, each run from where the last one ended.

The place is kept as the position of a consumer group in the partitions
themselves, so it survives everything that the records survive, lag tools see
it, and it can hold retention (``pin``). A part is committed when its reader says
so: after a crash the part that was not committed comes again, with the same
records and maybe newer ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ray.data import Dataset

from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.places import EARLIEST, Places, parse_places
from rayqueue.bridge.ranges import Range, clip, share
from rayqueue.bridge.scan import ScanSettings
from rayqueue.client.connection import RayQueue
from rayqueue.data.source import PlaceIn, dataset_of
from rayqueue.errors import InvalidInputError
from rayqueue.protocol.topics import TopicInfo, TopicPartition, check_name


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the topic, and how to say that it is done."""

    dataset: Dataset
    ranges: tuple[Range, ...]
    _rq: RayQueue
    _group: str

    def __len__(self) -> int:
        """Records."""
        return sum(map(len, self.ranges))

    def commit(self) -> None:
        """The next part, and the next run, begin after this one. Commit parts in order."""
        lookup = Lookup(self._rq)
        infos = lookup.topics(sorted({each.topic for each in self.ranges}))
        lanes = {name: info.settings.lanes for name, info in infos.items()}
        lookup.commit(self._group, {each.topic_partition: each.end for each in self.ranges}, lanes)


def follow_topic(
    rq: RayQueue,
    topic: str | Sequence[str],
    *,
    checkpoint: str,
    start: PlaceIn = "earliest",
    columns: Sequence[str] | None = None,
    max_records: int | None = None,
    wait_ms: int | None = 0,
    pin: bool = False,
    fail_on_data_loss: bool = True,
    **read_options: Any,
) -> Iterator[Part]:
    """Parts of the topic from where group ``checkpoint`` stands, or from ``start`` if it never was here.

    Ends when there is nothing new for ``wait_ms``; ``None`` waits for ever. ``max_records`` bounds a part.
    """
    topics = [topic] if isinstance(topic, str) else list(topic)
    group = check_name("group", checkpoint)
    if max_records is not None and max_records < 1:
        raise InvalidInputError(f"max_records is at least 1, not {max_records}", key="max_records")
    places = parse_places("start", start, topics, EARLIEST)
    reader = _Follower(rq, topics, group, places, fail_on_data_loss)
    if pin:
        reader.pin()
    scan = ScanSettings(fail_on_data_loss=fail_on_data_loss)
    while ranges := reader.wait(max_records, wait_ms):
        yield Part(dataset_of(rq, ranges, columns=columns, scan=scan, **read_options), tuple(ranges), rq, group)


_LOOK_S = 0.1


class _Follower:
    """Where this run is. A part that was handed out is not handed out again, committed or not."""

    def __init__(self, rq: RayQueue, topics: list[str], group: str, start: Places, fail_on_data_loss: bool) -> None:
        self._lookup = Lookup(rq)
        self._topics = topics
        self._group = group
        self._start = start
        self._fail_on_data_loss = fail_on_data_loss
        self._reached: dict[TopicPartition, int] = {}

    def pin(self) -> None:
        infos = self._lookup.topics(self._topics)
        self._lookup.pin(self._group, _partitions(infos))

    def wait(self, max_records: int | None, wait_ms: int | None) -> list[Range]:
        """What is new; [] if nothing comes in time."""
        deadline_s = None if wait_ms is None else time.monotonic() + wait_ms / 1000
        while True:
            ranges = self._next(max_records)
            if ranges or (deadline_s is not None and time.monotonic() >= deadline_s):
                return ranges
            time.sleep(_LOOK_S)

    def _next(self, max_records: int | None) -> list[Range]:
        infos = self._lookup.topics(self._topics)  # partitions may have been added
        bounds = self._lookup.bounds(_partitions(infos))
        fresh = {each: bounds[each] for each in bounds if each not in self._reached}
        if fresh:
            # A partition that is there now and was not when this run began is new: all of it is to be read.
            begin = Places(EARLIEST) if self._reached else self._start
            places = self._lookup.resolve(begin, fresh)
            positions = self._lookup.positions(self._group, fresh)
            for each, place in places.items():
                position = positions[each]
                known = None if position is None or not position.offsets else min(position.offsets.values())
                self._reached[each] = place if known is None else known
        backlog = {each: max(0, limits.end - self._reached[each]) for each, limits in bounds.items()}
        taken = share(backlog, sum(backlog.values()) if max_records is None else max_records)
        ranges = []
        for each, count in taken.items():
            if count:
                first = self._reached[each]
                whole = Range(each.topic, infos[each.topic].topic_id, each.partition, first, first + count)
                ranges.append(clip(whole, bounds[each], fail_on_data_loss=self._fail_on_data_loss))
                self._reached[each] = first + count
        return ranges


def _partitions(infos: dict[str, TopicInfo]) -> list[TopicPartition]:
    return [TopicPartition(name, part.number) for name, info in infos.items() for part in info.partitions]
