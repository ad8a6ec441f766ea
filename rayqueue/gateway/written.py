"""Written: where records were written, as JSON and as protobuf. Encoded by the run, not by the record.

Records of one request mostly follow each other in one partition, at one time:
then their encodings differ in the offset alone, and all that stands between two
offsets is put there by one ``join``.

``packed`` is the same places as numbers only, without a protocol: what is kept of the
answer to an idempotent request (``requests``). Each run is told as what it differs
by from the one before, so that most numbers have one byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from rayqueue.client.producer.delivery import Metadatas, RecordMetadata

Run = tuple[RecordMetadata, int]
"""The first of some records that follow each other, and how many they are."""

_LAST = [bytes([low]) for low in range(128)]
_MORE = [bytes([low | 128]) for low in range(128)]
"""The first byte of a varint: of one that ends here, and of one that goes on."""


class Places(NamedTuple):
    """Where the records of one topic are, by the run."""

    topic: str
    spans: Sequence[Span]

    def runs(self) -> Iterator[Run]:
        for span in self.spans:
            yield RecordMetadata(self.topic, span.partition, span.first, span.mark), span.count


class Span(NamedTuple):
    """Offsets that follow each other."""

    partition: int
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    mark: int
    """What is told with each of them: a record's timestamp, or whether a job was a duplicate."""


Written = Sequence[RecordMetadata] | Places

_SPANS = msgspec.msgpack.Decoder(list[int])


def runs_of(written: Written) -> Iterable[Run]:
    return written.runs() if isinstance(written, Metadatas | Places) else ((each, 1) for each in written)


def packed(spans: Iterable[Span]) -> bytes:
    """Those that follow each other in one."""
    joined: list[Span] = []
    for each in spans:
        last = joined[-1] if joined else None
        if last is not None and (last.partition, last.first + last.count, last.mark) == (
            each.partition,
            each.first,
            each.mark,
        ):
            joined[-1] = last._replace(count=last.count + each.count)
        else:
            joined.append(each)
    expected: dict[int, int] = {}
    mark = 0
    numbers: list[tuple[int, int, int, int]] = []
    for each in joined:
        numbers.append((each.partition, each.first - expected.get(each.partition, 0), each.count, each.mark - mark))
        expected[each.partition], mark = each.first + each.count, each.mark
    return msgspec.msgpack.encode(list(chain.from_iterable(numbers)))


def unpacked(kept: bytes) -> list[Span]:
    numbers = iter(_SPANS.decode(kept))
    expected: dict[int, int] = {}
    mark = 0
    spans: list[Span] = []
    for partition, step, count, more in zip(numbers, numbers, numbers, numbers, strict=True):
        first, mark = expected.get(partition, 0) + step, mark + more
        expected[partition] = first + count
        spans.append(Span(partition, first, count, mark))
    return spans


def spans_of(written: Written) -> Iterator[Span]:
    for (_, partition, offset, at_ms), count in runs_of(written):
        yield Span(partition, offset or 0, count, at_ms)


def as_json(written: Written) -> bytes:
    """``[{"partition":0,"offset":7,"timestamp_ms":1}, …]``."""
    told = []
    for (_, partition, offset, at_ms), count in runs_of(written):
        head, tail, first = f'{{"partition":{partition},"offset":', f',"timestamp_ms":{at_ms}}}', offset or 0
        told.append(f"{head}{f'{tail},{head}'.join(map(str, range(first, first + count)))}{tail}")
    return f"[{','.join(told)}]".encode()


def as_protobuf(written: Written, field: int) -> bytes:
    """``repeated rayqueue.v1.Written``, the field of this number (below 16) of some message."""
    told: list[bytes] = []
    tag = bytes([field << 3 | 2])
    for (_, partition, offset, at_ms), count in runs_of(written):
        begin = b"\x08" + varint(partition) if partition else b""
        end = b"\x18" + varint(at_ms) if at_ms else b""
        first, stop = offset or 0, (offset or 0) + count
        if first == 0:  # a number that is 0 is left out
            told += (tag, varint(len(begin) + len(end)), begin, end)
            first = 1
        while first < stop:  # those that have all but the lowest seven bits in common
            high = first >> 7
            until = min(stop, (high + 1) << 7)
            tail = varint(high) + end if high else end
            head = tag + varint(len(begin) + 2 + len(tail)) + begin + b"\x10"
            low = (_MORE if high else _LAST)[first & 127 : until - (high << 7)]
            told += (head, (tail + head).join(low), tail)
            first = until
    return b"".join(told)


def varint(number: int) -> bytes:
    """As protobuf has it; a negative one as 64 bits."""
    number &= 2**64 - 1
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)
