"""What a leader refuses before anything is written.

``Admission`` judges a batch by the state that is applied and by what this
leadership has proposed since, so a producer may have several batches in flight
and still learn of a gap or a newer epoch at once. Applying the entry remains
the judge: admission may let through what apply then refuses, never the other
way around (except for a leader that is none any more, whose answer is void).

It belongs to one leadership: ``reset()`` when that begins or ends.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rayqueue.errors import InvalidInputError, SequenceGapError
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
    max_ahead_ms: int = 3_600_000
    """How far in the future a timestamp may be. One record from the year 3000 would end retention by time."""


class Admission:
    def __init__(self, partition: Partition, limits: AdmissionLimits | None = None) -> None:
        self._partition = partition
        self._limits = AdmissionLimits() if limits is None else limits
        self._proposed: OrderedDict[int, tuple[int, int]] = OrderedDict()  # producer id -> epoch, next sequence

    def reset(self) -> None:
        """Forget what was proposed: leadership was won or lost."""
        self._proposed.clear()

    def admit(self, payload: bytes, *, now_ms: int | None = None) -> Appended | None:
        """Check a batch that is about to be proposed. None: propose it.

        A batch that is applied already needs no second entry in the log; its
        answer is returned. What cannot be accepted raises. Without ``now_ms``
        timestamps are taken as they come.
        """
        return self.admit_checked(self.check(payload, now_ms=now_ms))

    def check(self, payload: bytes, *, now_ms: int | None = None) -> BatchHeader:
        """The part of ``admit`` that depends on the batch alone, and may run in any thread."""
        limits = self._limits
        header = validate(payload, limits.max_batch_bytes, max_message_bytes=limits.max_message_bytes)
        lanes = self._partition.settings.lanes
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
            self._remember(header)
        return None

    def _remember(self, header: BatchHeader) -> None:
        proposed = self._proposed
        proposed[header.producer_id] = (header.epoch, header.sequence + header.count)
        proposed.move_to_end(header.producer_id)
        if len(proposed) > self._partition.settings.max_producers:
            proposed.popitem(last=False)
