"""A client's way to a partition: over the socket that the actor hands out, beside the same through Ray calls.

Three replicas as Ray actors, fsync before every answer. Each figure is taken
over a ``Channel`` and by calls of the leader's actor in the same run, in turns,
so that what else the machine does touches both.

    python benchmarks/client_channel.py [--quick] [--json]

"In flight" is how many batches of 1,000 x 100 B are under way. ``nothing`` is a
call that does nothing: ``GetStatus`` over the channel, an empty method by Ray.
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

from benchmarks._bench import Bench, Figures, median, parser, percentile
from rayqueue.client.channel import Channel
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.io import IoThread
from rayqueue.client.router import GroupRoute
from rayqueue.config import Settings
from rayqueue.protocol.calls import GetStatus
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchRequest
from rayqueue.records import RecordBatch
from rayqueue.testing.ray_group import ReplicaGroup

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
    """A group, its leader by both ways, and how long each measurement takes."""

    def __init__(self, group: ReplicaGroup, seconds: float) -> None:
        self.io = IoThread.shared()
        self.seconds = seconds
        self.channel: Channel = self.io.call(self._open(group), 30)
        self.actor: Any = group.handle(self.channel.endpoint.node)

    async def _open(self, group: ReplicaGroup) -> Channel:
        self.route = GroupRoute(group.group_id, group.nodes, group.settings.namespace, group.settings)
        return await self.route.leader()

    def both(
        self, ask: Callable[[], Awaitable[Any]], call: Callable[[], Any], width: int
    ) -> tuple[list[float], list[float]]:
        """The times of either way, a slice of one after a slice of the other."""
        direct: list[float] = []
        through: list[float] = []
        slice_s = self.seconds / SLICES
        for _ in range(SLICES):
            direct += self.io.call(over_channel(ask, width, slice_s), slice_s + 60)
            through += by_ray(call, width, slice_s)
        return direct, through


def latencies(bed: Bed) -> Figures:
    one = encoded(1)
    nothing = bed.both(lambda: bed.channel.call(GetStatus()), bed.actor.address.remote, 1)
    append = bed.both(lambda: bed.channel.append(one), lambda: bed.actor.append.remote(one), 1)
    return {
        f"{what}_{way}_p{percent}_ms": percentile(times_ms, percent)
        for what, pair in (("nothing", nothing), ("append", append))
        for way, times_ms in zip(("channel", "ray"), pair, strict=True)
        for percent in (50, 99)
    }


def throughputs(bed: Bed) -> Figures:
    batch = encoded(RECORDS)
    figures: Figures = {}
    for width in FLIGHTS:
        pair = bed.both(lambda: bed.channel.append(batch), lambda: bed.actor.append.remote(batch), width)
        for way, times_ms in zip(("channel", "ray"), pair, strict=True):
            figures[f"batches_{way}_{width}_msgs_per_s"] = len(times_ms) * RECORDS / bed.seconds
            figures[f"batches_{way}_{width}_p50_ms"] = percentile(times_ms, 50)
            figures[f"batches_{way}_{width}_p99_ms"] = percentile(times_ms, 99)
    return figures


def fetches(bed: Bed) -> Figures:
    """The newest 16 MB, which are in the leader's memory, again and again, 1 MB at a time."""
    end = ray.get(bed.actor.status.remote()).high_watermark
    start = max(0, end - (16 << 20) // RECORD_BYTES)

    async def direct() -> int:
        offset, fetched, deadline = start, 0, time.perf_counter() + bed.seconds
        while time.perf_counter() < deadline:
            answer = await bed.channel.fetch(FetchRequest((Cursor(ANY_LANE, offset),), FETCH_BYTES))
            fetched += sum(len(payload) for _, _, payload in answer.batches)
            offset = answer.batches[-1].base_offset + answer.batches[-1].count
            offset = start if offset >= end else offset
        return fetched

    def through_ray() -> int:
        offset, fetched, deadline = start, 0, time.perf_counter() + bed.seconds
        while time.perf_counter() < deadline:
            answer = ray.get(bed.actor.fetch.remote(offset, FETCH_BYTES))
            fetched += sum(len(batch.payload) for batch in answer.batches)
            offset = answer.batches[-1].base_offset + answer.batches[-1].count
            offset = start if offset >= end else offset
        return fetched

    return {
        "fetch_channel_mb_per_s": bed.io.call(direct(), bed.seconds + 60) / bed.seconds / 1e6,
        "fetch_ray_mb_per_s": through_ray() / bed.seconds / 1e6,
    }


def measure(bench: Bench, folder: Path) -> None:
    parts = (("latency", latencies), ("throughput", throughputs), ("fetch", fetches))
    rounds = 1 if bench.quick else 3
    with bench.progress(1 + rounds * len(parts)) as steps, embedded_ray():
        steps.next("starting Ray and three replicas")
        with ReplicaGroup.start("bench-0", Settings(data_dir=folder)) as group:
            bed = Bed(group, 1.0 if bench.quick else 3.0)
            by_ray(lambda: bed.actor.append.remote(encoded(1)), 4, 1.0)
            found: list[Figures] = []
            for number in range(rounds):
                figures: Figures = {}
                for name, part in parts:
                    steps.next(f"{name}, round {number + 1}")
                    figures |= part(bed)
                found.append(figures)
            bed.io.loop.call_soon_threadsafe(bed.route.close)
    bench.add(**{key: median([each[key] for each in found]) for key in found[0]})


def show(bench: Bench) -> None:
    figures = bench.figures

    def row(what: str, key: str) -> list[object]:
        direct, through = figures[key.replace("*", "channel")], figures[key.replace("*", "ray")]
        return [what, direct, through, direct / through]

    rows = [
        row("a call that does nothing, p50 ms", "nothing_*_p50_ms"),
        row("append of one record, p50 ms", "append_*_p50_ms"),
        row("append of one record, p99 ms", "append_*_p99_ms"),
    ]
    for width in FLIGHTS:
        rows.append(row(f"1,000 x 100 B, {width} in flight, msg/s", f"batches_*_{width}_msgs_per_s"))
        rows.append(row(f"1,000 x 100 B, {width} in flight, p50 ms", f"batches_*_{width}_p50_ms"))
    rows.append(row("fetch, MB/s", "fetch_*_mb_per_s"))
    bench.table("Three replicas, fsync before every answer", ("", "channel", "Ray call", "ratio"), rows)


def main() -> None:
    bench = Bench("client_channel", parser(__doc__).parse_args())
    with bench.data_dir() as folder:
        measure(bench, folder)
    show(bench)
    bench.finish()


if __name__ == "__main__":
    main()
