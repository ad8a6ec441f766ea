"""RecordBatch: the unit of append, checksum, replication and fetch.

    header (72 bytes, ``header.py``) + Arrow message (``message.py``), maybe compressed

Owns encoding columns to a batch and reading a batch back. Promises:

- Encoding is deterministic: the same columns and settings give the same bytes
  (for compressed batches: with the same version of the compressor).
- ``decode`` of any bytes whatever gives a batch or a typed error. What it
  returns has been checked, so Arrow can be let loose on it.
- Nothing is copied for ``arrow()`` of an uncompressed batch: it is a view of
  the buffer, which must stay unchanged while the view lives.

It does not stamp times or assign sequences and offsets; it is told them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from rayqueue.errors import InvalidInputError, OversizedBatchError, OversizedRecordError
from rayqueue.records import columns, compression
from rayqueue.records.columns import HeadersIn
from rayqueue.records.header import (
    CONTROL,
    HAS_HEADERS,
    HAS_KEYS,
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    TRANSACTIONAL,
    BatchHeader,
    Bytes,
    Compression,
    check_header,
    pack_header,
)
from rayqueue.records.message import Layout, shape_of
from rayqueue.records.record import Headers, Record

_COSTLY_BYTES = 256 * 1024


class RecordBatch:
    """A checked view of an encoded batch. Columns are read when they are asked for."""

    __slots__ = ("_layout", "_message", "base_offset", "header")

    def __init__(self, header: BatchHeader, base_offset: int, message: memoryview, layout: Layout) -> None:
        self.header = header
        self.base_offset = base_offset
        self._message = message
        self._layout = layout

    # -- encoding ---------------------------------------------------------------

    @staticmethod
    def encode(
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[HeadersIn] | None = None,
        *,
        timestamps: int | Sequence[int],
        lane: int = 0,
        compression: Compression = Compression.NONE,
        producer_id: int = 0,
        epoch: int = 0,
        sequence: int = 0,
        transactional: bool = False,
        control: bool = False,
    ) -> bytes:
        """A batch from columns of equal length. ``timestamps`` may be one for all of them.

        A batch that compression does not make smaller is left uncompressed.
        """
        count = len(values)
        if not count:
            raise InvalidInputError("a batch must hold at least one record")
        if isinstance(timestamps, int):
            first = last = timestamps
            stamps = columns.write_timestamps((timestamps,)) * count
        else:
            _same_length("timestamps", timestamps, count)
            stamps = columns.write_timestamps(timestamps)
            first, last = min(timestamps), max(timestamps)
        flags = 0
        nodes = [count, 0]
        buffers: list[Bytes] = [b"", stamps]
        if keys is not None:
            _same_length("keys", keys, count)
            nulls, *key_buffers = columns.write_binary("keys", keys)
            if nulls < count:
                flags |= HAS_KEYS
                nodes += (count, nulls)
                buffers += key_buffers
        nulls, *value_buffers = columns.write_binary("values", values)
        nodes += (count, nulls)
        buffers += value_buffers
        if headers is not None:
            _same_length("headers", headers, count)
            written = columns.write_headers(headers)
            if written is not None:
                pairs, header_buffers = written
                flags |= HAS_HEADERS
                nodes += (count, 0, pairs, 0, pairs, 0, pairs, 0)
                buffers += header_buffers
        if transactional:
            flags |= TRANSACTIONAL
        if control:
            flags |= CONTROL
        parts = shape_of(flags).write(count, nodes, buffers)
        return _seal(parts, count, flags, first, last, lane, compression, producer_id, epoch, sequence)

    @staticmethod
    def encode_arrow(
        values: Any,
        keys: Any = None,
        headers: Any = None,
        *,
        timestamps: Any,
        lane: int = 0,
        compression: Compression = Compression.NONE,
        producer_id: int = 0,
        epoch: int = 0,
        sequence: int = 0,
        transactional: bool = False,
    ) -> bytes:
        """The same from Arrow arrays: no record becomes a Python object on the way.

        Values and keys may be binary or string, timestamps int64 or timestamp,
        headers a list or map of names to values.
        """
        from rayqueue.records import arrow

        given = arrow.columns_of(values, keys, headers, timestamps)
        flags = given.flags | (TRANSACTIONAL if transactional else 0)
        parts = shape_of(flags).write(given.count, given.nodes, given.buffers)
        return _seal(
            parts,
            given.count,
            flags,
            given.min_timestamp,
            given.max_timestamp,
            lane,
            compression,
            producer_id,
            epoch,
            sequence,
        )

    # -- decoding ---------------------------------------------------------------

    @classmethod
    def decode(
        cls, buffer: Bytes, *, base_offset: int | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> RecordBatch:
        """A view of the batch. ``base_offset`` overrides the one in the batch's slot."""
        header = BatchHeader.parse(buffer)
        check_header(header, buffer, max_message_bytes=max_message_bytes)
        message = _unpack(header, buffer)
        layout = shape_of(header.flags).read(message, header.count)
        return cls(header, header.base_offset if base_offset is None else base_offset, message, layout)

    def __len__(self) -> int:
        return self.header.count

    def timestamps(self) -> list[int]:
        return columns.read_timestamps(self._message, self._layout.timestamps)

    def keys(self) -> list[bytes | None]:
        if self._layout.keys is None:
            return [None] * self.header.count
        return columns.read_binary("key", self._message, self.header.count, self._layout.keys)

    def values(self) -> list[bytes | None]:
        return columns.read_binary("value", self._message, self.header.count, self._layout.values)

    def headers(self) -> list[Headers]:
        if self._layout.headers is None:
            return [()] * self.header.count
        return columns.read_headers(self._message, self._layout.headers)

    def records(self, topic: str = "", partition: int = 0) -> list[Record]:
        """Every record of the batch."""
        return list(
            map(
                Record,
                range(self.base_offset, self.base_offset + self.header.count),
                self.timestamps(),
                self.keys(),
                self.values(),
                self.headers(),
                repeat(self.header.lane),
                repeat(topic),
                repeat(partition),
            )
        )

    def arrow(self) -> Any:
        """The records as a ``pyarrow.RecordBatch``: timestamp, key, value, headers. Loads Arrow."""
        from rayqueue.records import arrow

        return arrow.view(self._message, self.header.flags, self.header.count)


