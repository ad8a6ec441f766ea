"""Numbered: the records of an idempotent request, with numbers by which partitions know them again.

A request is written as a producer of its own would: with a producer id, an epoch
and sequences from 0 in each partition. The numbers are in its claim
(``requests``), and everything else follows from the request and the claim: which
record goes where, how they are cut into batches, their timestamps. Nothing follows
from the settings of whoever carries it out, or from what the topic's are by then.
So whoever
carries it out again, at any gateway and in the middle of another's attempt, sends
the same batches: what a partition has, it answers as the first time; what it has
not, it takes.

A producer id is used by one request at a time, the next one with a higher epoch,
once the answer to the one before is kept; one whose outcome is not known is never
used again. So partitions have to remember few of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rayqueue.bridge.append import Appends
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.accumulator import BATCH_BYTES
from rayqueue.client.producer.columns import Columns as Cuttable
from rayqueue.client.producer.columns import check_columns, cuts, overhead_bytes
from rayqueue.client.producer.delivery import RecordMetadata
from rayqueue.client.producer.partitioners import BY_KEY, KeyedPartitions
from rayqueue.client.producer.partitioners import NAMES as PARTITIONERS
from rayqueue.errors import (
    InvalidInputError,
    OutcomeUnknownError,
    OversizedRecordError,
    ProducerError,
    ProducerFencedError,
    RayQueueError,
    RequestInProgressError,
    RequestTooLargeError,
    TooManyProducersError,
)
from rayqueue.gateway.outcomes import worst
from rayqueue.protocol.data import Appended
from rayqueue.protocol.topics import TopicInfo, TopicPartition
from rayqueue.records import RecordBatch

if TYPE_CHECKING:
    from rayqueue.gateway.operations import Columns

REPEATABLE_MS = 5 * 3_600_000
"""Partitions remember a producer for six hours (``rayqueue.partition.producers.IDLE_MS``)."""

MAX_BATCHES = 32
"""Of one request in one partition: it remembers so many of a producer (``PartitionSettings.dedupe_window``), and a
retry has to be told where each of them is."""
MAX_AHEAD_MS = 3_600_000
"""What a partition takes (``AdmissionLimits.max_ahead_ms``)."""

_MAX_FREE = 256
_MAX_EPOCH = 2**31


class Number(NamedTuple):
    """A request's place among all that were ever written."""

    producer_id: int
    epoch: int
    partitions: int
    """How many the topic had: partitions that are added later do not change where the records go."""


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """How the records are spread and cut, by the settings of the gateway that claimed the request."""

    partitioner: str
    most_bytes: int
    """Of a batch."""
    most_records: int | None = None
    """Of a batch."""


class Numbers:
    """Producer ids that no request uses at the moment."""

    def __init__(self, new_id: Callable[[], Awaitable[int]]) -> None:
        self._new_id = new_id
        self._free: list[tuple[int, int]] = []

    async def take(self, partitions: int) -> Number:
        producer_id, epoch = self._free.pop() if self._free else (await self._new_id(), 0)
        return Number(producer_id, epoch, partitions)

    def put_back(self, number: Number) -> None:
        """Nobody writes with it any more. It is in a claim, be it one that came second: the next has another epoch."""
        epoch = number.epoch + 1
        if len(self._free) < _MAX_FREE and epoch < _MAX_EPOCH:
            self._free.append((number.producer_id, epoch))


