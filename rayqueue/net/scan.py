"""Reading a partition: one fetch, and the scan of a range.

``fetch`` is the one way in which a consumer, a peek and a scan ask a replica for
batches. A ``Scan`` reads a range of offsets from its start to its end, from the
leader or from the closest replica that has it, and decides what becomes of
records that retention has deleted and of batches that cannot be read.

A follower knows a little later than the leader what is committed. The end of a
range was committed when it was planned, so a follower that does not have it yet
will soon; after one wait the leader is asked instead.

Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from rayqueue.config import MIB, Settings
from rayqueue.errors import (
    CorruptBatchError,
    DataLossError,
    InvalidInputError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    RayQueueError,
    UnknownFormatError,
    UnreadableBatchError,
)
from rayqueue.net.backoff import Retry
from rayqueue.net.interfaces import Route, Routes
from rayqueue.net.requests import heard, request
from rayqueue.protocol.data import (
    ANY_LANE,
    READ_COMMITTED,
    READ_FOLLOWER,
    Cursor,
    FetchAnswer,
    FetchedBatch,
    FetchRequest,
)
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import BatchHeader

_log = logging.getLogger(__name__)

_FOLLOWER_WAIT_MS = 200

OnCorrupt = Literal["raise", "skip"]


async def fetch(route: Route, wanted: FetchRequest, *, patience_ms: int, host: str | None = None) -> FetchAnswer:
    """The answer of the leader; with ``READ_FOLLOWER`` of any replica, one on ``host`` if there is one.

    ``OutcomeUnknownError`` if the answer takes ``patience_ms`` longer than the fetch may wait: the replica may hang,
    with its connection open.
    """
    if wanted.flags & READ_FOLLOWER:
        channel = await route.any_replica(host)
    else:
        channel = route.leader_channel or await route.leader()
    answer = channel.fetch(wanted)
    timeout_ms = wanted.max_wait_ms + patience_ms
    late = False

    def give_up() -> None:
        nonlocal late
        late = True
        answer.cancel()

    timer = asyncio.get_running_loop().call_later(timeout_ms / 1000, give_up)
    try:
        return await answer
    except asyncio.CancelledError:
        if late:
            raise OutcomeUnknownError(f"no answer to a fetch within {timeout_ms} ms") from None
        raise
    finally:
        timer.cancel()


@dataclass(frozen=True, slots=True)
class Range:
    """``start <= offset < end`` of one partition, and of these only records whose timestamp may be in between."""

    topic: str
    topic_id: int
    partition: int
    start: int
    end: int
    min_timestamp_ms: int | None = None
    """Batches in which all records are older are left out."""
    max_timestamp_ms: int | None = None
    """Batches in which all are younger are."""

    def __len__(self) -> int:
        return max(0, self.end - self.start)

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True, slots=True)
class ScanSettings:
    fetch_bytes: int = 4 * MIB
    follower: bool = True
    """Read from the closest replica, not from the leader only."""
    fail_on_data_loss: bool = True
    committed: bool = False
    """Of transactions, only what is committed. The range ends at the last stable offset, or before it."""
    on_corrupt: OnCorrupt = "raise"
    """What becomes of a batch that cannot be read: an error with its place, or a line in the log."""

    def __post_init__(self) -> None:
        if self.on_corrupt not in get_args(OnCorrupt):
            raise InvalidInputError(f"on_corrupt is raise or skip, not {self.on_corrupt!r}", option="on_corrupt")


class Scan:
    """One range, answer by answer."""

    def __init__(
        self, routes: Routes, wanted: Range, settings: Settings, options: ScanSettings, *, host: str | None = None
    ) -> None:
        """``host``: the caller's own, where a replica is closest."""
        self._route = partial(routes.partition, wanted.topic_partition, wanted.topic_id)
        self._range = wanted
        self._options = options
        self._host = host
        self._fetch_bytes = min(options.fetch_bytes, settings.calls.max_fetch_bytes)
        self._client = settings.client
        self._cursor = wanted.start
        self._follower = options.follower
        self._rng = random.Random()  # noqa: S311  # jitter
        self.skipped = 0
        """Batches that could not be read, and were passed over."""

    async def batches(self) -> AsyncIterator[FetchedBatch]:
        """All of them, fetched ahead."""
        loop = asyncio.get_running_loop()
        ahead = loop.create_task(self.next())
        try:
            while found := await ahead:
                ahead = loop.create_task(self.next())
                ahead.add_done_callback(heard)
                for batch in found:
                    yield batch
        finally:
            ahead.cancel()

    async def next(self) -> list[FetchedBatch]:
        """The next batches, at least one of them; [] once the range is read.

        The first may begin before the range, the last end behind it. Who calls it again before looking at what came
        has the next ones meanwhile.
        """
        while self._cursor < self._range.end:
            retry = Retry(self._client, self._rng, asyncio.get_running_loop().time())
            try:
                batches, self._cursor = await request(self._route, self._fetch, retry)
            except OffsetOutOfRangeError as error:
                self._out_of_range(error)
                continue
            kept = [batch for batch in batches if self._in_time(batch)]
            if kept:
                return kept
        return []

    def unreadable(self, batch: FetchedBatch, error: RayQueueError) -> None:
        """The caller cannot decode this batch. ``UnreadableBatchError``, unless it is to be passed over."""
        start, end = max(batch.base_offset, self._range.start), min(batch.base_offset + batch.count, self._range.end)
        raised = self._options.on_corrupt == "raise"
        self.skipped += not raised
        advice = "on_corrupt='skip' leaves it out" if raised else f"left out, number {self.skipped} of this range"
        problem = unreadable(self._range.topic_partition, start, end, error, advice=advice)
        if raised:
            raise problem from error
        _log.error("%s", problem)

    async def _fetch(self, route: Route) -> tuple[Sequence[FetchedBatch], int]:
        """The next batches, and the offset to go on at: past what was aborted, if that is left out."""
        flags = (READ_FOLLOWER if self._follower else 0) | (READ_COMMITTED if self._options.committed else 0)
        wanted = FetchRequest((Cursor(ANY_LANE, self._cursor),), self._fetch_bytes, _FOLLOWER_WAIT_MS, flags)
        # After a follower that hangs there must be time for the leader.
        patience_ms = self._client.call_timeout_ms // 2
        try:
            answer = await fetch(route, wanted, patience_ms=patience_ms, host=self._host)
        except OffsetOutOfRangeError:
            raise
        except RayQueueError:
            self._follower = False
            raise
        last = [batch.base_offset + batch.count for batch in answer.batches[-1:]]
        cursor = max([self._cursor, *last, *(each.offset for each in answer.cursors)])
        if cursor > self._cursor:
            return answer.batches, cursor
        if not self._follower:
            raise OutcomeUnknownError(f"{self._range.topic_partition} does not have offset {self._cursor} yet")
        self._follower = False  # it lags; the leader has what was committed when this was planned
        return await self._fetch(route)

    def _out_of_range(self, error: OffsetOutOfRangeError) -> None:
        start = int(error.details.get("start", 0))
        if start > self._cursor:
            if self._options.fail_on_data_loss:
                raise data_loss(self._range.topic_partition, self._cursor, start)
            self._cursor = min(start, self._range.end)
        elif self._follower:
            self._follower = False
        else:
            raise DataLossError(
                f"{self._range.topic_partition} ends at {error.details.get('end')}, before offset {self._cursor}: "
                "it is not the log that this range was planned for",
                offset=self._cursor,
            ) from error

    def _in_time(self, batch: FetchedBatch) -> bool:
        oldest, newest = self._range.min_timestamp_ms, self._range.max_timestamp_ms
        if oldest is None and newest is None:
            return True
        try:
            header = BatchHeader.parse(batch.payload)
        except (CorruptBatchError, UnknownFormatError):
            return True  # whoever decodes it finds out
        return (oldest is None or header.max_timestamp >= oldest) and (newest is None or header.min_timestamp <= newest)


def data_loss(partition: TopicPartition, wanted: int, start: int) -> DataLossError:
    return DataLossError(
        f"records {wanted} to {start - 1} of {partition} are needed and retention has deleted them. Set "
        "failOnDataLoss=false to go on without them; a group with pin=true keeps this from happening",
        topic=partition.topic,
        partition=partition.partition,
        offset=wanted,
        start=start,
    )


def unreadable(
    partition: TopicPartition, start: int, end: int, error: RayQueueError, *, advice: str
) -> UnreadableBatchError:
    return UnreadableBatchError(
        f"{partition} cannot be read from offset {start} to {end}: {error}; {advice}",
        topic=partition.topic,
        partition=partition.partition,
        offset=start,
        end=end,
    )