def validate(
    buffer: Bytes,
    max_bytes: int,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_records: int | None = None,
    max_record_bytes: int | None = None,
) -> BatchHeader:
    """Check bytes that claim to be a batch before they are appended. Loads no Arrow.

    What passes can be read by every consumer, in every form. What the header
    claims is bounded before anything is decompressed, and a compressed batch is
    decompressed: ``is_costly`` says when this is not for a thread that others
    wait for. Bytes and times of the records are taken as they are.
    """
    if len(buffer) > max_bytes:
        raise OversizedBatchError(
            f"batch of {len(buffer)} bytes is larger than the limit of {max_bytes}", length=len(buffer), limit=max_bytes
        )
    header = BatchHeader.parse(buffer)
    check_header(header, buffer, max_message_bytes=max_message_bytes)
    if max_records is not None and header.count > max_records:
        raise OversizedBatchError(
            f"a batch of {header.count} records; the limit is {max_records}", length=header.count, limit=max_records
        )
    message = _unpack(header, buffer)
    layout = shape_of(header.flags).read(message, header.count)
    columns.check(message, layout)
    columns.check_timestamps(message, layout.timestamps, header.min_timestamp, header.max_timestamp)
    if max_record_bytes is not None and header.message_bytes > max_record_bytes:
        largest = columns.largest_row(message, layout)
        if largest > max_record_bytes:
            raise OversizedRecordError(
                f"a record of {largest} bytes is larger than the topic's max_record_bytes, {max_record_bytes}",
                length=largest,
                limit=max_record_bytes,
            )
    return header


def is_costly(buffer: Bytes) -> bool:
    """Whether ``validate`` of bytes that claim to be a batch may take more than a fraction of a millisecond."""
    return len(buffer) > _COSTLY_BYTES or BatchHeader.parse(buffer).compression != Compression.NONE


def _same_length(name: str, column: Sequence[Any], count: int) -> None:
    if len(column) != count:
        raise InvalidInputError(f"{len(column)} {name} for {count} values")


def _seal(
    parts: list[Bytes],
    count: int,
    flags: int,
    min_timestamp: int,
    max_timestamp: int,
    lane: int,
    method: Compression,
    producer_id: int,
    epoch: int,
    sequence: int,
) -> bytes:
    message_bytes = sum(map(len, parts))
    if message_bytes > MAX_MESSAGE_BYTES:
        raise OversizedBatchError(
            f"records of {message_bytes} bytes do not fit into one batch; the limit is {MAX_MESSAGE_BYTES}",
            length=message_bytes,
            limit=MAX_MESSAGE_BYTES,
        )
    if method is not Compression.NONE:
        packed = compression.pack(b"".join(parts), method)
        if len(packed) < message_bytes:
            parts = [packed]
        else:
            method = Compression.NONE
    header = pack_header(
        parts=parts,
        count=count,
        producer_id=producer_id,
        sequence=sequence,
        epoch=epoch,
        lane=lane,
        compression=method,
        flags=flags,
        min_timestamp=min_timestamp,
        max_timestamp=max_timestamp,
        message_bytes=message_bytes,
    )
    return b"".join((header, *parts))


def _unpack(header: BatchHeader, buffer: Bytes) -> memoryview:
    behind = memoryview(buffer)[HEADER_BYTES:]
    if header.compression == Compression.NONE:
        return behind
    return memoryview(compression.unpack(behind, header.compression, header.message_bytes))
