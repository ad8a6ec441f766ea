"""The plan of a checkpoint: which parts of its topics were handed out, and which of them are not committed.

A part has a number and ranges of offsets, and the two belong together for ever:
they are durable before the part is handed out, and a part that is not committed
is handed out again exactly as it was. So whatever is written under its number
can be recognized, wherever the run died.

The plan is kept beside the group's positions, as their metadata: in each
partition the slices of parts that are in it, and in one of them, the plan's home,
the parts themselves, with the token that their slices carry. Only the home's
note counts. Slices come before it, and stay until the part is gone from it:

    planning part 7      slices with a new token, then the home names part 7 and the token
    committing part 7    the other positions, then the home's, which names it no more

A slice whose token the home does not name is left over, and goes when the
partition is noted the next time.

One run at a time: a second one is found out, if late, by a number that has gone
on. Until then both hand out parts, and a sink that is bound to parts refuses those
that differ (``BatchConflictError``).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rayqueue.bridge.lookup import Lookup
from rayqueue.client.handle import RayQueue
from rayqueue.errors import DataLossError, InvalidInputError, StaleWriterError
from rayqueue.net.interfaces import same_topic
from rayqueue.net.scan import Range
from rayqueue.protocol.calls import Commit, Position
from rayqueue.protocol.topics import TopicInfo, TopicPartition

MAX_OPEN = 64
"""Parts that are handed out and not committed. Their notes fit into a position's metadata."""


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A part's range in this partition."""

    token: bytes
    start: int
    end: int


