"""The demo's producer and consumer: records that carry their number, so that each one can be checked.

``Writer`` is one idempotent producer, ``Reader`` follows the log by long-polls.
Both run in a thread, count what they did, and keep the error that ended them.
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field

from rayqueue.client.group import ReplicaGroup
from rayqueue.errors import InvariantBrokenError
from rayqueue.partition import Appended, Fetched
from rayqueue.records import RecordBatch

RECORD_BYTES = 100
_NUMBER_DIGITS = 12
_LONG_POLL_MS = 500
_POLL_EVERY_S = 0.005


def value_of(number: int) -> bytes:
    return b"%0*d" % (_NUMBER_DIGITS, number) + b"." * (RECORD_BYTES - _NUMBER_DIGITS)


class _Thread:
    """Work that can be stopped, and whose failure is not lost."""

    def __init__(self, name: str) -> None:
        self.error: Exception | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(10.0)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _main(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  # shown by whoever waits for this thread
            self.error = error

    def _run(self) -> None:
        raise NotImplementedError


class Writer(_Thread):
    """Writes records 0 to ``records - 1`` in order, evenly over ``seconds``."""

    def __init__(self, group: ReplicaGroup, records: int, batch_records: int, seconds: float) -> None:
        super().__init__("demo writer")
        self.sent = 0
        self.acknowledged = 0
        self.ack_times_s: list[float] = []
        """When each batch was acknowledged."""
        self.ceiling = records
        """It stops before this one until it is raised."""
        self._records = records
        self._batch_records = batch_records
        self._pace_s = seconds / records
        self._pipeline = group.pipeline()
        self._producer_id = secrets.randbits(62) + 1

    def _run(self) -> None:
        self.write()

    def write(self) -> None:
        """All of it, in the calling thread."""
        started_s = time.monotonic()
        while self.sent < self._records and not self._stopped.is_set():
            self._wait_until(started_s + self.sent * self._pace_s)
            if self.sent >= self.ceiling:
                self._wait_until(time.monotonic() + _POLL_EVERY_S)
                continue
            numbers = range(self.sent, min(self.sent + self._batch_records, self._records))
            batch = RecordBatch.encode(
                list(map(value_of, numbers)),
                timestamps=time.time_ns() // 1_000_000,
                producer_id=self._producer_id,
                sequence=self.sent,
            )
            self.sent += len(numbers)
            self._pipeline.send(batch, self._acknowledge)
        self._pipeline.flush()

    def _wait_until(self, due_s: float) -> None:
        while (left_s := due_s - time.monotonic()) > 0 and not self._stopped.is_set():
            self._pipeline.poll()
            self._stopped.wait(min(left_s, _POLL_EVERY_S))

    def _acknowledge(self, answer: Appended) -> None:
        self.acknowledged += answer.count
        self.ack_times_s.append(time.monotonic())


@dataclass(slots=True)
class Check:
    """What a reader makes of the records it has seen, each of which carries its number."""

    records: int
    read: int = 0
    out_of_order: int = 0
    gaps: int = 0
    """Batches whose offset does not follow on the one before."""
    _seen: bytearray = field(default_factory=bytearray)
    _next_number: int = 0
    _next_offset: int | None = None

    def __post_init__(self) -> None:
        self._seen = bytearray(self.records)

    def take(self, batch: Fetched) -> None:
        if self._next_offset not in (None, batch.base_offset):
            self.gaps += 1
        self._next_offset = batch.base_offset + batch.count
        for value in RecordBatch.decode(batch.payload).values():
            number = _number_of(value)
            if not 0 <= number < self.records:
                raise InvariantBrokenError(f"nobody wrote record {number}")
            self.out_of_order += number != self._next_number
            self._next_number = number + 1
            self._seen[number] = min(255, self._seen[number] + 1)
            self.read += 1

    @property
    def missing(self) -> int:
        return self._seen.count(0)

    @property
    def duplicated(self) -> int:
        return self.records - self._seen.count(0) - self._seen.count(1)


def _number_of(value: bytes | None) -> int:
    if value is None or len(value) != RECORD_BYTES:
        raise InvariantBrokenError("a record is not what was written")
    return int(value[:_NUMBER_DIGITS])


class Reader(_Thread):
    """Reads from ``offset`` on, as records come, until it has ``records`` of them."""

    def __init__(self, group: ReplicaGroup, offset: int, records: int) -> None:
        super().__init__("demo reader")
        self.check = Check(records)
        self._group = group
        self._offset = offset

    def _run(self) -> None:
        while self.check.read < self.check.records and not self._stopped.is_set():
            for batch in self._group.fetch(self._offset, max_wait_ms=_LONG_POLL_MS).batches:
                self.check.take(batch)
                self._offset = batch.base_offset + batch.count
