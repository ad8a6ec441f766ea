"""The producer's accumulator: records wait here, in batches, between ``send`` and the I/O thread.

Application threads add records; the sender, in the I/O thread, takes batches.
Between them stands one lock, held for about a microsecond. No I/O, and no
clock but the one that is handed in.

- A batch belongs to one lane of one partition. It is full before the record that would make it larger than
  ``batch_bytes``; a record that is larger alone is a batch alone.
- A full batch may be taken at once. One that is not full may be taken once it is ``linger_ms`` old; without
  linger, once nothing else of its partition is under way. So batches are small when there is little to send and
  fill by themselves when there is much.
- Batches of one lane are taken in the order in which their records were added. Among lanes the higher one goes first.
- ``buffer_bytes`` bounds all that was added and is not resolved yet, wherever it is. A topic with a bounded backlog
  bounds the same per partition: more than its partition ever takes is not accepted for it.
- Records for ``ANY`` partition go to the one that has the least on its way, some at a time, so that a burst is spread
  over partitions that have nothing to do and batches still fill where all are busy.
- What failed and nobody has looked at is kept for ``flush`` and ``close``, which tell it.
- The sender is woken when there is something to take that it does not know of, once, not for every record.
- Between transactions (``refuse``, ``accept``) nothing is accepted: a record is in one of them, or its ``send`` raises.
  Who names a transaction adds to that one or to none. Batches of one that is not released yet are not taken.
- Each partition that a transaction touches costs it something: what may go to any of them stays in one for a while.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

from rayqueue.client.forks import forked
from rayqueue.client.producer.batch import Batch
from rayqueue.client.producer.delivery import Delivery, Outcome, Part
from rayqueue.errors import ClosedError, InvalidInputError, RayQueueError
from rayqueue.protocol.data import Appended
from rayqueue.records import Compression, Headers, HeadersIn

RECORD_BYTES = 12
"""What a record costs in a batch besides its bytes: a timestamp, and where its value ends."""
KEY_BYTES = 4
PAIR_BYTES = 8
BATCH_BYTES = 1024
"""More than a batch has besides its records."""

STRIPE = 32
"""Records without a partition of their own that follow each other into one, before another is looked for."""
BURST = 1024
"""With so many on their way to a partition there is enough for everybody: the rest of its batch follows them, because
large batches cost less."""
STAY_BATCHES = 16
"""Batches of one transaction that follow each other into one partition, if they may go to any."""
_LOOK_AT = 8
"""Partitions among which the one with the least on its way is found. The next time others are looked at."""

MAX_FAILED = 10_000
"""Failed batches that are kept for ``flush``. Of more it knows the number of their records."""

_REFILL = 0.75
"""Whoever waits for space is woken when no more than this part of the buffer is used."""

Wake = Callable[[], None]


@dataclass(eq=False, slots=True)
class PartitionBuffer:
    """The batches that wait for one partition: the source of its writer."""

    accumulator: Accumulator
    topic: str
    topic_id: int
    number: int
    open: list[Batch | None]
    """By lane."""
    ready: deque[Batch] = field(default_factory=deque)
    in_flight: int = 0
    """Batches that the writer has taken and that are not acknowledged. The writer's to write."""
    signalled: bool = False
    _closed_records: int = 0
    _closed_bytes: int = 0

    @property
    def records(self) -> int:
        """Added and not resolved, wherever they are."""
        return self._closed_records + sum([len(batch.values) for batch in self.open if batch is not None])

    @property
    def size_bytes(self) -> int:
        """The same in bytes."""
        return self._closed_bytes + sum([batch.size_bytes for batch in self.open if batch is not None])

    def close(self, lane: int) -> Batch | None:
        """The open batch of this lane, which gets nothing more. None if there is none."""
        batch, self.open[lane] = self.open[lane], None
        if batch is not None:
            self.closed(batch)
        return batch

    def closed(self, batch: Batch) -> None:
        """It counts until it is resolved. What is still open is counted when somebody asks: not at every record."""
        self._closed_records += len(batch)
        self._closed_bytes += batch.size_bytes

    def resolved(self, batch: Batch) -> None:
        self._closed_records -= len(batch)
        self._closed_bytes -= batch.size_bytes

    # -- for the writer ------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches."""
        return len(self.ready) + len(self.open) - self.open.count(None)

    def take(self, now_s: float) -> Batch | None:
        """The next batch that may go now."""
        with self.accumulator.lock:
            released = self.accumulator.released
            if self.ready:
                return self.ready.popleft() if self.ready[0].number <= released else None
            linger_s = self.accumulator.linger_s
            if self.in_flight and not linger_s:
                return None
            for lane in range(len(self.open) - 1, -1, -1):
                batch = self.open[lane]
                if batch is not None and batch.opened_s <= now_s - linger_s and batch.number <= released:
                    return self.close(lane)
        return None

    def due_s(self) -> float | None:
        """When a batch that is not full may be taken, because it has waited long enough. What is held back may not be
        taken at any time: its release wakes the writer."""
        if not self.accumulator.linger_s:
            return None
        with self.accumulator.lock:
            released = self.accumulator.released
            opened = [batch.opened_s for batch in self.open if batch is not None and batch.number <= released]
        return min(opened) + self.accumulator.linger_s if opened else None

    def expired(self, now_s: float) -> list[Batch]:
        """Batches that were never taken and whose time is up; they are here no more."""
        with self.accumulator.lock:
            found: list[Batch] = []
            while self.ready and self.ready[0].deadline_s <= now_s:
                found.append(self.ready.popleft())
            for lane, batch in enumerate(self.open):
                if batch is not None and batch.deadline_s <= now_s:
                    found.append(batch)
                    self.close(lane)
            return found

    def drain(self) -> list[Batch]:
        """All batches; they are here no more."""
        return self.expired(float("inf"))

    def split(self, batch: Batch, pieces: tuple[Batch, Batch]) -> None:
        self.accumulator.split(batch, pieces)

    def resolve(self, batch: Batch, outcome: Appended | RayQueueError) -> None:
        self.accumulator.resolve(batch, outcome)


