"""Admission: batches that the leader refuses before anything is written.

``Admission`` judges a batch by the state that is applied and by what this
leadership has proposed since, so a producer may have several batches in flight
and still learn of a gap or a newer epoch at once. Applying the entry remains
the judge: admission may let through what apply then refuses, never the other
way around (except for a leader that is none any more, whose answer is void).

A partition with a bound on its backlog never takes a batch that, with what its
slowest group has not committed and what was proposed since, would be more than
that. A leader that has not applied yet what its predecessors left cannot know,
and takes nothing. Repetitions of what is written, or on its way, need no room.
Who finds no room may wait for some in ``line``; what was granted there to
somebody else is taken.

``tick`` says when the log must be told the time before what is admitted.

It belongs to one leadership: ``reset()`` when that begins or ends.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from rayqueue.errors import (
    DiskFullError,
    InvalidInputError,
    NotLeaderError,
    OversizedBatchError,
    OversizedRecordError,
    QueueFullError,
    SequenceGapError,
)
from rayqueue.partition.answers import Appended
from rayqueue.partition.clock import TICK_MS
from rayqueue.partition.commands import pass_time_command
from rayqueue.partition.jobs.queue import check_options
from rayqueue.partition.line import Answer, Line
from rayqueue.partition.machine import Partition
from rayqueue.partition.producers import fenced
from rayqueue.partition.transactions.endings import transaction_of
from rayqueue.protocol.calls import AwaitRoom, Room
from rayqueue.records import BatchHeader, validate
from rayqueue.records.header import MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits on what one replica accepts. Replicas may differ in these."""

    max_batch_bytes: int = 1 << 20
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """What a compressed batch may unpack to."""
    max_batch_records: int = 250_000
    max_ahead_ms: int = 3_600_000
    """How far in the future a timestamp may be. One record from the year 3000 would end retention by time."""


_NO_BOUND = 2**62


