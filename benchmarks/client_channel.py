"""A client's way to a partition: the socket that the actor hands out, beside a call of the actor that does nothing.

Three replicas as Ray actors, fsync before every answer. What a request over a
``Channel`` costs without the producer and the consumer around it, and what any
Ray call costs in the same run, in turns, so that what else the machine does
touches both.

    python benchmarks/client_channel.py [--quick] [--json]

"In flight" is how many batches of 1,000 x 100 B are under way. ``nothing`` is a
call that does nothing: ``GetStatus`` over the channel, ``address`` by Ray.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray

import rayqueue
from benchmarks._bench import Bench, Figures, median, parser, percentile
from rayqueue.actors.names import actor_name
from rayqueue.client.embedded import embedded_ray
from rayqueue.config import Settings
from rayqueue.net.channel import Channel
from rayqueue.protocol.calls import GetBounds, GetStatus
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchRequest
from rayqueue.records import RecordBatch

RECORD_BYTES = 100
RECORDS = 1000
FLIGHTS = (1, 8, 16)
FETCH_BYTES = 1 << 20
TIMESTAMP = 1_700_000_000_000
SLICES = 5


def encoded(records: int) -> bytes:
    return RecordBatch.encode([os.urandom(RECORD_BYTES)] * records, timestamps=TIMESTAMP)


async def over_channel(ask: Callable[[], Awaitable[Any]], width: int, seconds: float) -> list[float]:
    """Keep ``width`` requests under way for so long; the time of each, in ms."""
    clock = time.perf_counter
    times_ms: list[float] = []
    end = clock() + seconds

    async def one_after_the_other() -> None:
        while (started := clock()) < end:
            await ask()
            times_ms.append((clock() - started) * 1000)

    await asyncio.gather(*(one_after_the_other() for _ in range(width)))
    return times_ms


def by_ray(call: Callable[[], Any], width: int, seconds: float) -> list[float]:
    clock = time.perf_counter
    waiting: deque[tuple[float, Any]] = deque()
    times_ms: list[float] = []
    end = clock() + seconds
    while waiting or clock() < end:
        while len(waiting) < width and clock() < end:
            waiting.append((clock(), call()))
        started, ref = waiting.popleft()
        ray.get(ref)
        times_ms.append((clock() - started) * 1000)
    return times_ms


class Bed:
    """A partition, the channel to its leader, the leader's actor, and how long each measurement takes."""

    def __init__(self, rq: rayqueue.RayQueue, topic: str, seconds: float) -> None:
        self.io = rq.io
        self.seconds = seconds
        self.channel, group_id = self.io.call(self._open(rq, topic), 30)
        self.actor: Any = ray.get_actor(actor_name(group_id, self.channel.endpoint.replica_id), rq.namespace)

    async def _open(self, rq: rayqueue.RayQueue, topic: str) -> tuple[Channel, Any]:
        route = await rq.routes.partition(rayqueue.TopicPartition(topic, 0))
        return await route.leader(), route.group_id

    def times_ms(self, ask: Callable[[], Awaitable[Any]], width: int = 1) -> list[float]:
        return self.io.call(over_channel(ask, width, self.seconds), self.seconds + 60)


def latencies(bed: Bed) -> Figures:
    nothing: list[float] = []
    by_actor: list[float] = []
    slice_s = bed.seconds / SLICES
    for _ in range(SLICES):
        nothing += bed.io.call(over_channel(lambda: bed.channel.call(GetStatus()), 1, slice_s), slice_s + 60)
        by_actor += by_ray(bed.actor.address.remote, 1, slice_s)
    one = encoded(1)
    append = bed.times_ms(lambda: bed.channel.append(one))
    return {
        f"{what}_p{percent}_ms": percentile(times_ms, percent)
        for what, times_ms in (("nothing_channel", nothing), ("nothing_ray", by_actor), ("append", append))
        for percent in (50, 99)
    }


def throughputs(bed: Bed) -> Figures:
    batch = encoded(RECORDS)
    figures: Figures = {}
    for width in FLIGHTS:
        times_ms = bed.times_ms(lambda: bed.channel.append(batch), width)
        figures[f"batches_{width}_msgs_per_s"] = len(times_ms) * RECORDS / bed.seconds
        figures[f"batches_{width}_p50_ms"] = percentile(times_ms, 50)
        figures[f"batches_{width}_p99_ms"] = percentile(times_ms, 99)
    return figures


def fetches(bed: Bed) -> Figures:
    """The newest 16 MB, which are in the leader's memory, again and again, 1 MB at a time."""

    async def fetched_bytes() -> int:
        end = (await bed.channel.call(GetBounds())).end
        start = max(0, end - (16 << 20) // RECORD_BYTES)
        offset, fetched, deadline = start, 0, time.perf_counter() + bed.seconds
        while time.perf_counter() < deadline:
            answer = await bed.channel.fetch(FetchRequest((Cursor(ANY_LANE, offset),), FETCH_BYTES))
            fetched += sum(len(payload) for _, _, payload in answer.batches)
            offset = answer.batches[-1].base_offset + answer.batches[-1].count
            offset = start if offset >= end else offset
        return fetched

    return {"fetch_mb_per_s": bed.io.call(fetched_bytes(), bed.seconds + 60) / bed.seconds / 1e6}


def measure(bench: Bench, folder: Path) -> None:
    parts = (("latency", latencies), ("throughput", throughputs), ("fetch", fetches))
    rounds = 1 if bench.quick else 3
    with bench.progress(1 + rounds * len(parts)) as steps, embedded_ray():
        steps.next("starting Ray and three replicas")
        rq = rayqueue.connect(settings=Settings(data_dir=folder))
        rq.create_topic("bench", partitions=1, replication=3)
        bed = Bed(rq, "bench", 1.0 if bench.quick else 3.0)
        bed.times_ms(lambda: bed.channel.append(encoded(1)), 4)
        found: list[Figures] = []
        for number in range(rounds):
            figures: Figures = {}
            for name, part in parts:
                steps.next(f"{name}, round {number + 1}")
                figures |= part(bed)
            found.append(figures)
        rq.shutdown()
    bench.add(**{key: median([each[key] for each in found]) for key in found[0]})


def show(bench: Bench) -> None:
    figures = bench.figures
    rows: list[list[object]] = [
        ["a call that does nothing, p50 ms", figures["nothing_channel_p50_ms"]],
        ["a Ray call that does nothing, p50 ms", figures["nothing_ray_p50_ms"]],
        ["append of one record, p50 ms", figures["append_p50_ms"]],
        ["append of one record, p99 ms", figures["append_p99_ms"]],
    ]
    for width in FLIGHTS:
        rows.append([f"1,000 x 100 B, {width} in flight, msg/s", figures[f"batches_{width}_msgs_per_s"]])
        rows.append([f"1,000 x 100 B, {width} in flight, p50 ms", figures[f"batches_{width}_p50_ms"]])
    rows.append(["fetch, MB/s", figures["fetch_mb_per_s"]])
    bench.table("Three replicas, fsync before every answer", ("", ""), rows)


def main() -> None:
    bench = Bench("client_channel", parser(__doc__).parse_args())
    with bench.data_dir() as folder:
        measure(bench, folder)
    show(bench)
    bench.finish()


if __name__ == "__main__":
    main()
