"""Rows of a table as batches for partitions. Nothing is done per row but the hash of a key that is new.

A table may have these columns; only ``value`` must be there:

    value       binary or string, may be null
    key         binary or string, may be null: decides the partition, as the producer's partitioner does
    headers     list of (name, value), or a map
    topic       string; without it, or where it is null, the default topic
    partition   int: this one, whatever the key
    timestamp   timestamp, or milliseconds as long; now where it is null
    lane        int

Rows without key and partition are cut into as many stretches as there are
partitions. The order of rows that go to one partition is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayqueue.client.producer.partitioners import BY_KEY, KeyedPartitions
from rayqueue.config import MIB
from rayqueue.errors import InvalidInputError, OversizedRecordError
from rayqueue.protocol.topics import TopicInfo
from rayqueue.records import Compression, RecordBatch
from rayqueue.records.arrow import TIMESTAMP, VALUE, stored, stored_headers

WRITE_COLUMNS = ("value", "key", "headers", "topic", "partition", "timestamp", "lane")

_LANES = 256
_OVERHEAD_BYTES = 1024


class Cut(NamedTuple):
    """An encoded batch and where it goes. It belongs to no producer yet."""

    topic: str
    partition: int
    lane: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    payload: bytes
    topic_id: int = 0


@dataclass(frozen=True, slots=True)
class RowSettings:
    topic: str | None = None
    """Where rows go whose topic is not said in a column."""
    partitioner: str = "consistent"
    compression: Compression = Compression.NONE
    batch_bytes: int = MIB // 2
    max_batch_bytes: int = MIB
    lane: int = 0
    transactional: bool = True
    """Whether the batches count only once their transaction is committed."""


@dataclass(slots=True)
class _Pile:
    """Rows for one lane of one partition that wait for company."""

    parts: list[Any] = field(default_factory=list)
    size_bytes: int = 0


class Rows:
    """Takes tables of one task, gives batches."""

    def __init__(self, topics: Mapping[str, TopicInfo], settings: RowSettings, *, seed: int = 0) -> None:
        if settings.partitioner not in BY_KEY:
            raise InvalidInputError(
                f"rows are spread by {' or '.join(BY_KEY)}, or a column 'partition', not by {settings.partitioner!r}",
                option="partitioner",
            )
        self._names = sorted(topics)
        self._topics = [topics[name] for name in self._names]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._settings = settings
        self._keyed = [KeyedPartitions(settings.partitioner, len(info.partitions)) for info in self._topics]
        self._turn = seed
        self._piles: dict[int, _Pile] = {}

    def add(self, batch: Any) -> Iterator[Cut]:
        """Take a ``pyarrow.RecordBatch``; give what is full."""
        if not batch.num_rows:
            return
        plain, places = self._plain(batch)
        for place, part in _grouped(plain, places):
            pile = self._piles.setdefault(place, _Pile())
            pile.parts.append(part)
            pile.size_bytes += part.nbytes
            if pile.size_bytes >= self._settings.batch_bytes:
                yield from self._cuts(place, self._piles.pop(place))

    def finish(self) -> Iterator[Cut]:
        """Give the rest."""
        piles, self._piles = self._piles, {}
        for place in sorted(piles):
            yield from self._cuts(place, piles[place])

    # -- columns -------------------------------------------------------------------------

    def _plain(self, batch: Any) -> tuple[Any, Any]:
        """The stored columns of all rows, and a number per row that says where it goes."""
        names = batch.schema.names
        check_write_columns(names)
        rows = batch.num_rows
        value = _binary("value", batch.column("value"))
        key = _binary("key", batch.column("key")) if "key" in names else None
        headers = stored_headers(batch.column("headers")) if "headers" in names else None
        stamps = _stamps(batch.column("timestamp") if "timestamp" in names else None, rows)
        topics = self._topic_numbers(batch.column("topic") if "topic" in names else None, rows)
        lanes = _lanes(batch.column("lane") if "lane" in names else None, rows, self._settings.lane)
        partitions = self._partitions(batch.column("partition") if "partition" in names else None, key, topics, rows)
        self._check(value, key, topics, lanes, partitions)
        columns = {"timestamp": stamps, "value": value}
        if key is not None:
            columns["key"] = key
        if headers is not None:
            columns["headers"] = headers
        places = (topics * 2**20 + partitions) * _LANES + lanes
        return pa.RecordBatch.from_pydict(columns), places

    def _topic_numbers(self, column: Any, rows: int) -> Any:
        default = self._settings.topic
        if column is None:
            if default is None:
                raise InvalidInputError("say the topic: by an option, or by a column 'topic'", option="topic")
            return np.full(rows, self._numbers[default], np.int64)
        if default is not None and column.null_count:
            column = pc.fill_null(column, default)
        encoded = column.dictionary_encode()
        if encoded.null_count:
            raise InvalidInputError("a row has no topic, and there is no option that says one", option="topic")
        named = encoded.dictionary.to_pylist()
        for name in named:
            if name not in self._numbers:
                raise InvalidInputError(
                    f"a row is for topic {name!r}; name it in option 'topics', or write to one topic at a time",
                    topic=name,
                )
        return np.array([self._numbers[name] for name in named], np.int64)[encoded.indices.to_numpy()]

    def _partitions(self, column: Any, key: Any, topics: Any, rows: int) -> Any:
        chosen = np.full(rows, -1, np.int64)
        if column is not None:
            given = pc.fill_null(column.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
            chosen = given.copy()
        if key is not None and key.null_count < rows and (chosen < 0).any():
            encoded = key.dictionary_encode()
            keys = encoded.dictionary.to_pylist()
            index = pc.fill_null(encoded.indices, 0).to_numpy(zero_copy_only=False)
            keyed = pc.is_valid(key).to_numpy(zero_copy_only=False) & (chosen < 0)
            for number in np.unique(topics):
                of_topic = keyed & (topics == number)
                if of_topic.any():
                    spread = np.array(self._keyed[number].many(keys), np.int64)
                    chosen[of_topic] = spread[index[of_topic]]
        for number in np.unique(topics):
            free = np.nonzero((chosen < 0) & (topics == number))[0]
            if len(free):
                count = len(self._topics[number].partitions)
                chosen[free] = (np.arange(len(free)) * count // len(free) + self._turn) % count
                self._turn += 1
        return chosen

    def _check(self, value: Any, key: Any, topics: Any, lanes: Any, partitions: Any) -> None:
        sizes = pc.fill_null(pc.binary_length(value), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        if key is not None:
            sizes = sizes + pc.fill_null(pc.binary_length(key), 0).to_numpy(zero_copy_only=False)
        for number in np.unique(topics):
            info, of_topic = self._topics[number], topics == number
            largest = int(sizes[of_topic].max())
            if largest > info.settings.max_record_bytes:
                raise OversizedRecordError(
                    f"a row of {largest} bytes is larger than topic {info.name!r} takes: "
                    f"{info.settings.max_record_bytes}",
                    length=largest,
                    limit=info.settings.max_record_bytes,
                )
            last = int(partitions[of_topic].max())
            if last >= len(info.partitions):
                raise InvalidInputError(f"there is no partition {last} of topic {info.name!r}", partition=last)
            lane = int(lanes[of_topic].max())
            if lane >= info.settings.lanes:
                raise InvalidInputError(
                    f"there is no lane {lane} in topic {info.name!r}, which has {info.settings.lanes}", lane=lane
                )

    # -- batches -------------------------------------------------------------------------

    def _cuts(self, place: int, pile: _Pile) -> Iterator[Cut]:
        table = pa.Table.from_batches(pile.parts) if len(pile.parts) > 1 else None
        whole = pile.parts[0] if table is None else table.combine_chunks().to_batches()[0]
        pieces = max(1, -(-pile.size_bytes // (2 * self._settings.batch_bytes)))
        marks = [whole.num_rows * number // pieces for number in range(pieces + 1)]
        lane, partition = place % _LANES, place // _LANES % 2**20
        topic = self._topics[place // _LANES >> 20]
        for start, end in pairwise(marks):
            if end > start:
                for payload, count in self._encoded(whole.slice(start, end - start)):
                    yield Cut(topic.name, partition, lane, count, payload, topic.topic_id)

    def _encoded(self, part: Any) -> list[tuple[bytes, int]]:
        names = part.schema.names
        if part.nbytes <= 2 * self._settings.max_batch_bytes:
            payload = RecordBatch.encode_arrow(
                part.column("value"),
                part.column("key") if "key" in names else None,
                part.column("headers") if "headers" in names else None,
                timestamps=part.column("timestamp"),
                compression=self._settings.compression,
                transactional=self._settings.transactional,
            )
            if len(payload) <= self._settings.max_batch_bytes - _OVERHEAD_BYTES or part.num_rows == 1:
                return [(payload, part.num_rows)]
        half = part.num_rows // 2
        return self._encoded(part.slice(0, half)) + self._encoded(part.slice(half))


def check_write_columns(names: Sequence[str]) -> None:
    """``InvalidInputError`` unless a table with these columns can be written."""
    for name in names:
        if name not in WRITE_COLUMNS:
            raise InvalidInputError(
                f"column {name!r} cannot be written; a topic takes {', '.join(WRITE_COLUMNS)}. "
                "Pack other columns into value, for example by to_json(struct(...))",
                column=name,
            )
    if "value" not in names:
        raise InvalidInputError("there is no column 'value'", column="value")


def _grouped(plain: Any, places: Any) -> Iterator[tuple[int, Any]]:
    """The rows of each place, in order."""
    marks = np.nonzero(np.diff(places))[0] + 1
    runs = np.concatenate(([0], marks, [len(places)]))
    first = places[runs[:-1]]
    if len(np.unique(first)) < len(first):  # not in stretches already
        order = np.argsort(places, kind="stable")
        yield from _grouped(plain.take(pa.array(order)), places[order])
        return
    for place, start, end in zip(first.tolist(), runs[:-1].tolist(), runs[1:].tolist(), strict=True):
        yield place, plain.slice(start, end - start)


def _binary(name: str, column: Any) -> Any:
    try:
        return stored(f"column {name!r}", column, VALUE.type)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}; cast it, or pack it by to_json", column=name) from None


def _stamps(column: Any, rows: int) -> Any:
    now_ms = int(time.time() * 1000)
    if column is None:
        return pa.repeat(pa.scalar(now_ms, pa.int64()), rows)
    return pc.fill_null(stored("column 'timestamp'", column, TIMESTAMP.type), now_ms)


def _lanes(column: Any, rows: int, default: int) -> Any:
    if column is None:
        return np.full(rows, default, np.int64)
    lanes = pc.fill_null(column.cast(pa.int64()), default).to_numpy(zero_copy_only=False)
    if len(lanes) and not 0 <= int(lanes.min()) <= int(lanes.max()) < _LANES:
        raise InvalidInputError(f"a lane is a number from 0 to {_LANES - 1}")
    return lanes