@dataclass(eq=False, slots=True)
class TopicBuffer:
    """The batches that wait for one topic, and whose turn it is among its partitions."""

    accumulator: Accumulator
    name: str
    topic_id: int
    """Another topic of the same name has another buffer: what waits here is not for it."""
    lanes: int
    turn: int
    partitions: list[PartitionBuffer] = field(default_factory=list)
    most_records: int | None = None
    most_bytes: int | None = None
    bounded: bool = False
    number: int = 0
    """The transaction that has chosen the partition whose turn it is."""
    stays: int = 0
    """How many batches more it leaves there."""

    def bound(self, most_records: int | None, most_bytes: int | None) -> None:
        """Of a partition's backlog, and so of what is on its way there."""
        self.most_records = most_records
        self.most_bytes = most_bytes
        self.bounded = most_records is not None or most_bytes is not None

    def grow(self, partitions: int) -> None:
        """The topic has so many partitions by now."""
        for number in range(len(self.partitions), partitions):
            lanes: list[Batch | None] = [None] * self.lanes
            self.partitions.append(PartitionBuffer(self.accumulator, self.name, self.topic_id, number, lanes))


ANY = -1
"""As a partition's number: the one with the least on its way, until its batch is full or gone; of a ``BURST`` each one
gets a ``STRIPE`` at a time."""


class Lack(NamedTuple):
    """The space that a record or batch has not found."""

    size_bytes: int
    topic: TopicBuffer
    number: int
    count: int = 1  # type: ignore[assignment]  # hides tuple.count, which nobody needs here


