"""Outgoing batches: records of one lane of one partition, first as columns, then encoded.

The accumulator fills them, the partition's stream numbers and sends them, and
cuts one whose partition has room for a part of it only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayqueue.client.delivery import Outcome
from rayqueue.records import Compression, HeadersIn, RecordBatch, with_producer

if TYPE_CHECKING:
    from rayqueue.client.accumulator import PartitionBuffer


class Batch:
    """Records of one lane of one partition, first as columns, then encoded."""

    __slots__ = (
        "attempt",
        "buffer",
        "count",
        "deadline_s",
        "headers",
        "keys",
        "lane",
        "maybe_written",
        "opened_s",
        "outcome",
        "payload",
        "sequence",
        "serial",
        "settled",
        "size_bytes",
        "timestamps",
        "values",
    )

    def __init__(
        self,
        buffer: PartitionBuffer,
        outcome: Outcome,
        lane: int,
        timestamps: list[int],
        opened_s: float,
        deadline_s: float,
    ) -> None:
        self.buffer = buffer
        self.outcome = outcome
        self.lane = lane
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] | None = None
        self.headers: list[HeadersIn] | None = None
        self.timestamps = timestamps
        self.size_bytes = 0
        self.opened_s = opened_s
        self.deadline_s = deadline_s
        self.serial = 0
        self.count = 0
        """Of an encoded batch."""
        self.payload: bytes | None = None
        # What the sender knows of it.
        self.sequence = -1
        self.attempt = 0
        self.maybe_written = False
        self.settled = False

    def __len__(self) -> int:
        return self.count or len(self.values)

    def stamp(self, compression: Compression, producer_id: int, sequence: int, epoch: int) -> bytes:
        """The batch as it goes over the wire. From now on it is kept in this form only."""
        self.sequence = sequence
        if self.payload is not None:
            self.payload = with_producer(self.payload, producer_id, sequence, epoch)
            return self.payload
        self.payload = RecordBatch.encode(
            self.values,
            self.keys,
            self.headers,
            timestamps=self.timestamps,
            lane=self.lane,
            compression=compression,
            producer_id=producer_id,
            sequence=sequence,
            epoch=epoch,
        )
        self.count = len(self.values)
        self.values, self.keys, self.headers = [], None, None
        return self.payload

    def first_bytes(self) -> int:
        """What its first record takes as a batch. It is encoded."""
        return len(self._part(RecordBatch.decode(self._encoded()), 0, 1)) if self.count > 1 else len(self._encoded())

    def cut(self, records: int, size_bytes: int) -> tuple[Batch, Batch] | None:
        """As much of it as fits into this, and the rest, of the same producer. None if no record fits, or all do.

        It is encoded, and neither it nor its outcome is used after this.
        """
        encoded = self._encoded()
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
        pieces: list[Batch] = []
        for start, outcome, encoded, size in zip(
            (0, at), outcomes, payloads, (cut_bytes, self.size_bytes - cut_bytes), strict=True
        ):
            piece = Batch(self.buffer, outcome, self.lane, [], self.opened_s, self.deadline_s)
            piece.payload, piece.size_bytes, piece.serial = encoded, size, self.serial
            piece.count = self.count - at if start else at
            piece.sequence = self.sequence + start
            piece.maybe_written = self.maybe_written
            pieces.append(piece)
        return pieces[0], pieces[1]

    def _encoded(self) -> bytes:
        assert self.payload is not None  # noqa: S101  # stamped before
        return self.payload

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
        )
