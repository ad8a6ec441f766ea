"""Fetches: clients that read a partition.

At the end of the log they are answered from memory; what is older is read by a
few threads beside; what is not there yet is waited for, and waiting costs
nothing until it comes.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rayqueue.config import CallSettings
from rayqueue.errors import InvalidInputError, OffsetOutOfRangeError, QueueFullError, RayQueueError
from rayqueue.partition import CommittedRead, Fetched, Partition, read_committed, read_lanes
from rayqueue.partition.commands import check_offset
from rayqueue.protocol.data import ANY_LANE, READ_COMMITTED, READ_FOLLOWER, Cursor, decode_fetch, encode_fetched
from rayqueue.protocol.frames import Frame, Kind
from rayqueue.replica.disk_reads import DiskReads
from rayqueue.replica.parking import Parking
from rayqueue.replica.tail import Tail

if TYPE_CHECKING:
    from rayqueue.replica.core import ReplicaCore

_WOKEN_PER_TURN = 128
"""Waiting fetches that are answered in one turn, so that appends need not wait for thousands of them."""


@dataclass(eq=False, slots=True)
class _Fetch:
    """One fetch that is under way. ``cursors`` move forward past what holds nothing for them."""

    client: int
    request: int
    cursors: tuple[Cursor, ...]
    max_bytes: int
    deadline_s: float
    follower: bool
    committed: bool = False
    """Of transactions only what is committed."""
    lane: int = ANY_LANE
    """The one that was asked for, where ``cursors`` say any."""
    stuck: bool = False
    """The disk shows less than is applied."""

    def continues(self) -> list[Cursor]:
        """The cursors to continue at, as whoever asks has named the lanes."""
        return [Cursor(self.lane if lane == ANY_LANE else lane, offset) for lane, offset in self.cursors]

    @property
    def keys(self) -> list[int]:
        """The lanes it waits for."""
        return [lane for lane, _ in self.cursors]


class Fetches:
    """On the engine's thread."""

    def __init__(
        self, replica: ReplicaCore[Any], partition: Partition, tail: Tail, disk: DiskReads, settings: CallSettings
    ) -> None:
        self.fetched_records = 0
        self.fetched_bytes = 0
        self.parked: Parking[_Fetch] = Parking()
        self._replica = replica
        self._clients = replica.clients
        self._partition = partition
        self._tail = tail
        self._disk = disk
        self._settings = settings
        self._woken: deque[_Fetch] = deque()
        self._answers: dict[tuple[tuple[Cursor, ...], int, int], tuple[list[bytes], list[Fetched]]] = {}

    @property
    def next_deadline_s(self) -> float:
        return 0.0 if self._woken or self._tail.grown else self.parked.next_deadline_s

    def fetch(self, client: int, frame: Frame) -> None:
        wanted = decode_fetch(frame.body)
        lanes = self._partition.settings.lanes
        cursors = wanted.cursors
        for lane, offset in cursors:
            check_offset(offset)
            if lane >= lanes and lane != ANY_LANE:
                raise InvalidInputError(f"there is no lane {lane}; the partition has {lanes}", lane=lane)
        lane = cursors[0].lane
        if lanes == 1:
            cursors = (Cursor(ANY_LANE, cursors[0].offset),)  # the same, and found sooner
        follower = bool(wanted.flags & READ_FOLLOWER)
        if not follower:
            self._replica.check_leads()
        settings = self._settings
        wait_s = min(wanted.max_wait_ms, settings.max_fetch_wait_ms) / 1000
        deadline_s = time.monotonic() + wait_s if wait_s else 0.0
        max_bytes = min(wanted.max_bytes, settings.max_fetch_bytes)
        committed = bool(wanted.flags & READ_COMMITTED)
        fetch = _Fetch(client, frame.request, cursors, max_bytes, deadline_s, follower, committed=committed, lane=lane)
        self._continue(fetch)

    def tick(self, now_s: float) -> None:
        grown = self._tail.grown
        if grown:
            self._woken.extend(self.parked.take([ANY_LANE, *grown]))
            grown.clear()
        for fetch in self.parked.take_expired(now_s):
            self._answer(fetch, [])
        for _ in range(min(len(self._woken), _WOKEN_PER_TURN)):
            self._go_on(self._woken.popleft())
        self._answers.clear()

    def lost(self) -> None:
        """This replica leads no more: only those go on that may read from a follower."""
        for fetch in self.parked.take_all():
            if fetch.follower:
                self.parked.add(fetch)
            else:
                self._fail(fetch, self._replica.not_leader())
        for fetch in self._woken:
            fetch.follower = True  # what they wait for is committed, and there

    def close(self, error: RayQueueError) -> None:
        for fetch in [*self.parked.take_all(), *self._woken]:
            self._fail(fetch, error)

    def _go_on(self, fetch: _Fetch) -> None:
        """``_continue``, when its client is not being served already."""
        self._clients.serving(fetch.client, fetch.request, partial(self._continue, fetch))

    def _continue(self, fetch: _Fetch) -> None:
        """Answer the fetch, or see to it that it is answered later."""
        end = self._tail.end
        if any(offset > end for _, offset in fetch.cursors):
            self._past_end(fetch)
            return
        if self._clients.is_full(fetch.client):
            self._fail(fetch, _not_taken())
            return
        key = (fetch.cursors, fetch.max_bytes, fetch.lane if fetch.committed else -1)
        known = self._answers.get(key)
        if known is not None:
            self._send(fetch, *known)
            return
        found = self._read_tail(fetch)
        if found is None:
            self._read_disk(fetch)
        elif found:
            self._answers[key] = self._answer(fetch, found), found
        else:
            self._wait(fetch)

    def _read_tail(self, fetch: _Fetch) -> list[Fetched] | None:
        if not fetch.committed:
            return self._tail.read_lanes(fetch.cursors, fetch.max_bytes)
        first_open = self._partition.transactions.first_open
        read = self._tail.read_committed(fetch.cursors, fetch.max_bytes, first_open)
        if read is None:
            return None
        fetch.cursors = tuple(read.cursors)
        return read.found

    def _wait(self, fetch: _Fetch) -> None:
        if fetch.deadline_s <= time.monotonic():
            self._answer(fetch, [])
        elif len(self.parked) >= self._settings.max_fetches:
            self._fail(fetch, QueueFullError(f"{len(self.parked)} fetches wait here already, which is the limit"))
        else:
            self.parked.add(fetch)

    def _past_end(self, fetch: _Fetch) -> None:
        """A cursor is past the end that this replica knows.

        A leader that was just elected may not know yet how much of its log is committed, and a follower never does.
        To say "out of range" then would send a reader back to records that it has read.
        """
        if not self._replica.engine.is_leader:
            self._wait(fetch)
            return

        def confirmed(error: Any) -> None:
            end = self._tail.end
            if isinstance(error, RayQueueError):
                self._fail(fetch, error)
            elif all(offset <= end for _, offset in fetch.cursors):
                self._go_on(fetch)
            else:
                lane, offset = max(fetch.cursors, key=lambda cursor: cursor.offset)
                start = self._partition.readable_from
                text = f"offset {offset} is past the end; the log has {start} to {end}"
                self._fail(fetch, OffsetOutOfRangeError(text, offset=offset, lane=lane, start=start, end=end))

        try:
            self._replica.confirm(confirmed)
        except RayQueueError as error:
            self._fail(fetch, error)

    def _read_disk_committed(self, fetch: _Fetch) -> None:
        tail = self._tail

        def read() -> CommittedRead:
            with self._replica.snapshot() as snapshot:
                return read_committed(snapshot, fetch.cursors, fetch.max_bytes, high_watermark=tail.end)

        def done(result: Any) -> None:
            if isinstance(result, RayQueueError):
                self._fail(fetch, result)
                return
            moved = fetch.cursors != tuple(result.cursors)
            fetch.cursors = tuple(result.cursors)
            if result.found and self._clients.is_full(fetch.client):
                self._fail(fetch, _not_taken())
            elif result.found:
                self._answer(fetch, result.found)
            elif result.is_cut and fetch.deadline_s <= time.monotonic():
                self._answer(fetch, [])  # with where to continue: whoever asks again need not begin anew
            elif moved:
                fetch.stuck = False
                self._go_on(fetch)
            elif not fetch.stuck:
                # The transaction that holds it up has ended, but not yet on disk.
                fetch.stuck = True
                self._replica.once_settled(lambda: self._go_on(fetch))
            else:
                self._wait(fetch)

        self._disk.read(read, done)

    def _read_disk(self, fetch: _Fetch) -> None:
        if fetch.committed:
            self._read_disk_committed(fetch)
            return
        tail = self._tail
        tail_start = tail.start

        def read() -> list[Fetched]:
            with self._replica.snapshot() as snapshot:
                return read_lanes(snapshot, fetch.cursors, fetch.max_bytes, high_watermark=tail.end)

        def done(result: Any) -> None:
            if isinstance(result, RayQueueError):
                self._fail(fetch, result)
            elif result and self._clients.is_full(fetch.client):
                self._fail(fetch, _not_taken())
            elif result:
                self._answer(fetch, result)
            else:
                # All that is older than the tail was in the snapshot, and nothing of it is in these lanes.
                fetch.cursors = tuple(Cursor(lane, max(offset, tail_start)) for lane, offset in fetch.cursors)
                self._go_on(fetch)

        self._disk.read(read, done)

    def _answer(self, fetch: _Fetch, found: list[Fetched]) -> list[bytes]:
        if fetch.committed:
            stable = self._stable(fetch)
            buffers = encode_fetched(stable, self._partition.readable_from, found, fetch.continues())
        else:
            buffers = encode_fetched(self._tail.end, self._partition.readable_from, found)
        self._send(fetch, buffers, found)
        return buffers

    def _stable(self, fetch: _Fetch) -> int:
        """The last stable offset of the lanes that are read."""
        first_open = self._partition.transactions.first_open
        found = [first_open(None if lane == ANY_LANE else lane) for lane, _ in fetch.cursors]
        return min([each for each in found if each is not None], default=self._tail.end)

    def _send(self, fetch: _Fetch, buffers: list[bytes], found: list[Fetched]) -> None:
        self._clients.send(fetch.client, Kind.FETCHED, fetch.request, buffers)
        for _, count, payload in found:
            self.fetched_records += count
            self.fetched_bytes += len(payload)

    def _fail(self, fetch: _Fetch, error: RayQueueError) -> None:
        self._clients.fail(fetch.client, fetch.request, error)


def _not_taken() -> QueueFullError:
    return QueueFullError("this client does not take what it was answered; fetch less at a time")
