"""An unbounded read. Spark's checkpoint has the offsets; nothing here has to be remembered.

An offset of the stream, as Spark keeps it:

    {"orders": {"id": 7, "offsets": {"0": 120, "1": 98}}}

``id`` tells a topic from another that had its name before. A partition that is
not named is new, and all of it is to be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from rayqueue.bridge.lookup import Lookup
from rayqueue.bridge.ranges import clip, share, split
from rayqueue.errors import DataLossError, InvalidInputError
from rayqueue.net.scan import Range
from rayqueue.protocol.topics import TopicInfo, TopicPartition
from rayqueue.spark.options import StreamOptions
from rayqueue.spark.reader import RangePartition, read_range
from rayqueue.spark.schema import arrow_schema_of
from rayqueue.spark.worker import connected

Offset = dict[str, Any]


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema_of(schema)
        self._stop_at: dict[TopicPartition, int] | None = None
        self._pinned: set[TopicPartition] = set()
        self._told: dict[TopicPartition, int] = {}

    # -- offsets ---------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802  # Spark's names, here and below
        lookup, read = self._lookup(), self._options.read
        infos = lookup.topics(read.topics)
        bounds = lookup.bounds(self._partitions(infos))
        start = lookup.resolve(read.start, bounds)
        self._pin(lookup, list(start))
        return encode_offset(infos, start)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        lookup = self._lookup()
        infos = lookup.topics(self._options.read.topics)
        bounds = lookup.bounds(self._partitions(infos))
        self._pin(lookup, list(bounds))
        begin = decode_offset(start, infos)
        # Spark asks for the next batch when the one before is through, and calls commit only if there is a next one.
        self._tell(lookup, infos, begin)
        ends = {each: limits.end for each, limits in bounds.items()}
        if self._stop_at is not None:
            # What was not there when the query began is for the next one.
            ends = {each: self._stop_at[each] for each in ends if each in self._stop_at}
        backlog = {
            each: max(0, end - max(begin.get(each, 0), bounds[each].start if each not in begin else 0))
            for each, end in ends.items()
        }
        taken = share(backlog, self._most_records(lookup, backlog, limit))
        reached = dict(begin)
        for each, count in taken.items():
            first = max(begin.get(each, 0), ends[each] - backlog[each])
            reached[each] = first + count
        return encode_offset(infos, reached)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_records is not None:
            return ReadMaxRows(self._options.max_records)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        lookup = self._lookup()
        infos = lookup.topics(self._options.read.topics)
        return encode_offset(infos, {each: b.end for each, b in lookup.bounds(self._partitions(infos)).items()})

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        lookup = self._lookup()
        infos = lookup.topics(self._options.read.topics)
        self._stop_at = {each: limits.end for each, limits in lookup.bounds(self._partitions(infos)).items()}

    def _most_records(self, lookup: Lookup, backlog: Mapping[TopicPartition, int], limit: ReadLimit) -> int:
        waiting = {each: count for each, count in backlog.items() if count}
        most = sum(waiting.values())
        if isinstance(limit, ReadAllAvailable) and self._stop_at is None and self.getDefaultReadLimit() != limit:
            return most  # Trigger.Once: all of it, whatever the options say
        max_records, max_bytes = self._options.max_records, self._options.max_bytes
        if isinstance(limit, ReadMaxRows):
            max_records = limit.max_rows
        if isinstance(limit, ReadMaxBytes):
            max_bytes = limit.max_bytes
        if max_records is not None:
            most = min(most, max_records)
        if max_bytes is not None and waiting:
            # Nobody counts bytes by offset: by what a record has taken so far, on average.
            sizes = lookup.record_bytes(waiting)
            total_bytes = sum(count * sizes[each] for each, count in waiting.items())
            if total_bytes > max_bytes:
                most = min(most, max(1, int(sum(waiting.values()) * max_bytes / total_bytes)))
        return most

    # -- reading ---------------------------------------------------------------------------

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        options, lookup = self._options.read, self._lookup()
        infos = lookup.topics(options.topics)
        begin, until = decode_offset(start, infos), decode_offset(end, infos)
        moved = {each: last for each, last in until.items() if last > begin.get(each, 0)}
        bounds = lookup.bounds(moved)
        wholes = [
            Range(each.topic, infos[each.topic].topic_id, each.partition, begin.get(each, bounds[each].start), last)
            for each, last in moved.items()
        ]
        kept = []
        for whole in wholes:
            limits = bounds[whole.topic_partition]
            if limits.end < whole.end:
                raise DataLossError(
                    f"{whole.topic_partition} ends at {limits.end}, before offset {whole.end} that the checkpoint has",
                    offset=whole.end,
                    end=limits.end,
                )
            kept.append(clip(whole, limits, fail_on_data_loss=options.scan.fail_on_data_loss))
        pieces = split(kept, max_records=options.max_records_per_split, at_least=options.min_splits)
        return [RangePartition(each) for each in pieces]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_range(self._options.read, partition, self._schema)

    # -- progress --------------------------------------------------------------------------

    def commit(self, end: Offset) -> None:
        """Spark is through with all before ``end``."""
        if self._options.group is not None:
            lookup = self._lookup()
            infos = lookup.topics(self._options.read.topics)
            self._tell(lookup, infos, decode_offset(end, infos))

    def stop(self) -> None:
        pass

    def _partitions(self, infos: Mapping[str, TopicInfo]) -> list[TopicPartition]:
        only = self._options.read.partitions
        return [
            TopicPartition(name, part.number)
            for name, info in infos.items()
            for part in info.partitions
            if only is None or part.number in only
        ]

    def _lookup(self) -> Lookup:
        read = self._options.read
        return Lookup(connected(read.where), committed=read.scan.committed)

    def _tell(self, lookup: Lookup, infos: Mapping[str, TopicInfo], offsets: Mapping[TopicPartition, int]) -> None:
        """Tell the group how far this is, for whoever looks at its lag."""
        news = {each: offset for each, offset in offsets.items() if self._told.get(each, -1) < offset}
        if self._options.group is not None and news:
            lanes = {name: info.settings.lanes for name, info in infos.items()}
            lookup.commit(self._options.group, news, lanes)
            self._told.update(news)

    def _pin(self, lookup: Lookup, partitions: Sequence[TopicPartition]) -> None:
        group = self._options.group
        fresh = [each for each in partitions if each not in self._pinned]
        if group is not None and self._options.pin and fresh:
            lookup.pin(group, fresh)
            self._pinned.update(fresh)


def encode_offset(infos: Mapping[str, TopicInfo], offsets: Mapping[TopicPartition, int]) -> Offset:
    """In the order of names and numbers, so that the same offsets are the same text."""
    encoded: Offset = {name: {"id": infos[name].topic_id, "offsets": {}} for name in sorted(infos)}
    for each in sorted(offsets):
        encoded[each.topic]["offsets"][str(each.partition)] = offsets[each]
    return encoded


def decode_offset(offset: Offset, infos: Mapping[str, TopicInfo]) -> dict[TopicPartition, int]:
    """``DataLossError`` if it is of another topic that had the same name. Topics that are not read any more go."""
    decoded: dict[TopicPartition, int] = {}
    try:
        for name, told in offset.items():
            if name not in infos:
                continue
            if told["id"] != infos[name].topic_id:
                raise DataLossError(
                    f"topic {name!r} was deleted and made again: the checkpoint is of the one before. Start the query "
                    "with a new checkpoint",
                    topic=name,
                )
            for number, position in told["offsets"].items():
                decoded[TopicPartition(name, int(number))] = int(position)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(f"not an offset of a rayqueue stream: {offset!r} ({error})") from None
    return decoded
