"""The batch format cannot change by accident. See golden/README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayqueue.records import BatchHeader, Compression, RecordBatch, validate

GOLDEN = Path(__file__).parent / "golden"
NOW = 1_700_000_000_000
JSON = [b'{"user": %d, "event": "click", "page": "/products/%d"}' % (i, i % 5) for i in range(100)]

CASES: dict[str, dict[str, Any]] = {
    "plain": {"values": [b"alpha", b"beta", b"gamma"], "timestamps": NOW},
    "one": {"values": [b"v" * 100], "keys": [b"key"], "timestamps": NOW},
    "keys": {
        "values": [b"a", b"bb", b"ccc", b"dddd"],
        "keys": [b"k1", b"k2", b"k1", b"k3"],
        "timestamps": [NOW + 3, NOW, NOW + 7, NOW - 5],
    },
    "nulls": {
        "values": [b"x", None, b"", b"y", None, b"z", b"", b"w", None, b"last"],
        "keys": [None, b"", b"k", None, None, b"k", None, b"", b"k", None],
        "timestamps": list(range(NOW, NOW + 10)),
    },
    "headers": {
        "values": [b"1", b"2", b"3"],
        "headers": [None, {"trace": b"\x00\x01"}, [("tag", b"a"), ("tag", b""), ("größe", b"b")]],
        "timestamps": NOW,
    },
    "everything": {
        "values": [b"one", None, b"three"],
        "keys": [b"k", None, b""],
        "headers": [{"h": b"v"}, None, {"a": b"1", "b": b"2"}],
        "timestamps": [NOW, NOW + 1, NOW + 2],
        "lane": 2,
        "producer_id": 77,
        "epoch": 3,
        "sequence": 1000,
        "transactional": True,
    },
    "lane": {"values": [b"urgent"], "timestamps": NOW, "lane": 7},
    "producer": {
        "values": [b"p"],
        "timestamps": -1,
        "producer_id": 2**64 - 1,
        "epoch": 2**32 - 1,
        "sequence": 2**63 - 2,
    },
    "control": {"values": [b"commit"], "timestamps": NOW, "control": True},
    "lz4": {"values": JSON, "keys": [b"k"] * 100, "timestamps": NOW, "compression": Compression.LZ4},
    "zstd": {"values": JSON, "keys": [b"k"] * 100, "timestamps": NOW, "compression": Compression.ZSTD},
}

EXACT = [name for name in CASES if name not in ("lz4", "zstd")]


def stored(name: str) -> bytes:
    return (GOLDEN / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("name", EXACT)
def test_encoding_gives_exactly_these_bytes(name: str) -> None:
    assert RecordBatch.encode(**CASES[name]) == stored(name)


@pytest.mark.parametrize("name", CASES)
def test_decoding_gives_exactly_these_records(name: str) -> None:
    case = CASES[name]
    count = len(case["values"])
    validate(stored(name), 1 << 20)
    batch = RecordBatch.decode(stored(name), base_offset=40)
    stamps = case["timestamps"]
    given = case.get("headers") or [None] * count
    assert batch.values() == case["values"]
    assert batch.keys() == case.get("keys", [None] * count)
    assert batch.timestamps() == ([stamps] * count if isinstance(stamps, int) else stamps)
    assert batch.headers() == [tuple(h.items()) if isinstance(h, dict) else tuple(h or ()) for h in given]
    assert [record.offset for record in batch.records()] == list(range(40, 40 + count))
    header = batch.header
    assert header.count == count
    assert header.lane == case.get("lane", 0)
    assert header.producer_id == case.get("producer_id", 0)
    assert header.epoch == case.get("epoch", 0)
    assert header.sequence == case.get("sequence", 0)
    assert header.transactional == case.get("transactional", False)
    assert header.control == case.get("control", False)
    assert header.compression == case.get("compression", Compression.NONE)
    assert header.min_timestamp == min(batch.timestamps())
    assert header.max_timestamp == max(batch.timestamps())


def test_every_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(CASES)


def test_the_header_byte_by_byte() -> None:
    batch = stored("everything")
    numbers = [
        (0, 2, int.from_bytes(b"RQ", "little")),
        (2, 1, 1),  # version
        (3, 1, 0),
        (4, 8, 0),  # base offset
        (16, 4, len(batch)),
        (20, 4, 3),  # count
        (24, 8, 77),  # producer id
        (32, 8, 1000),  # sequence
        (40, 4, 3),  # epoch
        (44, 1, 2),  # lane
        (45, 1, 0),  # compression
        (46, 2, 0b1101),  # transactional, keys, headers
        (48, 8, NOW),
        (56, 8, NOW + 2),
        (64, 4, len(batch) - 72),
        (68, 4, 0),
    ]
    for at, size, number in numbers:
        assert int.from_bytes(batch[at : at + size], "little") == number, f"field at {at}"
    assert BatchHeader.parse(batch).crc == int.from_bytes(batch[12:16], "little")


if __name__ == "__main__":
    for name, case in CASES.items():
        path = GOLDEN / f"{name}.bin"
        if not path.exists():
            path.write_bytes(RecordBatch.encode(**case))
            print(f"wrote {path}")