class OpenPart(msgspec.Struct, frozen=True, array_like=True):
    number: int
    token: bytes
    slices: int
    """How many there are in all partitions."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """The metadata of a position."""

    slices: tuple[Slice, ...] = ()
    parts: tuple[OpenPart, ...] = ()
    """Only in the home: not committed, in the order of their numbers."""
    following: int = 0
    """Only in the home: the number of the next part, and so never 0 there."""


@dataclass(frozen=True, slots=True)
class PlannedPart:
    number: int
    ranges: tuple[Range, ...]

    @property
    def identity(self) -> bytes:
        """A digest of the ranges, for which its number stands."""
        told = [(each.topic, each.topic_id, each.partition, each.start, each.end) for each in self.ranges]
        return hashlib.blake2b(msgspec.msgpack.encode(sorted(told)), digest_size=16).digest()


class Plan:
    """Any thread but the I/O thread."""

    def __init__(self, rq: RayQueue, group: str) -> None:
        self._rq = rq
        self._group = group
        self._home: TopicPartition | None = None
        self._following = 0
        self._places: set[TopicPartition] = set()

    def load(self, lookup: Lookup, infos: Mapping[str, TopicInfo], *, fail_on_data_loss: bool) -> list[PlannedPart]:
        """The parts that were handed out and not committed."""
        places = [TopicPartition(name, part.number) for name, info in infos.items() for part in info.partitions]
        positions = lookup.positions(self._group, places)
        notes = {each: note_of(position) for each, position in positions.items()}
        self._places = {each for each, position in positions.items() if position is not None}
        self.renew(lookup)
        self._home = max(places, key=lambda each: notes[each].following)  # the first, if there is no plan yet
        home = notes[self._home]
        self._following = home.following
        return [self._part(each, notes, infos, fail_on_data_loss=fail_on_data_loss) for each in home.parts]

    def begin(self, lookup: Lookup, places: Mapping[TopicPartition, int], infos: Mapping[str, TopicInfo]) -> None:
        """Now is when these partitions begin to be followed. Else a later run would begin later where nothing came
        before, and miss what has come since. The first partition of a topic is last, and says that all have begun."""
        for first in (False, True):
            chosen = {each: offset for each, offset in places.items() if (each.partition == 0) is first}
            lookup.commit(self._group, chosen, {name: info.settings.lanes for name, info in infos.items()})
        self._places.update(places)

    def renew(self, lookup: Lookup) -> None:
        """Use all positions. One that is not used for long expires, and a partition may have nothing new for long."""
        lookup.ask({each: Commit(group=self._group, generation=0, offsets={}) for each in self._places})

    def _part(
        self,
        part: OpenPart,
        notes: Mapping[TopicPartition, Note],
        infos: Mapping[str, TopicInfo],
        *,
        fail_on_data_loss: bool,
    ) -> PlannedPart:
        ranges = tuple(
            Range(each.topic, infos[each.topic].topic_id, each.partition, found.start, found.end)
            for each, note in notes.items()
            for found in note.slices
            if found.token == part.token
        )
        if len(ranges) != part.slices and fail_on_data_loss:
            raise DataLossError(
                f"part {part.number} of checkpoint {self._group!r} has {part.slices} ranges, and {len(ranges)} of them "
                "are left: a topic was deleted, or is not followed any more. With fail_on_data_loss=False the part is "
                "what is left of it",
                group=self._group,
                part=part.number,
            )
        return PlannedPart(part.number, ranges)

    def add(self, lookup: Lookup, ranges: Sequence[Range]) -> PlannedPart:
        """Make these ranges the next part. Durable when it returns."""
        home = self._known_home()
        places = {each.topic_partition: each for each in ranges}
        positions = lookup.positions(self._group, {*places, home})
        notes = {each: note_of(position) for each, position in positions.items()}
        at_home = notes[home]
        if at_home.following != self._following:
            raise StaleWriterError(
                f"another run follows with checkpoint {self._group!r}: the next part would be {at_home.following}, not "
                f"{self._following}. Let one run at a time",
                group=self._group,
            )
        if len(at_home.parts) >= MAX_OPEN:
            raise InvalidInputError(
                f"{MAX_OPEN} parts of checkpoint {self._group!r} are handed out and not committed: commit them first",
                group=self._group,
            )
        token = secrets.token_bytes(8)
        live = {part.token for part in at_home.parts}
        for place, each in places.items():
            kept = tuple(found for found in notes[place].slices if found.token in live)
            fresh = Slice(token, each.start, each.end)
            notes[place] = msgspec.structs.replace(notes[place], slices=(*kept, fresh))
        lookup.ask({place: self._commit({}, notes[place]) for place in places if place != home})
        parts = (*at_home.parts, OpenPart(self._following, token, len(ranges)))
        note = msgspec.structs.replace(notes[home], parts=parts, following=self._following + 1)
        lookup.ask({home: self._commit({}, note)})
        self._places.update(places, (home,))
        self._following += 1
        return PlannedPart(self._following - 1, tuple(ranges))

    def commit(self, part: PlannedPart) -> None:
        """The next run begins after this part. It may be repeated."""
        lookup, home = Lookup(self._rq), self._known_home()
        infos = lookup.topics(sorted({home.topic, *(each.topic for each in part.ranges)}))
        for each in part.ranges:
            same_topic(infos[each.topic], each.topic_id)
        ends = {each.topic_partition: each.end for each in part.ranges}
        positions = lookup.positions(self._group, {*ends, home})
        at_home = note_of(positions[home])
        numbers = [each.number for each in at_home.parts]
        if part.number not in numbers:
            if part.number < at_home.following:
                return  # committed before
            raise StaleWriterError(
                f"checkpoint {self._group!r} does not know part {part.number}: it was deleted or set to another place "
                "since the part was handed out",
                group=self._group,
            )
        if part.number != numbers[0]:
            raise InvalidInputError(
                f"parts are committed in order: part {numbers[0]} of checkpoint {self._group!r} is not committed yet, "
                f"and this is part {part.number}",
                group=self._group,
            )

        def offsets(place: TopicPartition) -> dict[int, int]:
            lanes = infos[place.topic].settings.lanes
            return dict.fromkeys(range(lanes), ends[place]) if place in ends else {}

        lookup.ask({each: self._commit(offsets(each), note_of(positions[each])) for each in ends if each != home})
        note = msgspec.structs.replace(at_home, parts=at_home.parts[1:])
        lookup.ask({home: self._commit(offsets(home), note)})

    def _commit(self, offsets: dict[int, int], note: Note) -> Commit:
        return Commit(group=self._group, generation=0, offsets=offsets, metadata=msgspec.msgpack.encode(note))

    def _known_home(self) -> TopicPartition:
        if self._home is None:
            raise InvalidInputError("the plan was not loaded")
        return self._home


def was_here(topic: str, positions: Mapping[TopicPartition, Position | None]) -> bool:
    """Whether this topic has been followed before: all of it has begun, or a part of it was planned."""
    found = {each: position for each, position in positions.items() if each.topic == topic and position is not None}
    return any(position.metadata or (each.partition == 0 and position.offsets) for each, position in found.items())


def place_of(position: Position | None) -> int | None:
    """The offset to go on at; None if it has not begun. A part that an earlier release planned and never committed
    begins at its first slice."""
    if position is not None and position.offsets:
        return min(position.offsets.values())
    return min((each.start for each in note_of(position).slices), default=None)


def note_of(position: Position | None) -> Note:
    """Empty for a position that carries none, or something else: a consumer has committed for this group."""
    if position is None or not position.metadata:
        return Note()
    try:
        return msgspec.msgpack.decode(position.metadata, type=Note)
    except (msgspec.MsgspecError, RecursionError):
        return Note()
