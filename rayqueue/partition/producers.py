"""The partition's memory of its idempotent producers.

Owns the PRODUCERS table: per producer its epoch, the sequence it must send
next, and the answers to its last batches. Sequences count records.

A batch is judged by ``answer``:

    unknown producer or newer epoch    accepted if it starts at sequence 0, else a gap
    older epoch                        fenced
    sequence is the expected one       accepted
    sequence is higher                 a gap: an earlier batch is missing
    sequence is lower                  answered as the first time; expired if that is forgotten

A part of a batch that was written is answered too: its producer has cut it
since, because it was told that the batch as a whole had no room.

A producer is forgotten when two things are true: there are more than
``max_producers``, with it as the one whose last batch is the oldest, and that
batch is older than ``IDLE_MS`` by the partition's clock. So however many others
come and go, a producer that repeats what it sent not long ago gets its answer.
``MAX_KNOWN`` bounds the memory: with so many that are not idle, a new one is
refused until some are. Whoever comes back after it was forgotten is unknown,
and must take a new epoch to write again.

Until the log has told a time, the count alone decides: that is how logs of
before there was a clock were applied.
"""

from __future__ import annotations

from collections import OrderedDict
from struct import Struct

from rayqueue.errors import (
    ProducerError,
    ProducerFencedError,
    SequenceExpiredError,
    SequenceGapError,
    TooManyProducersError,
)
from rayqueue.ids import Index, Offset
from rayqueue.log.store import LogStore
from rayqueue.partition.answers import Appended, Fenced
from rayqueue.partition.clock import Clock
from rayqueue.partition.settings import PartitionSettings
from rayqueue.partition.tables import PRODUCERS
from rayqueue.records import BatchHeader

IDLE_MS = 6 * 3_600_000
MAX_KNOWN = 65_536
"""About 30 MB, for producers of a few batches each."""

FORGOTTEN_AT_ONCE = 128
"""So that no entry holds up the others."""

_KEY = Struct(">Q")
_STATE = Struct("<QQI")  # index of the last change, next sequence, epoch
_STAMP = Struct("<Q")  # time of the last change; rows of before there was a clock have none
_WRITTEN = Struct("<QQI")  # sequence, base offset, count
_DUMPED = Struct("<QI")  # producer id, length of its row


class Producer:
    """One producer. ``window`` holds the last batches as packed bytes: appending to it costs no parsing."""

    __slots__ = ("epoch", "next_sequence", "used_at", "used_ms", "window")

    def __init__(self, used_at: int, used_ms: int, next_sequence: int, epoch: int, window: bytes = b"") -> None:
        self.used_at = used_at
        self.used_ms = used_ms
        self.next_sequence = next_sequence
        self.epoch = epoch
        self.window = window

    def encode(self) -> bytes:
        stamp = _STAMP.pack(self.used_ms) if self.used_ms else b""
        return _STATE.pack(self.used_at, self.next_sequence, self.epoch) + stamp + self.window

    @staticmethod
    def decode(row: bytes) -> Producer:
        used_at, next_sequence, epoch = _STATE.unpack_from(row)
        used_ms, window_at = 0, _STATE.size
        if (len(row) - _STATE.size) % _WRITTEN.size == _STAMP.size:
            used_ms, window_at = _STAMP.unpack_from(row, _STATE.size)[0], _STATE.size + _STAMP.size
        return Producer(used_at, used_ms, next_sequence, epoch, row[window_at:])


