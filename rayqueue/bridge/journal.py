"""The journal of a writer: its decisions, in the first partition of its staging topic.

"Batch 7 is these pieces" is one record. Decisions are numbered, and of all
records that claim a number the first that follows the decision before it in the
log is the decision; every other is void, whoever reads the journal. So two
drivers that decide at the same time agree on one outcome by reading.

Mostly nobody has to read: a decision is appended by an idempotent producer whose
id follows from the writer's, with one sequence per decision, and the partition
takes one record per sequence. Who comes later is told where the first is.
A partition may forget a producer; then the next epoch begins, at sequence 0, and
since nobody keeps a driver that was asleep from beginning it as well, whoever
wrote sequence 0 of an epoch reads the journal to see whether it counts.

That a decision is carried out is noted by the position of group "decisions". What
is before that position may be trimmed.

Belongs to the I/O thread.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from rayqueue.bridge.append import append_once
from rayqueue.bridge.ledger import Ledger, ledger_of_old
from rayqueue.bridge.scan import scanned
from rayqueue.bridge.staging import Piece
from rayqueue.client.handle import RayQueue
from rayqueue.errors import (
    BridgeError,
    DataLossError,
    InvalidInputError,
    ProducerFencedError,
    SequenceGapError,
)
from rayqueue.net.interfaces import ask
from rayqueue.net.route import GroupRoute
from rayqueue.net.scan import Range
from rayqueue.protocol.calls import Bounds, Call, Commit, GetBounds, GetPosition, Pin, Position
from rayqueue.protocol.data import Appended
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import BatchHeader, RecordBatch

JOURNAL = 0
"""The partition of a staging topic that has the decisions."""
GROUP = "decisions"
_ATTEMPTS = 10


class Target(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    end: int
    """Of its log, before the decision."""
    topic_id: int = 0

    @property
    def place(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class Decision(msgspec.Struct, frozen=True, array_like=True):
    batch_id: int
    token: bytes
    """Another one for each attempt to decide."""
    targets: tuple[Target, ...]
    pieces: tuple[Piece, ...]
    number: int = -1
    """-1: the sequence it was appended with, as releases before epochs did."""
    ledger: Ledger | None = None
    """All that is decided, this one included."""


class Decided(NamedTuple):
    number: int
    offset: int
    epoch: int
    sequence: int
    decision: Decision

    @property
    def ledger(self) -> Ledger:
        return self.decision.ledger or ledger_of_old(self.decision.batch_id)


class Journal:
    def __init__(self, rq: RayQueue, staging: str, writer: str) -> None:
        self._rq = rq
        self._writer = writer
        self._place = TopicPartition(staging, JOURNAL)
        self.topic_id = 0
        self.producer_id = 0
        self.last: Decided | None = None
        self.done = -1
        """The number of the last decision that is known to be carried out."""
        self._noted: int | None = None
        self.loaded = False

    @property
    def ledger(self) -> Ledger:
        return Ledger() if self.last is None else self.last.ledger

    async def load(self, *, whole: bool = False) -> None:
        """Go on from the last decision that is noted as carried out; ``whole``: read what comes after it, too.

        Without, a decision that is newer is met by whoever wants to make it again.
        """
        if not self.loaded:
            self.last, self.done = None, -1
            self.topic_id = (await self._rq.routes.topic(self._place.topic, refresh=True)).topic_id
            self.producer_id = producer_id_of(self.topic_id, self._writer)
        for _ in range(_ATTEMPTS):
            noted = self._noted = await self.look_done()
            bounds: Bounds = await self._ask(GetBounds())
            if self.last is not None and self.last.offset < max(noted or 0, bounds.start):
                self.last = None  # numbers go on from what is noted
            start = max(noted or 0, bounds.start) if self.last is None else self.last.offset + 1
            end = bounds.end if whole or noted is None else noted + 1
            with suppress(DataLossError):  # trimmed meanwhile, up to a decision that is newer
                await self._read(start, end)
                self.loaded = True
                return
        raise BridgeError(f"the journal of {self._writer!r} is trimmed faster than it can be read", writer=self._writer)

    async def look_done(self) -> int | None:
        """Where the last decision is that is noted as carried out."""
        position: Position | None = await self._ask(GetPosition(group=GROUP))
        if position is None or not position.metadata:
            return None
        self.done = max(self.done, msgspec.msgpack.decode(position.metadata, type=int))
        return position.offsets.get(0, 0)

    async def note_done(self, decided: Decided) -> None:
        done = msgspec.msgpack.encode(decided.number)
        noted: Position = await self._ask(Commit(group=GROUP, generation=0, offsets={0: decided.offset}, metadata=done))
        if not noted.pinned:  # positions that nobody commits for long expire, and a writer may rest for long
            await self._ask(Pin(group=GROUP))
        self.done = max(self.done, decided.number)

    async def decide(self, decision: Decision) -> Decided | None:
        """This as the next decision. None if another one is, which is ``last`` then, or one after it."""
        last = self.last
        number = 0 if last is None else last.number + 1
        epoch, sequence = (0, 0) if last is None else (last.epoch, last.sequence + 1)
        decision = msgspec.structs.replace(decision, number=number)
        try:
            try:
                written = await self._append(decision, epoch, sequence)
            except SequenceGapError as gap:
                if gap.details.get("expected") or not sequence:
                    raise
                epoch, sequence = epoch + 1, 0  # it has forgotten this producer
                written = await self._append(decision, epoch, sequence)
        except ProducerFencedError:
            await self.load(whole=True)  # another driver has begun another epoch
            return None
        if sequence and not written.duplicate and written.base_offset is not None:
            self.last = Decided(number, written.base_offset, epoch, sequence, decision)
            return self.last
        if written.duplicate and written.base_offset is not None:
            # Spark commits in whichever of its Python processes is free: what the others decide is not known here.
            await self._follow(written.base_offset)
        else:
            await self.load(whole=True)
        return self.last if self.last is not None and self.last.decision.token == decision.token else None

    async def _follow(self, offset: int) -> None:
        """Another record has this number: the one at this offset."""
        before = self.last
        with suppress(DataLossError):
            await self._read(offset, offset + 1)
        if self.last is before:  # it is trimmed, and newer ones are there
            await self.load(whole=True)
        await self.look_done()

    async def _ask(self, call: Call) -> Any:
        return await ask(self._rq.routes, self._place, call, topic_id=self.topic_id)

    async def route(self) -> GroupRoute:
        return await self._rq.routes.partition(self._place, self.topic_id)

    async def _append(self, decision: Decision, epoch: int, sequence: int) -> Appended:
        payload = RecordBatch.encode(
            [msgspec.msgpack.encode(decision)],
            timestamps=int(time.time() * 1000),
            producer_id=self.producer_id,
            epoch=epoch,
            sequence=sequence,
        )
        return await append_once(self._place, self.route, payload, self._rq.settings.client)

    async def _read(self, start: int, end: int) -> None:
        wanted = Range(self._place.topic, self.topic_id, JOURNAL, start, end)
        async for batch in scanned(self._rq, wanted):
            header = BatchHeader.parse(batch.payload)
            if header.producer_id != self.producer_id:
                continue
            decision = _decision(batch.payload)
            number = header.sequence if decision.number < 0 else decision.number
            if self.last is None or number == self.last.number + 1:
                self.last = Decided(number, batch.base_offset, header.epoch, header.sequence, decision)
                if batch.base_offset == self._noted:
                    self.done = max(self.done, number)  # whatever a driver that was late has noted there since


def producer_id_of(*identity: str | int) -> int:
    """A producer id that follows from these. The coordinator counts its ids from one; these have the highest bit."""
    digest = hashlib.blake2b("\0".join(map(str, identity)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") | 2**63


def _decision(payload: Any) -> Decision:
    (value,) = RecordBatch.decode(payload).values()
    try:
        return msgspec.msgpack.decode(value or b"", type=Decision)
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"a decision cannot be read by this release: {error}") from None
