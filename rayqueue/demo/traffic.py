"""The demo's producers and consumers, as an application would write them: Ray tasks that are handed the queue.

Each record carries its producer and its number, so that each one can be
checked. The tasks tell a ``Board`` how far they are; what they return at their
end is what is judged.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import ray

from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.delivery import Delivery
from rayqueue.errors import InvariantBrokenError
from rayqueue.records import Record

RECORD_BYTES = 100
_NUMBER = b"%02d.%010d."
_NUMBER_BYTES = len(_NUMBER % (0, 0))
_KEYS = 1000
_REPORT_S = 0.2
_GAP_S = 0.05
_POLL_MS = 200


def value_of(producer: int, number: int) -> bytes:
    return (_NUMBER % (producer, number)).ljust(RECORD_BYTES, b".")


def key_of(number: int) -> bytes:
    return b"customer-%d" % (number % _KEYS)


def number_of(value: bytes | None) -> tuple[int, int]:
    """Producer and number. ``InvariantBrokenError`` if nobody wrote this."""
    if value is None or len(value) != RECORD_BYTES or value != value_of(int(value[:2]), int(value[3:13])):
        raise InvariantBrokenError("a record is not what was written")
    return int(value[:2]), int(value[3:13])


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which one partition acknowledged nothing although it was written to. Wall-clock seconds."""

    partition: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class Produced:
    """The progress of a producer."""

    sent: int = 0
    acknowledged: int = 0
    failed: str | None = None
    gaps: list[Gap] = field(default_factory=list)


@dataclass(slots=True)
class Consumed:
    """The records that a consumer has seen."""

    read: int = 0
    out_of_order: int = 0
    seen: list[bytearray] = field(default_factory=list)
    """Per producer, how often each number was read."""
    partitions: tuple[int, ...] = ()


class Board:
    """A board on which the tasks note their progress. An actor."""

    def __init__(self) -> None:
        self._produced: dict[int, Produced] = {}
        self._consumed: dict[int, Consumed] = {}
        self._ceiling = 0.0
        self._enough = False

    def producing(self, producer: int, told: Produced) -> float:
        """Answers which part of its records the producer may have sent by now."""
        self._produced[producer] = told
        return self._ceiling

    def consuming(self, member: int, told: Consumed) -> bool:
        """Answers whether all is read."""
        self._consumed[member] = told
        return self._enough

    def look(self, ceiling: float, enough: bool) -> tuple[dict[int, Produced], dict[int, Consumed]]:
        self._ceiling, self._enough = ceiling, enough
        return self._produced, self._consumed


@ray.remote(num_cpus=0)
def produce(rq: RayQueue, topic: str, producer: int, records: int, seconds: float, board: Any) -> Produced:
    """Send records 0 to ``records - 1`` with keys, evenly over ``seconds``."""
    told = Produced()
    last_ack_s: dict[int, float] = {}

    def delivered(delivery: Delivery) -> None:
        error = delivery.exception()
        if error is not None:
            told.failed = str(error)
            return
        metadata = delivery.result()
        now_s = time.time()
        before_s = last_ack_s.get(metadata.partition, now_s)
        if now_s - before_s > _GAP_S:
            told.gaps.append(Gap(metadata.partition, before_s, now_s))
        last_ack_s[metadata.partition] = now_s
        told.acknowledged += 1

    ceiling = ray.get(board.producing.remote(producer, told))
    started_s = reported_s = time.monotonic()
    with rq.producer(linger_ms=2) as sender:
        while told.sent < records and told.failed is None:
            now_s = time.monotonic()
            due = records if not seconds else int((now_s - started_s) / seconds * records)
            due = min(records, due, int(ceiling * records))
            for number in range(told.sent, due):
                sender.send(topic, value_of(producer, number), key=key_of(number), on_delivery=delivered)
            told.sent = max(told.sent, due)
            if now_s - reported_s > _REPORT_S:
                reported_s = now_s
                ceiling = ray.get(board.producing.remote(producer, told))
            time.sleep(0.005)
        sender.flush()
    ray.get(board.producing.remote(producer, told))
    return told


@ray.remote(num_cpus=0)
def consume(rq: RayQueue, topic: str, group: str, member: int, producers: int, records: int, board: Any) -> Consumed:
    """Read with the group until the board says that all is read."""
    check = Check(producers, records)
    reported_s = 0.0
    with rq.consumer(topic, group=group) as consumer:
        while True:
            for record in consumer.poll(timeout_ms=_POLL_MS):
                check.take(record)
            now_s = time.monotonic()
            if now_s - reported_s > _REPORT_S:
                reported_s = now_s
                told = Consumed(check.told.read, partitions=tuple(sorted(tp.partition for tp in consumer.assignment())))
                if ray.get(board.consuming.remote(member, told)):
                    return check.told


class Check:
    """A check of the records that a consumer sees."""

    def __init__(self, producers: int, records: int) -> None:
        self.told = Consumed(seen=[bytearray(records) for _ in range(producers)])
        self._last: dict[tuple[int, int], int] = {}  # partition and producer -> number

    def take(self, record: Record) -> None:
        producer, number = number_of(record.value)
        seen = self.told.seen
        if not (producer < len(seen) and number < len(seen[producer]) and record.key == key_of(number)):
            raise InvariantBrokenError(f"nobody wrote record {number} of producer {producer}")
        place = (record.partition, producer)
        self.told.out_of_order += number <= self._last.get(place, -1)
        self._last[place] = number
        seen[producer][number] = min(255, seen[producer][number] + 1)
        self.told.read += 1


@dataclass(frozen=True, slots=True)
class Sum:
    """All consumers' reports together."""

    read: int
    lost: int
    duplicated: int
    out_of_order: int


def add_up(reports: list[Consumed], producers: int, records: int) -> Sum:
    lost = duplicated = 0
    for producer in range(producers):
        counts = [0] * records
        for report in reports:
            for number, count in enumerate(report.seen[producer]):
                counts[number] += count
        lost += counts.count(0)
        duplicated += sum(count > 1 for count in counts)
    return Sum(sum(report.read for report in reports), lost, duplicated, sum(each.out_of_order for each in reports))


class Rate:
    """Records per second over the last few looks."""

    def __init__(self, looks: int = 8) -> None:
        self._points: deque[tuple[float, int]] = deque(maxlen=looks)

    def add(self, now_s: float, count: int) -> None:
        self._points.append((now_s, count))

    @property
    def per_s(self) -> float:
        if len(self._points) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0
