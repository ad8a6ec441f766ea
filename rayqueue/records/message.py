"""The Arrow record batch message inside a batch, written and checked by hand.

What follows a batch's header is a genuine Arrow IPC record batch message:
any Arrow library reads it, given the schema. But the schema is fixed, so the
message's metadata (a flatbuffer) always has the same shape and only its
numbers differ: the row count, the null counts, the buffers' places. This
module therefore treats the metadata as one ``struct``. That has three gains:

- A batch of one record is encoded in a few microseconds, without Arrow, and
  a broker never loads Arrow at all (28 MB per process).
- There is exactly one encoding. Metadata that differs from it in any byte
  (custom metadata, Arrow's own buffer compression, overlapping buffers) is
  refused before Arrow's parser sees it, so nothing inside a batch can make
  Arrow read out of bounds or allocate without limit.
- The bytes do not depend on the Arrow version.

The metadata, positions from the start of the flatbuffer:

     0  offset of the Message table (16)
     4  Message's vtable: version, header type, header, body length
    16  Message: vtable, header -> 48, body length, version V5, type RecordBatch
    36  RecordBatch's vtable: length, nodes, buffers
    48  RecordBatch: vtable, nodes -> 68, length, buffers -> after the nodes
    68  nodes: count, then (length, null count) of each field, depth first
     .  four bytes of padding
     .  buffers: count, then (position, length) of each buffer in the body

Every buffer of the body starts at a multiple of 8, right after the one before.

Columns: ``timestamp`` int64, ``key`` binary, ``value`` binary, ``headers``
list<struct<name: utf8, value: binary>>. A batch where no record has a key, or
headers, is written without that column; flags in the batch header say so.
Only keys and values may be null.
"""

from __future__ import annotations

import struct
from struct import Struct, pack
from typing import NamedTuple

from rayqueue.errors import CorruptBatchError
from rayqueue.records.header import HAS_HEADERS, HAS_KEYS, Bytes

_METADATA_V5 = 4
_RECORD_BATCH = 3
_CONTINUATION = 0xFFFFFFFF
_PADDING = tuple(bytes(size) for size in range(8))


class BinaryColumn(NamedTuple):
    """The buffers of a binary or utf8 column, as slices of the message."""

    nulls: int
    validity: slice
    offsets: slice
    data: slice


class HeaderColumn(NamedTuple):
    pairs: int
    offsets: slice
    names: BinaryColumn
    values: BinaryColumn


class Layout(NamedTuple):
    """The layout of one message: its columns."""

    timestamps: slice
    keys: BinaryColumn | None
    values: BinaryColumn
    headers: HeaderColumn | None