class Producers:
    """All of them, least recently used first."""

    def __init__(self, store: LogStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._known: OrderedDict[int, Producer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, producer_id: int) -> Producer | None:
        return self._known.get(producer_id)

    # -- judging ------------------------------------------------------------------

    def answer(self, header: BatchHeader) -> Appended | ProducerError | None:
        """The answer that the applied log already has for this batch; None if it is to be accepted."""
        producer = self._known.get(header.producer_id)
        if producer is None or header.epoch > producer.epoch:
            if header.sequence:
                return _gap(header, 0)
            return self._too_many() if producer is None and self._is_full else None
        if header.epoch < producer.epoch:
            return fenced(header, producer.epoch)
        if header.sequence == producer.next_sequence:
            return None
        if header.sequence > producer.next_sequence:
            return _gap(header, producer.next_sequence)
        return _repeated(header, producer)

    @property
    def _is_full(self) -> bool:
        return len(self._known) >= MAX_KNOWN and not self._oldest_may_go()

    def _oldest_may_go(self) -> bool:
        oldest = next(iter(self._known.values()))
        return not self._clock.now_ms or self._clock.age_ms(oldest.used_ms) > IDLE_MS

    def _too_many(self) -> TooManyProducersError:
        return TooManyProducersError(
            f"{len(self._known)} producers wrote here within {IDLE_MS // 3_600_000} hours; the partition can remember "
            "no more of them: retry later, and let producers live longer",
            limit=MAX_KNOWN,
        )

    # -- changing -----------------------------------------------------------------

    def accept(self, header: BatchHeader, base_offset: Offset, index: Index, settings: PartitionSettings) -> None:
        """Remember a batch that ``answer`` let through."""
        producer_id = header.producer_id
        producer = self._known.get(producer_id)
        written = _WRITTEN.pack(header.sequence, base_offset, header.count)
        next_sequence = header.sequence + header.count
        if producer is not None and producer.epoch == header.epoch:
            producer.used_at = index
            producer.used_ms = self._clock.now_ms
            producer.next_sequence = next_sequence
            producer.window = (producer.window + written)[-settings.dedupe_window * _WRITTEN.size :]
            self._known.move_to_end(producer_id)
            self._store.put(PRODUCERS, _KEY.pack(producer_id), producer.encode())
        else:
            made = Producer(index, self._clock.now_ms, next_sequence, header.epoch, written)
            self._replace(producer_id, made, settings)

    def fence(self, producer_id: int, epoch: int, index: Index, settings: PartitionSettings) -> Fenced | ProducerError:
        producer = self._known.get(producer_id)
        if producer is not None and epoch < producer.epoch:
            return ProducerFencedError(
                f"producer {producer_id} has epoch {producer.epoch} already", epoch=epoch, current=producer.epoch
            )
        if producer is None and self._is_full:
            return self._too_many()
        if producer is None or epoch > producer.epoch:
            self._replace(producer_id, Producer(index, self._clock.now_ms, 0, epoch), settings)
        return Fenced(epoch)

    def shrink(self, settings: PartitionSettings) -> None:
        """Forget those that the settings have no room for and that are idle."""
        for _ in range(FORGOTTEN_AT_ONCE):
            if len(self._known) <= settings.max_producers or not self._oldest_may_go():
                return
            forgotten, _ = self._known.popitem(last=False)
            self._store.delete(PRODUCERS, _KEY.pack(forgotten))

    def _replace(self, producer_id: int, producer: Producer, settings: PartitionSettings) -> None:
        self._known[producer_id] = producer
        self._known.move_to_end(producer_id)
        self._store.put(PRODUCERS, _KEY.pack(producer_id), producer.encode())
        self.shrink(settings)

    # -- the table and the checkpoint ---------------------------------------------

    def load(self) -> None:
        rows = [(_KEY.unpack(key)[0], Producer.decode(row)) for key, row in self._store.scan(PRODUCERS)]
        self._known = OrderedDict(sorted(rows, key=lambda row: row[1].used_at))

    def dump(self) -> bytes:
        parts: list[bytes] = []
        for producer_id, producer in self._known.items():
            row = producer.encode()
            parts.append(_DUMPED.pack(producer_id, len(row)))
            parts.append(row)
        return b"".join(parts)

    def restore(self, dumped: bytes) -> None:
        """Take over a dump; the table is empty."""
        self._known.clear()
        at = 0
        while at < len(dumped):
            producer_id, size = _DUMPED.unpack_from(dumped, at)
            at += _DUMPED.size
            row = dumped[at : at + size]
            at += size
            self._known[producer_id] = Producer.decode(row)
            self._store.put(PRODUCERS, _KEY.pack(producer_id), row)


def fenced(header: BatchHeader, current: int) -> ProducerFencedError:
    return ProducerFencedError(
        f"producer {header.producer_id} writes with epoch {header.epoch}, but epoch {current} exists",
        epoch=header.epoch,
        current=current,
    )


def _gap(header: BatchHeader, expected: int) -> SequenceGapError:
    return SequenceGapError(
        f"producer {header.producer_id} sent sequence {header.sequence}, but {expected} is expected",
        sequence=header.sequence,
        expected=expected,
    )


def _repeated(header: BatchHeader, producer: Producer) -> Appended | ProducerError:
    oldest: int | None = None
    for sequence, base_offset, count in _WRITTEN.iter_unpack(producer.window):
        skipped = header.sequence - sequence
        if skipped >= 0 and skipped + header.count <= count:
            return Appended(Offset(base_offset + skipped), header.count, True)
        oldest = sequence if oldest is None else oldest
    if oldest is None or header.sequence < oldest:
        return SequenceExpiredError(
            f"producer {header.producer_id} repeats sequence {header.sequence}; answers before {oldest} are forgotten",
            sequence=header.sequence,
            oldest=oldest,
        )
    # Retrying cannot help: it was cut into other batches than the first time.
    return ProducerError(
        f"producer {header.producer_id} repeats sequence {header.sequence} with {header.count} records, "
        "which were not in one batch the first time",
        sequence=header.sequence,
        count=header.count,
    )
