"""Written: where records were written, as JSON and as protobuf. Encoded by the run, not by the record.

Records of one request mostly follow each other in one partition, at one time:
then their encodings differ in the offset alone, and all that stands between two
offsets is put there by one ``join``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayqueue.client.producer.delivery import Metadatas, RecordMetadata

Run = tuple[RecordMetadata, int]
"""The first of some records that follow each other, and how many they are."""

_LAST = [bytes([low]) for low in range(128)]
_MORE = [bytes([low | 128]) for low in range(128)]
"""The first byte of a varint: of one that ends here, and of one that goes on."""


def runs_of(written: Sequence[RecordMetadata]) -> Iterable[Run]:
    return written.runs() if isinstance(written, Metadatas) else ((each, 1) for each in written)


def as_json(written: Sequence[RecordMetadata]) -> bytes:
    """``[{"partition":0,"offset":7,"timestamp_ms":1}, …]``."""
    told = []
    for (_, partition, offset, at_ms), count in runs_of(written):
        head, tail, first = f'{{"partition":{partition},"offset":', f',"timestamp_ms":{at_ms}}}', offset or 0
        told.append(f"{head}{f'{tail},{head}'.join(map(str, range(first, first + count)))}{tail}")
    return f"[{','.join(told)}]".encode()


def as_protobuf(written: Sequence[RecordMetadata], field: int) -> bytes:
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
