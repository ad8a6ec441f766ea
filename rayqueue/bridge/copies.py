"""Copying staged batches to their topics, each once, however often the copy is torn and taken up again.

A copy follows from its decision alone: a producer id and an epoch, the pieces in
one order, sequences that count their records. Whoever repeats it repeats the
same appends, and each is taken once.

Who takes up a copy that somebody else began asks each partition, by a batch of an
impossible sequence, which one it expects next. "0" has two meanings: nothing was
written, or the partition has forgotten this producer. So the log since the decision
is searched for batches that carry its id. If there are some, it was forgotten in
the middle, and would take none of the rest: that is written by a producer whose
id follows from the first one's and from where the rest begins, so that everybody
who takes up this copy writes the same again.

Belongs to the I/O thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

from rayqueue.bridge.append import Appends
from rayqueue.bridge.journal import Target, producer_id_of
from rayqueue.bridge.scan import scanned
from rayqueue.bridge.staging import Piece
from rayqueue.client.handle import RayQueue
from rayqueue.errors import (
    BridgeError,
    DataLossError,
    ProducerFencedError,
    SequenceGapError,
    StagedDataLostError,
    StaleWriterError,
)
from rayqueue.net.backoff import Retry
from rayqueue.net.interfaces import ask
from rayqueue.net.requests import request
from rayqueue.net.route import GroupRoute
from rayqueue.net.scan import Range
from rayqueue.protocol.calls import Bounds, GetBounds
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import BatchHeader, RecordBatch, with_producer

_IMPOSSIBLE = 2**62
_ATTEMPTS = 10
"""How often a copy is taken up again that a partition forgets in the middle."""


class Source(NamedTuple):
    """Who writes the records of a copy to one partition, from one of them on."""

    producer_id: int
    epoch: int
    base: int = 0
    """The sequence that is its sequence 0."""

    def rest(self, base: int) -> Source:
        """Who writes from there on, to a partition that has forgotten this one."""
        return Source(producer_id_of("rest", self.producer_id, self.epoch, base), self.epoch, base)


class Entry(NamedTuple):
    """A piece, and what it is to its topic's partition."""

    piece: Piece
    sequence: int


async def ends_of(rq: RayQueue, pieces: Iterable[Piece]) -> tuple[Target, ...]:
    """Where the logs end to which these pieces go. ``TopicRecreatedError`` if a topic is not the one it was."""
    wanted = sorted({(piece.place, piece.topic_id) for piece in pieces})

    async def end(place: TopicPartition, topic_id: int) -> Target:
        bounds: Bounds = await ask(rq.routes, place, GetBounds(), topic_id=topic_id)
        return Target(place.topic, place.partition, bounds.end, topic_id)

    return tuple(await asyncio.gather(*(end(*each) for each in wanted)))


@dataclass(frozen=True, slots=True)
class Copy:
    """Pieces, where they are staged, where they go, and who writes them."""

    rq: RayQueue
    pieces: Sequence[Piece]
    source: Source
    staging: str
    staging_id: int
    targets: Sequence[Target]

    async def run(self, *, resume: bool) -> None:
        """Append the pieces to their partitions. ``resume``: some may be there already."""
        for _ in range(_ATTEMPTS):
            try:
                await self._attempt(resume=resume)
                return
            except SequenceGapError as error:
                resume, forgotten = True, error
            except ProducerFencedError as error:
                raise StaleWriterError(f"another run of this query has gone on: {error}", **error.details) from error
        raise BridgeError(f"a partition forgets this producer again and again: {forgotten}") from forgotten

    async def _attempt(self, *, resume: bool) -> None:
        wanted = _sequenced(self.pieces)
        with ExitStack() as opened:
            lanes: dict[TopicPartition, Lane] = {}
            for target in self.targets:
                place, written, by = target.place, 0, self.source
                if resume:
                    written, by = await _written(self.rq, target, self.source)
                wanted[place] = [entry for entry in wanted.get(place, []) if entry.sequence >= written]
                lanes[place] = opened.enter_context(closing(Lane(self.rq, place, target.topic_id, by)))
            await self._fill(lanes, [(place, entry) for place, entries in wanted.items() for entry in entries])
            await asyncio.gather(*(lane.finish() for lane in lanes.values()))

    async def _fill(self, lanes: Mapping[TopicPartition, Lane], wanted: Sequence[tuple[TopicPartition, Entry]]) -> None:
        staged: dict[int, dict[int, tuple[TopicPartition, Entry]]] = {}
        for place, entry in wanted:
            if entry.piece.stage < 0:
                await lanes[place].write(entry, entry.piece.payload)
            else:
                staged.setdefault(entry.piece.stage, {})[entry.piece.offset] = place, entry
        for stage, by_offset in sorted(staged.items()):
            first = min(by_offset)
            last = max(offset + entry.piece.count for offset, (_, entry) in by_offset.items())
            try:
                async for batch in scanned(self.rq, Range(self.staging, self.staging_id, stage, first, last)):
                    found = by_offset.pop(batch.base_offset, None)
                    if found is not None:
                        await lanes[found[0]].write(found[1], batch.payload)
            except DataLossError as error:
                raise _gone(self.staging, len(by_offset)) from error
            if by_offset:
                raise _gone(self.staging, len(by_offset))


