"""Reading one range of a partition, from the closest replica that has it.

A follower knows a little later than the leader what is committed. The end of a
range was committed when it was planned, so a follower that does not have it yet
will soon; after one wait the leader is asked instead.

While the caller looks at one answer, the next is fetched already.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayqueue.bridge.append import pause
from rayqueue.bridge.frame import Frames
from rayqueue.bridge.lookup import route_to
from rayqueue.bridge.ranges import Range, data_loss
from rayqueue.client.channel import Channel
from rayqueue.client.connection import RayQueue
from rayqueue.client.retry import Retry
from rayqueue.client.router import GroupRoute
from rayqueue.config import MIB
from rayqueue.errors import DataLossError, OffsetOutOfRangeError, RayQueueError
from rayqueue.protocol.data import ANY_LANE, READ_FOLLOWER, Cursor, FetchedBatch, FetchRequest
from rayqueue.records import BatchHeader

_FOLLOWER_WAIT_MS = 200


@dataclass(frozen=True, slots=True)
class ScanSettings:
    fetch_bytes: int = 4 * MIB
    follower: bool = True
    """Read from the closest replica, not from the leader only."""
    fail_on_data_loss: bool = True


class Scan:
    """One range, answer by answer. Belongs to the I/O thread."""

    def __init__(self, rq: RayQueue, wanted: Range, settings: ScanSettings) -> None:
        self._rq = rq
        self._range = wanted
        self._settings = settings
        self._cursor = wanted.start
        self._follower = settings.follower
        self._host = _own_host() if settings.follower else None
        self._retry = Retry(rq.settings.client, random.Random(), time.monotonic(), idempotent=True)  # noqa: S311

    async def next(self) -> list[FetchedBatch]:
        """The next batches, at least one of them; [] once the range is read."""
        while self._cursor < self._range.end:
            try:
                batches = await self._fetch()
            except OffsetOutOfRangeError as error:
                self._out_of_range(error)
                continue
            except RayQueueError as error:
                self._follower = False
                await pause(self._retry, self._route, await self._route(), error)
                continue
            if not batches:
                self._follower = False  # it lags; the leader has what was committed when this was planned
                continue
            self._retry.progress(time.monotonic())
            last = batches[-1]
            self._cursor = last.base_offset + last.count
            kept = self._in_time(batches)
            if kept:
                return kept
        return []

    async def _fetch(self) -> Sequence[FetchedBatch]:
        route = await self._route()
        channel: Channel
        if self._follower:
            channel = await route.any_replica(self._host)
        else:
            channel = await route.leader()
        request = FetchRequest(
            (Cursor(ANY_LANE, self._cursor),),
            self._settings.fetch_bytes,
            _FOLLOWER_WAIT_MS,
            READ_FOLLOWER if self._follower else 0,
        )
        return (await channel.fetch(request)).batches

    async def _route(self) -> GroupRoute:
        return await route_to(self._rq, self._range.topic_partition, self._range.topic_id)

    def _out_of_range(self, error: OffsetOutOfRangeError) -> None:
        start = int(error.details.get("start", 0))
        if start > self._cursor:
            if self._settings.fail_on_data_loss:
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

    def _in_time(self, batches: Sequence[FetchedBatch]) -> list[FetchedBatch]:
        oldest, newest = self._range.min_timestamp_ms, self._range.max_timestamp_ms
        if oldest is None and newest is None:
            return list(batches)
        kept = []
        for batch in batches:
            header = BatchHeader.parse(batch.payload)
            if (oldest is None or header.max_timestamp >= oldest) and (
                newest is None or header.min_timestamp <= newest
            ):
                kept.append(batch)
        return kept


def scan(rq: RayQueue, wanted: Range, settings: ScanSettings | None = None) -> Iterator[list[FetchedBatch]]:
    """The batches of a range as they come. The first may begin before the range, the last end behind it."""
    settings = settings or ScanSettings()
    fetch_bytes = min(settings.fetch_bytes, rq.settings.calls.max_fetch_bytes)
    reading = Scan(rq, wanted, replace(settings, fetch_bytes=fetch_bytes))
    ahead = rq.io.run(reading.next())
    try:
        while batches := ahead.result():
            ahead = rq.io.run(reading.next())
            yield batches
    finally:
        ahead.cancel()


def read(rq: RayQueue, wanted: Range, schema: Any, settings: ScanSettings | None = None) -> Iterator[Any]:
    """The records of a range as ``pyarrow.RecordBatch`` of ``schema`` (columns of ``frame.COLUMNS``)."""
    frames = Frames(wanted.topic, wanted.partition, schema)
    for batches in scan(rq, wanted, settings):
        made = frames.make(batches, wanted.start, wanted.end)
        if made is not None:
            yield made


def _own_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
