"""Messages: records and their columns between protobuf and operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

from rayqueue.errors import InvalidInputError
from rayqueue.gateway.operations import Columns, Isolation
from rayqueue.gateway.rpc.v1 import common_pb2
from rayqueue.gateway.sessions import Place
from rayqueue.records import Record

# Asked of every record of a batch: in C.
_HAS_KEY = methodcaller("HasField", "key")
_HAS_PARTITION = methodcaller("HasField", "partition")
_HAS_TIMESTAMP = methodcaller("HasField", "timestamp_ms")
_VALUE = attrgetter("value")
_HEADERS = attrgetter("headers")
_PRIORITY = attrgetter("priority")


def columns_of_contents(records: Sequence[Any]) -> Columns:
    """Of records or jobs. Columns that none of them has are left out: nothing is done for them."""
    made = Columns([each.value if each.HasField("value") else None for each in records])
    if any(map(_HAS_KEY, records)):
        made.keys = [each.key if each.HasField("key") else None for each in records]
    if any(map(_HEADERS, records)):
        made.headers = [tuple((header.name, header.value) for header in each.headers) for each in records]
    if any(map(_PRIORITY, records)):
        made.priorities = [each.priority for each in records]
    return made


def columns_of(records: Sequence[common_pb2.NewRecord], size_bytes: int) -> Columns:
    """``size_bytes``: of the records in their message. Of most batches it says that they have values and nothing else;
    to ask each record for each of its fields would take five times as long."""
    values = list(map(_VALUE, records))
    if all(values) and size_bytes == _bare_bytes(values):
        return Columns(values)
    made = columns_of_contents(records)
    if any(map(_HAS_PARTITION, records)):
        made.partitions = [each.partition if each.HasField("partition") else None for each in records]
    if any(map(_HAS_TIMESTAMP, records)):
        made.timestamps_ms = [each.timestamp_ms if each.HasField("timestamp_ms") else None for each in records]
    return made


def _bare_bytes(values: Sequence[bytes]) -> int:
    """Of records with these values, none of them empty, and no other field. Any other field makes it more."""
    total = 0
    for length, count in Counter(map(len, values)).items():
        record = 1 + _varint_bytes(length) + length
        total += count * (1 + _varint_bytes(record) + record)
    return total


def _varint_bytes(number: int) -> int:
    return (number.bit_length() + 6) // 7


def records_of(records: Iterable[Record]) -> list[common_pb2.Record]:
    make = common_pb2.Record
    made = []
    for each in records:
        record = make(
            topic=each.topic,
            partition=each.partition,
            offset=each.offset,
            lane=each.lane,
            timestamp_ms=each.timestamp,
            value=each.value,
            key=each.key,
        )
        if each.headers:
            record.headers.extend(common_pb2.Header(name=name, value=value) for name, value in each.headers)
        made.append(record)
    return made


_ISOLATIONS: dict[int, Isolation] = {
    common_pb2.ISOLATION_READ_COMMITTED: "read_committed",
    common_pb2.ISOLATION_READ_UNCOMMITTED: "read_uncommitted",
}


def isolation_of(number: int) -> Isolation | None:
    if number and number not in _ISOLATIONS:
        raise InvalidInputError(f"there is no isolation {number}: 1 is read_committed, 2 is read_uncommitted")
    return _ISOLATIONS.get(number)


def places_of(places: Iterable[common_pb2.Place]) -> list[Place]:
    return [Place(each.topic, each.partition, each.offset, each.lane) for each in places]
