"""Columns between Python lists and Arrow buffers.

Loops over records run in C: ``join``, ``accumulate`` and ``struct`` to write,
Arrow to read many. Readers check what they read: bytes that are not a column
give ``CorruptBatchError``, never a wrong record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from operator import add, itemgetter, sub
from struct import pack

from rayqueue.errors import CorruptBatchError, InvalidInputError, OversizedBatchError
from rayqueue.records.message import BinaryColumn, HeaderColumn, Layout
from rayqueue.records.record import Headers

HeadersIn = Mapping[str, bytes] | Iterable[tuple[str, bytes]] | None
"""The headers of one record, as an application gives them."""


_ARROW_FROM_ROWS = 32
"""From here on, reading a column through Arrow is faster than slicing it in Python."""


# -- to buffers -----------------------------------------------------------------


def write_timestamps(timestamps: Sequence[int]) -> bytes:
    try:
        return pack(f"<{len(timestamps)}q", *timestamps)
    except struct.error as error:
        raise InvalidInputError(f"timestamps must be whole milliseconds that fit 64 bits: {error}") from None


def write_binary(name: str, column: Sequence[bytes | None]) -> tuple[int, bytes, bytes, bytes]:
    """Null count, validity, offsets and data of a binary column."""
    try:
        data = b"".join(column)  # type: ignore[arg-type]
        lengths: Iterable[int] = map(len, column)  # type: ignore[arg-type]
        nulls, validity = 0, b""
    except TypeError:
        try:
            data = b"".join(filter(None, column))
        except TypeError:
            raise InvalidInputError(f"{name} must be bytes or None") from None
        nulls = sum(item is None for item in column)
        lengths = map(len, (item or b"" for item in column))
        validity = _write_bits(column)
    return nulls, validity, _write_offsets(lengths, len(column), len(data)), data


def write_headers(headers: Sequence[HeadersIn]) -> tuple[int, list[bytes]] | None:
    """Count of all pairs and the nine buffers of the column; None if no record has headers."""
    pairs: list[tuple[str, bytes]] = []
    counts: list[int] = []
    try:
        for given in headers:
            before = len(pairs)
            if given:
                # dict first: asking whether something is a Mapping costs more than all the rest
                pairs.extend(given.items() if isinstance(given, (dict, Mapping)) else given)
            counts.append(len(pairs) - before)
        if not pairs:
            return None
        names = [name.encode() for name, _ in pairs]
    except (TypeError, ValueError, AttributeError):
        raise InvalidInputError("headers must map names (str) to values (bytes), per record") from None
    lists = _write_offsets(counts, len(counts), len(pairs))
    _, _, name_offsets, name_data = write_binary("header names", names)
    nulls, _, value_offsets, value_data = write_binary("header values", [value for _, value in pairs])
    if nulls:
        raise InvalidInputError("header values must be bytes")
    return len(pairs), [b"", lists, b"", b"", name_offsets, name_data, b"", value_offsets, value_data]


def _write_bits(column: Sequence[bytes | None]) -> bytes:
    """One bit per row, set where there is a value, least significant first."""
    digits = "".join(["0" if item is None else "1" for item in reversed(column)])
    return int(digits, 2).to_bytes((len(column) + 7) >> 3, "little")


def _write_offsets(lengths: Iterable[int], rows: int, total: int) -> bytes:
    if total >= 1 << 31:
        raise OversizedBatchError(f"one column of {total} bytes is too long for a batch; split it", length=total)
    offsets = pack(f"<{rows + 1}i", *accumulate(lengths, initial=0))
    if int.from_bytes(offsets[-4:], "little") != total:
        raise InvalidInputError("the length of an item is not its number of bytes")
    return offsets


# -- from buffers -----------------------------------------------------------------


def read_timestamps(message: memoryview, span: slice) -> list[int]:
    return message[span].cast("q").tolist()


def read_binary(name: str, message: memoryview, rows: int, column: BinaryColumn) -> list[bytes | None]:
    if rows >= _ARROW_FROM_ROWS:
        from rayqueue.records import arrow

        return arrow.read_binary(name, message, rows, column)
    data = bytes(message[column.data])
    offsets = _read_offsets(name, message[column.offsets], len(data))
    if not column.nulls:
        return [data[start:stop] for start, stop in pairwise(offsets)]
    bits = _read_bits(name, message[column.validity], rows, column.nulls)
    return [
        data[start:stop] if bit == "1" else None for bit, (start, stop) in zip(bits, pairwise(offsets), strict=True)
    ]


def read_headers(message: memoryview, column: HeaderColumn) -> list[Headers]:
    names = read_binary("headers", message, column.pairs, column.names)
    values = read_binary("headers", message, column.pairs, column.values)
    try:
        pairs = [((name or b"").decode(), value or b"") for name, value in zip(names, values, strict=True)]
    except UnicodeDecodeError:
        raise _not_utf8() from None
    lists = _read_offsets("headers", message[column.offsets], len(pairs))
    return [tuple(pairs[start:stop]) for start, stop in pairwise(lists)]


def largest_row(message: memoryview, layout: Layout) -> int:
    """Bytes of the largest key, value and headers together."""
    ends = _column_offsets("value", message, layout.values)
    if layout.keys is not None:
        ends = list(map(add, ends, _column_offsets("key", message, layout.keys)))
    if layout.headers is not None:
        names = _column_offsets("headers", message, layout.headers.names)
        texts = _column_offsets("headers", message, layout.headers.values)
        # Where each row's headers begin among all pairs, and from that among the bytes of all pairs.
        pick = itemgetter(*_read_offsets("headers", message[layout.headers.offsets], layout.headers.pairs))
        ends = list(map(add, ends, map(add, pick(names), pick(texts))))
    largest: int = max(map(sub, islice(ends, 1, None), ends))
    return largest


def check(message: memoryview, layout: Layout) -> None:
    """``CorruptBatchError`` unless every row of every column can be read. Makes no record, and no list of them."""
    rows = (layout.timestamps.stop - layout.timestamps.start) >> 3
    if layout.keys is not None:
        _check_binary("key", message, rows, layout.keys)
    _check_binary("value", message, rows, layout.values)
    headers = layout.headers
    if headers is not None:
        _check_offsets("headers", message[headers.offsets], headers.pairs)
        _check_binary("headers", message, headers.pairs, headers.names)
        _check_binary("headers", message, headers.pairs, headers.values)
        _check_names(bytes(message[headers.names.data]), message[headers.names.offsets])


def check_timestamps(message: memoryview, span: slice, least: int, most: int) -> None:
    """``InvalidInputError`` unless all are from ``least`` to ``most``."""
    stamps = message[span]
    rows = len(stamps) >> 3
    if least == most:
        inside = stamps == pack("<q", least) * rows
    elif least >= 0:  # by one subtraction each, as in ``_check_offsets``
        signs = int.from_bytes(b"\0\0\0\0\0\0\0\x80" * rows, "little")
        ones = signs >> 63
        all_stamps = int.from_bytes(stamps, "little")
        inside = (
            not all_stamps & signs
            and ((all_stamps | signs) - least * ones) & signs == signs
            and ((most * ones | signs) - all_stamps) & signs == signs
        )
    else:
        numbers = stamps.cast("q").tolist()
        inside = least <= min(numbers) and max(numbers) <= most
    if not inside:
        raise InvalidInputError(f"a timestamp is not from {least} to {most}, as the batch header says")


def _check_binary(name: str, message: memoryview, rows: int, column: BinaryColumn) -> None:
    _check_offsets(name, message[column.offsets], column.data.stop - column.data.start)
    if column.nulls:
        bits = int.from_bytes(message[column.validity], "little")
        if bits >> rows or bits.bit_count() != rows - column.nulls:
            raise _wrong_nulls(name, column.nulls)


def _check_offsets(name: str, span: memoryview, total: int) -> None:
    """The same as ``_read_offsets`` checks, for a replica that needs no list of them: all rows in one subtraction.

    The numbers, side by side, are one large number, and each is less than 2^31. With the sign bits of the ends set,
    end minus start keeps that bit where it is not negative and takes nothing from its neighbour in any case.
    """
    ends, starts = int.from_bytes(span[4:], "little"), int.from_bytes(span[:-4], "little")
    signs = _sign_bits((len(span) >> 2) - 1)
    divided = not (ends | starts) & signs and ((ends | signs) - starts) & signs == signs
    if not divided or int.from_bytes(span[:4], "little") != 0 or int.from_bytes(span[-4:], "little") != total:
        raise _undivided(name)


@lru_cache(maxsize=32)
def _sign_bits(rows: int) -> int:
    return int.from_bytes(b"\0\0\0\x80" * rows, "little")


def _check_names(names: bytes, offsets: memoryview) -> None:
    """Each name is UTF-8: all of them together are, and none begins inside a character."""
    if names.isascii():
        return
    try:
        names.decode()
    except UnicodeDecodeError:
        raise _not_utf8() from None
    starts = offsets.cast("i").tolist()
    if any(start < len(names) and names[start] & 0xC0 == 0x80 for start in starts):
        raise _not_utf8()


def _column_offsets(name: str, message: memoryview, column: BinaryColumn) -> list[int]:
    return _read_offsets(name, message[column.offsets], column.data.stop - column.data.start)


def _read_offsets(name: str, span: memoryview, total: int) -> list[int]:
    offsets: list[int] = span.cast("i").tolist()
    # Sorting a sorted list is one pass in C, the fastest way to ask whether it is sorted.
    if offsets[0] != 0 or offsets[-1] != total or offsets != sorted(offsets):
        raise _undivided(name)
    return offsets


def _read_bits(name: str, span: memoryview, rows: int, nulls: int) -> str:
    bits = int.from_bytes(span, "little")
    if bits >> rows or bits.bit_count() != rows - nulls:
        raise _wrong_nulls(name, nulls)
    # A one in front keeps the leading zeros; bin() writes "0b1" before the first row read backwards.
    return bin(bits | 1 << rows)[:2:-1]


def _undivided(name: str) -> CorruptBatchError:
    return CorruptBatchError(f"offsets of column {name!r} do not divide its data", column=name)


def _wrong_nulls(name: str, nulls: int) -> CorruptBatchError:
    return CorruptBatchError(f"column {name!r} does not have the {nulls} nulls it says", column=name)


def _not_utf8() -> CorruptBatchError:
    return CorruptBatchError("a header's name is not UTF-8", column="headers")
