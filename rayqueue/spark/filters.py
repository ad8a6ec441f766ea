"""Filters of a query that decide what has to be read at all. Pure.

Filters on ``topic``, ``partition`` and ``offset`` are carried out here, exactly. One on
``timestamp`` only leaves out what cannot match: everything before the first
record that is not older, and batches that are altogether too old or too young;
Spark filters the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from rayqueue.net.scan import Range

_NEVER_NULL = {"topic", "partition", "offset", "timestamp", "lane", "headers"}


@dataclass(slots=True)
class Wanted:
    """The ranges that the pushed filters leave."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    first_offset: int = 0
    end_offset: int | None = None
    offsets: frozenset[int] | None = None
    min_timestamp_ms: int | None = None
    max_timestamp_ms: int | None = None
    nothing: bool = field(default=False)

    def push(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take what can be taken. Returns what Spark still has to do."""
        return [each for each in filters if not self._take(each)]

    def wants(self, topic: str, partition: int) -> bool:
        return (
            not self.nothing
            and (self.topics is None or topic in self.topics)
            and (self.partitions is None or partition in self.partitions)
        )

    def cut(self, whole: Range) -> list[Range]:
        """The parts of a range that are wanted."""
        if not self.wants(whole.topic, whole.partition):
            return []
        start = max(whole.start, self.first_offset)
        end = whole.end if self.end_offset is None else min(whole.end, self.end_offset)
        part = replace(
            whole, start=start, end=end, min_timestamp_ms=self.min_timestamp_ms, max_timestamp_ms=self.max_timestamp_ms
        )
        if self.offsets is None:
            return [part] if len(part) else []
        inside = sorted(each for each in self.offsets if part.start <= each < part.end)
        return [replace(part, start=first, end=last + 1) for first, last in _runs(inside)]

    def _take(self, each: Filter) -> bool:
        if isinstance(each, IsNotNull):
            return len(each.attribute) == 1 and each.attribute[0] in _NEVER_NULL
        path = getattr(each, "attribute", None)
        if path is None or len(path) != 1:
            return False
        name, value = path[0], getattr(each, "value", None)
        if name == "timestamp":
            self._take_time(each, value)
            return False
        if name == "topic" and isinstance(each, (EqualTo, In)):
            self.topics = _narrowed(self.topics, _values(each, value))
            return True
        if name == "partition":
            return self._take_partition(each, value)
        if name == "offset":
            return self._take_offset(each, value)
        return False

    def _take_partition(self, each: Filter, value: Any) -> bool:
        if not isinstance(each, (EqualTo, In)):
            return False
        self.partitions = _narrowed(self.partitions, _values(each, value))
        return True

    def _take_offset(self, each: Filter, value: Any) -> bool:
        match each:
            case EqualTo() | In():
                self.offsets = _narrowed(self.offsets, _values(each, value))
            case GreaterThan():
                self.first_offset = max(self.first_offset, value + 1)
            case GreaterThanOrEqual():
                self.first_offset = max(self.first_offset, value)
            case LessThan():
                self._end(value)
            case LessThanOrEqual():
                self._end(value + 1)
            case _:
                return False
        return True

    def _end(self, offset: int) -> None:
        self.end_offset = max(0, offset if self.end_offset is None else min(self.end_offset, offset))

    def _take_time(self, each: Filter, value: Any) -> None:
        stamp = _ms(value)
        if stamp is None:
            return
        if isinstance(each, (EqualTo, GreaterThan, GreaterThanOrEqual)):
            self.min_timestamp_ms = stamp if self.min_timestamp_ms is None else max(self.min_timestamp_ms, stamp)
        if isinstance(each, (EqualTo, LessThan, LessThanOrEqual)):
            self.max_timestamp_ms = stamp if self.max_timestamp_ms is None else min(self.max_timestamp_ms, stamp)


def _values(each: Filter, value: Any) -> frozenset[Any]:
    return frozenset(value) if isinstance(each, In) else frozenset({value})


def _narrowed(known: frozenset[Any] | None, wanted: frozenset[Any]) -> frozenset[Any]:
    return wanted if known is None else known & wanted


def _ms(value: Any) -> int | None:
    """A filter's time in whole milliseconds, which is what records have; a finer one may not cut too much."""
    if not isinstance(value, datetime):
        return None
    if value.tzinfo is None:
        value = value.replace(tzinfo=timezone.utc)
    return int(value.timestamp() * 1000)


def _runs(offsets: list[int]) -> list[tuple[int, int]]:
    """First and last of each stretch without gaps."""
    runs: list[tuple[int, int]] = []
    for each in offsets:
        if runs and runs[-1][1] + 1 == each:
            runs[-1] = (runs[-1][0], each)
        else:
            runs.append((each, each))
    return runs
