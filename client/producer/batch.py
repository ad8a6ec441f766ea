"""The producer's batches: records of one lane of one partition, first as columns, then encoded.

The accumulator fills them, the partition's writer numbers and sends them, and
cuts one whose partition has room for a part of it only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rayqueue.client.producer.delivery import Outcome
from rayqueue.net.outgoing import Outgoing
from rayqueue.records import Compression, HeadersIn, RecordBatch, with_producer

if TYPE_CHECKING:
    from rayqueue.client.producer.accumulator import PartitionBuffer


COMPRESSIONS = {"none": Compression.NONE, "lz4": Compression.LZ4, "zstd": Compression.ZSTD}


@dataclass(eq=False, slots=True, kw_only=True)
class Batch(Outgoing):
    """Records of one lane of one partition, first as columns, then encoded."""

    buffer: PartitionBuffer
    outcome: Outcome
    lane: int
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] | None = None
    headers: list[HeadersIn] | None = None
    timestamps: list[int] = field(default_factory=list)
    opened_s: float
    serial: int
    compression: Compression = Compression.NONE
    transactional: bool = False
    number: int = 0
    """Of the transaction that it is of, in its producer."""

    def __len__(self) -> int:
        return self.count or len(self.values)

    def stamp(self, producer_id: int, sequence: int, epoch: int) -> None:
        """The batch as it goes over the wire. From now on it is kept in this form only."""
        self.sequence = sequence
        if self.payload is not None:
            self.payload = with_producer(self.payload, producer_id, sequence, epoch)
            return
        self.payload = RecordBatch.encode(
            self.values,
            self.keys,
            self.headers,
            timestamps=self.timestamps,
            lane=self.lane,
            compression=self.compression,
            producer_id=producer_id,
            sequence=sequence,
            epoch=epoch,
            transactional=self.transactional,
        )
        self.count = len(self.values)
        self.values, self.keys, self.headers = [], None, None

    def least(self) -> tuple[int, int]:
        """Its first record as a batch. It is encoded."""
        return 1, len(self.encoded if self.count == 1 else self._part(RecordBatch.decode(self.encoded), 0, 1))

    def cut(self, records: int, size_bytes: int) -> tuple[Batch, Batch] | None:
        """As much of it as fits into this, and the rest, of the same producer. None if no record fits, or all do.

        It is encoded, and neither it nor its outcome is used after this.
        """
        encoded = self.encoded
        at = min(records, self.count)
        if at < 1 or (at == self.count and len(encoded) <= size_bytes):
            return None
        whole = RecordBatch.decode(encoded)
        at = min(at, self.count - 1)
        while at:
            payload = self._part(whole, 0, at)
            if len(payload) <= size_bytes:
                break
            at = max(1, min(at - 1, at * size_bytes // len(payload))) if at > 1 else 0
        else:
            return None
        outcomes = self.outcome.cut(at)
        payloads = payload, self._part(whole, at, self.count)
        cut_bytes = self.size_bytes * at // self.count
        sizes = cut_bytes, self.size_bytes - cut_bytes
        pieces = [
            Batch(
                payload=payload,
                count=count,
                deadline_s=self.deadline_s,
                size_bytes=size,
                sequence=self.sequence + start,
                maybe_written=self.maybe_written,
                buffer=self.buffer,
                outcome=outcome,
                lane=self.lane,
                opened_s=self.opened_s,
                serial=self.serial,
                transactional=self.transactional,
                number=self.number,
            )
            for start, count, outcome, payload, size in zip(
                (0, at), (at, self.count - at), outcomes, payloads, sizes, strict=True
            )
        ]
        return pieces[0], pieces[1]

    def _part(self, whole: RecordBatch, start: int, stop: int) -> bytes:
        part = slice(start, stop)
        header = whole.header
        return RecordBatch.encode(
            whole.values()[part],
            whole.keys()[part],
            whole.headers()[part],
            timestamps=whole.timestamps()[part],
            lane=header.lane,
            compression=Compression(header.compression),
            producer_id=header.producer_id,
            sequence=header.sequence + start,
            epoch=header.epoch,
            transactional=header.transactional,
        )
