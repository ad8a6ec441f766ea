"""Carrying out what a job has decided: staged batches become records of their topics, each once.

A stream's driver calls ``publish(batch_id, pieces)``. It may die anywhere in it,
may be started again with the same batch computed anew, may even run twice at
the same time. Three things make the outcome the same:

1. The decision comes first. "Batch 7 is these pieces" is a record in the
   staging topic, appended by an idempotent producer whose id follows from the
   writer's, with the number of the decision as its sequence. The partition
   takes one record per sequence: the first decides, every later one is told
   where the first is, and follows it.
2. The copy to the topic follows from the decision alone: producer id from the
   writer, epoch from the decision's number, sequences from the pieces' order.
   However often, and by whomever, it is repeated: each batch is taken once.
3. A driver that does not know whether a copy was made asks each partition,
   by a batch of an impossible sequence, which one it expects next. A partition
   remembers a bounded number of producers; if it has forgotten this one, the log
   since the decision is searched for batches that carry its id.

A job that runs once has nothing to come back to: ``publish_once``.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from rayqueue.bridge.append import Appends, append_once, persist, signed
from rayqueue.bridge.ranges import Range
from rayqueue.bridge.rows import Cut
from rayqueue.bridge.scan import Scan, ScanSettings
from rayqueue.bridge.staging import Piece
from rayqueue.client.connection import RayQueue
from rayqueue.client.router import GroupRoute
from rayqueue.config import MIB
from rayqueue.errors import (
    BridgeError,
    DataLossError,
    InvalidInputError,
    ProducerFencedError,
    SequenceGapError,
    StaleWriterError,
)
from rayqueue.protocol.calls import Bounds, Commit, GetBounds, GetPosition, NewProducerIds, Position, Trim
from rayqueue.protocol.data import FetchedBatch
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import BatchHeader, RecordBatch

_JOURNAL = 0
"""The partition of a staging topic that has the decisions."""
_GROUP = "decisions"
_INLINE_BYTES = MIB // 2
_IMPOSSIBLE = 2**62
_TRIM_BYTES = 32 * MIB
_MAX_OVERTAKEN = 1000
"""Decisions of others that one attempt follows."""


class Target(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    end: int
    """Of its log, before the decision."""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    batch_id: int
    token: bytes
    """Another one for each attempt to decide."""
    targets: tuple[Target, ...]
    pieces: tuple[Piece, ...]


class Decided(NamedTuple):
    number: int
    offset: int
    decision: Decision


class _Entry(NamedTuple):
    """A piece, and what it is to its topic's partition."""

    piece: Piece
    sequence: int


