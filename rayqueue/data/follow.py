"""Reading a topic part by part, each run from where the last one ended.

The place is kept as the position of a consumer group in the partitions
themselves, so it survives everything that the records survive, lag tools see
it, and it can hold retention (``pin``). A part is committed when its reader says
so. After a crash the part that was not committed comes again: the same records,
no more and no less, under the same id (``plan.py``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.data import Dataset

from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.places import EARLIEST, Places, parse_places
from rayqueue.bridge.ranges import clip, share
from rayqueue.client.handle import RayQueue
from rayqueue.data.plan import Plan, PlannedPart, place_of, was_here
from rayqueue.data.source import BLOCK_RECORDS, Isolation, PlaceIn, dataset_of, reads_committed
from rayqueue.errors import InvalidInputError
from rayqueue.net.scan import OnCorrupt, Range, ScanSettings
from rayqueue.protocol.calls import Bounds
from rayqueue.protocol.topics import TopicInfo, TopicPartition, check_name


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the topic, and how to say that it is done."""

    id: int
    """Its number. It has the same id and the same records however often it is handed out."""
    dataset: Dataset
    ranges: tuple[Range, ...]
    """What is read: all that was planned, or what retention has left of it."""
    checkpoint: str
    _plan: Plan
    _planned: PlannedPart

    def __len__(self) -> int:
        """Records."""
        return sum(map(len, self.ranges))

    @property
    def identity(self) -> bytes:
        """A digest of the ranges that were planned, for which the id stands."""
        return self._planned.identity

    def commit(self) -> None:
        """The next run begins after this part. Parts are committed in order; to commit one again changes nothing."""
        self._plan.commit(self._planned)


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
    on_corrupt: OnCorrupt = "raise",
    isolation: Isolation = "read_committed",
    max_records_per_task: int = BLOCK_RECORDS,
    place: bool = True,
    override_num_blocks: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> Iterator[Part]:
    """Parts of the topic from where group ``checkpoint`` stands, or from ``start`` if it never was here.

    Begins with the parts that the last run has not committed, as they were. Ends when there is nothing new for
    ``wait_ms``; ``None`` waits for ever. ``max_records`` bounds a new part. One run per checkpoint at a time.
    The other arguments are those of ``read_topic``.
    """
    topics = [topic] if isinstance(topic, str) else list(topic)
    group = check_name("group", checkpoint)
    if max_records is not None and max_records < 1:
        raise InvalidInputError(f"max_records is at least 1, not {max_records}", key="max_records")
    places = parse_places("start", start, topics, EARLIEST)
    committed = reads_committed(isolation)
    reader = _Follower(rq, topics, group, places, fail_on_data_loss, committed=committed)
    if pin:
        reader.pin()
    scan = ScanSettings(fail_on_data_loss=fail_on_data_loss, committed=committed, on_corrupt=on_corrupt)
    while (planned := reader.wait(max_records, wait_ms)) is not None:
        ranges = reader.readable(planned)
        dataset = dataset_of(
            rq,
            ranges,
            columns=columns,
            max_records_per_task=max_records_per_task,
            scan=scan,
            place=place,
            override_num_blocks=override_num_blocks,
            ray_remote_args=ray_remote_args,
        )
        yield Part(planned.number, dataset, tuple(ranges), group, reader.plan, planned)


_LOOK_S = 0.1
_RENEW_S = 3600.0
"""How often a run that waits uses its positions, so that they do not expire."""


class _Follower:
    """The place of this run. A part that was handed out is not handed out again in the same run, committed or not."""

    def __init__(
        self,
        rq: RayQueue,
        topics: list[str],
        group: str,
        start: Places,
        fail_on_data_loss: bool,
        *,
        committed: bool = False,
    ) -> None:
        self._lookup = Lookup(rq, committed=committed)
        self._topics = topics
        self._group = group
        self._start = start
        self._fail_on_data_loss = fail_on_data_loss
        self._reached: dict[TopicPartition, int] = {}
        self._again: deque[PlannedPart] | None = None
        self._renewed_s = 0.0
        self.plan = Plan(rq, group)

    def pin(self) -> None:
        infos = self._lookup.topics(self._topics)
        self._lookup.pin(self._group, _partitions(infos))

    def wait(self, max_records: int | None, wait_ms: int | None) -> PlannedPart | None:
        """The next part; None if nothing comes in time."""
        if self._again is None:
            infos = self._lookup.topics(self._topics)
            parts = self.plan.load(self._lookup, infos, fail_on_data_loss=self._fail_on_data_loss)
            self._find_places(infos)
            for each in [each for part in parts for each in part.ranges]:
                self._reached[each.topic_partition] = max(each.end, self._reached[each.topic_partition])
            self._again = deque(parts)
            self._renewed_s = time.monotonic()
        if self._again:
            return self._again.popleft()
        deadline_s = None if wait_ms is None else time.monotonic() + wait_ms / 1000
        while True:
            if time.monotonic() - self._renewed_s > _RENEW_S:
                self.plan.renew(self._lookup)
                self._renewed_s = time.monotonic()
            ranges = self._next(max_records)
            if ranges:
                return self.plan.add(self._lookup, ranges)
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return None
            time.sleep(_LOOK_S)

    def readable(self, part: PlannedPart) -> list[Range]:
        """The ranges that retention has left of it. ``DataLossError`` if some is gone and that matters."""
        bounds = self._lookup.bounds(each.topic_partition for each in part.ranges)
        fail = self._fail_on_data_loss
        return [clip(each, bounds[each.topic_partition], fail_on_data_loss=fail) for each in part.ranges]

    def _find_places(self, infos: Mapping[str, TopicInfo]) -> dict[TopicPartition, Bounds]:
        """The bounds of all partitions. Where this run is in those that are new to it is known then."""
        bounds = self._lookup.bounds(_partitions(infos))
        fresh = {each: bounds[each] for each in bounds if each not in self._reached}
        if fresh:
            positions = self._lookup.positions(self._group, fresh)
            known = {each: place_of(position) for each, position in positions.items()}
            # A partition without a place beside others that have one is younger than they: all of it is to be read.
            old = {name for name in infos if self._reached or was_here(name, positions)}
            began = self._lookup.resolve(self._start, {each: fresh[each] for each in fresh if each.topic not in old})
            grown = self._lookup.resolve(Places(EARLIEST), {each: fresh[each] for each in fresh if each.topic in old})
            begin = {each: place for each, place in {**began, **grown}.items() if known[each] is None}
            self.plan.begin(self._lookup, begin, infos)
            self._reached |= begin | {each: place for each, place in known.items() if place is not None}
        return bounds

    def _next(self, max_records: int | None) -> list[Range]:
        infos = self._lookup.topics(self._topics)  # partitions may have been added
        bounds = self._find_places(infos)
        backlog = {each: max(0, limits.end - self._reached[each]) for each, limits in bounds.items()}
        taken = share(backlog, sum(backlog.values()) if max_records is None else max_records)
        ranges = []
        for each, count in taken.items():
            if count:
                first = self._reached[each]
                whole = Range(each.topic, infos[each.topic].topic_id, each.partition, first, first + count)
                ranges.append(clip(whole, bounds[each], fail_on_data_loss=self._fail_on_data_loss))
        for each, count in taken.items():
            self._reached[each] += count
        return ranges


def _partitions(infos: Mapping[str, TopicInfo]) -> list[TopicPartition]:
    return [TopicPartition(name, part.number) for name, info in infos.items() for part in info.partitions]
