"""The columns of a ``send_many``: checked, and cut into pieces that fit into a batch. No loop over records in Python.

What it is given may be lists of bytes, or Arrow arrays, which are encoded
without making a Python object of any record. A mistake anywhere in the columns
is found before the first record is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add, itemgetter
from typing import Any, NamedTuple

from rayqueue.client.producer.accumulator import KEY_BYTES, PAIR_BYTES, RECORD_BYTES
from rayqueue.errors import InvalidInputError
from rayqueue.records import Headers, HeadersIn

_ALLOWED = frozenset((bytes, type(None)))

Integers = Sequence[int] | memoryview


class Columns(NamedTuple):
    """Python lists of one length."""

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None
    headers: Sequence[HeadersIn] | None
    timestamps: Sequence[int]
    sizes: Sequence[int]
    """Of key, value and headers of each record."""

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def max_size(self) -> int:
        return max(self.sizes, default=0)

    @property
    def ends(self) -> Sequence[int]:
        """The sizes, added up."""
        return list(accumulate(self.sizes))

    def slice(self, start: int, stop: int, step: int = 1) -> Columns:
        return Columns(*(None if column is None else column[start:stop:step] for column in self))  # type: ignore[arg-type]

    def take(self, rows: Sequence[int]) -> Columns:
        """These rows only, in this order."""
        if isinstance(rows, range):
            return self.slice(rows.start, rows.stop, rows.step)
        if len(rows) == 1:
            (row,) = rows
            return Columns(*(None if column is None else [column[row]] for column in self))  # type: ignore[arg-type]
        pick = itemgetter(*rows)
        return Columns(*(None if column is None else pick(column) for column in self))  # type: ignore[arg-type]


def check_columns(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None,
    headers: Sequence[HeadersIn] | None,
    timestamps_ms: Sequence[int] | int,
) -> Columns:
    """``InvalidInputError`` if these are no columns of records."""
    values = _as_bytes("values", listed("values", values))
    count = len(values)
    sizes = _lengths(values)
    if keys is not None:
        keys = _as_bytes("keys", listed("keys", keys, count))
        sizes = list(map(add, sizes, _lengths(keys)))
    if headers is not None:
        checked = [check_headers(each) for each in listed("headers", headers, count)]
        headers = [each for each, _ in checked]
        sizes = list(map(add, sizes, (size for _, size in checked)))
    if isinstance(timestamps_ms, int):
        timestamps: Sequence[int] = [timestamps_ms] * count
    else:
        timestamps = listed("timestamps_ms", timestamps_ms, count)
        if not set(map(type, timestamps)) <= {int} or (count and not _fits(min(timestamps), max(timestamps))):
            raise InvalidInputError("timestamps are whole milliseconds that fit 64 bits")
    return Columns(values, keys, headers, timestamps, sizes)


def as_bytes(what: str, given: Any) -> bytes:
    """A copy, as bytes, of anything as good as bytes: it may change after the call. Else ``InvalidInputError``."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        return bytes(given)
    form = "str" if isinstance(given, str) else "json"
    option = f"{what.rpartition(' ')[2]}_serializer"
    raise InvalidInputError(
        f"{what} is bytes or None, not {type(given).__name__}; encode it, or give the producer {option}={form!r}"
    )


def check_headers(headers: HeadersIn) -> tuple[Headers | None, int]:
    """The headers of one record in one form, and their size. ``InvalidInputError`` if they are none."""
    if not headers:
        return None, 0
    try:
        pairs: Headers = tuple(headers.items() if hasattr(headers, "items") else headers)
        size_bytes, copied = 0, False
        for name, value in pairs:
            if type(name) is not str or not isinstance(value, (bytes, bytearray, memoryview)):
                raise TypeError
            copied = copied or type(value) is not bytes
            size_bytes += len(name.encode()) + len(value) + PAIR_BYTES
    except (TypeError, ValueError):
        raise InvalidInputError("headers map names (str) to values (bytes)") from None
    return tuple((name, bytes(value)) for name, value in pairs) if copied else pairs, size_bytes


def overhead_bytes(columns: Columns | ArrowColumns) -> int:
    """The bytes that each record takes besides its own."""
    return RECORD_BYTES + KEY_BYTES * (columns.keys is not None) + KEY_BYTES * (columns.headers is not None)