class NumberedWrite:
    """Of one request. ``place`` finds everything that can be wrong with it, before it is claimed."""

    def __init__(self, rq: RayQueue, info: TopicInfo, columns: Columns, request: bytes, patience_ms: int) -> None:
        """``patience_ms``: how long a partition may be silent before it is given up."""
        self._rq = rq
        self._info = info
        self._columns = columns
        self._request = request
        self._patience_ms = patience_ms

    # -- before the claim ---------------------------------------------------------------------------

    def place(self, now_ms: int) -> Placement:
        """How this gateway would place them. Raises what a partition would refuse, or could not answer twice."""
        columns, settings = self._columns, self._info.settings
        check_ahead(columns, now_ms)
        whole = self._whole(now_ms)
        batch_bytes = self._rq.settings.log.max_batch_bytes - BATCH_BYTES
        limit = min(settings.max_record_bytes, batch_bytes - overhead_bytes(whole))
        if whole.max_size > limit:
            raise OversizedRecordError(
                f"key, value and headers have {whole.max_size} bytes; {self._info.name} takes {limit}",
                size_bytes=whole.max_size,
                limit=limit,
            )
        if settings.max_backlog_bytes is not None:
            self._check_backlog(whole, settings.max_backlog_bytes)
            batch_bytes = min(batch_bytes, max(1, settings.max_backlog_bytes - BATCH_BYTES))
        made = Placement(self._rq.settings.producer.partitioner, batch_bytes, settings.max_backlog_records)
        if len(columns.values) > MAX_BATCHES:
            for partition, batches in self._batches(whole, len(self._info.partitions), made).items():
                if len(batches) > MAX_BATCHES:
                    raise RequestTooLargeError(
                        f"these records are {len(batches)} batches in partition {partition} of {self._info.name}, and "
                        f"it can answer for {MAX_BATCHES} of one request: publish fewer with one idempotency key"
                    )
        return made

    def _whole(self, at_ms: int) -> Cuttable:
        columns = self._columns
        given = columns.timestamps_ms or [None] * len(columns.values)
        stamps = [at_ms if each is None else each for each in given]
        return check_columns(columns.values, columns.keys, columns.headers, stamps)

    def _check_backlog(self, whole: Cuttable, most_bytes: int) -> None:
        """A record that is larger than the partition may ever be is refused there, however empty it is."""
        for row, size_bytes in enumerate(whole.sizes):
            if size_bytes + BATCH_BYTES > most_bytes:
                values, keys, headers, stamps = whole.slice(row, row + 1)[:4]
                length = len(RecordBatch.encode(values, keys, headers, timestamps=stamps, producer_id=1))
                if length > most_bytes:
                    raise OversizedRecordError(
                        f"record {row} takes {length} bytes as a batch, more than the max_backlog_bytes of "
                        f"{self._info.name}, {most_bytes}",
                        length=length,
                        limit=most_bytes,
                    )

    # -- once it is claimed -------------------------------------------------------------------------

    async def carry_out(self, number: Number, placement: Placement | None, at_ms: int) -> list[RecordMetadata]:
        """Where the records are, in their order. Runs in the I/O thread."""
        if placement is None:  # of a release that placed as the gateway does that is asked
            settings = self._rq.settings
            placement = Placement(
                settings.producer.partitioner,
                settings.log.max_batch_bytes - BATCH_BYTES,
                self._info.settings.max_backlog_records,
            )
        if placement.partitioner not in PARTITIONERS:
            raise OutcomeUnknownError(
                f"a gateway of a later release began this request, with partitioner {placement.partitioner!r}, which "
                "is not known here; ask that one"
            )
        whole = self._whole(at_ms)
        places = self._batches(whole, number.partitions, placement)
        parts = [self._append(place, whole, batches, number) for place, batches in places.items()]
        outcomes = await asyncio.gather(*parts, return_exceptions=True)
        if any(isinstance(each, BaseException) for each in outcomes):
            raise worst([_meaning(each) if isinstance(each, BaseException) else each for each in outcomes])
        written: list[RecordMetadata | None] = [None] * len(whole.values)
        for place, found in zip(places, outcomes, strict=True):
            for row, offset in found:  # type: ignore[union-attr]  # no error among them
                written[row] = RecordMetadata(self._info.name, place, offset, whole.timestamps[row])
        return [each for each in written if each is not None]

    def _batches(self, whole: Cuttable, partitions: int, placement: Placement) -> dict[int, list[_Rows]]:
        """The batches of each partition, in the order of their sequences."""
        overhead = overhead_bytes(whole)
        batches: dict[int, list[_Rows]] = {}
        for place, lanes in self._rows(partitions, placement.partitioner).items():
            made = batches[place] = []
            for lane, rows in sorted(lanes.items()):
                ends = whole.take(rows).ends
                for start, stop, _ in cuts(ends, overhead, placement.most_bytes, placement.most_records):
                    made.append(_Rows(lane, rows[start:stop]))
        return batches

    def _rows(self, partitions: int, partitioner: str) -> dict[int, dict[int, list[int]]]:
        """The rows of each partition and lane. Those that may go anywhere go to one, which follows from the request."""
        columns, rest = self._columns, int.from_bytes(self._request[:8], "little") % partitions
        keyed = KeyedPartitions(partitioner, partitions) if partitioner in BY_KEY else None
        rows: dict[int, dict[int, list[int]]] = {}
        for row in range(len(columns.values)):
            place = columns.partitions[row] if columns.partitions else None
            key = columns.keys[row] if columns.keys else None
            if place is None:
                place = rest if key is None or keyed is None else keyed[key]
            lane = columns.priorities[row] if columns.priorities else 0
            rows.setdefault(place, {}).setdefault(lane, []).append(row)
        return rows

    async def _append(
        self, partition: int, whole: Cuttable, batches: list[_Rows], number: Number
    ) -> list[tuple[int, int]]:
        """Each row of this partition, with its offset."""
        place = TopicPartition(self._info.name, partition)
        payloads, sequence = [], 0
        for lane, rows in batches:
            values, keys, headers, stamps = whole.take(rows)[:4]
            payloads.append(
                RecordBatch.encode(
                    values,
                    keys,
                    headers,
                    timestamps=stamps,
                    lane=lane,
                    producer_id=number.producer_id,
                    epoch=number.epoch,
                    sequence=sequence,
                )
            )
            sequence += len(rows)
        way = partial(self._rq.routes.partition, place, self._info.topic_id)
        client = self._rq.settings.client
        with closing(
            Appends(
                place,
                way,
                client,
                refuse_forgotten=True,
                raises_full=True,
                patience_ms=min(self._patience_ms, client.call_timeout_ms),
            )
        ) as appends:
            try:
                for payload in payloads:
                    await appends.put(payload)
                appended = await appends.finish()
            except RayQueueError as error:
                if appends.wrote_nothing or isinstance(error, OutcomeUnknownError):
                    raise
                raise OutcomeUnknownError(f"some of these records may be written: {error}", cause=error.code) from error
        return [
            (row, _offset(each) + at)
            for each, batch in zip(appended, batches, strict=True)
            for at, row in enumerate(batch.rows)
        ]


class _Rows(NamedTuple):
    """A batch."""

    lane: int
    rows: list[int]


def check_ahead(columns: Columns, now_ms: int) -> None:
    """A partition refuses what is from the future, when others may have taken their share."""
    latest = max((each for each in columns.timestamps_ms or () if each is not None), default=now_ms)
    if latest > now_ms + MAX_AHEAD_MS:
        raise InvalidInputError(
            f"timestamp {latest} is {latest - now_ms} ms ahead of the gateway's clock; the limit is {MAX_AHEAD_MS} ms",
            timestamp=latest,
        )


def _offset(appended: Appended) -> int:
    if appended.base_offset is None:
        raise OutcomeUnknownError("this is written, but its partition has forgotten where; look for the records")
    return appended.base_offset


def _meaning(error: BaseException) -> BaseException:
    """What it means for the request that a partition has not taken its batches."""
    if isinstance(error, ProducerFencedError):
        return RequestInProgressError("another attempt of the same request is further than this one; ask again")
    if isinstance(error, ProducerError) and not isinstance(error, TooManyProducersError):
        return OutcomeUnknownError(
            f"a partition cannot say any more whether this was written before; look for the records ({error})"
        )
    return error
