"""Numbered: the records of an idempotent request, with numbers by which partitions know them again.

A request is written as a producer of its own would: with a producer id, an epoch
and sequences from 0 in each partition. The numbers are in its claim
(``requests``), and everything else follows from the request and the claim: which
record goes where, how they are cut into batches, their timestamps. So whoever
carries it out again, at any gateway and in the middle of another's attempt, sends
the same batches: what a partition has, it answers as the first time; what it has
not, it takes.

A producer id is used by one request at a time, the next one with a higher epoch,
once the answer to the one before is kept; one whose outcome is not known is never
used again. So partitions have to remember few of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rayqueue.bridge.append import Appends
from rayqueue.client.handle import RayQueue
from rayqueue.client.producer.accumulator import BATCH_BYTES
from rayqueue.client.producer.columns import Columns as Cuttable
from rayqueue.client.producer.columns import check_columns, cuts, overhead_bytes
from rayqueue.client.producer.delivery import RecordMetadata
from rayqueue.client.producer.partitioners import BY_KEY, KeyedPartitions
from rayqueue.errors import (
    OutcomeUnknownError,
    OversizedRecordError,
    ProducerError,
    ProducerFencedError,
    RequestInProgressError,
    TooManyProducersError,
)
from rayqueue.protocol.topics import TopicInfo, TopicPartition
from rayqueue.records import RecordBatch

if TYPE_CHECKING:
    from rayqueue.gateway.operations import Columns

REPEATABLE_MS = 5 * 3_600_000
"""Partitions remember a producer for six hours (``rayqueue.partition.producers.IDLE_MS``)."""

_MAX_FREE = 256
_MAX_EPOCH = 2**31


class Number(NamedTuple):
    """A request's place among all that were ever written."""

    producer_id: int
    epoch: int
    partitions: int
    """How many the topic had: partitions that are added later do not change where the records go."""


class Numbers:
    """Producer ids that no request uses at the moment."""

    def __init__(self, new_id: Callable[[], Awaitable[int]]) -> None:
        self._new_id = new_id
        self._free: list[tuple[int, int]] = []

    async def take(self, partitions: int) -> Number:
        producer_id, epoch = self._free.pop() if self._free else (await self._new_id(), 0)
        return Number(producer_id, epoch, partitions)

    def put_back(self, number: Number, *, used: bool) -> None:
        """Nobody will ask for it again; or it was never used."""
        epoch = number.epoch + used
        if len(self._free) < _MAX_FREE and epoch < _MAX_EPOCH:
            self._free.append((number.producer_id, epoch))


class NumberedWrite:
    """Of one request. Everything that can be wrong with it is found when it is made."""

    def __init__(self, rq: RayQueue, info: TopicInfo, columns: Columns, request: bytes) -> None:
        self._rq = rq
        self._info = info
        self._columns = columns
        self._request = request
        self._most_bytes = rq.settings.log.max_batch_bytes - BATCH_BYTES
        checked = check_columns(columns.values, columns.keys, columns.headers, 0)
        if checked.max_size + overhead_bytes(checked) > self._most_bytes:
            raise OversizedRecordError(
                f"key, value and headers have {checked.max_size} bytes; {info.name} takes {self._most_bytes}",
                size_bytes=checked.max_size,
                limit=self._most_bytes,
            )

    async def carry_out(self, number: Number, at_ms: int) -> Sequence[RecordMetadata]:
        """Where the records are, in their order. Runs in the I/O thread."""
        columns = self._columns
        given = columns.timestamps_ms or [None] * len(columns.values)
        stamps = [at_ms if each is None else each for each in given]
        whole = check_columns(columns.values, columns.keys, columns.headers, stamps)
        rows = self._rows(number.partitions)
        written: list[RecordMetadata | None] = [None] * len(stamps)
        parts = [self._append(place, whole, lanes, number) for place, lanes in rows.items()]
        outcomes = await asyncio.gather(*parts, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise _meaning(outcome)
        for place, found in zip(rows, outcomes, strict=True):
            for row, offset in found:  # type: ignore[union-attr]  # no error among them
                written[row] = RecordMetadata(self._info.name, place, offset, stamps[row])
        return [each for each in written if each is not None]

    def _rows(self, partitions: int) -> dict[int, dict[int, list[int]]]:
        """The rows of each partition and lane. Those that may go anywhere go to one, which follows from the request."""
        columns, rest = self._columns, int.from_bytes(self._request[:8], "little") % partitions
        partitioner = self._rq.settings.producer.partitioner
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
        self, partition: int, whole: Cuttable, lanes: dict[int, list[int]], number: Number
    ) -> list[tuple[int, int]]:
        """Each row of this partition, with its offset."""
        place = TopicPartition(self._info.name, partition)
        payloads, ordered, sequence = [], [], 0
        for lane, rows in sorted(lanes.items()):
            part = whole.take(rows)
            bound = self._info.settings.max_backlog_records
            for start, stop, _ in cuts(part.ends, overhead_bytes(part), self._most_bytes, bound):
                values, keys, headers, stamps = part.slice(start, stop)[:4]
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
                ordered.append(rows[start:stop])
                sequence += stop - start
        way = partial(self._rq.routes.partition, place, self._info.topic_id)
        with closing(Appends(place, way, self._rq.settings.client, refuse_forgotten=True)) as appends:
            for payload in payloads:
                await appends.put(payload)
            appended = await appends.finish()
        return [
            (row, (each.base_offset or 0) + at)
            for each, batch in zip(appended, ordered, strict=True)
            for at, row in enumerate(batch)
        ]


def _meaning(error: BaseException) -> BaseException:
    """What it means for the request that a partition has not taken its batches."""
    if isinstance(error, ProducerFencedError):
        return RequestInProgressError("another attempt of the same request is further than this one; ask again")
    if isinstance(error, ProducerError) and not isinstance(error, TooManyProducersError):
        return OutcomeUnknownError(
            f"a partition cannot say any more whether this was written before; look for the records ({error})"
        )
    return error
