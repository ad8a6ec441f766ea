"""Load on a partition: one producer's batches over one connection, a bounded number in flight, and what it took.

What it measures includes making each batch anew: its sequence changes, so its checksum does.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayqueue.net.channel import Channel
from rayqueue.protocol.data import Appended
from rayqueue.records import HEADER_BYTES, BatchHeader
from rayqueue.records.header import pack_header


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The course of appending ``batches``, seen from the client."""

    batches: int
    records: int
    batch_bytes: int
    wall_s: float
    latencies_ms: array[float]
    """From the call to its answer, batch by batch."""

    @property
    def batches_per_s(self) -> float:
        return self.batches / self.wall_s

    @property
    def records_per_s(self) -> float:
        return self.records / self.wall_s


class _Stamp:
    """The same batch again and again, each time with the producer's next sequence."""

    def __init__(self, batch: bytes) -> None:
        header = BatchHeader.parse(batch)
        self._batch = batch
        self._parts: list[bytes | bytearray | memoryview] = [batch[HEADER_BYTES:]]
        self._next = 0
        self._count = header.count
        self._idempotent = header.producer_id != 0
        self._fields: dict[str, Any] = {
            name: getattr(header, name)
            for name in (
                "count",
                "producer_id",
                "epoch",
                "lane",
                "compression",
                "flags",
                "min_timestamp",
                "max_timestamp",
                "message_bytes",
            )
        }

    def next(self) -> bytes:
        if not self._idempotent:
            return self._batch
        header = pack_header(parts=self._parts, sequence=self._next, **self._fields)
        self._next += self._count
        return b"".join((header, *self._parts))


async def drive(channel: Channel, batch: bytes, count: int, in_flight: int) -> LoadReport:
    """Append the batch ``count`` times, with at most ``in_flight`` unanswered. The first error ends it.

    If the batch has a producer id, it must be a new one: sequences count from 0.
    """
    stamp = _Stamp(batch)
    latencies_ms = array("d")
    clock = time.perf_counter
    left = count
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send() -> None:
        nonlocal left
        left -= 1
        prepared = stamp.next()
        channel.append(prepared).add_done_callback(partial(answered, clock()))

    def answered(sent_s: float, answer: asyncio.Future[Appended]) -> None:
        latencies_ms.append((clock() - sent_s) * 1000)
        if done.done():
            return
        if (error := answer.exception()) is not None:
            done.set_exception(error)
        elif left:
            send()
        elif len(latencies_ms) == count:
            done.set_result(None)

    started_s = clock()
    for _ in range(min(in_flight, count)):
        send()
    await done
    records = BatchHeader.parse(batch).count * count
    return LoadReport(count, records, len(batch) * count, clock() - started_s, latencies_ms)