class Publisher:
    """Publishes the batches of one stream. Any thread but the I/O thread; one batch at a time."""

    def __init__(self, rq: RayQueue, staging: str, writer: str) -> None:
        self._rq = rq
        self._staging = staging
        self._writer = writer
        self._producer_id = 0
        self._last: Decided | None = None
        self._done = -1
        self._loaded = False
        self._untrimmed_bytes = _TRIM_BYTES

    def publish(self, batch_id: int, pieces: Sequence[Piece]) -> None:
        """Make these the records of this batch, unless others are already."""
        self._rq.io.call(self._publish(batch_id, pieces))

    async def _publish(self, batch_id: int, pieces: Sequence[Piece]) -> None:
        if not self._loaded:
            await self._load()
        for _ in range(_MAX_OVERTAKEN):
            last = self._last
            if last is not None and last.number > self._done:
                await self._carry_out(last, resume=True)
            if last is not None and batch_id <= last.decision.batch_id:
                return
            decided = await self._decide(batch_id, pieces)
            if decided is not None:
                await self._carry_out(decided, resume=False)
                return
        raise StaleWriterError(f"other runs of {self._writer!r} decide faster than this one", batch_id=batch_id)

    # -- deciding --------------------------------------------------------------------------

    async def _load(self) -> None:
        """The last decision, as the staging topic has it."""
        info = await self._rq.routes.topic(self._staging)
        self._producer_id = producer_id_of(self._writer, info.topic_id)
        journal = await self._journal()
        bounds: Bounds = await journal.call(GetBounds())
        position = await self._look_done(journal)
        start = bounds.start if position is None else max(bounds.start, position.offsets.get(0, 0))
        wanted = Range(self._staging, info.topic_id, _JOURNAL, start, bounds.end)
        async for batch in self._batches(wanted):
            header = BatchHeader.parse(batch.payload)
            if header.producer_id == self._producer_id:
                self._last = Decided(header.sequence, batch.base_offset, _decision(batch.payload))
        self._loaded = True

    async def _look_done(self, journal: GroupRoute) -> Position | None:
        """The number of the last decision that is known to be carried out, and where it is."""
        position: Position | None = await journal.call(GetPosition(group=_GROUP))
        done = -1 if position is None or not position.metadata else msgspec.msgpack.decode(position.metadata, type=int)
        self._done = max(self._done, done)
        return position

    async def _decide(self, batch_id: int, pieces: Sequence[Piece]) -> Decided | None:
        """The decision for this batch; None if another one has this number, which is the last one known then."""
        number = 0 if self._last is None else self._last.number + 1
        decision = Decision(batch_id, secrets.token_bytes(8), await self._targets(pieces), await self._small(pieces))
        payload = RecordBatch.encode(
            [msgspec.msgpack.encode(decision)],
            timestamps=int(time.time() * 1000),
            producer_id=self._producer_id,
            sequence=number,
        )
        journal = await self._journal()
        try:
            written = await append_once(journal, payload, self._rq.settings.client)
        except (SequenceGapError, ProducerFencedError) as error:
            self._loaded = False
            raise StaleWriterError(f"staging topic {self._staging!r} is not the one of this writer: {error}") from error
        there: Decision | None = decision
        if written.duplicate:
            there = None if written.base_offset is None else await self._read_decision(written.base_offset)
        if written.base_offset is None or there is None:  # so far behind that it is forgotten, or trimmed
            await self._load()
            return None
        self._last = Decided(number, written.base_offset, there)
        if there.token == decision.token:
            return self._last
        # Spark commits in whichever of its Python processes is free, so this may be an older batch of this very run.
        await self._look_done(journal)
        return None

    async def _targets(self, pieces: Iterable[Piece]) -> tuple[Target, ...]:
        wanted = sorted({TopicPartition(piece.topic, piece.partition) for piece in pieces})

        async def end(each: TopicPartition) -> Target:
            bounds: Bounds = await (await self._rq.routes.partition(each)).call(GetBounds())
            return Target(each.topic, each.partition, bounds.end)

        return tuple(await asyncio.gather(*map(end, wanted)))

    async def _small(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """The pieces, such that all fit into one record: what came with messages is staged if it is much."""
        if sum(len(piece.payload) for piece in pieces) <= _INLINE_BYTES:
            return tuple(pieces)
        appends = Appends(await self._journal(), self._rq.settings.client)
        inline = [piece for piece in pieces if piece.stage < 0]
        for piece in inline:
            await appends.put(piece.payload)
        moved = [
            msgspec.structs.replace(piece, stage=_JOURNAL, offset=written.base_offset or 0, payload=b"")
            for piece, written in zip(inline, await appends.finish(), strict=True)
        ]
        return (*moved, *(piece for piece in pieces if piece.stage >= 0))

    async def _read_decision(self, offset: int) -> Decision | None:
        """None if it is trimmed: then it was carried out."""
        try:
            async for batch in self._batches(Range(self._staging, 0, _JOURNAL, offset, offset + 1)):
                return _decision(batch.payload)
        except DataLossError:
            return None
        raise BridgeError(f"there is no decision at {offset} of {self._staging!r}")

    # -- carrying out ----------------------------------------------------------------------

    async def _carry_out(self, decided: Decided, *, resume: bool) -> None:
        number, offset, decision = decided
        await copy(
            self._rq,
            decision.pieces,
            producer_id=self._producer_id,
            epoch=number,
            staging=self._staging,
            resume_from=decision.targets if resume else None,
        )
        journal = await self._journal()
        done = msgspec.msgpack.encode(number)
        await journal.call(Commit(group=_GROUP, generation=0, offsets={0: offset}, metadata=done))
        self._done = number
        self._untrimmed_bytes += 1024 + sum(piece.count * 64 for piece in decision.pieces if piece.stage >= 0)
        if self._untrimmed_bytes >= _TRIM_BYTES:
            await self._trim(decided)
            self._untrimmed_bytes = 0

    async def _trim(self, decided: Decided) -> None:
        ends = {_JOURNAL: decided.offset}
        for piece in decided.decision.pieces:
            if piece.stage > _JOURNAL:
                ends[piece.stage] = max(ends.get(piece.stage, 0), piece.offset + piece.count)
        for stage, before in ends.items():
            route = await self._rq.routes.partition(TopicPartition(self._staging, stage))
            await route.call(Trim(before=before))

    # -- reading ---------------------------------------------------------------------------

    async def _journal(self) -> GroupRoute:
        return await self._rq.routes.partition(TopicPartition(self._staging, _JOURNAL))

    async def _batches(self, wanted: Range) -> AsyncIterator[FetchedBatch]:
        async for batch in _scanned(self._rq, wanted):
            yield batch


def publish_once(rq: RayQueue, pieces: Sequence[Piece], staging: str) -> None:
    """Make these pieces records, for a job that will not come back. Any thread but the I/O thread."""

    async def publish() -> None:
        producer_id: int = await rq.routes.coordinator.call(NewProducerIds())
        await copy(rq, pieces, producer_id=producer_id, epoch=0, staging=staging, resume_from=None)

    rq.io.call(publish())


class DirectWriter:
    """A task that writes to its topics itself, as a producer of its own. Any thread but the I/O thread."""

    def __init__(self, rq: RayQueue) -> None:
        self._rq = rq
        self._producer_id = 0
        self._lanes: dict[TopicPartition, _Lane] = {}
        self._sequences: dict[TopicPartition, int] = {}

    def add(self, cuts: Iterable[Cut]) -> None:
        for cut in cuts:
            self._rq.io.call(self._put(cut))

    def finish(self) -> list[Piece]:
        """All is written. There is nothing left to publish."""

        async def finish() -> None:
            await asyncio.gather(*(lane.finish() for lane in self._lanes.values()))

        self._rq.io.call(finish())
        return []

    async def _put(self, cut: Cut) -> None:
        rq, place = self._rq, TopicPartition(cut.topic, cut.partition)
        if not self._producer_id:
            self._producer_id = await rq.routes.coordinator.call(NewProducerIds())
        if place not in self._lanes:
            self._lanes[place] = _Lane(rq, await rq.routes.partition(place), self._producer_id, 0)
        sequence = self._sequences.get(place, 0)
        self._sequences[place] = sequence + cut.count
        piece = Piece(cut.topic, cut.partition, cut.lane, cut.count)
        await self._lanes[place].put(_Entry(piece, sequence), cut.payload)


def producer_id_of(writer: str, topic_id: int) -> int:
    """The producer of a writer. The coordinator counts its ids from one; these have the highest bit."""
    digest = hashlib.blake2b(f"{topic_id}\0{writer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") | 2**63


async def copy(
    rq: RayQueue,
    pieces: Sequence[Piece],
    *,
    producer_id: int,
    epoch: int,
    staging: str,
    resume_from: Sequence[Target] | None,
) -> None:
    """Append the pieces to their partitions as this producer. ``resume_from``: some may be there already."""
    wanted = _sequenced(pieces)
    if resume_from is not None:
        for target in resume_from:
            place = TopicPartition(target.topic, target.partition)
            known = await _written(rq, place, producer_id, epoch, target.end)
            wanted[place] = [entry for entry in wanted[place] if entry.sequence >= known]
    lanes = {
        place: _Lane(rq, await rq.routes.partition(place), producer_id, epoch)
        for place, entries in wanted.items()
        if entries
    }
    inline = [(place, entry) for place, entries in wanted.items() for entry in entries if entry.piece.stage < 0]
    for place, entry in inline:
        await lanes[place].put(entry, entry.piece.payload)
    staged = [(place, entry) for place, entries in wanted.items() for entry in entries if entry.piece.stage >= 0]
    staged.sort(key=lambda each: (each[1].piece.stage, each[1].piece.offset))
    for stage, entries_of_stage in groupby(staged, key=lambda each: each[1].piece.stage):
        by_offset = {entry.piece.offset: (place, entry) for place, entry in entries_of_stage}
        first = min(by_offset)
        last = max(offset + entry.piece.count for offset, (_, entry) in by_offset.items())
        async for batch in _scanned(rq, Range(staging, 0, stage, first, last)):
            found = by_offset.pop(batch.base_offset, None)
            if found is not None:
                await lanes[found[0]].put(found[1], batch.payload)
        if by_offset:
            raise BridgeError(f"{len(by_offset)} staged batches are not in {staging!r} any more", topic=staging)
    await asyncio.gather(*(lane.finish() for lane in lanes.values()))


class _Lane:
    """The way of entries to one partition."""

    def __init__(self, rq: RayQueue, route: GroupRoute, producer_id: int, epoch: int) -> None:
        self._appends = Appends(route, rq.settings.client)
        self._producer_id = producer_id
        self._epoch = epoch

    async def put(self, entry: _Entry, payload: bytes | memoryview) -> None:
        batch = signed(
            payload,
            producer_id=self._producer_id,
            epoch=self._epoch,
            sequence=entry.sequence,
            lane=entry.piece.lane,
        )
        try:
            await self._appends.put(batch)
        except ProducerFencedError as error:
            raise _fenced(error) from error

    async def finish(self) -> None:
        try:
            await self._appends.finish()
        except ProducerFencedError as error:
            raise _fenced(error) from error


def _fenced(error: ProducerFencedError) -> StaleWriterError:
    return StaleWriterError(f"another run of this query has gone on: {error}", **error.details)


def _sequenced(pieces: Sequence[Piece]) -> dict[TopicPartition, list[_Entry]]:
    """Per partition the pieces in the order in which they are copied, each with its sequence."""
    wanted: dict[TopicPartition, list[_Entry]] = {}
    following: dict[TopicPartition, int] = {}
    # Inline ones first, in the order given; staged ones as one pass over each stage finds them.
    for piece in sorted(pieces, key=lambda each: (each.stage, each.offset)):
        place = TopicPartition(piece.topic, piece.partition)
        sequence = following.get(place, 0)
        wanted.setdefault(place, []).append(_Entry(piece, sequence))
        following[place] = sequence + piece.count
    return wanted


async def _written(rq: RayQueue, place: TopicPartition, producer_id: int, epoch: int, since: int) -> int:
    """How many records of this producer and epoch the partition has."""
    route = await rq.routes.partition(place)
    probe = RecordBatch.encode(
        [b""], timestamps=int(time.time() * 1000), producer_id=producer_id, epoch=epoch, sequence=_IMPOSSIBLE
    )

    async def ask() -> int:
        try:
            await (await route.leader()).append(probe)
        except SequenceGapError as gap:
            return int(gap.details["expected"])
        except ProducerFencedError as error:
            raise _fenced(error) from error
        raise BridgeError(f"{place} took a batch of an impossible sequence")

    expected = await persist(ask, route, rq.settings.client)
    if expected:
        return expected
    # Nothing was written; or the partition has forgotten this producer.
    bounds: Bounds = await route.call(GetBounds())
    if bounds.start > since:
        raise BridgeError(
            f"whether {place} has this batch cannot be known: it has forgotten the producer, and retention has deleted "
            f"offsets {since} to {bounds.start - 1}. Delete the staging topic to go on without this batch's duplicates "
            "being recognized",
            topic=place.topic,
            partition=place.partition,
        )
    found = 0
    async for batch in _scanned(rq, Range(place.topic, 0, place.partition, since, bounds.end)):
        header = BatchHeader.parse(batch.payload)
        if (header.producer_id, header.epoch) == (producer_id, epoch):
            found = max(found, header.sequence + header.count)
    return found


async def _scanned(rq: RayQueue, wanted: Range) -> AsyncIterator[FetchedBatch]:
    """The batches of a range, from the leader: what was appended a moment ago is there."""
    reading = Scan(rq, wanted, ScanSettings(follower=False))
    ahead = asyncio.ensure_future(reading.next())
    try:
        while batches := await ahead:
            ahead = asyncio.ensure_future(reading.next())
            for batch in batches:
                yield batch
    finally:
        ahead.cancel()


def _decision(payload: Any) -> Decision:
    (value,) = RecordBatch.decode(payload).values()
    try:
        return msgspec.msgpack.decode(value or b"", type=Decision)
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"a decision cannot be read by this release: {error}") from None
