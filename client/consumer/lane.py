"""A lane of one partition, as a reader sees it: how far it has come.

Owns three marks and what lies between them:

    committable <= position <= cursor

``cursor`` is what to fetch next, ``position`` what to hand out next (between
the two are the batches that wait in memory), and ``committable`` the end of
the longest run of records that were handed out and are all acknowledged.

A lane's offsets have gaps, for the lanes of a partition share its offsets.
``passed`` says that a stretch has no record of this lane, so that the position
of a lane that nobody writes to still moves on, and retention finds no reader
in what it has deleted.

Records are taken once and in order, whatever arrives twice or late. No I/O,
no locks: its owner has one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Any

from rayqueue.errors import InvariantBrokenError
from rayqueue.records import Record, RecordBatch


@dataclass(eq=False, slots=True)
class Chunk:
    """A fetched batch, from the first record that was not handed out yet."""

    base: int
    start: int
    end: int
    payload: memoryview | bytes
    _batch: RecordBatch | None = None
    _records: list[Record] | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.payload)

    def records(self, topic: str, partition: int) -> list[Record]:
        """All records of the batch, also those before ``start``. ``CorruptBatchError`` if it is damaged."""
        if self._records is None:
            self._records = self._decoded().records(topic, partition)
        return self._records

    def arrow(self, start: int, stop: int) -> Any:
        """The records of these offsets as a ``pyarrow.RecordBatch`` over the same memory."""
        whole = self._decoded().arrow()
        if start == self.base and stop == self.end:
            return whole
        return whole.slice(start - self.base, stop - start)

    def _decoded(self) -> RecordBatch:
        if self._batch is None:
            batch = RecordBatch.decode(self.payload, base_offset=self.base)
            if len(batch) != self.end - self.base:
                raise InvariantBrokenError(
                    f"a batch of {len(batch)} records was announced with {self.end - self.base}", offset=self.base
                )
            self._batch = batch
        return self._batch


class Acks:
    """Which of the records that were handed out are done."""

    __slots__ = ("_done", "_open")

    def __init__(self) -> None:
        self._open: deque[list[int]] = deque()  # [start, end) that were handed out, from the first one not done
        self._done: set[int] = set()  # those that are done behind one that is not

    def hand(self, start: int, end: int) -> None:
        """These were handed out. In order."""
        if self._open and self._open[-1][1] == start:
            self._open[-1][1] = end
        else:
            self._open.append([start, end])

    def ack(self, offset: int) -> bool:
        """This one is done. False if it was not handed out, or is done already."""
        at = bisect_right(self._open, offset, key=_start_of) - 1
        if at < 0 or offset >= self._open[at][1] or offset in self._done:
            return False
        self._done.add(offset)
        if offset == self._open[0][0]:
            self._settle()
        return True

    def ack_before(self, offset: int) -> None:
        """All that were handed out below ``offset`` are done."""
        while self._open and self._open[0][1] <= offset:
            self._open.popleft()
        if self._open and self._open[0][0] < offset:
            self._open[0][0] = offset
        if self._done:
            self._done = {done for done in self._done if done >= offset}
            self._settle()

    @property
    def first_open(self) -> int | None:
        """The first record that was handed out and is not done."""
        return self._open[0][0] if self._open else None

    def clear(self) -> None:
        self._open.clear()
        self._done.clear()

    def _settle(self) -> None:
        """Move the front over what is done."""
        while self._open and self._open[0][0] in self._done:
            front = self._open[0]
            self._done.remove(front[0])
            front[0] += 1
            if front[0] == front[1]:
                self._open.popleft()


def _start_of(stretch: list[int]) -> int:
    return stretch[0]


class Lane:
    """One lane: its cursor, what waits to be handed out, and what was and is not done."""

    __slots__ = ("acks", "chunks", "cursor", "handed", "number", "queued")

    def __init__(self, number: int, offset: int) -> None:
        self.number = number
        self.cursor = self.handed = offset  # behind the last record that was handed out
        self.chunks: deque[Chunk] = deque()
        self.acks = Acks()
        self.queued = False  # of whoever keeps a queue of lanes that have something

    @property
    def position(self) -> int:
        """The next record to hand out is the first of this lane from here on."""
        return self.chunks[0].start if self.chunks else self.cursor

    @property
    def committable(self) -> int:
        """A reader that begins here misses nothing, and repeats only what is not acknowledged."""
        first_open = self.acks.first_open
        return self.position if first_open is None else first_open

    def received(self, base: int, count: int, payload: memoryview | bytes) -> int:
        """A batch of this lane. Returns the bytes that are kept of it: none if all of it came before."""
        end = base + count
        if end <= self.cursor:
            return 0
        self.chunks.append(Chunk(base, max(base, self.cursor), end, payload))
        self.cursor = end
        return len(payload)

    def passed(self, offset: int) -> None:
        """There is no record of this lane between the cursor and ``offset``."""
        self.cursor = max(self.cursor, offset)

    def take(self, chunk: Chunk, stop: int) -> int:
        """The first chunk was handed out up to ``stop``. Returns the bytes that this frees."""
        self.acks.hand(chunk.start, stop)
        self.handed = stop
        return self.skip(chunk, stop)

    def skip(self, chunk: Chunk, stop: int) -> int:
        """The same of what is not handed out, and so needs no acknowledgement."""
        chunk.start = stop
        if stop < chunk.end:
            return 0
        self.chunks.popleft()
        return chunk.size_bytes

    def seek(self, offset: int) -> int:
        """Begin anew at ``offset``. Returns the bytes that this frees."""
        freed_bytes = sum(chunk.size_bytes for chunk in self.chunks)
        self.chunks.clear()
        self.acks.clear()
        self.cursor = self.handed = offset
        return freed_bytes