def _gone(staging: str, count: int) -> StagedDataLostError:
    return StagedDataLostError(
        f"{count} staged batches are not in {staging!r} any more, and some of their batch may be written. If a query "
        "is stuck with this: delete the staging topic and start the query again, which writes the batch anew",
        topic=staging,
    )


class Lane(Appends):
    """The way of entries to one partition."""

    def __init__(
        self, rq: RayQueue, place: TopicPartition, topic_id: int, source: Source, *, refuse_forgotten: bool = True
    ) -> None:
        way = partial(rq.routes.partition, place, topic_id)
        super().__init__(place, way, rq.settings.client, refuse_forgotten=refuse_forgotten)
        self._source = source

    async def write(self, entry: Entry, payload: bytes | memoryview) -> None:
        source = self._source
        sequence = entry.sequence - source.base
        await self.put(with_producer(payload, source.producer_id, sequence, source.epoch, entry.piece.lane))


def _sequenced(pieces: Sequence[Piece]) -> dict[TopicPartition, list[Entry]]:
    """Per partition the pieces in the order in which they are copied, each with its sequence."""
    wanted: dict[TopicPartition, list[Entry]] = {}
    following: dict[TopicPartition, int] = {}
    # Inline ones first, in the order given; staged ones as one pass over each stage finds them.
    for piece in sorted(pieces, key=lambda each: (each.stage, each.offset)):
        sequence = following.get(piece.place, 0)
        wanted.setdefault(piece.place, []).append(Entry(piece, sequence))
        following[piece.place] = sequence + piece.count
    return wanted


# -- how far it came -----------------------------------------------------------------------------


async def _written(rq: RayQueue, target: Target, source: Source) -> tuple[int, Source]:
    """How many records of a copy the partition has, and who is to write the others."""
    expected = await _expected(rq, target, source)
    if expected:
        return expected, source
    seen = await _seen(rq, target, source)
    while True:
        count = seen.get((source.producer_id, source.epoch), 0)
        # Asked again: what was found may have been written after the first answer.
        expected = await _expected(rq, target, source)
        if expected or not count:
            return source.base + expected, source
        source = source.rest(source.base + count)


async def _expected(rq: RayQueue, target: Target, source: Source) -> int:
    """The sequence that the partition expects of this producer; 0 if it does not know it."""
    probe = RecordBatch.encode(
        [b""],
        timestamps=int(time.time() * 1000),
        producer_id=source.producer_id,
        epoch=source.epoch,
        sequence=_IMPOSSIBLE,
    )

    async def probed(route: GroupRoute) -> int:
        channel = await route.leader()
        await channel.call(GetBounds())  # a leader that is new has applied all that is committed once it answers this
        try:
            await channel.append(probe)
        except SequenceGapError as gap:
            return int(gap.details["expected"])
        raise BridgeError(f"{target.place} took a batch of an impossible sequence")

    now_s = asyncio.get_running_loop().time()
    retry = Retry(rq.settings.client, Random(), now_s)  # noqa: S311  # jitter
    return await request(partial(rq.routes.partition, target.place, target.topic_id), probed, retry)


async def _seen(rq: RayQueue, target: Target, source: Source) -> dict[tuple[int, int], int]:
    """What the log has since the decision: by producer and epoch, the sequence after the last."""
    bounds: Bounds = await ask(rq.routes, target.place, GetBounds(), topic_id=target.topic_id)
    if bounds.start > target.end:
        raise BridgeError(
            f"whether {target.place} has this batch cannot be known: it has forgotten the producer, and retention has "
            f"deleted offsets {target.end} to {bounds.start - 1}. Delete the staging topic to go on: the batch is then "
            "written again, and what the partition has of it already is there twice",
            topic=target.topic,
            partition=target.partition,
        )
    seen: dict[tuple[int, int], int] = {}
    async for batch in scanned(rq, Range(target.topic, target.topic_id, target.partition, target.end, bounds.end)):
        header = BatchHeader.parse(batch.payload)
        if header.producer_id == source.producer_id or header.producer_id >> 63:  # it, or one that follows from it
            key = (header.producer_id, header.epoch)
            seen[key] = max(seen.get(key, 0), header.sequence + header.count)
    return seen