class Admission:
    def __init__(
        self,
        partition: Partition,
        limits: AdmissionLimits | None = None,
        *,
        next_index: Callable[[], int] | None = None,
        applied: Callable[[], int] | None = None,
        line: Line | None = None,
        disks_full: Callable[[], bool] | None = None,
    ) -> None:
        """``next_index`` tells which entry the next proposal becomes, ``applied`` how far the log is applied, with
        entries that are Raft's own and never reach the partition: the engine's. Without them, bounds on the backlog
        count what is applied only. ``disks_full`` tells whether a majority has no room for records."""
        self.line = Line() if line is None else line
        self._partition = partition
        self._limits = AdmissionLimits() if limits is None else limits
        self._next_index = next_index or (lambda: partition.applied)
        self._applied = applied or (lambda: partition.applied)
        self._disks_full = disks_full or (lambda: False)
        self._proposed: OrderedDict[int, tuple[int, int]] = OrderedDict()  # producer id -> epoch, next sequence
        self._waiting: deque[tuple[int, int, int]] = deque()  # index, records, bytes of what is not applied yet
        self._waiting_records = 0
        self._waiting_bytes = 0
        self._inherited = 0  # the last entry that this leadership has not counted
        self._ticked_ms = 0

    def reset(self) -> None:
        """Forget what was proposed: leadership was won or lost."""
        self._inherited = self._next_index() - 1
        self._proposed.clear()
        self._waiting.clear()
        self._waiting_records = self._waiting_bytes = 0
        self._ticked_ms = 0

    def tick(self, now_ms: int, within_ms: int = TICK_MS) -> bytes | None:
        """The command to propose before an entry that gets the partition's time; None while its clock is right."""
        if now_ms - max(self._partition.clock.now_ms, self._ticked_ms) < within_ms:
            return None
        return pass_time_command(now_ms)

    def ticked(self, now_ms: int) -> None:
        """It was proposed."""
        self._ticked_ms = now_ms

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
        if header.transactional and not header.producer_id:
            raise InvalidInputError("a batch of a transaction must say which producer it is from")
        if settings.queue:
            check_options(header, payload)
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
        transaction = transaction_of(header)
        if transaction is not None:
            refused = self._partition.endings.batch_refusal(transaction, header)
            if refused is not None:
                raise refused
        if header.epoch > epoch or header.sequence + header.count > next_sequence:
            self._take_room(header)
            self._remember(header)
        return None

    def _take_room(self, header: BatchHeader) -> None:
        """``QueueFullError`` or ``DiskFullError`` if there is none."""
        if self._disks_full():
            raise DiskFullError("the disks of this partition are full; records are taken again once there is space")
        index = self._next_index()
        self._forget_applied(index)
        settings = self._partition.settings
        if settings.max_backlog_bytes is not None or settings.max_backlog_records is not None:
            self._check_room(header)
            self.line.used(header.producer_id, header.count, header.length)
        self._waiting.append((index, header.count, header.length))
        self._waiting_records += header.count
        self._waiting_bytes += header.length

    def _check_room(self, header: BatchHeader) -> None:
        self._check_settled()
        settings = self._partition.settings
        most_bytes = settings.max_backlog_bytes
        if header.count == 1 and most_bytes is not None and header.length > most_bytes:
            raise _never_fits(header.length, most_bytes)
        records, size_bytes = self._present()
        behind = self.line.stands_before(header.producer_id, header.count, header.length)
        reserved = self.line.reserved(header.producer_id)
        for bound, limit, present, kept, more in (
            ("max_backlog_bytes", most_bytes, size_bytes, reserved.size_bytes, header.length),
            ("max_backlog_records", settings.max_backlog_records, records, reserved.records, header.count),
        ):
            if limit is not None and (behind or present + kept + more > limit):
                why = "others wait for room already" if behind else f"{more} more would pass {bound} = {limit}"
                raise QueueFullError(
                    f"{present} wait for the slowest group, and {why}; retry once it has committed",
                    bound=bound,
                    limit=limit,
                    backlog=present,
                )

    def _check_settled(self) -> None:
        applied = self._applied()
        if applied < self._inherited:
            raise NotLeaderError(
                f"this leader was just elected and has applied {applied} of {self._inherited} entries that it found; "
                "it does not know yet how much room there is",
                leader=None,
            )

    def _present(self) -> tuple[int, int]:
        """Records and bytes that count against the bounds."""
        backlog = self._partition.backlog()
        return backlog.records + self._waiting_records, backlog.size_bytes + self._waiting_bytes

    # -- waiting for room ----------------------------------------------------------------

    def await_room(self, wanted: AwaitRoom, client: int, deadline_s: float, answer: Answer) -> None:
        """Take a place in the line. Answered by ``advance``."""
        self._check_settled()
        in_order = 1 <= wanted.least_records <= wanted.records and 0 <= wanted.least_bytes <= wanted.size_bytes
        if wanted.producer_id < 1 or not in_order:
            raise InvalidInputError(
                f"producer {wanted.producer_id} waits for {wanted.least_records} to {wanted.records} records of "
                f"{wanted.least_bytes} to {wanted.size_bytes} bytes: each must be positive, the least no more than all"
            )
        most_bytes, most_records = (
            self._partition.settings.max_backlog_bytes,
            self._partition.settings.max_backlog_records,
        )
        if most_records is not None and wanted.least_records > most_records:
            raise OversizedBatchError(
                f"a batch of {wanted.least_records} records that cannot be cut is larger than the topic's "
                f"max_backlog_records, {most_records}",
                count=wanted.least_records,
                limit=most_records,
            )
        if most_bytes is not None and wanted.least_bytes > most_bytes:
            raise _never_fits(wanted.least_bytes, most_bytes)
        self.line.join(wanted, client, deadline_s, answer)

    def advance(self, now_s: float) -> None:
        """Grant what room there is to those who wait for it."""
        if not len(self.line):
            return
        settings = self._partition.settings
        most_records, most_bytes = settings.max_backlog_records, settings.max_backlog_bytes
        self._forget_applied(self._next_index())
        records, size_bytes = self._present()
        free = Room(
            _NO_BOUND if most_records is None else most_records - records,
            _NO_BOUND if most_bytes is None else most_bytes - size_bytes,
        )
        self.line.advance(free, now_s)

    def _forget_applied(self, next_index: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= self._partition.applied:
            self._no_longer_waits(*waiting.popleft())
        while waiting and waiting[-1][0] >= next_index:
            self._no_longer_waits(*waiting.pop())  # it was admitted, but the engine refused it

    def _no_longer_waits(self, _: int, records: int, size_bytes: int) -> None:
        self._waiting_records -= records
        self._waiting_bytes -= size_bytes

    def _remember(self, header: BatchHeader) -> None:
        proposed = self._proposed
        proposed[header.producer_id] = (header.epoch, header.sequence + header.count)
        proposed.move_to_end(header.producer_id)
        if len(proposed) > self._partition.settings.max_producers:
            proposed.popitem(last=False)


def _never_fits(size_bytes: int, most_bytes: int) -> OversizedRecordError:
    return OversizedRecordError(
        f"a record that takes {size_bytes} bytes as a batch is larger than the topic's max_backlog_bytes, {most_bytes}",
        length=size_bytes,
        limit=most_bytes,
    )
