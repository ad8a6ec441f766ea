"""What a consumer reads: its partitions, what waits in memory, and the order in which it is handed out.

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
from enum import Enum
from typing import NamedTuple, TypeVar

from rayqueue.client.feed import Feed, Plan
from rayqueue.client.positions import Chunk, Lane
from rayqueue.config import ConsumerSettings
from rayqueue.errors import RayQueueError, UnreadableBatchError
from rayqueue.protocol.data import FetchAnswer
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
    feeds: tuple[Feed, ...]


class Stretch(NamedTuple):
    """Records that are next to be handed out, from ``start`` to ``stop``: looked at, and not taken."""

    feed: Feed
    epoch: int
    lane: Lane
    chunk: Chunk
    start: int
    stop: int


class Reading:
    """A batch that is handed out record by record. ``index``: how many of its records the application has seen."""

    __slots__ = ("chunk", "epoch", "feed", "index", "lane", "records", "stamp")

    def __init__(self, feed: Feed, lane: Lane, chunk: Chunk, records: list[Record], stamp: int) -> None:
        self.stamp = stamp
        self.feed = feed
        self.lane = lane
        self.chunk = chunk
        self.records = records
        self.epoch = feed.epoch
        self.index = chunk.start - chunk.base


class Subscription:
    """See the module's text. Methods lock by themselves unless they say otherwise."""

    def __init__(self, settings: ConsumerSettings, *, explicit: bool = False) -> None:
        self.lock = threading.Lock()
        self.feeds: dict[TopicPartition, Feed] = {}
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
        self._ready: list[deque[Feed]] = []
        self._handed: list[Lane] = []
        self._held_back = False
        self._failed: set[Feed] = set()
        self._reading: Reading | None = None

    # -- the I/O thread: partitions come and go ------------------------------------------

    def add(self, feed: Feed) -> None:
        with self.lock:
            self.feeds[feed.partition] = feed

    def begin(self, feed: Feed, offsets: Mapping[int, int], committed: Mapping[int, int]) -> None:
        with self.lock:
            feed.begin(offsets, committed)
            while len(self._ready) < len(feed.lanes):
                self._ready.append(deque())

    def let_go(self, feed: Feed) -> None:
        """Nothing more of it is handed out. It can still be committed until it is removed."""
        with self.lock:
            self._settle(current_done=False)
            self.total_bytes -= feed.end()
            self.stamp += 1
            self._reading = None

    def remove(self, feed: Feed) -> None:
        self.let_go(feed)
        with self.lock:
            if self.feeds.get(feed.partition) is feed:
                del self.feeds[feed.partition]
            self._failed.discard(feed)

    def announce(self, kind: ChangeKind, feeds: Iterable[Feed], *, deleted: bool = False) -> None:
        """``deleted``: with their topic, so that nobody else will read what was not committed."""
        with self.lock:
            change = Change(kind, tuple(feeds))
            self.changes.append(change)
            self.stamp += 1
            if kind is ChangeKind.LOST and not deleted:
                self.forfeited.update(feed.partition for feed in change.feeds if feed.due() is not None)
        self.on_data()

    def topic_deleted(self, topic: str) -> None:
        with self.lock:
            self.deleted.append(topic)
            self.stamp += 1
        self.on_data()

    # -- the I/O thread: fetching --------------------------------------------------------

    def plan(self, feed: Feed) -> Plan | None:
        settings = self._settings
        with self.lock:
            share_bytes = settings.prefetch_bytes // max(len(self.feeds), 1)
            max_bytes = min(settings.fetch_bytes, max(share_bytes, _LEAST_FETCH_BYTES))
            room = self.total_bytes < settings.prefetch_bytes and feed.buffered_bytes < max(share_bytes, max_bytes)
            plan = feed.plan(room=room, max_bytes=max_bytes, max_wait_ms=settings.fetch_wait_ms)
            if not room and not feed.paused:
                self._held_back = True
            return plan

    def ended(self, feed: Feed, plan: Plan) -> None:
        with self.lock:
            feed.ended(plan)

    def received(self, feed: Feed, plan: Plan, answer: FetchAnswer) -> None:
        with self.lock:
            before_bytes = feed.buffered_bytes
            try:
                grown = feed.received(plan, answer)
            finally:
                self.total_bytes += feed.buffered_bytes - before_bytes
            for lane in grown:
                self._enqueue(feed, lane)
                if len(feed.lanes) > 1:
                    self.stamp += 1
        if grown:
            self.on_data()

    def reset(self, feed: Feed, offsets: Mapping[int, int]) -> None:
        """These lanes have to go on elsewhere, for what they were to read is gone."""
        with self.lock:
            back = {lane: offset for lane, offset in offsets.items() if offset < feed.lanes[lane].cursor}
            for lane in offsets.keys() - back.keys():
                feed.lanes[lane].passed(offsets[lane])  # what was fetched before is still handed out
            if back:
                self._settle(current_done=False)
                self._reading = None
                self.total_bytes -= feed.seek(back)
                self.stamp += 1

    def failed(self, feed: Feed, error: RayQueueError) -> None:
        """Nothing more comes of this partition until the application seeks."""
        with self.lock:
            feed.error = error
            self._failed.add(feed)
            self.stamp += 1
        self.on_data()

    def _enqueue(self, feed: Feed, lane: Lane) -> None:
        if not lane.queued and lane.chunks:
            lane.queued = True
            self._ready[lane.number].append(feed)

    # -- the application: taking -----------------------------------------------------------

    def take(self, max_records: int, decode: Callable[[Feed, Chunk, int, int], _T]) -> tuple[int, _T] | None:
        """The next stretch of one batch: how many records, and what ``decode`` makes of it. None if nothing waits.

        ``decode`` gets the offsets from and to. If it raises, nothing was taken.
        """
        with self.lock:
            found = self._head()
            if found is None:
                return None
            feed, lane, chunk = found
            start = chunk.start
            stop = min(chunk.end, start + max_records)
            try:
                decoded = decode(feed, chunk, start, stop)
            except RayQueueError as error:
                raise self._unreadable(feed, lane, chunk, error) from error
            self._hand(feed, lane, chunk, stop)
            room = self._has_room()
        if room:
            self.on_room()
        return stop - start, decoded

    def look(self, max_records: int) -> tuple[Stretch, list[Record]] | None:
        """The next stretch of one batch without taking it, for what is not to be done under the lock."""
        with self.lock:
            found = self._head()
            if found is None:
                return None
            feed, lane, chunk = found
            records = self._records(feed, lane, chunk)
            start = chunk.start
            stop = min(chunk.end, start + max_records)
            return Stretch(feed, feed.epoch, lane, chunk, start, stop), records[start - chunk.base : stop - chunk.base]

    def take_seen(self, seen: Stretch) -> bool:
        """Take what was looked at. False if it is not to be read any more."""
        with self.lock:
            if not self._is_next(seen):
                return False
            self._hand(seen.feed, seen.lane, seen.chunk, seen.stop)
            room = self._has_room()
        if room:
            self.on_room()
        return True

    def _is_next(self, seen: Stretch) -> bool:
        feed, epoch, lane, chunk, start, _ = seen
        return (
            feed.epoch == epoch
            and feed.readable
            and bool(lane.chunks)
            and lane.chunks[0] is chunk
            and chunk.start == start
        )

    def _hand(self, feed: Feed, lane: Lane, chunk: Chunk, stop: int) -> None:
        self._took(feed, lane, chunk, stop)
        if not self._handed or self._handed[-1] is not lane:
            self._handed.append(lane)

    def _head(self) -> tuple[Feed, Lane, Chunk] | None:
        for number in range(len(self._ready) - 1, -1, -1):
            queue = self._ready[number]
            while queue:
                feed = queue[0]
                lane = feed.lanes[number]
                if feed.readable and lane.chunks:
                    return feed, lane, lane.chunks[0]
                queue.popleft()
                lane.queued = False
        return None

    def _took(self, feed: Feed, lane: Lane, chunk: Chunk, stop: int) -> None:
        self._free(feed, lane, lane.take(chunk, stop))

    def _free(self, feed: Feed, lane: Lane, freed_bytes: int) -> None:
        """The first batch of the lane is gone, if it has freed something."""
        if freed_bytes:
            feed.buffered_bytes -= freed_bytes
            self.total_bytes -= freed_bytes
            queue = self._ready[lane.number]
            if queue and queue[0] is feed:
                queue.popleft()
                lane.queued = False
            self._enqueue(feed, lane)

    def _unreadable(self, feed: Feed, lane: Lane, chunk: Chunk, error: RayQueueError) -> UnreadableBatchError:
        self.stuck = Stretch(feed, feed.epoch, lane, chunk, chunk.start, chunk.end)
        return UnreadableBatchError(
            f"{feed.partition} cannot be read from offset {chunk.start} to {chunk.end}: {error}; seek to go on",
            topic=feed.partition.topic,
            partition=feed.partition.partition,
            offset=chunk.start,
            end=chunk.end,
        )

    def skip_unreadable(self) -> bytes | memoryview | None:
        """Go on behind what was just found unreadable. Its batch's bytes; None if it is not to be read any more."""
        with self.lock:
            stuck, self.stuck = self.stuck, None
            if stuck is None or not self._is_next(stuck):
                return None
            feed, _, lane, chunk, _, stop = stuck
            # Not handed out, so there is nothing to acknowledge: the position moves on by itself.
            self._free(feed, lane, lane.skip(chunk, stop))
            room = self._has_room()
        if room:
            self.on_room()
        return chunk.payload

    def _has_room(self) -> bool:
        if self._held_back and self.total_bytes <= self._settings.prefetch_bytes * 3 // 4:
            self._held_back = False
            return True
        return False

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
            feed, lane, chunk = found
            self._reading = Reading(feed, lane, chunk, self._records(feed, lane, chunk), self.stamp)
            return self._reading

    def _records(self, feed: Feed, lane: Lane, chunk: Chunk) -> list[Record]:
        try:
            return chunk.records(feed.partition.topic, feed.partition.partition)
        except RayQueueError as error:
            raise self._unreadable(feed, lane, chunk, error) from error

    @property
    def progress(self) -> int:
        """Changes whenever a record is handed out by a ``Reading``."""
        reading = self._reading
        return 0 if reading is None else reading.chunk.base + reading.index

    def settle(self, *, current_done: bool) -> None:
        """Take note of what was handed out record by record. ``current_done``: also the newest one is done."""
        with self.lock:
            self._settle(current_done=current_done)
            room = self._has_room()
        if room:
            self.on_room()

    def _settle(self, *, current_done: bool) -> None:
        reading = self._reading
        if reading is None or reading.feed.epoch != reading.epoch:
            return
        lane, chunk = reading.lane, reading.chunk
        stop = chunk.base + reading.index
        if stop > chunk.start:
            self._took(reading.feed, lane, chunk, stop)
        if not self.explicit:
            lane.acks.ack_before(stop if current_done else stop - 1)

    # -- the application: acknowledging ------------------------------------------------------

    def ack(self, partition: TopicPartition, lane: int, offset: int) -> bool:
        """One record is done; from now on only those that are said to be. False: not handed out, or not ours now."""
        with self.lock:
            self.explicit = True
            self._settle(current_done=False)
            feed = self.feeds.get(partition)
            if feed is None or lane >= len(feed.lanes):
                return False
            return feed.lanes[lane].acks.ack(offset)

    def ack_handed(self, feeds: Iterable[Feed] | None = None) -> None:
        """All that was handed out (of these) is done, unless the application acknowledges record by record."""
        with self.lock:
            self._settle(current_done=True)
            if not self.explicit:
                for feed in self.feeds.values() if feeds is None else feeds:
                    for lane in feed.lanes:
                        lane.acks.ack_before(lane.position)

    def next_change(self) -> Change | None:
        """What the application is to be told next."""
        with self.lock:
            if not self.changes:
                return None
            kind, feeds = self.changes.popleft()
            while self.changes and self.changes[0].kind is kind is ChangeKind.ASSIGNED:
                feeds += self.changes.popleft().feeds
            return Change(kind, feeds)

    def interrupt(self) -> None:
        """Whoever reads record by record is to look up."""
        with self.lock:
            self.stamp += 1
        self.on_data()

    # -- the application: steering -----------------------------------------------------------

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        with self.lock:
            for partition in partitions:
                self.feeds[partition].paused = True
            self.stamp += 1

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        with self.lock:
            for partition in partitions:
                feed = self.feeds[partition]
                feed.paused = False
                self._requeue(feed)
            self.stamp += 1
        self.on_room()

    def show(self, feeds: Iterable[Feed]) -> None:
        """The application knows now that it reads these."""
        with self.lock:
            for feed in feeds:
                feed.shown = True
                self._requeue(feed)

    def seek(self, partition: TopicPartition, offsets: Mapping[int, int]) -> None:
        with self.lock:
            self._settle(current_done=True)
            self._reading = None
            feed = self.feeds[partition]
            self.total_bytes -= feed.seek(offsets)
            self._failed.discard(feed)
            self.stamp += 1
        self.on_room()

    def error(self) -> RayQueueError | None:
        """The first error of a partition that is not paused."""
        if not self._failed:
            return None
        with self.lock:
            return next((feed.error for feed in self._failed if not feed.paused and not feed.letting_go), None)

    def _requeue(self, feed: Feed) -> None:
        for lane in feed.lanes:
            self._enqueue(feed, lane)


def _nothing() -> None:
    return None
