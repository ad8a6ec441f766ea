"""Carrying out what a job has decided: staged batches become records of their topics, each once.

A driver calls ``publish(batch_id, pieces)``. It may die anywhere in it, may be
started again with the same batch computed anew, may even run twice at the same
time. Four things make the outcome the same:

1. The decision comes first, as a record that only one driver can write (``journal.py``).
2. It carries the ids of all batches that are decided (``ledger.py``): a batch is
   skipped if it is known to be decided, written if it is known not to be, and
   refused otherwise.
3. What a decision tells of is there: it is held from before it is staged until the
   decision is carried out (``staging.py``), and looked at before it is decided.
4. The copy to the topic follows from the decision alone (``copies.py``).

A decision is carried out before the next one is made. So all that a ledger names
is carried out, except for the last.

A job that runs once has nothing to come back to: ``publish_once``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence

import msgspec

from rayqueue.bridge.append import append_all
from rayqueue.bridge.copies import Copy, Entry, Lane, Source, ends_of
from rayqueue.bridge.journal import JOURNAL, Decided, Decision, Journal
from rayqueue.bridge.rows import Cut
from rayqueue.bridge.staging import Hold, Piece, batch_hold, check_staged, held_batch, staging_is_gone
from rayqueue.client.handle import RayQueue
from rayqueue.config import MIB
from rayqueue.errors import InvalidInputError, StagedDataLostError, StaleWriterError, TopicError
from rayqueue.protocol.calls import NewProducerIds
from rayqueue.protocol.topics import TopicPartition

_INLINE_BYTES = MIB // 2
_TRIM_BYTES = 32 * MIB
_MAX_OVERTAKEN = 1000
"""Decisions of others that one attempt follows."""


class Publisher:
    """Publishes the batches of one writer. Any thread but the I/O thread; one batch at a time."""

    def __init__(self, rq: RayQueue, staging: str, writer: str) -> None:
        self._rq = rq
        self._staging = staging
        self._writer = writer
        self._journal = Journal(rq, staging, writer)
        self._untrimmed_bytes = _TRIM_BYTES

    def publish(
        self, batch_id: int, pieces: Sequence[Piece], *, identity: bytes = b"", token: str | None = None
    ) -> bool:
        """Make these the records of this batch. False if it was written before.

        ``identity``: what the id stands for; the same id with another one is a ``BatchConflictError``. ``token``: of
        the hold that the tasks have taken before they staged anything, ``batch_hold(batch_id, token)``.
        """
        if token is None and any(piece.stage >= 0 for piece in pieces):
            raise InvalidInputError("what was staged is held by a token: give it", batch_id=batch_id)
        hold = Hold(self._rq, self._staging, batch_hold(batch_id, token or secrets.token_hex(8)))
        try:
            return self._rq.io.call(self._publish(batch_id, pieces, identity, hold))
        except TopicError:
            self._journal.loaded = False  # deleted, or made again
            staging_is_gone(self._rq, self._staging)
            raise

    async def _publish(self, batch_id: int, pieces: Sequence[Piece], identity: bytes, hold: Hold) -> bool:
        journal = self._journal
        if not journal.loaded:
            await journal.load()
        for _ in range(_MAX_OVERTAKEN):
            last = journal.last
            if last is not None and last.number > journal.done:
                await journal.look_done()
            if last is not None and last.number > journal.done:
                await self._carry_out(last, resume=True)
            if journal.ledger.has(batch_id, identity, writer=self._writer):
                await self._tidy(hold, pieces, trim=False)
                return False
            pieces = await self._small(pieces, hold)
            try:
                decided = await self._decide(batch_id, pieces, identity, hold)
            except StagedDataLostError:
                await journal.load(whole=True)
                if journal.last is last:
                    raise
                continue  # another run has gone on, and maybe trimmed what it made void
            if decided is not None:
                await self._carry_out(decided, resume=False)
                await self._tidy(hold, pieces, trim=True)
                return True
        raise StaleWriterError(f"other runs of {self._writer!r} decide faster than this one", batch_id=batch_id)

    async def _decide(self, batch_id: int, pieces: Sequence[Piece], identity: bytes, hold: Hold) -> Decided | None:
        for stage in sorted({piece.stage for piece in pieces if piece.stage >= 0}):
            await hold.renewed(stage)
        await check_staged(self._rq, self._staging, self._journal.topic_id, pieces)
        targets = await ends_of(self._rq, pieces)
        ledger = self._journal.ledger.add(batch_id, identity)
        decision = Decision(batch_id, secrets.token_bytes(8), targets, tuple(pieces), ledger=ledger)
        return await self._journal.decide(decision)

    async def _small(self, pieces: Sequence[Piece], hold: Hold) -> Sequence[Piece]:
        """The pieces, such that all fit into one record: what came with messages is staged if it is much."""
        if sum(len(piece.payload) for piece in pieces) <= _INLINE_BYTES:
            return pieces
        await hold.taken(JOURNAL)
        inline = [piece for piece in pieces if piece.stage < 0]
        place = TopicPartition(self._staging, JOURNAL)
        written = await append_all(
            place, self._journal.route, (piece.payload for piece in inline), self._rq.settings.client, numbered=False
        )
        moved = [
            msgspec.structs.replace(
                piece,
                stage=JOURNAL,
                offset=each.base_offset or 0,
                payload=b"",
                staging_id=self._journal.topic_id,
            )
            for piece, each in zip(inline, written, strict=True)
        ]
        return [*moved, *(piece for piece in pieces if piece.stage >= 0)]

    async def _carry_out(self, decided: Decided, *, resume: bool) -> None:
        decision = decided.decision
        source = Source(self._journal.producer_id, decided.number)
        copy = Copy(self._rq, decision.pieces, source, self._staging, self._journal.topic_id, decision.targets)
        await copy.run(resume=resume)
        await self._journal.note_done(decided)
        self._untrimmed_bytes += 1024 + sum(piece.count * 64 for piece in decision.pieces if piece.stage >= 0)

    async def _tidy(self, hold: Hold, pieces: Iterable[Piece], *, trim: bool) -> None:
        """Let go of what this batch has staged; from time to time, delete what nobody holds."""
        for stage in sorted({piece.stage for piece in pieces if piece.stage >= 0}):
            await hold.dropped(stage)
        last = self._journal.last
        if not trim or last is None or self._untrimmed_bytes < _TRIM_BYTES:
            return

        def over(name: str) -> bool:
            """Whether a hold is of an attempt at a batch that is decided, and so carried out."""
            batch_id = held_batch(name)
            return batch_id is not None and last.ledger.span_of(batch_id) is not None

        for part in (await self._rq.routes.topic(self._staging)).partitions:
            # The last decision stays: the next driver goes on from it.
            await hold.trimmed(part.number, before=last.offset if part.number == JOURNAL else None, drop=over)
        self._untrimmed_bytes = 0


def publish_once(rq: RayQueue, pieces: Sequence[Piece], staging: str) -> None:
    """Make these pieces records, for a job that will not come back. Any thread but the I/O thread.

    ``StagedDataLostError`` if some are gone; nothing is written then.
    """

    async def publish() -> None:
        staging_id = 0
        if any(piece.stage >= 0 for piece in pieces):
            staging_id = (await rq.routes.topic(staging)).topic_id
            await check_staged(rq, staging, staging_id, pieces)
        targets = await ends_of(rq, pieces)
        source = Source(await rq.routes.coordinator.call(NewProducerIds()), 0)
        await Copy(rq, pieces, source, staging, staging_id, targets).run(resume=False)

    rq.io.call(publish())


class DirectWriter:
    """A task that writes to its topics itself, as a producer of its own. Any thread but the I/O thread."""

    def __init__(self, rq: RayQueue) -> None:
        self._rq = rq
        self._producer_id = 0
        self._lanes: dict[TopicPartition, Lane] = {}
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
            source = Source(self._producer_id, 0)
            self._lanes[place] = Lane(rq, place, cut.topic_id, source, refuse_forgotten=False)
        sequence = self._sequences.get(place, 0)
        self._sequences[place] = sequence + cut.count
        piece = Piece(cut.topic, cut.partition, cut.lane, cut.count)
        await self._lanes[place].write(Entry(piece, sequence), cut.payload)
