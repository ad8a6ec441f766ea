"""One assigned partition as a reader sees it: a ``Lane`` per priority, and which fetches are worth sending.

Owns what is asked of the partition and what becomes of the answers. At most
one fetch is under way per lane. A seek, or the end of the assignment, starts a
new epoch: answers to fetches of an older one are ignored, so that nothing that
was prefetched is handed out at the wrong place.

Higher lanes are asked for even while there is no room for more of the lower
ones, so that an urgent record overtakes everything that waits in memory.

No I/O and no lock: ``Subscription`` has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rayqueue.client.consumer.lane import Lane
from rayqueue.errors import (
    InvalidInputError,
    InvalidOffsetError,
    InvariantBrokenError,
    OffsetOutOfRangeError,
    RayQueueError,
)
from rayqueue.protocol.calls import Grant
from rayqueue.protocol.data import READ_COMMITTED, Cursor, FetchAnswer, FetchRequest
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records.header import LANE_AT


class Plan(NamedTuple):
    """A fetch to send. ``epoch`` is the partition's when it was made."""

    epoch: int
    request: FetchRequest


@dataclass(eq=False, slots=True)
class AssignedPartition:
    """Everything about one assigned partition. Nothing is fetched before ``begin``."""

    partition: TopicPartition
    topic_id: int
    """Of the topic that it reads. Another one of the same name has another log."""
    generation: int = 0
    """Of the grant: what it commits with."""
    seal: bytes = b""
    """What proves the grant to the partition."""
    shown: bool = True
    """The application knows that it reads this partition, so records may be handed out."""
    lanes: tuple[Lane, ...] = ()
    epoch: int = 0
    in_flight: set[int] = field(default_factory=set)
    buffered_bytes: int = 0
    paused: bool = False
    letting_go: bool = False
    """The partition is to be given up, or is: nothing more is fetched or handed out."""
    error: RayQueueError | None = None
    """Why nothing more comes. A seek repairs it."""
    sent: dict[int, int] = field(default_factory=dict)
    """The newest vector that was committed, whatever the partition made of it."""
    origin: dict[int, int] = field(default_factory=dict)
    """Where this reader has begun, has gone to on purpose, or has committed by a transaction."""
    rewind: bool = False
    """The reader went back on purpose, and its next commit must. Of no use to one that commits by transactions, whose
    positions these move forward only: see ``gone_back``."""

    @property
    def grant(self) -> Grant:
        """By which it reads."""
        return Grant(self.partition.topic, self.partition.partition, self.generation, self.topic_id)

    # -- where it stands -------------------------------------------------------------

    @property
    def begun(self) -> bool:
        return bool(self.lanes)

    @property
    def readable(self) -> bool:
        return self.shown and not self.paused and not self.letting_go and self.error is None

    def positions(self) -> dict[int, int]:
        """Lane to the offset of the next record to hand out."""
        return {lane.number: lane.position for lane in self.lanes}

    def vector(self, given: Any) -> dict[int, int]:
        """Lane to offset, of one offset for all lanes or one for each that is named. Typed errors if they cannot be."""
        vector: dict[Any, Any] = dict(given) if isinstance(given, Mapping) else dict.fromkeys(self.positions(), given)
        for lane, offset in vector.items():
            if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
                raise InvalidOffsetError(f"an offset is a number that is not negative, not {offset!r}")
            if not isinstance(lane, int) or not 0 <= lane < len(self.lanes):
                raise InvalidInputError(f"there is no lane {lane!r}; the topic has {len(self.lanes)}", lane=lane)
        return vector

    def committable(self) -> dict[int, int]:
        return {lane.number: lane.committable for lane in self.lanes}

    def due(self) -> dict[int, int] | None:
        """The offsets to be committed, for each lane; None if nothing is new."""
        offsets = self.committable()
        return offsets if offsets != self.sent else None

    def passed(self) -> dict[int, int] | None:
        """The position of a reader that commits by transactions, if all since its last one was passed over: there was
        nothing to hand out, and so nothing to wait for. None if something was, nothing is new, or it would go back."""
        if any(lane.handed > self.origin[lane.number] for lane in self.lanes):
            return None
        offsets = self.positions()
        if any(offset < self.sent.get(lane, 0) for lane, offset in offsets.items()):
            return None
        return offsets if offsets not in (self.origin, self.sent) else None

    def gone_back(self) -> dict[int, int]:
        """Of a reader that commits by transactions: where it went back to, before what is committed, in such lanes."""
        return {lane: offset for lane, offset in self.origin.items() if offset < self.sent.get(lane, 0)}

    def passed_over(self, epoch: int, offsets: dict[int, int]) -> None:
        """That was committed. ``epoch``: when it was asked for."""
        if self.epoch == epoch and all(offset >= self.origin[lane] for lane, offset in offsets.items()):
            self.origin = self.sent = offsets

    @property
    def settled(self) -> bool:
        """Nothing that was handed out waits for its acknowledgement."""
        return all(lane.acks.first_open is None for lane in self.lanes)

    # -- moving ----------------------------------------------------------------------

    def begin(self, offsets: Mapping[int, int], committed: Mapping[int, int]) -> None:
        """Begin to fetch at these offsets, for each lane; ``committed``: those that the partition has from earlier."""
        self.lanes = tuple(Lane(number, offsets[number]) for number in sorted(offsets))
        self.origin = dict(offsets)
        self.sent = dict(committed)

    def seek(self, offsets: Mapping[int, int]) -> int:
        """Go on from there in these lanes. Returns the bytes that this frees."""
        freed_bytes = 0
        for number, offset in offsets.items():
            lane = self.lanes[number]
            self.rewind |= offset < lane.committable
            freed_bytes += lane.seek(offset)
        self.origin = {**self.origin, **offsets}  # not in place: it may be what was sent, too
        self._new_epoch()
        self.error = None
        self.buffered_bytes -= freed_bytes
        return freed_bytes

    def end(self) -> int:
        """Let it go: what waits is dropped. What was handed out can still be acknowledged. Returns the bytes freed."""
        self.letting_go = True
        self._new_epoch()
        freed_bytes = 0
        for lane in self.lanes:
            if lane.chunks:
                lane.cursor = lane.position
                freed_bytes += sum(chunk.size_bytes for chunk in lane.chunks)
                lane.chunks.clear()
        self.buffered_bytes -= freed_bytes
        return freed_bytes

    def _new_epoch(self) -> None:
        self.epoch += 1
        self.in_flight.clear()

    # -- fetching --------------------------------------------------------------------

    def plan(self, *, room: bool, max_bytes: int, max_wait_ms: int, flags: int = 0) -> Plan | None:
        """The next fetch, of all lanes that none is under way for. Without ``room``: of those above what waits."""
        if not self.lanes or self.paused or self.letting_go or self.error is not None:
            return None
        floor = -1 if room else max((lane.number for lane in self.lanes if lane.chunks), default=-1)
        cursors = tuple(
            Cursor(lane.number, lane.cursor)
            for lane in reversed(self.lanes)
            if lane.number > floor and lane.number not in self.in_flight
        )
        if not cursors:
            return None
        self.in_flight.update(cursor.lane for cursor in cursors)
        return Plan(self.epoch, FetchRequest(cursors, max_bytes, max_wait_ms, flags))

    def ended(self, plan: Plan) -> None:
        """The fetch is not under way any more, answered or not."""
        if plan.epoch == self.epoch:
            self.in_flight.difference_update(cursor.lane for cursor in plan.request.cursors)

    def received(self, plan: Plan, answer: FetchAnswer) -> list[Lane]:
        """Keep what is new in an answer. Returns the lanes that have something more."""
        if plan.epoch != self.epoch:
            return []
        asked = {cursor.lane for cursor in plan.request.cursors}
        stable = bool(plan.request.flags & READ_COMMITTED)
        grown: list[Lane] = []
        lowest, edge = -1, answer.high_watermark
        for base, count, payload in answer.batches:
            number = payload[LANE_AT]
            if number not in asked:
                raise InvariantBrokenError(f"a fetch of lanes {sorted(asked)} was answered with lane {number}")
            lane = self.lanes[number]
            if len(self.lanes) == 1 and base > lane.cursor and not stable:
                raise InvariantBrokenError(
                    f"{self.partition} answered with offset {base} where {lane.cursor} comes next", offset=base
                )
            kept_bytes = lane.received(base, count, payload)
            if kept_bytes:
                self.buffered_bytes += kept_bytes
                if not grown or grown[-1] is not lane:
                    grown.append(lane)
            lowest, edge = (number, base + count) if lowest < 0 else (min(lowest, number), max(edge, base + count))
        if stable:
            # Each lane has its own last stable offset, and what was aborted is passed over: the partition says where.
            for number, offset in answer.cursors:
                if number in asked:
                    self.lanes[number].passed(offset)
        # A partition answers with a lower lane, or with nothing, only if the lanes above it have no more. So much
        # is sure up to the last offset that it showed.
        elif len(self.lanes) > 1:
            for number in asked:
                if number > lowest:
                    self.lanes[number].passed(edge)
        return grown

    def behind(self, error: OffsetOutOfRangeError, plan: Plan) -> dict[int, int]:
        """The lanes, and their cursors, that an answer says are not in the log; all that were asked if it does not."""
        start, end = error.details.get("start"), error.details.get("end")
        cursors: Iterable[Cursor] = plan.request.cursors
        if isinstance(start, int) and isinstance(end, int):
            outside = [cursor for cursor in cursors if not start <= cursor.offset <= end]
            cursors = outside or cursors
        return {cursor.lane: cursor.offset for cursor in cursors}
