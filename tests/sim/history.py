"""The applications' history, held against the logs: RayQueue's promises from the application's side.

Of producers: what was acknowledged is in the log, where the answer said, once;
what was reported as not written is not there; what is unknown may be either, and
never twice; and the records of one producer are in its order.

Of consumers: a record that is handed out is the one that the log has there; none
is passed over, neither by what is handed out nor by what is committed; those of
one assignment come in order, each once, and only while it lasts; what a commit
said is committed is. At most once means that nobody ever gets a record again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rayqueue.errors import OutcomeUnknownError, RayQueueError
from rayqueue.partition import Partition
from rayqueue.partition.commands import CommitOffsets
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record, RecordBatch
from tests.sim.checker import ReadChecker
from tests.sim.invariants import BrokenError, Invariant


@dataclass(frozen=True, slots=True)
class Acked:
    partition: int
    offset: int


Outcome = Acked | RayQueueError | None
"""Of a record that was sent; None if whoever sent it has died, or waits."""


@dataclass(slots=True)
class Sent:
    producer: str
    number: int
    """Of this producer's records for this partition and lane."""
    partition: int
    lane: int
    outcome: Outcome = None


@dataclass(slots=True)
class Assignment:
    """A partition, from when a consumer was told that it reads it. ``at``: lane to the next offset."""

    at: dict[int, int] = field(default_factory=dict)
    handed: dict[int, int] = field(default_factory=dict)
    """Lane to behind the last record that was handed out."""


class PartitionLog:
    """The committed records of one partition, as offsets, lanes and values."""

    def __init__(self, reads: ReadChecker) -> None:
        self._reads = reads
        self._batches = 0
        self.records: list[tuple[int, bytes]] = []

    def grow(self) -> list[tuple[int, bytes]]:
        batches = self._reads.batches
        while self._batches < len(batches):
            batch = RecordBatch.decode(batches[self._batches].payload)
            self.records.extend((batch.header.lane, bytes(value or b"")) for value in batch.values())
            self._batches += 1
        return self.records

    def next_of(self, lane: int, offset: int) -> int | None:
        """The first record of this lane from there on; None if there is none yet."""
        records = self.grow()
        return next((at for at in range(offset, len(records)) if records[at][0] == lane), None)