def cuts(
    ends: Integers, overhead: int, limit_bytes: int, most_records: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """Cut records into pieces of at most ``limit_bytes``, or of one record: start, stop and size of each.

    ``ends``: the sizes of the records, added up; each takes ``overhead`` bytes besides. A piece has ``most_records``.
    """
    count, start, before = len(ends), 0, 0
    while start < count:
        low, high = start + 1, count if most_records is None else min(count, start + most_records)
        while low < high:  # the most records that fit
            middle = (low + high + 1) >> 1
            if ends[middle - 1] - before + overhead * (middle - start) <= limit_bytes:
                low = middle
            else:
                high = middle - 1
        yield start, low, ends[low - 1] - before + overhead * (low - start)
        start, before = low, ends[low - 1]


def listed(name: str, column: Any, count: int | None = None) -> Any:
    """The column as a list. ``InvalidInputError`` if it is none, or not of this length."""
    if isinstance(column, (str, bytes, bytearray, memoryview, dict)) or not hasattr(column, "__iter__"):
        raise InvalidInputError(f"{name} is a column, a list of {name}, not {type(column).__name__}")
    column = column if isinstance(column, (list, tuple)) else list(column)
    if count is not None and len(column) != count:
        raise InvalidInputError(f"{len(column)} {name} for {count} values")
    return column


def _as_bytes(name: str, column: Sequence[Any]) -> Sequence[bytes | None]:
    kinds = set(map(type, column)) - _ALLOWED
    if not kinds:
        return column
    wrong = [each.__name__ for each in kinds if not issubclass(each, (bytes, bytearray, memoryview))]
    if wrong:
        raise InvalidInputError(
            f"{name} are bytes or None, not {min(wrong)}; encode them, or give the producer {name[:-1]}_serializer"
        )
    return [None if item is None else bytes(item) for item in column]


def _lengths(column: Sequence[bytes | None]) -> list[int]:
    try:
        return list(map(len, column))  # type: ignore[arg-type]
    except TypeError:
        return [len(item or b"") for item in column]


def _fits(least: int, most: int) -> bool:
    return least >= -(2**63) and most < 2**63


# -- Arrow ---------------------------------------------------------------------------


def is_arrow(column: Any) -> bool:
    return type(column).__module__.startswith("pyarrow")


class ArrowColumns(NamedTuple):
    """Arrow arrays of one length; values and keys binary."""

    values: Any
    keys: Any
    headers: Any
    timestamps: Any
    """An int64 array, or one number for all."""
    ends: memoryview
    max_size: int

    @property
    def size_bytes(self) -> int:
        return self.ends[-1] if len(self.ends) else 0

    def slice(self, start: int, stop: int) -> ArrowColumns:
        values, keys, headers, stamps = (
            column if column is None or isinstance(column, int) else column.slice(start, stop - start)
            for column in self[:4]
        )
        return ArrowColumns(values, keys, headers, stamps, self.ends[start:stop], self.max_size)

    def stamps(self) -> Sequence[int] | int:
        """The timestamps as ``RecordMetadata`` wants them."""
        if isinstance(self.timestamps, int):
            return self.timestamps
        array = self.timestamps
        words = memoryview(array.buffers()[1]).cast("B").cast("q")
        return words[array.offset : array.offset + len(array)]

    def take(self, rows: Any) -> ArrowColumns:
        import pyarrow as pa

        rows = rows if isinstance(rows, pa.Array) else pa.array(rows, pa.int64())
        values, keys, headers, stamps = (
            column if column is None or isinstance(column, int) else column.take(rows) for column in self[:4]
        )
        return ArrowColumns(values, keys, headers, stamps, _arrow_ends(values, keys, headers)[0], self.max_size)

    def group(self, partitions_of: Any) -> tuple[dict[int, ArrowColumns], list[int]]:
        """By partition, and the row of each record in this order. ``partitions_of`` maps a list of keys."""
        import pyarrow as pa
        import pyarrow.compute as pc

        encoded = self.keys.dictionary_encode()
        names = pa.array(partitions_of(encoded.dictionary.to_pylist()), pa.int32())  # there is no null among them
        chosen = names.take(encoded.indices).fill_null(-1)
        parts: dict[int, ArrowColumns] = {}
        order: list[int] = []
        for number in sorted(chosen.unique().to_pylist()):
            rows = pc.indices_nonzero(pc.equal(chosen, number))
            parts[number] = self.take(rows)
            order += memoryview(rows.buffers()[1]).cast("B").cast("Q")[rows.offset : rows.offset + len(rows)].tolist()
        return parts, order


def check_arrow(values: Any, keys: Any, headers: Any, timestamps_ms: Any) -> ArrowColumns:
    """``InvalidInputError`` if these are no columns of records."""
    import pyarrow as pa

    from rayqueue.records.arrow import KEY, TIMESTAMP, VALUE, stored, stored_headers

    given = [pa.array(each) if isinstance(each, (list, tuple)) else each for each in (values, keys, timestamps_ms)]
    values = stored("values", given[0], VALUE.type)
    count = len(values)
    keys = None if keys is None else stored("keys", given[1], KEY.type, count=count)
    headers = None if headers is None else stored_headers(headers, count=count)
    stamps: Any = timestamps_ms
    if not isinstance(stamps, int):
        stamps = stored("timestamps_ms", given[2], TIMESTAMP.type, count=count, nullable=False)
    ends, most = _arrow_ends(values, keys, headers)
    return ArrowColumns(values, keys, headers, stamps, ends, most)


def _arrow_ends(values: Any, keys: Any, headers: Any) -> tuple[memoryview, int]:
    """The sizes of the records, added up, and the largest."""
    import pyarrow as pa
    import pyarrow.compute as pc

    sizes = pc.fill_null(pc.binary_length(values), 0).cast(pa.int64())
    if keys is not None:
        sizes = pc.add(sizes, pc.fill_null(pc.binary_length(keys), 0).cast(pa.int64()))
    if headers is not None and len(headers):
        # Headers are few and alike; their share is spread evenly rather than looked at one by one.
        sizes = pc.add(sizes, headers.nbytes // len(headers) + 1)
    ends = pc.cumulative_sum(sizes)
    words = memoryview(ends.buffers()[1]).cast("B").cast("q") if len(ends) else memoryview(b"").cast("q")
    most = pc.max(sizes).as_py() or 0
    return words[ends.offset : ends.offset + len(ends)], most