class Shape:
    """The metadata of all messages with the same columns."""

    def __init__(self, *, has_keys: bool, has_headers: bool) -> None:
        self.has_keys = has_keys
        self.has_headers = has_headers
        self.nodes = 2 + has_keys + 4 * has_headers
        self.buffers = 5 + 3 * has_keys + 9 * has_headers
        metadata_bytes = 80 + 16 * self.nodes + 16 * self.buffers
        self.body_from = 8 + metadata_bytes
        buffers_at = 76 + 16 * self.nodes
        # The constant stretches between the numbers.
        self._until_body_length = pack(
            "<IIIHHHHHHiI", _CONTINUATION, metadata_bytes, 16, 12, 20, 16, 18, 4, 8, 16 - 4, 48 - 20
        )
        self._until_length = pack("<hBxHHHHHxxiI", _METADATA_V5, _RECORD_BATCH, 10, 20, 8, 4, 16, 48 - 36, 68 - 52)
        self._until_nodes = pack("<II", buffers_at - 64, self.nodes)
        self._until_buffers = pack("<II", 0, self.buffers)
        self._metadata = Struct(f"<32sq24sq8s{2 * self.nodes}q8s{2 * self.buffers}q")

    def write(self, count: int, nodes: list[int], buffers: list[Bytes]) -> list[Bytes]:
        """The message, in parts to be joined. ``nodes`` is length, null count, length, null count, ..."""
        table: list[int] = []
        parts: list[Bytes] = [b""]
        position = 0
        for buffer in buffers:
            size = len(buffer)
            table.append(position)
            table.append(size)
            if size:
                parts.append(buffer)
                padding = -size & 7
                if padding:
                    parts.append(_PADDING[padding])
                position += size + padding
        parts[0] = self._metadata.pack(
            self._until_body_length,
            position,
            self._until_length,
            count,
            self._until_nodes,
            *nodes,
            self._until_buffers,
            *table,
        )
        return parts

    def read(self, message: Bytes, count: int) -> Layout:
        """Check the message's metadata and say where its columns are. Looks at no record."""
        try:
            fields = self._metadata.unpack_from(message)
        except struct.error:
            raise CorruptBatchError(f"Arrow message of {len(message)} bytes is too short for its columns") from None
        nodes_to = 5 + 2 * self.nodes
        if (
            fields[0] != self._until_body_length
            or fields[2] != self._until_length
            or fields[4] != self._until_nodes
            or fields[nodes_to] != self._until_buffers
        ):
            raise CorruptBatchError("Arrow message is not encoded the one way a batch encodes it")
        if fields[3] != count:
            raise CorruptBatchError(f"Arrow message has {fields[3]} rows, the batch header says {count}")
        table = fields[nodes_to + 1 :]
        spans: list[slice] = []
        sizes: list[int] = []
        position = 0
        for slot in range(0, len(table), 2):
            size = table[slot + 1]
            if table[slot] != position or size < 0:
                raise CorruptBatchError("buffers of the Arrow message do not follow each other")
            start = self.body_from + position
            spans.append(slice(start, start + size))
            sizes.append(size)
            position += (size + 7) & ~7
        if position != fields[1] or self.body_from + position != len(message):
            raise CorruptBatchError("buffers of the Arrow message do not fill it exactly")
        return self._columns(count, fields[5:nodes_to], spans, sizes)

    def _columns(self, count: int, nodes: tuple[int, ...], spans: list[slice], sizes: list[int]) -> Layout:
        _require(nodes[0] == count and nodes[1] == 0 and sizes[0] == 0 and sizes[1] == 8 * count, "timestamp")
        node, at = 2, 2
        keys: BinaryColumn | None = None
        if self.has_keys:
            keys = _binary("key", count, nodes[node], nodes[node + 1], spans, sizes, at)
            node, at = node + 2, at + 3
        values = _binary("value", count, nodes[node], nodes[node + 1], spans, sizes, at)
        node, at = node + 2, at + 3
        headers: HeaderColumn | None = None
        if self.has_headers:
            lists, list_nulls, pairs, pair_nulls, names, name_nulls, texts, text_nulls = nodes[node:]
            _require(
                pairs >= 0 and lists == count and list_nulls == pair_nulls == name_nulls == text_nulls == 0, "headers"
            )
            _require(sizes[at] == sizes[at + 2] == 0 and sizes[at + 1] == 4 * (count + 1), "headers")
            headers = HeaderColumn(
                pairs,
                spans[at + 1],
                _binary("headers", pairs, names, 0, spans, sizes, at + 3),
                _binary("headers", pairs, texts, 0, spans, sizes, at + 6),
            )
        return Layout(spans[1], keys, values, headers)


def _binary(
    name: str, rows: int, length: int, nulls: int, spans: list[slice], sizes: list[int], at: int
) -> BinaryColumn:
    _require(
        length == rows
        and 0 <= nulls <= rows
        and sizes[at] == ((rows + 7) >> 3 if nulls else 0)
        and sizes[at + 1] == 4 * (rows + 1),
        name,
    )
    return BinaryColumn(nulls, spans[at], spans[at + 1], spans[at + 2])


def _require(holds: bool, column: str) -> None:
    if not holds:
        raise CorruptBatchError(f"column {column!r} of the Arrow message has the wrong size", column=column)


_SHAPES = {
    has_keys * HAS_KEYS | has_headers * HAS_HEADERS: Shape(has_keys=has_keys, has_headers=has_headers)
    for has_keys in (False, True)
    for has_headers in (False, True)
}


def shape_of(flags: int) -> Shape:
    """The shape that a batch header's flags name."""
    return _SHAPES[flags & (HAS_KEYS | HAS_HEADERS)]
