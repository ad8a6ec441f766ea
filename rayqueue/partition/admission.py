"""What a leader refuses before anything is written.

``Admission`` judges a batch by the state that is applied and by what this
leadership has proposed since, so a producer may have several batches in flight
and still learn of a gap or a newer epoch at once. Applying the entry remains
the judge: admission may let through what apply then refuses, never the other
way around (except for a leader that is none any more, whose answer is void).

A partition with a bound on its backlog is full once what its slowest group has
not committed, what was proposed since and the batch would be more than that.
Repetitions of what is written, or on its way, need no room. A batch that is
larger than the bound gets in when nothing else waits.

It belongs to one leadership: ``reset()`` when that begins or ends.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from rayqueue.errors import InvalidInputError, QueueFullError, SequenceGapError
from rayqueue.partition.answers import Appended
from rayqueue.partition.machine import Partition
from rayqueue.partition.producers import fenced
from rayqueue.records import BatchHeader, validate
from rayqueue.records.header import MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """What one replica accepts. Replicas may differ in these."""

    max_batch_bytes: int = 1 << 20
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """What a compressed batch may unpack to."""
    max_batch_records: int = 250_000
    max_ahead_ms: int = 3_600_000
    """How far in the future a timestamp may be. One record from the year 3000 would end retention by time."""


class Admission:
    def __init__(
        self,
        partition: Partition,
        limits: AdmissionLimits | None = None,
        *,
        next_index: Callable[[], int] | None = None,
    ) -> None:
        """``next_index`` tells which entry the next proposal becomes: the engine's. Without it, bounds on the
        backlog count what is applied only."""
        self._partition = partition
        self._limits = AdmissionLimits() if limits is None else limits
        self._next_index = next_index or (lambda: partition.applied)
        self._proposed: OrderedDict[int, tuple[int, int]] = OrderedDict()  # producer id -> epoch, next sequence
        self._waiting: deque[tuple[int, int, int]] = deque()  # index, records, bytes of what is not applied yet
        self._waiting_records = 0
        self._waiting_bytes = 0

    def reset(self) -> None:
        """Forget what was proposed: leadership was won or lost."""
        self._proposed.clear()
        self._waiting.clear()
        self._waiting_records = self._waiting_bytes = 0

    def admit(self, payload: bytes, *, now_ms: int | None = None) -> Appended | None:
        """Check a batch that is about to be proposed. None: propose it.

        A batch that is applied already needs no second entry in the log; its
        answer is returned. What cannot be accepted raises. Without ``now_ms``
        timestamps are taken as they come.
        """
        return self.admit_checked(self.check(payload, now_ms=now_ms))

    def check(self, payload: bytes, *, now_ms: int | None = None) -> BatchHeader:
        """The part of ``admit`` that depends on the batch alone, and may run in any thread.

        What it lets through can be read by every consumer. It decompresses: see ``records.batch.is_costly``.
        """
        limits = self._limits
        settings = self._partition.settings
        header = validate(
            payload,
            limits.max_batch_bytes,
            max_message_bytes=limits.max_message_bytes,
            max_records=limits.max_batch_records,
            max_record_bytes=settings.max_record_bytes,
        )
        lanes = settings.lanes
        if header.lane >= lanes:
            raise InvalidInputError(f"there is no lane {header.lane}; the partition has {lanes}", lane=header.lane)
        if header.control:
            raise InvalidInputError("control batches are not for clients to write")
        if now_ms is not None and header.max_timestamp > now_ms + limits.max_ahead_ms:
            raise InvalidInputError(
                f"timestamp {header.max_timestamp} is {header.max_timestamp - now_ms} ms ahead of the broker's clock; "
                f"the limit is {limits.max_ahead_ms} ms",
                timestamp=header.max_timestamp,
            )
        return header

    def admit_checked(self, header: BatchHeader) -> Appended | None:
        """The part of ``admit`` that belongs on the engine's thread."""
        if not header.producer_id:
            self._take_room(header)
            return None
        epoch, next_sequence = self._proposed.get(header.producer_id, (-1, 0))
        if header.epoch < epoch:
            raise fenced(header, epoch)
        answer = self._partition.producers.answer(header)
        if isinstance(answer, Appended):
            return answer
        if isinstance(answer, SequenceGapError) and header.epoch == epoch and header.sequence <= next_sequence:
            answer = None  # what is missing was proposed and is on its way
        if answer is not None:
            raise answer
        if header.epoch > epoch or header.sequence + header.count > next_sequence:
            self._take_room(header)
            self._remember(header)
        return None

    def _take_room(self, header: BatchHeader) -> None:
        """``QueueFullError`` if there is none. Free while the partition has no bounds."""
        settings = self._partition.settings
        if settings.max_backlog_bytes is None and settings.max_backlog_records is None:
            return
        index, waiting = self._next_index(), self._waiting
        while waiting and waiting[0][0] <= self._partition.applied:
            self._no_longer_waits(*waiting.popleft())
        while waiting and waiting[-1][0] >= index:
            self._no_longer_waits(*waiting.pop())  # it was admitted, but the engine refused it
        backlog = self._partition.backlog()
        records, size_bytes = backlog.records + self._waiting_records, backlog.size_bytes + self._waiting_bytes
        for bound, limit, present, more in (
            ("max_backlog_bytes", settings.max_backlog_bytes, size_bytes, header.length),
            ("max_backlog_records", settings.max_backlog_records, records, header.count),
        ):
            if limit is not None and records and present + more > limit:
                raise QueueFullError(
                    f"{present} wait for the slowest group and {more} more would pass {bound} = {limit}; "
                    "retry once it has committed",
                    bound=bound,
                    limit=limit,
                    backlog=present,
                )
        waiting.append((index, header.count, header.length))
        self._waiting_records += header.count
        self._waiting_bytes += header.length

    def _no_longer_waits(self, _: int, records: int, size_bytes: int) -> None:
        self._waiting_records -= records
        self._waiting_bytes -= size_bytes

    def _remember(self, header: BatchHeader) -> None:
        proposed = self._proposed
        proposed[header.producer_id] = (header.epoch, header.sequence + header.count)
        proposed.move_to_end(header.producer_id)
        if len(proposed) > self._partition.settings.max_producers:
            proposed.popitem(last=False)
