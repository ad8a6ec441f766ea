"""Values of applications as a target: whatever the bytes, each form of ``rayqueue.values`` returns or refuses, soon.

A form may refuse by any ``Exception``, and whoever reads a value gets its place with it. What it may not do is to take
more time or memory than the input explains, or to read what it cannot write and read again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from pydantic import BaseModel

from rayqueue import values
from tests.fuzz import mutations

MAX_S = 5.0
"""A hundred thousand times what an input of these lengths takes: for a machine that has much else to do."""


class _Order(BaseModel):
    id: int
    tags: list[str] = []
    by: dict[str, float] = {}


class _Line(msgspec.Struct):
    name: str
    amount: float | None = None
    parts: list[int] = msgspec.field(default_factory=list)


@dataclasses.dataclass
class _Point:
    x: int
    y: int = 0


_AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"]},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "by", "type": {"type": "map", "values": "double"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
FORMS: list[values.Form[Any]] = [
    values.STR,
    values.JSON,
    values.MSGPACK,
    *(values.model(kind, way) for kind in (_Order, _Line, _Point) for way in ("json", "msgpack")),
    values.avro(_AVRO),
]


def _plain() -> list[Any]:
    order = {"id": 7, "tags": ["a", "größe"], "by": {"x": 1.5}}
    line = {"name": "bolt", "amount": 2.5, "parts": [1, 2, 3]}
    point = {"x": -1, "y": 2**40}
    return [order, line, point, [[[None]]], "text", 1e300]


_PACKED = [msgspec.msgpack.encode(each) for each in _plain()]


def seeds() -> list[bytes]:
    avro = (
        b"\x0e\x02\x08bolt\x04\x01\x00\x02\x02a\x00\x02\x02x\x00\x00\x00\x00\x00\x00\xf8?\x00\x02\x80\x80\x80\x80\x80@"
    )
    return [*map(msgspec.json.encode, _plain()), *_PACKED, avro]


def draw(rng: Random, of: list[bytes]) -> bytes:
    return mutations.packed(rng, _PACKED) if rng.random() < 0.3 else mutations.plain(rng, of)


def read_by_all() -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        for form in FORMS:
            began_s = time.monotonic()
            try:
                value = form.decode(data)
            except MemoryError as error:
                raise AssertionError(f"{form.name} wanted all memory for {len(data)} bytes") from error
            except Exception:  # noqa: BLE001  # a form may refuse as it likes: its caller says where
                continue
            finally:
                took_s = time.monotonic() - began_s
                assert took_s < MAX_S, f"{form.name} took {took_s:.1f} s for {len(data)} bytes"
            _again(form, value)

    return run


def _again(form: values.Form[Any], value: Any) -> None:
    """What was read can be written, and is then read as the same; by its bytes, for a NaN is not equal to itself."""
    try:
        written = form.encode(value)
    except (UnicodeEncodeError, RecursionError):  # half of a surrogate pair; as deep as Python goes
        return
    assert form.encode(form.decode(written)) == written, form.name
