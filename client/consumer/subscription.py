"""The subscription: a consumer's partitions, what waits in memory, and the order in which it is handed out.

Shared by two threads, with one lock: the I/O thread adds what it has fetched,
the application's thread takes it. Neither holds the lock for longer than it
takes to decode one batch, and neither waits for the network here.

- Records of a higher lane go first, whatever partition they are of. In one
  lane the partitions take turns, a batch each.
- ``prefetch_bytes`` bounds what waits over all partitions. A partition of
  which nothing waits may fetch nevertheless, so that none starves; and a
  partition with much does not take the room of the others.
- Records count as done when the application asks for more (implicitly), or
  when each of them is acknowledged (explicitly; for good from the first
  ``ack`` on).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

from rayqueue.client.consumer.assigned import AssignedPartition, Plan
from rayqueue.client.consumer.lane import Chunk, Lane
from rayqueue.config import ConsumerSettings
from rayqueue.errors import RayQueueError, UnreadableBatchError
from rayqueue.net.scan import unreadable
from rayqueue.protocol.data import READ_COMMITTED, FetchAnswer
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record

_LEAST_FETCH_BYTES = 64 * 1024
_T = TypeVar("_T")


class ChangeKind(Enum):
    ASSIGNED = "assigned"
    REVOKED = "revoked"
    """To be given up, once the application has finished with it."""
    LOST = "lost"
    """Somebody else may read it already: what was not committed cannot be any more."""


class Change(NamedTuple):
    """Something that the application is to be told by its listener, in its own thread."""

    kind: ChangeKind
    partitions: tuple[AssignedPartition, ...]


class Stretch(NamedTuple):
    """Records that are next to be handed out, from ``start`` to ``stop``: looked at, and not taken."""

    assigned: AssignedPartition
    epoch: int
    lane: Lane
    chunk: Chunk
    start: int
    stop: int


@dataclass(eq=False, slots=True)
class Reading:
    """A batch that is handed out record by record. ``index``: how many of its records the application has seen."""

    assigned: AssignedPartition
    epoch: int
    lane: Lane
    chunk: Chunk
    records: list[Record]
    stamp: int
    index: int


class Subscription:
    """See the module's text. Methods lock by themselves unless they say otherwise."""

    def __init__(self, settings: ConsumerSettings, *, explicit: bool = False, committed: bool = False) -> None:
        """``committed``: of transactions, only what is committed is fetched."""
        self.lock = threading.Lock()
        self._flags = READ_COMMITTED if committed else 0
        self.assigned: dict[TopicPartition, AssignedPartition] = {}
        self.changes: deque[Change] = deque()
        self.deleted: deque[str] = deque()
        """Topics that are gone and of which the application is to be told."""
        self.explicit = explicit
        self.stamp = 0
        """Grows when a record that is about to be handed out may not be the right one any more."""
        self.total_bytes = 0
        self.on_data: Callable[[], None] = _nothing
        """Called, in the I/O thread, when there is something new for the application."""
        self.on_room: Callable[[], None] = _nothing
        """Called, in the application's thread, when fetches that were held back may go."""
        self.forfeited: set[TopicPartition] = set()
        """Partitions that were lost with something that was handed out and not committed."""
        self._settings = settings
        self.stuck: Stretch | None = None
        """What was just found unreadable."""
        self._ready: list[deque[AssignedPartition]] = []
        self._handed: list[Lane] = []
        self._held_back = False
        self._failed: set[AssignedPartition] = set()
        self._reading: Reading | None = None

    # -- the I/O thread: partitions come and go ------------------------------------------

    def add(self, assigned: AssignedPartition) -> None:
        with self.lock:
            self.assigned[assigned.partition] = assigned

    def begin(self, assigned: AssignedPartition, offsets: Mapping[int, int], committed: Mapping[int, int]) -> None:
        with self.lock:
            assigned.begin(offsets, committed)
            while len(self._ready) < len(assigned.lanes):
                self._ready.append(deque())

    def let_go(self, assigned: AssignedPartition) -> None:
        """Nothing more of it is handed out. It can still be committed until it is removed."""
        with self.lock:
            self._settle(current_done=False)
            self.total_bytes -= assigned.end()
            self.stamp += 1
            self._reading = None

    def remove(self, assigned: AssignedPartition) -> None:
        self.let_go(assigned)
        with self.lock:
            if self.assigned.get(assigned.partition) is assigned:
                del self.assigned[assigned.partition]
            self._failed.discard(assigned)

    def announce(self, kind: ChangeKind, partitions: Iterable[AssignedPartition], *, deleted: bool = False) -> None:
        """``deleted``: with their topic, so that nobody else will read what was not committed."""
        with self.lock:
            change = Change(kind, tuple(partitions))
            self.changes.append(change)
            self.stamp += 1
            if kind is ChangeKind.LOST and not deleted:
                self._forfeit(change.partitions)
        self.on_data()

    def forfeit(self, partitions: Iterable[AssignedPartition]) -> None:
        """These are given up with what was handed out and not committed."""
        with self.lock:
            self._forfeit(partitions)

    def _forfeit(self, partitions: Iterable[AssignedPartition]) -> None:
        # What the application works on now is not due yet, and it may be about to commit it.
        self.forfeited.update(
            assigned.partition
            for assigned in partitions
            if assigned.due() is not None or not (self.explicit or assigned.settled)
        )

    def take_forfeited(self) -> set[TopicPartition]:
        with self.lock:
            forfeited, self.forfeited = self.forfeited, set()
            return forfeited

    def topic_deleted(self, topic: str) -> None:
        with self.lock:
            self.deleted.append(topic)
            self.stamp += 1
        self.on_data()

    # -- the I/O thread: fetching --------------------------------------------------------

    def plan(self, assigned: AssignedPartition) -> Plan | None:
        settings = self._settings
        with self.lock:
            share_bytes = settings.prefetch_bytes // max(len(self.assigned), 1)
            max_bytes = min(settings.fetch_bytes, max(share_bytes, _LEAST_FETCH_BYTES))
            room = self.total_bytes < settings.prefetch_bytes and assigned.buffered_bytes < max(share_bytes, max_bytes)
            plan = assigned.plan(room=room, max_bytes=max_bytes, max_wait_ms=settings.fetch_wait_ms, flags=self._flags)
            if not room and not assigned.paused:
                self._held_back = True
            return plan

    def ended(self, assigned: AssignedPartition, plan: Plan) -> None:
        with self.lock:
            assigned.ended(plan)

    def received(self, assigned: AssignedPartition, plan: Plan, answer: FetchAnswer) -> None:
        with self.lock:
            before_bytes = assigned.buffered_bytes
            try:
                grown = assigned.received(plan, answer)
            finally:
                self.total_bytes += assigned.buffered_bytes - before_bytes
            for lane in grown:
                self._enqueue(assigned, lane)
                if len(assigned.lanes) > 1:
                    self.stamp += 1
        if grown:
            self.on_data()

    def reset(self, assigned: AssignedPartition, offsets: Mapping[int, int]) -> None:
        """These lanes have to go on elsewhere, for what they were to read is gone."""
        with self.lock:
            back = {lane: offset for lane, offset in offsets.items() if offset < assigned.lanes[lane].cursor}
            for lane in offsets.keys() - back.keys():
                assigned.lanes[lane].passed(offsets[lane])  # what was fetched before is still handed out
            if back:
                self._settle(current_done=False)
                self._reading = None
                self.total_bytes -= assigned.seek(back)
                self.stamp += 1

    def failed(self, assigned: AssignedPartition, error: RayQueueError) -> None:
        """Nothing more comes of this partition until the application seeks."""
        with self.lock:
            assigned.error = error
            self._failed.add(assigned)
            self.stamp += 1
        self.on_data()

    def _enqueue(self, assigned: AssignedPartition, lane: Lane) -> None:
        if not lane.queued and lane.chunks:
            lane.queued = True
            self._ready[lane.number].append(assigned)

    # -- the application: taking -----------------------------------------------------------

    def take(
        self, max_records: int, decode: Callable[[AssignedPartition, Chunk, int, int], _T]
    ) -> tuple[int, _T] | None:
        """The next stretch of one batch: how many records, and what ``decode`` makes of it. None if nothing waits.

        ``decode`` gets the offsets from and to. If it raises, nothing was taken.
        """
        with self.lock:
            found = self._head()
            if found is None:
                return None
            assigned, lane, chunk = found
            start = chunk.start
            stop = min(chunk.end, start + max_records)
            try:
                decoded = decode(assigned, chunk, start, stop)
            except RayQueueError as error:
                raise self._unreadable(assigned, lane, chunk, error) from error
            self._hand(assigned, lane, chunk, stop)
        self._tell_room()
        return stop - start, decoded

    def look(self, max_records: int) -> tuple[Stretch, list[Record]] | None:
        """The next stretch of one batch without taking it, for what is not to be done under the lock."""
        with self.lock:
            found = self._head()
            if found is None:
                return None
            assigned, lane, chunk = found
            records = self._records(assigned, lane, chunk)
            start = chunk.start
            stop = min(chunk.end, start + max_records)
            return Stretch(assigned, assigned.epoch, lane, chunk, start, stop), records[
                start - chunk.base : stop - chunk.base
            ]

    def take_seen(self, seen: Stretch) -> bool:
        """Take what was looked at. False if it is not to be read any more."""
        with self.lock:
            if not self._is_next(seen):
                return False
            self._hand(seen.assigned, seen.lane, seen.chunk, seen.stop)
        self._tell_room()
        return True

    def _is_next(self, seen: Stretch) -> bool:
        assigned, epoch, lane, chunk, start, _ = seen
        return (
            assigned.epoch == epoch
            and assigned.readable
            and bool(lane.chunks)
            and lane.chunks[0] is chunk
            and chunk.start == start
        )

    def _hand(self, assigned: AssignedPartition, lane: Lane, chunk: Chunk, stop: int) -> None:
        self._took(assigned, lane, chunk, stop)
        if not self._handed or self._handed[-1] is not lane:
            self._handed.append(lane)

    def _head(self) -> tuple[AssignedPartition, Lane, Chunk] | None:
        for number in range(len(self._ready) - 1, -1, -1):
            queue = self._ready[number]
            while queue:
                assigned = queue[0]
                lane = assigned.lanes[number]
                if assigned.readable and lane.chunks:
                    return assigned, lane, lane.chunks[0]
                queue.popleft()
                lane.queued = False
        return None

    def _took(self, assigned: AssignedPartition, lane: Lane, chunk: Chunk, stop: int) -> None:
        self._free(assigned, lane, lane.take(chunk, stop))

    def _free(self, assigned: AssignedPartition, lane: Lane, freed_bytes: int) -> None:
        """The first batch of the lane is gone, if it has freed something."""
        if freed_bytes:
            assigned.buffered_bytes -= freed_bytes
            self.total_bytes -= freed_bytes
            queue = self._ready[lane.number]
            if queue and queue[0] is assigned:
                queue.popleft()
                lane.queued = False
            self._enqueue(assigned, lane)

    def _unreadable(
        self, assigned: AssignedPartition, lane: Lane, chunk: Chunk, error: RayQueueError
    ) -> UnreadableBatchError:
        self.stuck = Stretch(assigned, assigned.epoch, lane, chunk, chunk.start, chunk.end)
        return unreadable(assigned.partition, chunk.start, chunk.end, error, advice="seek to go on")

    def skip_unreadable(self) -> bytes | memoryview | None:
        """Go on behind what was just found unreadable. Its batch's bytes; None if it is not to be read any more."""
        with self.lock:
            stuck, self.stuck = self.stuck, None
            if stuck is None or not self._is_next(stuck):
                return None
            assigned, _, lane, chunk, _, stop = stuck
            # Not handed out, so there is nothing to acknowledge: the position moves on by itself.
            self._free(assigned, lane, lane.skip(chunk, stop))
        self._tell_room()
        return chunk.payload

    def _tell_room(self) -> None:
        """Once, when there is some again. Without the lock: the worst that a race does is to tell it twice."""
        if self._held_back and self.total_bytes <= self._settings.prefetch_bytes * 3 // 4:
            self._held_back = False
            self.on_room()

    def asked_for_more(self) -> None:
        """The application comes back: what it was given before is done, unless it says so record by record."""
        with self.lock:
            self._settle(current_done=True)
            self._reading = None
            if not self.explicit:
                for lane in self._handed:
                    lane.acks.ack_before(lane.position)
            self._handed.clear()

    # -- the application: record by record ---------------------------------------------------

    def read(self) -> Reading | None:
        """The next batch, to be handed out record by record: raise ``index`` with each, while ``stamp`` stays."""
        with self.lock:
            self._settle(current_done=True)
            self._reading = None
            found = self._head()
            if found is None:
                return None
            assigned, lane, chunk = found
            records, index = self._records(assigned, lane, chunk), chunk.start - chunk.base
            self._reading = Reading(assigned, assigned.epoch, lane, chunk, records, self.stamp, index)
            return self._reading

    def _records(self, assigned: AssignedPartition, lane: Lane, chunk: Chunk) -> list[Record]:
        try:
            return chunk.records(assigned.partition.topic, assigned.partition.partition)
        except RayQueueError as error:
            raise self._unreadable(assigned, lane, chunk, error) from error

    @property
    def progress(self) -> int:
        """Changes whenever a record is handed out by a ``Reading``."""
        reading = self._reading
        return 0 if reading is None else reading.chunk.base + reading.index

    def settle(self, *, current_done: bool) -> None:
        """Take note of what was handed out record by record. ``current_done``: also the newest one is done."""
        with self.lock:
            self._settle(current_done=current_done)
        self._tell_room()

    def _settle(self, *, current_done: bool) -> None:
        reading = self._reading
        if reading is None or reading.assigned.epoch != reading.epoch:
            return
        lane, chunk = reading.lane, reading.chunk
        stop = chunk.base + reading.index
        if stop > chunk.start:
            self._took(reading.assigned, lane, chunk, stop)
        if not self.explicit:
            lane.acks.ack_before(stop if current_done else stop - 1)

    # -- the application: acknowledging ------------------------------------------------------

    def ack(self, partition: TopicPartition, lane: int, offset: int) -> bool:
        """One record is done; from now on only those that are said to be. May be repeated.

        False: it was not handed out since this partition came here, so that another reads it, or has.
        """
        with self.lock:
            self.explicit = True
            self._settle(current_done=False)
            assigned = self.assigned.get(partition)
            if assigned is None or lane >= len(assigned.lanes):
                return False
            of = assigned.lanes[lane]
            return of.acks.ack(offset) or assigned.origin[lane] <= offset < of.handed

    def ack_handed(self, partitions: Iterable[AssignedPartition] | None = None) -> None:
        """All that was handed out (of these) is done, unless the application acknowledges record by record."""
        with self.lock:
            self._settle(current_done=True)
            if not self.explicit:
                for assigned in self.assigned.values() if partitions is None else partitions:
                    for lane in assigned.lanes:
                        lane.acks.ack_before(lane.position)

    def next_change(self) -> Change | None:
        """The next change that the application is to be told."""
        with self.lock:
            if not self.changes:
                return None
            kind, partitions = self.changes.popleft()
            while self.changes and self.changes[0].kind is kind is ChangeKind.ASSIGNED:
                partitions += self.changes.popleft().partitions
            return Change(kind, partitions)

    def interrupt(self) -> None:
        """Whoever reads record by record is to look up."""
        with self.lock:
            self.stamp += 1
        self.on_data()

    # -- the application: steering -----------------------------------------------------------

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        with self.lock:
            for partition in partitions:
                self.assigned[partition].paused = True
            self.stamp += 1

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        with self.lock:
            for partition in partitions:
                assigned = self.assigned[partition]
                assigned.paused = False
                self._requeue(assigned)
            self.stamp += 1
        self.on_room()

    def show(self, partitions: Iterable[AssignedPartition]) -> None:
        """The application knows now that it reads these."""
        with self.lock:
            for assigned in partitions:
                assigned.shown = True
                self._requeue(assigned)

    def seek(self, partition: TopicPartition, offsets: Mapping[int, int]) -> None:
        with self.lock:
            self._settle(current_done=True)
            self._reading = None
            assigned = self.assigned[partition]
            self.total_bytes -= assigned.seek(offsets)
            self._failed.discard(assigned)
            self.stamp += 1
        self.on_room()

    def rewind(self) -> None:
        """Back to behind the last committed transaction, or to where reading began: what was handed out since comes
        again. What went to another member since is read there."""
        with self.lock:
            self.forfeited.clear()
            self._settle(current_done=True)
            self._reading = None
            for assigned in self.assigned.values():
                if assigned.begun and not assigned.letting_go and assigned.positions() != assigned.origin:
                    self.total_bytes -= assigned.seek(assigned.origin)
            self._handed.clear()
            self.stamp += 1
        self.on_room()

    def error(self) -> RayQueueError | None:
        """The first error of a partition that is not paused."""
        if not self._failed:
            return None
        with self.lock:
            return next(
                (assigned.error for assigned in self._failed if not assigned.paused and not assigned.letting_go), None
            )

    def _requeue(self, assigned: AssignedPartition) -> None:
        for lane in assigned.lanes:
            self._enqueue(assigned, lane)


def _nothing() -> None:
    return None
