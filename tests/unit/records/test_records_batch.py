"""RecordBatch: what goes in comes out, and nothing else is taken for a batch."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
from collections import OrderedDict
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayqueue.errors import (
    CorruptBatchError,
    InvalidInputError,
    OversizedBatchError,
    RayQueueError,
    UnknownFormatError,
)
from rayqueue.records import BatchHeader, Compression, Record, RecordBatch, validate, with_base_offset, with_producer
from rayqueue.records.arrow import SCHEMA
from rayqueue.records.batch import is_costly
from rayqueue.records.checksum import crc32c
from rayqueue.records.compression import pack
from rayqueue.records.header import HEADER_BYTES, MAX_MESSAGE_BYTES, pack_header
from rayqueue.records.message import shape_of

LIMIT = 1 << 24
NOW = 1_700_000_000_000

stamps = st.integers(-(2**63), 2**63 - 1)
blobs = st.one_of(st.none(), st.binary(max_size=40))
pairs = st.lists(st.tuples(st.text(max_size=8), st.binary(max_size=8)), max_size=3)


@st.composite
def columns(draw: st.DrawFn, max_count: int = 80) -> dict[str, Any]:
    count = draw(st.integers(1, max_count))

    def column(of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(of, min_size=count, max_size=count)

    return {
        "values": draw(column(blobs)),
        "keys": draw(st.none() | column(blobs)),
        "headers": draw(st.none() | column(st.none() | pairs)),
        "timestamps": draw(stamps | column(stamps)),
        "lane": draw(st.integers(0, 255)),
        "compression": draw(st.sampled_from(Compression)),
        "producer_id": draw(st.integers(0, 2**64 - 1)),
        "epoch": draw(st.integers(0, 2**32 - 1)),
        "sequence": draw(st.integers(0, 2**63 - max_count)),
        "transactional": draw(st.booleans()),
    }


def expected(case: dict[str, Any], base_offset: int) -> list[Record]:
    count = len(case["values"])
    times = case["timestamps"]
    return [
        Record(base_offset + i, time, key, value, tuple(headers or ()), case["lane"], "orders", 3)
        for i, (time, key, value, headers) in enumerate(
            zip(
                [times] * count if isinstance(times, int) else times,
                case["keys"] or [None] * count,
                case["values"],
                case["headers"] or [None] * count,
                strict=True,
            )
        )
    ]


def resealed(batch: bytes) -> bytes:
    """The same bytes with a checksum that matches: what a malicious client would send."""
    return batch[:12] + struct.pack("<I", crc32c(batch[16:])) + batch[16:]


# -- round trips ------------------------------------------------------------------


@pytest.mark.slow
@given(columns(), st.integers(0, 2**63))
def test_round_trip(case: dict[str, Any], base_offset: int) -> None:
    batch = RecordBatch.encode(**case)
    header = validate(batch, LIMIT)
    assert header == BatchHeader.parse(batch)
    assert header.count == len(case["values"])
    for name in ("lane", "producer_id", "epoch", "sequence", "transactional"):
        assert getattr(header, name) == case[name]
    assert RecordBatch.decode(batch, base_offset=base_offset).records("orders", 3) == expected(case, base_offset)


@pytest.mark.slow
@given(columns())
def test_arrow_reads_the_same_records(case: dict[str, Any]) -> None:
    batch = RecordBatch.decode(RecordBatch.encode(**case))
    table = batch.arrow()
    assert table.schema == SCHEMA
    assert table.column("timestamp").to_pylist() == batch.timestamps()
    assert table.column("key").to_pylist() == batch.keys()
    assert table.column("value").to_pylist() == batch.values()
    read = [tuple((h["name"], h["value"]) for h in row or ()) for row in table.column("headers").to_pylist()]
    assert read == batch.headers()


@pytest.mark.slow
@given(columns(max_count=20), st.integers(0, 5), st.integers(0, 5))
@example({"values": [None], "keys": None, "headers": [[]], "timestamps": 0}, 0, 1)  # headers only outside the slice
def test_arrow_columns_encode_to_the_same_bytes(case: dict[str, Any], before: int, after: int) -> None:
    """Also when they are slices of longer arrays, with offsets and bitmaps that do not start at zero."""

    def sliced(column: list[Any] | None, kind: pa.DataType, padding: Any) -> Any:
        if column is None:
            return None
        array = pa.array([padding] * before + column + [padding] * after, kind)
        return array.slice(before, len(column))

    times = case["timestamps"]
    arrow = case | {
        "values": sliced(case["values"], pa.binary(), b"padding"),
        "keys": sliced(case["keys"], pa.binary(), b"padding"),
        "headers": sliced(case["headers"], SCHEMA.field("headers").type, [("padding", b"padding")]),
        "timestamps": times if isinstance(times, int) else sliced(times, pa.int64(), 0),
    }
    assert RecordBatch.encode_arrow(**arrow) == RecordBatch.encode(**case)


def test_arrow_columns_of_other_types() -> None:
    batch = RecordBatch.encode_arrow(
        pa.chunked_array([["a"], ["b", None]]),
        pa.array(["k", "l", "m"], pa.large_string()),
        pa.array([{"h": b"v"}, None, {}], pa.map_(pa.string(), pa.binary())),
        timestamps=pa.array([1_000_999, 2_000_000, 3_000_001], pa.timestamp("us", tz="Europe/Berlin")),
    )
    decoded = RecordBatch.decode(batch)
    assert decoded.values() == [b"a", b"b", None]
    assert decoded.keys() == [b"k", b"l", b"m"]
    assert decoded.headers() == [(("h", b"v"),), (), ()]
    assert decoded.timestamps() == [1000, 2000, 3000]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"values": [b"a"]}, "Arrow array"),
        ({"values": pa.array([], pa.binary())}, "at least one"),
        ({"values": pa.array([1])}, "values cannot be read"),
        ({"keys": pa.array([b"a", b"b"])}, "2 keys for 1"),
        ({"timestamps": pa.array([None], pa.int64())}, "timestamps must not be null"),
        ({"headers": pa.array([[("a", None)]], pa.map_(pa.string(), pa.binary()))}, "not be null"),
        ({"headers": pa.array([[{"name": None, "value": b""}]], SCHEMA.field("headers").type)}, "not be null"),
        ({"headers": pa.array(["a"])}, "headers must be maps"),
        ({"headers": [[("a", b"b")]]}, "Arrow array"),
        ({"headers": pa.array([[], []], SCHEMA.field("headers").type)}, "2 headers for 1"),
        ({"timestamps": pa.array(["now"])}, "timestamps cannot be read"),
    ],
)
def test_wrong_arrow_columns(wrong: dict[str, Any], text: str) -> None:
    case: dict[str, Any] = {"values": pa.array([b"a"]), "timestamps": 1}
    with pytest.raises(InvalidInputError, match=text):
        RecordBatch.encode_arrow(**case | wrong)


def test_arrow_view_copies_nothing() -> None:
    batch = RecordBatch.encode([b"value" * 20] * 50, timestamps=NOW)
    data = RecordBatch.decode(batch).arrow().column("value").buffers()[2]
    start = pa.py_buffer(batch).address
    assert start < data.address < start + len(batch)


def test_the_message_is_one_that_any_arrow_reads() -> None:
    """Behind the header stands a genuine Arrow IPC message; a stock reader needs only the schema."""
    batch = RecordBatch.encode([b"a", b"b"], [b"k", None], timestamps=[1, 2])
    message = pyarrow.ipc.read_message(batch[HEADER_BYTES:])
    assert (message.type, message.metadata_version) == ("record batch", pa.MetadataVersion.V5)
    schema = pa.schema([SCHEMA.field(name) for name in ("timestamp", "key", "value")])
    stream = pyarrow.ipc.open_stream(schema.serialize().to_pybytes() + batch[HEADER_BYTES:])
    assert stream.read_all().to_pydict() == {"timestamp": [1, 2], "key": [b"k", None], "value": [b"a", b"b"]}


def test_a_broker_does_not_load_arrow() -> None:
    code = (
        "import sys; from rayqueue.records import *;"
        "b = RecordBatch.encode([b'v'], [b'k'], timestamps=1); validate(b, 1000); RecordBatch.decode(b).records();"
        "assert not [m for m in sys.modules if m.startswith('pyarrow')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
def test_compression_is_left_out_where_it_does_not_help(compression: Compression) -> None:
    small = RecordBatch.encode([b"\x93\x1f"], timestamps=-81_985_529_216_486_896, compression=compression)
    large = RecordBatch.encode([b"v" * 1000] * 20, timestamps=NOW, compression=compression)
    assert BatchHeader.parse(large).compression == compression
    assert len(large) < 1000
    assert len(small) <= len(RecordBatch.encode([b"\x93\x1f"], timestamps=-81_985_529_216_486_896))


def test_the_base_offset_does_not_touch_the_checksum() -> None:
    batch = RecordBatch.encode([b"a", b"b"], timestamps=NOW)
    placed = with_base_offset(batch, 2**40)
    assert validate(placed, LIMIT).base_offset == 2**40
    assert [record.offset for record in RecordBatch.decode(placed).records()] == [2**40, 2**40 + 1]
    assert with_base_offset(placed, 0) == batch


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer(kind: Any) -> None:
    batch = kind(RecordBatch.encode([b"a"] * 40, timestamps=NOW, compression=Compression.ZSTD))
    assert validate(batch, LIMIT).count == 40
    assert RecordBatch.decode(batch).values() == [b"a"] * 40
    assert with_base_offset(batch, 0) == batch


@pytest.mark.parametrize("compression", list(Compression))
def test_a_batch_stamped_later_is_the_batch_stamped_at_once(compression: Compression) -> None:
    values = [b"x" * 100] * 50
    plain = RecordBatch.encode(values, timestamps=7, lane=2, compression=compression)
    stamp: dict[str, Any] = {"producer_id": 2**40, "sequence": 2**33, "epoch": 9}
    stamped = RecordBatch.encode(values, timestamps=7, lane=2, compression=compression, **stamp)
    assert with_producer(plain, **stamp) == stamped
    assert with_producer(stamped, 0, 0, 0) == plain
    validate(stamped, 1 << 20)
    with pytest.raises(InvalidInputError):
        with_producer(plain, -1, 0, 0)


def test_headers_may_be_any_mapping() -> None:
    batch = RecordBatch.encode([b"a"], headers=[OrderedDict(x=b"1")], timestamps=1)
    assert RecordBatch.decode(batch).headers() == [(("x", b"1"),)]


# -- bad input to encode --------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"values": []}, "at least one"),
        ({"values": ["text"]}, "values must be bytes"),
        ({"values": [None, 5]}, "values must be bytes"),
        ({"values": "text"}, "values must be bytes"),
        ({"values": [memoryview(b"12345678").cast("q")]}, "number of bytes"),
        ({"keys": ["k"]}, "keys must be bytes"),
        ({"keys": []}, "0 keys for 1 values"),
        ({"headers": []}, "0 headers for 1 values"),
        ({"headers": [{"a": None}]}, "header values must be bytes"),
        ({"headers": [{"a": "b"}]}, "header values must be bytes"),
        ({"headers": [{b"a": b"b"}]}, "headers must map"),
        ({"headers": [{"\ud800": b"b"}]}, "headers must map"),
        ({"headers": [5]}, "headers must map"),
        ({"headers": ["ab"]}, "headers must map"),
        ({"timestamps": []}, "0 timestamps for 1 values"),
        ({"timestamps": [1.5]}, "whole milliseconds"),
        ({"timestamps": 2**63}, "whole milliseconds"),
        ({"lane": 256}, "does not fit"),
        ({"lane": -1}, "does not fit"),
        ({"producer_id": -1}, "does not fit"),
        ({"epoch": 2**32}, "does not fit"),
        ({"sequence": 2**64}, "does not fit"),
    ],
)
def test_wrong_columns(wrong: dict[str, Any], text: str) -> None:
    case: dict[str, Any] = {"values": [b"v"], "timestamps": 1}
    with pytest.raises(InvalidInputError, match=text):
        RecordBatch.encode(**case | wrong)


def test_more_than_a_batch_can_hold() -> None:
    with pytest.raises(OversizedBatchError):
        RecordBatch.encode([bytes(MAX_MESSAGE_BYTES)], timestamps=1)


# -- bad bytes ------------------------------------------------------------------------


@pytest.mark.slow
@given(columns(max_count=5), st.data())
def test_any_flipped_bit_is_noticed(case: dict[str, Any], data: st.DataObject) -> None:
    batch = bytearray(RecordBatch.encode(**case))
    slot = range(4 * 8, 12 * 8)  # the base offset, which is not the producer's to protect
    bit = data.draw(st.integers(0, len(batch) * 8 - 1).filter(lambda bit: bit not in slot))
    batch[bit >> 3] ^= 1 << (bit & 7)
    with pytest.raises((CorruptBatchError, UnknownFormatError)):
        validate(batch, LIMIT)
    with pytest.raises((CorruptBatchError, UnknownFormatError)):
        RecordBatch.decode(batch)


@given(columns(max_count=5), st.data())
def test_truncation_and_trailing_bytes_are_noticed(case: dict[str, Any], data: st.DataObject) -> None:
    batch = RecordBatch.encode(**case)
    cut = data.draw(st.integers(0, len(batch) - 1))
    for wrong in (batch[:cut], batch + b"\0"):
        with pytest.raises((CorruptBatchError, UnknownFormatError)):
            validate(wrong, LIMIT)
        with pytest.raises((CorruptBatchError, UnknownFormatError)):
            RecordBatch.decode(wrong)


def read_everything(batch: bytes) -> None:
    decoded = RecordBatch.decode(batch, max_message_bytes=1 << 20)
    decoded.records()
    decoded.arrow().to_pylist()


@given(st.binary(max_size=600))
@example(b"")
@example(b"RQ")
def test_arbitrary_bytes_never_crash(junk: bytes) -> None:
    for batch in (junk, b"RQ\x01\0" + junk, resealed(b"RQ\x01\0" + bytes(12) + junk)):
        with pytest.raises(RayQueueError):
            validate(batch, LIMIT)
        with pytest.raises(RayQueueError):
            read_everything(batch)


@pytest.mark.slow
@given(columns(max_count=70), st.data())
def test_changed_bytes_behind_a_matching_checksum_never_crash(case: dict[str, Any], data: st.DataObject) -> None:
    """A malicious producer computes the checksum too. What it sends is refused, or decodes to some records: whatever
    a replica accepts, every consumer can read."""
    batch = bytearray(RecordBatch.encode(**case))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(16, len(batch) - 1))
        batch[at] = data.draw(st.integers(0, 255))
    hostile = resealed(bytes(batch))
    try:
        validate(hostile, LIMIT)
    except InvalidInputError:
        with contextlib.suppress(InvalidInputError):
            read_everything(hostile)
    else:
        read_everything(hostile)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3), st.sampled_from([2, 40]))
def test_hostile_offsets_are_refused(offsets: list[int], count: int) -> None:
    """Offsets are what would make Arrow read outside the batch. Both readers must notice: Python's and Arrow's."""
    if offsets[0] == 0 and sorted(offsets) == offsets and offsets[-1] == 8:
        return
    column = struct.pack("<3i", *offsets) + struct.pack("<i", offsets[-1]) * (count - 2)
    parts = shape_of(0).write(count, [count, 0, count, 0], [b"", bytes(8 * count), b"", column, b"12345678"])
    batch = bytearray(RecordBatch.encode([b"x" * 8, *[b""] * (count - 1)], timestamps=0))
    message = b"".join(parts)
    assert len(message) == len(batch) - HEADER_BYTES
    batch[HEADER_BYTES:] = message
    hostile = RecordBatch.decode(resealed(bytes(batch)))
    for read in (hostile.values, hostile.arrow):
        try:
            read()
        except CorruptBatchError:
            continue
        # Arrow allows data that no offset points to; nothing outside is ever read.
        assert 0 <= offsets[0] <= offsets[1] <= offsets[2] <= 8


def test_nulls_that_are_not_there_are_refused() -> None:
    for count in (9, 40):
        batch = bytearray(RecordBatch.encode([None, *[b"v"] * (count - 1)], timestamps=0))
        bitmap = bytes([0xFE, *[0xFF] * ((count >> 3) - 1), (1 << (count & 7)) - 1])[: (count + 7) >> 3]
        at = batch.index(bitmap, HEADER_BYTES + 200)
        batch[at] = 0xFF
        hostile = RecordBatch.decode(resealed(bytes(batch)))
        with pytest.raises(CorruptBatchError):
            hostile.values()
        with pytest.raises(CorruptBatchError):
            hostile.arrow()


def change(batch: bytes, fmt: str, at: int, number: Any) -> bytes:
    changed = bytearray(batch)
    struct.pack_into(fmt, changed, at, number)
    return resealed(bytes(changed))


@pytest.mark.parametrize(
    ("fmt", "at", "number", "error", "text"),
    [
        ("<2s", 0, b"PK", UnknownFormatError, "starts with"),
        ("<B", 2, 2, UnknownFormatError, "version 2"),
        ("<B", 3, 1, UnknownFormatError, "does not know"),
        ("<I", 16, 1, CorruptBatchError, "says it has 1 bytes"),
        ("<I", 20, 0, InvalidInputError, "at least one"),
        ("<I", 20, 3, CorruptBatchError, "2 rows"),
        ("<B", 45, 3, UnknownFormatError, "does not know"),
        ("<H", 46, 1 << 7, UnknownFormatError, "does not know"),
        ("<H", 46, 1 << 2, CorruptBatchError, "too short"),
        ("<Q", 32, 2**63 - 1, InvalidInputError, "out of range"),
        ("<q", 48, 2, InvalidInputError, "after the largest"),
        ("<I", 64, 2**32 - 1, OversizedBatchError, "unpacks to"),
        ("<I", 64, 1, CorruptBatchError, "message has 1 bytes"),
        ("<I", 68, 1, UnknownFormatError, "does not know"),
        ("<q", 72 + 32, 8, CorruptBatchError, "fill it exactly"),
        ("<q", 72 + 80, 3, CorruptBatchError, "timestamp"),
        ("<q", 72 + 104, -1, CorruptBatchError, "value"),
        ("<q", 72 + 104, 3, CorruptBatchError, "value"),
        ("<q", 72 + 120, 64, CorruptBatchError, "follow each other"),
        ("<q", 72 + 128, -8, CorruptBatchError, "follow each other"),
    ],
)
def test_what_is_wrong_is_said(fmt: str, at: int, number: Any, error: type[RayQueueError], text: str) -> None:
    batch = change(RecordBatch.encode([b"a", b"b"], timestamps=1), fmt, at, number)
    with pytest.raises(error, match=text) as caught:
        validate(batch, LIMIT)
    assert type(caught.value) is error
    with pytest.raises(error, match=text):
        RecordBatch.decode(batch)


def test_arrow_compression_inside_is_refused() -> None:
    """Arrow would decompress it by itself, to a length that nobody bounded."""
    schema = pa.schema([SCHEMA.field("timestamp"), SCHEMA.field("value")])
    values = [Random(row).randbytes(99) for row in range(99)]  # else it is refused for being so small already
    rows = pa.record_batch([pa.array([1] * 99, pa.int64()), pa.array(values)], schema=schema)
    sink = pa.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, schema, options=pyarrow.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(rows)
    bomb = sink.getvalue().to_pybytes()[schema.serialize().size : -8]
    honest = RecordBatch.encode(values, timestamps=1)
    batch = change(honest[:HEADER_BYTES] + bomb, "<I", 16, HEADER_BYTES + len(bomb))
    batch = change(batch, "<I", 64, len(bomb))
    with pytest.raises(CorruptBatchError, match="one way"):
        validate(batch, LIMIT)


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
@pytest.mark.parametrize("claim", [100, 2000, 1 << 20, MAX_MESSAGE_BYTES])
def test_wrong_uncompressed_length(compression: Compression, claim: int) -> None:
    batch = RecordBatch.encode([b"v" * 1000] * 2, timestamps=1, compression=compression)
    lying = change(batch, "<I", 64, claim)
    with pytest.raises(CorruptBatchError, match=r"decompress|holds"):
        validate(lying, LIMIT)
    with pytest.raises(CorruptBatchError, match=r"decompress|holds"):
        RecordBatch.decode(lying)


@pytest.mark.parametrize("compression", [Compression.LZ4, Compression.ZSTD])
def test_bomb(compression: Compression) -> None:
    """A few kilobytes that unpack to megabytes are refused before a byte is unpacked."""
    batch = RecordBatch.encode([bytes(8 << 20)], timestamps=1, compression=compression)
    assert len(batch) < 100_000
    with pytest.raises(OversizedBatchError, match="unpacks to"):
        RecordBatch.decode(batch, max_message_bytes=1 << 20)
    with pytest.raises(OversizedBatchError, match="unpacks to"):
        validate(batch, LIMIT, max_message_bytes=1 << 20)


def test_damage_inside_a_compressed_message() -> None:
    for compression in (Compression.LZ4, Compression.ZSTD):
        batch = RecordBatch.encode([b"value %d" % i for i in range(200)], timestamps=1, compression=compression)
        for at in range(HEADER_BYTES, len(batch), 7):
            hostile = bytearray(batch)
            hostile[at] ^= 0x55
            with contextlib.suppress(InvalidInputError):
                read_everything(resealed(bytes(hostile)))


def test_oversized() -> None:
    batch = RecordBatch.encode([b"v" * 100], timestamps=1)
    assert validate(batch, len(batch)).count == 1
    with pytest.raises(OversizedBatchError) as caught:
        validate(batch, len(batch) - 1)
    assert caught.value.details == {"length": len(batch), "limit": len(batch) - 1}


def test_a_header_name_that_is_not_utf8() -> None:
    batch = bytearray(RecordBatch.encode([b"v"], headers=[{"name": b"v"}], timestamps=1))
    at = batch.index(b"name")
    batch[at] = 0xFF
    hostile = resealed(bytes(batch))
    with pytest.raises(CorruptBatchError, match="UTF-8"):
        validate(hostile, LIMIT)
    with pytest.raises(CorruptBatchError):
        RecordBatch.decode(hostile).arrow()


@pytest.mark.parametrize("stamps", [[5] * 3, [5, 8, 6], [-5, 8, 0], [-9, -7, -8]])
@pytest.mark.parametrize("wrong", [(48, 1), (56, -1)], ids=["smallest", "largest"])
def test_timestamps_that_are_not_what_the_header_says(stamps: list[int], wrong: tuple[int, int]) -> None:
    """Retention and searches by time go by the header: no record may be outside of what it says."""
    at, by = wrong
    batch = RecordBatch.encode([b"v"] * 3, timestamps=stamps)
    validate(batch, LIMIT)
    said = (min(stamps) if at == 48 else max(stamps)) + by
    lying = change(batch, "<q", at, said)
    if len(set(stamps)) == 1:  # else the header contradicts itself
        lying = change(lying, "<q", 104 - at, said)
    with pytest.raises(InvalidInputError, match="timestamp"):
        validate(lying, LIMIT)


# -- what a replica accepts -------------------------------------------------------


def binary_column(offsets: list[int], data: bytes, count: int) -> bytes:
    """A batch whose value column has these offsets, whatever they are."""
    column = struct.pack(f"<{count + 1}i", *offsets)
    parts = shape_of(0).write(count, [count, 0, count, 0], [b"", bytes(8 * count), b"", column, data])
    return sealed(b"".join(parts), count)


def sealed(
    message: bytes, count: int, *, compression: Compression = Compression.NONE, claim: int | None = None
) -> bytes:
    packed = pack(message, compression)
    header = pack_header(
        parts=[packed],
        count=count,
        producer_id=0,
        sequence=0,
        epoch=0,
        lane=0,
        compression=compression,
        flags=0,
        min_timestamp=0,
        max_timestamp=0,
        message_bytes=len(message) if claim is None else claim,
    )
    return header + packed


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 20), min_size=1, max_size=40), st.booleans())
def test_offsets_are_accepted_exactly_if_they_divide_the_data(numbers: list[int], ordered: bool) -> None:
    """By one subtraction of two large numbers: it must say the same as looking at each."""
    offsets = [0, *(sorted(numbers) if ordered else numbers), 20]
    batch = binary_column(offsets, bytes(20), len(offsets) - 1)
    if sorted(offsets) == offsets:
        assert validate(batch, LIMIT).count == len(offsets) - 1
        read_everything(batch)
    else:
        with pytest.raises(CorruptBatchError, match="divide"):
            validate(batch, LIMIT)


@pytest.mark.parametrize("compression", Compression)
def test_poison_is_refused(compression: Compression) -> None:
    honest = RecordBatch.encode([b"v" * 100] * 40, timestamps=0)[HEADER_BYTES:]
    validate(sealed(honest, 40, compression=compression), LIMIT)
    for count in (39, 41, 2**32 - 1):
        with pytest.raises(InvalidInputError):
            validate(sealed(honest, count, compression=compression), LIMIT)
    wrong = bytearray(honest)
    at = honest.index(struct.pack("<3i", 0, 100, 200))
    struct.pack_into("<i", wrong, at + 4, 2**30)
    with pytest.raises(CorruptBatchError, match="divide"):
        validate(sealed(bytes(wrong), 40, compression=compression), LIMIT)
    for claim in (0, 41, 2**24, 2**32 - 1):
        with pytest.raises(InvalidInputError):
            validate(sealed(honest, 40, compression=compression, claim=claim), LIMIT)


def test_a_batch_of_too_many_records_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = RecordBatch.encode([b""] * 1001, timestamps=0, compression=Compression.ZSTD)
    validate(batch, LIMIT, max_records=1001)
    monkeypatch.setattr("rayqueue.records.compression.unpack", None)
    with pytest.raises(OversizedBatchError, match="1001 records"):
        validate(batch, LIMIT, max_records=1000)


def test_names_of_headers_that_are_not_ascii() -> None:
    headers = [{"größe": b"1", "ñ": b"2"}, {}, {"": b"3", "日本": b"4"}]
    batch = RecordBatch.encode([b"v"] * 3, headers=headers, timestamps=1)
    validate(batch, LIMIT)
    hostile = bytearray(batch)
    at = batch.index(struct.pack("<3i", 0, 7, 9))
    struct.pack_into("<i", hostile, at + 4, 8)  # the second name begins inside a character; all together is UTF-8
    with pytest.raises(CorruptBatchError, match="UTF-8"):
        validate(resealed(bytes(hostile)), LIMIT)
    with pytest.raises(CorruptBatchError, match="UTF-8"):
        read_everything(resealed(bytes(hostile)))


def test_what_is_costly_to_check() -> None:
    assert not is_costly(RecordBatch.encode([b"v" * 100] * 1000, timestamps=1))
    assert is_costly(RecordBatch.encode([b"v" * 1000] * 1000, timestamps=1))
    assert is_costly(RecordBatch.encode([b"v" * 100] * 10, timestamps=1, compression=Compression.LZ4))
    with pytest.raises(UnknownFormatError):
        is_costly(b"RQ")