class GroupHistory:
    """What the members of one consumer group were handed, have done and have committed."""

    def __init__(self, name: str, logs: Mapping[int, PartitionLog], *, at_most_once: bool) -> None:
        self.name = name
        self.at_most_once = at_most_once
        self.handed: dict[int, set[int]] = {number: set() for number in logs}
        self.done: dict[int, set[int]] = {number: set() for number in logs}
        self.rewinds = 0
        self._logs = logs
        self._reads: dict[int, int] = {}
        """Partition to the newest generation that was handed anything of it."""
        self._solid: dict[tuple[int, int], int] = {}
        """Partition and lane to behind which record all were handed out."""

    def hand(self, who: str, record: Record, generation: int, assignment: Assignment | None) -> None:
        """``generation``: 0 if the partition was lost meanwhile. ``assignment``: None if this consumer is not told what
        it reads."""
        number, offset, lane = record.partition, record.offset, record.lane
        log = self._logs[number]
        records = log.grow()
        if offset >= len(records) or records[offset] != (lane, record.value):
            raise BrokenError(Invariant.READS, f"{who} was handed {record}, which is not what the log has there")
        if self.at_most_once:
            if offset in self.handed[number]:
                raise BrokenError(Invariant.AT_MOST_ONCE, f"{who} was handed {number}:{offset}, as somebody was before")
        else:
            self._check_none_skipped(who, number, lane, offset)
        self.handed[number].add(offset)
        self._reads[number] = max(generation, self._reads.get(number, 0))
        if assignment is not None:
            expected = assignment.at.get(lane)
            due = None if expected is None else log.next_of(lane, expected)
            # What a poll takes and then cannot commit is never handed out, if that is to be at most once.
            if due is not None and (offset < due if self.at_most_once else offset != due):
                raise BrokenError(Invariant.IN_ORDER, f"{who} was handed {number}:{offset} where {due} comes next")
            assignment.at[lane] = offset + 1

    def _check_none_skipped(self, who: str, number: int, lane: int, offset: int) -> None:
        records, handed = self._logs[number].records, self.handed[number]
        for at in range(self._solid.get((number, lane), 0), offset):
            if records[at][0] == lane and at not in handed:
                raise BrokenError(Invariant.NONE_SKIPPED, f"{who} was handed {number}:{offset}, and nobody {at}")
        if offset >= self._solid.get((number, lane), 0):
            self._solid[number, lane] = offset

    def excuse(self, number: int, lane: int, offset: int) -> None:
        """The application goes on there by itself: what is before is not asked for."""
        before = [at for at, (its_lane, _) in enumerate(self._logs[number].grow()[:offset]) if its_lane == lane]
        self.handed[number].update(before)
        self.done[number].update(before)

    def committed(self, number: int, commit: CommitOffsets) -> None:
        """A commit is in the log, and the partition has taken it."""
        if commit.generation < self._reads.get(number, 0):
            raise BrokenError(
                Invariant.FENCED,
                f"{self.name}: generation {commit.generation} committed to {number}, which {self._reads[number]} reads",
            )
        records, done = self._logs[number].grow(), self.done[number]
        for lane, offset in commit.offsets.items():
            left = [at for at in range(offset) if records[at][0] == lane and at not in done]
            if left and not self.at_most_once:
                raise BrokenError(
                    Invariant.NONE_SKIPPED,
                    f"{self.name} committed {offset} of lane {lane} of {number}, and nobody is through with {left}",
                )

    def check_commit(self, who: str, number: int, done: Mapping[int, int], reference: Partition) -> None:
        """A consumer was told that all this is committed."""
        position = reference.position(self.name)
        found = {} if position is None else position.offsets
        for lane, offset in done.items():
            if found.get(lane, 0) < offset:
                raise BrokenError(
                    Invariant.COMMITTED, f"{who} committed {offset} of lane {lane} of {number}, which is at {found}"
                )


class ProducerHistory:
    """What producers sent and were told."""

    def __init__(self) -> None:
        self.sent: dict[bytes, Sent] = {}

    @property
    def acked(self) -> int:
        return sum(isinstance(sent.outcome, Acked) for sent in self.sent.values())

    def check(self, logs: Mapping[int, PartitionLog], *, ordered: bool) -> None:
        """Not ``ordered``: of calls of ``send_async`` that wait for room together, which is first is not promised."""
        where: dict[bytes, Acked] = {}
        newest: dict[tuple[str, int, int], int] = {}
        for number, log in logs.items():
            for offset, (lane, value) in enumerate(log.grow()):
                sent, place = self.sent[value], Acked(number, offset)
                if value in where:
                    raise BrokenError(Invariant.ONCE, f"{value!r} is there twice, at {where[value]} and {place}")
                where[value] = place
                stream = (sent.producer, number, lane)
                if ordered and sent.number <= newest.get(stream, -1):
                    raise BrokenError(Invariant.IN_ORDER, f"{value!r} at {place} is out of its producer's order")
                newest[stream] = sent.number
        for value, sent in self.sent.items():
            self._check_outcome(value, sent.outcome, where.get(value))

    def _check_outcome(self, value: bytes, outcome: Outcome, place: Acked | None) -> None:
        if isinstance(outcome, Acked) and outcome != place:
            raise BrokenError(Invariant.ACKNOWLEDGED, f"{value!r} was acknowledged at {outcome} and is at {place}")
        unsure = outcome is None or isinstance(outcome, OutcomeUnknownError)
        if not isinstance(outcome, Acked) and not unsure and place is not None:
            raise BrokenError(
                Invariant.TRUE_OUTCOME, f"{value!r} was said not to be written and is at {place}: {outcome!r}"
            )


def names_of(partitions: Iterable[TopicPartition]) -> list[int]:
    return sorted(each.partition for each in partitions)