class Accumulator:
    """All that a producer has accepted and that is not resolved."""

    _all: WeakSet[Accumulator] = WeakSet()  # noqa: RUF012  # the process's own

    def __init__(
        self,
        *,
        batch_bytes: int,
        buffer_bytes: int,
        linger_ms: int,
        delivery_timeout_ms: int,
        compression: Compression = Compression.NONE,
        transactional: bool = False,
        clock_s: Callable[[], float],
        wake: Wake,
    ) -> None:
        self.lock = threading.Lock()
        self.linger_s = linger_ms / 1000
        self.used_bytes = 0
        self.is_closed = False
        """For good."""
        self.number = 0
        """The transaction that takes what is added. Without transactions there is only this one."""
        self.released = 0
        """Batches of those up to this one may be taken."""
        self.on_failure: Callable[[RayQueueError, int], None] = _nothing
        """Called, in the I/O thread, when a batch was given up; with the transaction that it was of."""
        self._refusal: Callable[[], RayQueueError] | None = None
        self._batch_bytes = batch_bytes
        self._buffer_bytes = buffer_bytes
        self._timeout_s = delivery_timeout_ms / 1000
        self._compression = compression
        self._transactional = transactional
        self._clock_s = clock_s
        self._wake = wake
        self._serial = 0
        self._unresolved: dict[int, list[Batch]] = {}  # by serial, the oldest first; the pieces of one that was cut
        self._failed: list[tuple[int, Outcome, int]] = []  # of which transaction, what, how many records
        self._failed_more: dict[int, int] = {}  # by transaction
        self._signalled: list[PartitionBuffer] = []
        self._space_waiters: list[tuple[Lack, Wake]] = []
        self._flush_waiters: list[tuple[int, Wake]] = []
        self._topics: list[TopicBuffer] = []
        self._all.add(self)

    # -- for application threads ---------------------------------------------------------

    def add_topic(self, name: str, topic_id: int, partitions: int, lanes: int, turn: int = 0) -> TopicBuffer:
        topic = TopicBuffer(self, name, topic_id, lanes, turn % partitions)
        topic.grow(partitions)
        with self.lock:
            self._topics.append(topic)
        return topic

    def append(
        self,
        topic: TopicBuffer,
        number: int,
        lane: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers | None,
        timestamp_ms: int,
        size_bytes: int,
        on_delivery: Callable[[Delivery], object] | None = None,
        of: int = 0,
    ) -> Delivery | None:
        """Add a record. None if there is no space now. ``size_bytes`` is what it takes in a batch. ``of``: this
        transaction and no other."""
        with self.lock:
            if of and of != self.number:
                raise over()
            used_bytes = self.used_bytes
            if used_bytes + size_bytes > self._buffer_bytes and used_bytes:
                return None
            if self._refusal is not None:
                raise self._refusal()
            partition = topic.partitions[number if number >= 0 else topic.turn]
            batch = partition.open[lane]
            if number < 0 and (
                batch is None
                or batch.size_bytes + size_bytes > self._batch_bytes
                or (not len(batch.values) % STRIPE and partition.records < BURST)
                or topic.bounded
            ):
                partition = self._next_partition(topic)
                batch = partition.open[lane]
            if topic.bounded and not _has_room(topic, partition, 1, size_bytes):
                return None
            if batch is None or batch.size_bytes + size_bytes > self._batch_bytes:
                batch = self._begin(topic, partition, lane)
            self.used_bytes = used_bytes + size_bytes
            batch.size_bytes += size_bytes
            values = batch.values
            position = len(values)
            values.append(value)
            batch.timestamps.append(timestamp_ms)
            keys = batch.keys
            if key is not None:
                if keys is None:
                    keys = batch.keys = [None] * position
                keys.append(key)
            elif keys is not None:
                keys.append(None)
            if headers is not None or batch.headers is not None:
                _add_headers(batch, position, (headers,))
            delivery = Delivery(batch.outcome, position)
            if on_delivery is not None:
                delivery.add_done_callback(on_delivery)
        return delivery

    def extend(
        self,
        topic: TopicBuffer,
        number: int,
        lane: int,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        headers: Sequence[HeadersIn] | None,
        timestamps: Sequence[int],
        size_bytes: int,
        of: int = 0,
    ) -> Part | None:
        """Add records that fit into one batch together. None if there is no space now."""
        with self.lock:
            partition = self._partition_for(topic, number, len(values), size_bytes, of)
            if partition is None:
                return None
            batch = partition.open[lane]
            if batch is None or batch.size_bytes + size_bytes > self._batch_bytes:
                batch = self._begin(topic, partition, lane)
            self.used_bytes += size_bytes
            batch.size_bytes += size_bytes
            position = len(batch.values)
            batch.values += values
            batch.timestamps += timestamps
            if keys is not None or batch.keys is not None:
                if batch.keys is None:
                    batch.keys = [None] * position
                batch.keys += [None] * len(values) if keys is None else keys
            if headers is not None or batch.headers is not None:
                _add_headers(batch, position, [None] * len(values) if headers is None else headers)
            return Part(batch.outcome, position, len(values))

    def put(
        self,
        topic: TopicBuffer,
        number: int,
        lane: int,
        payload: bytes,
        count: int,
        timestamps: Sequence[int] | int,
        of: int = 0,
    ) -> Part | None:
        """Add a batch that is encoded already, without a producer. None if there is no space now."""
        size_bytes = len(payload)
        with self.lock:
            partition = self._partition_for(topic, number, count, size_bytes, of)
            if partition is None:
                return None
            self._cut(partition, lane)
            batch = self._new_batch(partition, lane, Outcome(topic.name, partition.number, timestamps), [])
            self.used_bytes += size_bytes
            batch.size_bytes = size_bytes
            batch.payload = payload
            batch.count = count
            partition.closed(batch)
            partition.ready.append(batch)
            topic.stays -= topic.stays > 0
            self._signal(partition)
            return Part(batch.outcome, 0, count)

    def fits(self, size_bytes: int) -> bool:
        """Whether so much could be added now."""
        with self.lock:
            return not self._lacks_space(size_bytes)

    def when_space(self, lack: Lack, wake: Wake) -> None:
        """Wake the caller, once, when there is space for this and some more. At once if it is so now."""
        with self.lock:
            if self._refusal is None and not self._has_space(lack):
                self._space_waiters.append((lack, wake))
                return
        wake()

    def cut_all(self) -> int:
        """Everything that was added may be taken now. The serial of the newest batch, for ``when_resolved``."""
        with self.lock:
            for topic in self._topics:
                for partition in topic.partitions:
                    for lane in range(topic.lanes - 1, -1, -1):
                        if partition.open[lane] is not None:
                            self._cut(partition, lane)
                            self._signal(partition)
            return self._serial

    def when_resolved(self, serial: int, wake: Wake) -> None:
        """Wake the caller when no batch up to this one is unresolved. At once if it is so now."""
        with self.lock:
            if self._oldest() <= serial:
                self._flush_waiters.append((serial, wake))
                return
        wake()

    def close(self) -> None:
        """Nothing can be added any more."""
        self.refuse(closed, for_good=True)

    def refuse(self, why: Callable[[], RayQueueError], *, for_good: bool = False) -> None:
        """Nothing can be added until ``accept``: whoever tries, or waits for space, gets this error."""
        with self.lock:
            if not self.is_closed:
                self.is_closed, self._refusal = for_good, why
            waiters, self._space_waiters = self._space_waiters, []
        for _, wake in waiters:
            wake()

    def accept(self, number: int) -> None:
        """Count all that is added from now on to this transaction."""
        with self.lock:
            self.number = number
            if not self.is_closed:
                self._refusal = None

    def release(self, number: int) -> None:
        """Let batches of transactions up to this one be taken."""
        with self.lock:
            self.released = number
            for topic in self._topics:
                for partition in topic.partitions:
                    if len(partition):
                        self._signal(partition)

    def forget(self) -> None:
        """This process is a forked child: all that is here is sent by its parent, and nothing can be added."""
        self.lock = threading.Lock()  # another thread may have held it
        self.used_bytes = 0
        self._unresolved, self._topics, self._signalled = {}, [], []
        self._space_waiters, self._flush_waiters = [], []
        self._failed, self._failed_more = [], {}
        self.is_closed, self._refusal = True, lambda: forked("this producer")

    def check_open(self) -> None:
        """``ClosedError``, ``ForkedError`` or what else is the reason, unless something can be added."""
        if self._refusal is not None:
            raise self._refusal()

    @property
    def unresolved_records(self) -> int:
        with self.lock:
            return sum(len(batch) for pieces in self._unresolved.values() for batch in pieces)

    def failures(self, of: Collection[int] | None = None) -> tuple[list[tuple[Outcome, int]], int]:
        """Batches that have failed since the last time, each with its number of records; and how many more records.

        ``of``: these transactions only. Failures of later ones stay for the next time, those of other ones before them
        are told already.
        """
        with self.lock:
            failed, more = self._failed, self._failed_more
            last = float("inf") if of is None else max(of, default=0)
            self._failed = [each for each in failed if each[0] > last]
            self._failed_more = {number: count for number, count in more.items() if number > last}
        told = [(outcome, count) for number, outcome, count in failed if of is None or number in of]
        return told, sum(count for number, count in more.items() if of is None or number in of)

    def note_failure(self, outcome: Outcome, count: int, number: int = 0) -> None:
        """Of records that were never added. ``number``: their transaction; 0 is whichever is open."""
        with self.lock:
            self._note_failure(outcome, count, number or self.number)

    def withdraw(self, first: int, error: RayQueueError) -> None:
        """Let go of what is of this transaction, or of a later one: it is resolved with this. In the I/O thread; none
        of it was released, so the sender has nothing of it."""
        found: list[Batch] = []
        with self.lock:
            for partition in [each for topic in self._topics for each in topic.partitions]:
                found += [batch for batch in partition.ready if batch.number >= first]
                partition.ready = deque([batch for batch in partition.ready if batch.number < first])
                for lane, batch in enumerate(partition.open):
                    if batch is not None and batch.number >= first:
                        partition.close(lane)
                        found.append(batch)
        for batch in found:
            self.resolve(batch, error)

    # -- for the sender ------------------------------------------------------------------

    def signalled(self) -> list[PartitionBuffer]:
        """Partitions that may have something to take, since the last time."""
        with self.lock:
            signalled, self._signalled = self._signalled, []
            for partition in signalled:
                partition.signalled = False
        return signalled

    def resolve(self, batch: Batch, answer: Appended | RayQueueError) -> None:
        """The batch's outcome is known. Its space is free; whoever waits for either is woken."""
        error = answer if isinstance(answer, RayQueueError) else None
        wakes: list[Wake] = []
        with self.lock:
            pieces = self._unresolved.get(batch.serial)
            if pieces is None or batch not in pieces:
                return
            pieces.remove(batch)
            if not pieces:
                del self._unresolved[batch.serial]
            batch.buffer.resolved(batch)
            self.used_bytes -= batch.size_bytes
            if error is not None:
                self._note_failure(batch.outcome, len(batch), batch.number)
            waiters, self._space_waiters = self._space_waiters, []
            for lack, wake in waiters:
                if self._has_space(lack):
                    wakes.append(wake)
                else:
                    self._space_waiters.append((lack, wake))
            if self._flush_waiters:
                oldest = self._oldest()
                wakes += [wake for serial, wake in self._flush_waiters if serial < oldest]
                self._flush_waiters = [waiter for waiter in self._flush_waiters if waiter[0] >= oldest]
        batch.outcome.resolve(None if isinstance(answer, RayQueueError) else answer.base_offset, error)
        if error is not None:
            self.on_failure(error, batch.number)
        for wake in wakes:
            wake()

    def split(self, batch: Batch, pieces: tuple[Batch, Batch]) -> None:
        """The batch was cut: these are resolved in its place."""
        with self.lock:
            known = self._unresolved[batch.serial]
            at = known.index(batch)
            known[at : at + 1] = pieces

    # -- under the lock ------------------------------------------------------------------

    def _lacks_space(self, size_bytes: int) -> bool:
        self.check_open()
        # What is larger than the whole buffer goes alone.
        return self.used_bytes + size_bytes > self._buffer_bytes and self.used_bytes > 0

    def _partition_for(
        self, topic: TopicBuffer, number: int, records: int, size_bytes: int, of: int
    ) -> PartitionBuffer | None:
        """The one to add so much to; None if there is no space now."""
        if of and of != self.number:
            raise over()
        if self._lacks_space(size_bytes):
            return None
        partition = topic.partitions[number] if number >= 0 else self._next_partition(topic)
        return partition if _has_room(topic, partition, records, size_bytes) else None

    def _has_space(self, lack: Lack) -> bool:
        topic, number, size_bytes = lack.topic, lack.number, lack.size_bytes
        if self.used_bytes > max(0, min(int(self._buffer_bytes * _REFILL), self._buffer_bytes - size_bytes)):
            return False
        partitions = [topic.partitions[number]] if number >= 0 else topic.partitions
        return any(_has_room(topic, each, lack.count, size_bytes) for each in partitions)

    def _next_partition(self, topic: TopicBuffer) -> PartitionBuffer:
        """The one with the least on its way, and among equals the next in turn. A transaction stays where it is."""
        partitions = topic.partitions
        if self.number:
            if topic.number == self.number and topic.stays and not topic.bounded:
                return partitions[topic.turn]
            topic.number, topic.stays = self.number, STAY_BATCHES
        count = len(partitions)
        first = best = (topic.turn + 1) % count
        least = partitions[best].records
        for step in range(1, count if topic.bounded else min(count, _LOOK_AT)):
            number = (first + step) % count
            records = partitions[number].records
            if records < least:
                best, least = number, records
        topic.turn = best
        return partitions[best]

    def _note_failure(self, outcome: Outcome, count: int, number: int) -> None:
        if len(self._failed) < MAX_FAILED:
            self._failed.append((number, outcome, count))
        else:
            self._failed_more[number] = self._failed_more.get(number, 0) + count

    def _begin(self, topic: TopicBuffer, partition: PartitionBuffer, lane: int) -> Batch:
        """A new batch."""
        if partition.open[lane] is not None:
            self._cut(partition, lane)
            self._signal(partition)
        elif self.linger_s or not partition.in_flight:
            self._signal(partition)
        timestamps: list[int] = []
        batch = self._new_batch(partition, lane, Outcome(topic.name, partition.number, timestamps), timestamps)
        partition.open[lane] = batch
        topic.stays -= topic.stays > 0
        return batch

    def _new_batch(self, partition: PartitionBuffer, lane: int, outcome: Outcome, timestamps: list[int]) -> Batch:
        now_s = self._clock_s()
        self._serial += 1
        batch = Batch(
            buffer=partition,
            outcome=outcome,
            lane=lane,
            timestamps=timestamps,
            opened_s=now_s,
            deadline_s=now_s + self._timeout_s,
            serial=self._serial,
            compression=self._compression,
            transactional=self._transactional,
            number=self.number,
        )
        self._unresolved[self._serial] = [batch]
        return batch

    def _cut(self, partition: PartitionBuffer, lane: int) -> None:
        batch = partition.close(lane)
        if batch is not None:
            partition.ready.append(batch)

    def _signal(self, partition: PartitionBuffer) -> None:
        if not partition.signalled:
            partition.signalled = True
            self._signalled.append(partition)
            if len(self._signalled) == 1:
                self._wake()

    def _oldest(self) -> float:
        return next(iter(self._unresolved), float("inf"))


def _after_fork() -> None:
    for accumulator in list(Accumulator._all):
        accumulator.forget()


os.register_at_fork(after_in_child=_after_fork)


def _has_room(topic: TopicBuffer, partition: PartitionBuffer, records: int, size_bytes: int) -> bool:
    """Whether so much more may be on its way to the partition. What is larger than the bound goes alone."""
    if not partition.records:
        return True
    if topic.most_records is not None and partition.records + records > topic.most_records:
        return False
    return topic.most_bytes is None or partition.size_bytes + size_bytes <= topic.most_bytes


def _nothing(error: RayQueueError, number: int) -> None:
    """Nobody has to be told."""


def over() -> InvalidInputError:
    return InvalidInputError("this transaction is over: what is sent in it now is in none")


def closed() -> ClosedError:
    return ClosedError("this producer was closed; make a new one")


def _add_headers(batch: Batch, position: int, headers: Sequence[Any]) -> None:
    if batch.headers is None:
        batch.headers = [None] * position
    batch.headers += headers
