"""The fetcher over real partitions: prefetching, failures, what retention has deleted, and where to begin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rayqueue.client.consumer.assigned import AssignedPartition
from rayqueue.client.consumer.fetcher import Fetcher
from rayqueue.client.consumer.subscription import Subscription
from rayqueue.config import Settings
from rayqueue.errors import DamagedLogError, NotLeaderError, OffsetOutOfRangeError, OutcomeUnknownError
from rayqueue.protocol.calls import Position
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record
from tests.unit.client.consumer.consumer_parts import records_of
from tests.unit.client.small_cluster import LocalPartition, SmallCluster, quick_settings, until

P0 = TopicPartition("orders", 0)


class Bench:
    """One partition, and a fetcher that reads it."""

    def __init__(self, settings: Settings, cluster: SmallCluster, lanes: int) -> None:
        self.lanes = lanes
        self.cluster = cluster
        self.settings = settings
        self.subscription = Subscription(settings.consumer)
        self.fetcher = Fetcher(self.subscription, cluster.process(), settings, Random(1))
        loop = asyncio.get_running_loop()

        def kick() -> None:
            loop.call_soon_threadsafe(self.fetcher.kick)

        self.subscription.on_room = kick
        self.assigned = AssignedPartition(P0, cluster.machine.topics[P0.topic].topic_id)

    @property
    def partition(self) -> LocalPartition:
        return self.cluster.partitions[P0]

    async def start(self, position: dict[int, int] | None = None, **options: Any) -> bool:
        self.subscription.add(self.assigned)
        given = None if position is None else Position(1, position)
        new = await self.fetcher.begin(self.assigned, given, **options)
        self.fetcher.start(self.assigned)
        return new

    async def take(self, records: int) -> list[Record]:
        found: list[Record] = []

        def more() -> bool:
            taken = self.subscription.take(records - len(found), records_of)
            found.extend(taken[1] if taken else [])
            return len(found) >= records

        await until(more)
        return found


def on_bench(tmp: Path, test: Callable[[Bench], Coroutine[Any, Any, None]], lanes: int = 1, **consumer: Any) -> None:
    async def run() -> None:
        cluster = SmallCluster()
        await cluster.create("orders", lanes=lanes)
        bench = Bench(quick_settings(tmp, **consumer), cluster, lanes)
        try:
            await test(bench)
        finally:
            bench.fetcher.close()
            cluster.close()

    asyncio.run(run())


def offsets(records: list[Record]) -> list[int]:
    return [record.offset for record in records]


def test_records_come_without_being_asked_for(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.partition.append(10)
        assert await bench.start()
        await until(lambda: bench.subscription.total_bytes)
        assert offsets(await bench.take(10)) == list(range(10))
        bench.partition.append(3)  # a fetch waits there already
        waiting = len(bench.partition.fetches)
        assert offsets(await bench.take(3)) == [10, 11, 12]
        assert len(bench.partition.fetches) <= waiting + 1

    on_bench(tmp_path, test, fetch_wait_ms=60_000)


def test_fetching_stops_when_enough_waits(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(50):
            bench.partition.append(100)
        await bench.start()
        await until(lambda: bench.subscription.total_bytes >= 10_000)
        asked = len(bench.partition.fetches)
        await asyncio.sleep(0.05)
        assert len(bench.partition.fetches) == asked
        assert bench.subscription.total_bytes < 100_000
        assert offsets(await bench.take(5000)) == list(range(5000))

    on_bench(tmp_path, test, prefetch_bytes=10_000, fetch_bytes=5_000)


@pytest.mark.parametrize(
    "error",
    [NotLeaderError("elsewhere", leader="r2"), OutcomeUnknownError("gone"), DamagedLogError("rotten", index=3)],
)
def test_a_failure_is_retried_from_the_same_cursor(tmp_path: Path, error: Any) -> None:
    async def test(bench: Bench) -> None:
        bench.partition.append(5)
        bench.partition.failures += [error] * 3
        await bench.start()
        assert offsets(await bench.take(5)) == list(range(5))
        bench.partition.failures.append(error)
        bench.partition.append(5)
        assert offsets(await bench.take(5)) == list(range(5, 10))
        # The fetch that waited at the end may have been answered before it could fail: then the next one does.
        await until(lambda: len(bench.partition.found_out) >= 4)

    on_bench(tmp_path, test)


@pytest.mark.parametrize(("start", "first"), [("earliest", 30), ("latest", 50)])
def test_what_retention_has_deleted_is_passed_over(tmp_path: Path, start: str, first: int) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(5):
            bench.partition.append(10)
        bench.partition.trim(30)
        await bench.start({0: 5})
        await until(lambda: bench.assigned.lanes[0].cursor >= 30)
        bench.partition.append(5)
        assert (await bench.take(1))[0].offset == first

    on_bench(tmp_path, test, start=start)


def test_what_was_fetched_before_the_trim_is_handed_out(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.partition.append(10)
        await bench.start()
        await until(lambda: bench.assigned.lanes[0].cursor == 10)
        bench.subscription.pause([P0])
        await until(lambda: not bench.assigned.in_flight)
        for _ in range(4):
            bench.partition.append(10)
        bench.partition.trim(30)
        bench.subscription.resume([P0])
        assert offsets(await bench.take(30)) == [*range(10), *range(30, 50)]

    on_bench(tmp_path, test, fetch_wait_ms=20)


def test_without_a_policy_it_is_an_error_until_a_seek(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(5):
            bench.partition.append(10)
        bench.partition.trim(30)
        await bench.start({0: 5})
        await until(bench.subscription.error)
        error = bench.subscription.error()
        assert isinstance(error, OffsetOutOfRangeError)
        assert (error.details["start"], error.details["end"], error.details["topic"]) == (30, 50, "orders")
        bench.subscription.seek(P0, {0: 40})
        assert offsets(await bench.take(10)) == list(range(40, 50))
        assert bench.subscription.error() is None

    on_bench(tmp_path, test, start="error")


def test_a_position_past_the_end_follows_the_policy(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.partition.append(10)
        await bench.start({0: 10})
        bench.subscription.seek(P0, {0: 99})
        assert offsets(await bench.take(10)) == list(range(10))
        assert bench.assigned.rewind, "it goes back on purpose"

    on_bench(tmp_path, test)


def test_lanes_without_a_position_beside_one_that_has_miss_nothing(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.partition.append(4, lane=0)
        bench.partition.append(4, lane=1)
        await bench.start({0: 2})
        assert offsets(await bench.take(6)) == [4, 5, 6, 7, 2, 3]

    on_bench(tmp_path, test, lanes=2, start="latest")


def test_an_urgent_record_overtakes_what_waits(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(20):
            bench.partition.append(50)
        await bench.start()
        await until(lambda: bench.subscription.total_bytes >= 10_000)
        first = await bench.take(10)
        assert {record.lane for record in first} == {0}
        bench.partition.append(2, lane=2)
        await until(lambda: bench.assigned.lanes[2].chunks)
        rest = await bench.take(1002 - 10)
        assert [record.lane for record in rest[:2]] == [2, 2]
        assert offsets(first) + offsets(rest[2:]) == list(range(1000))

    on_bench(tmp_path, test, lanes=3, prefetch_bytes=10_000, fetch_bytes=5_000, fetch_wait_ms=60_000)


def test_a_backlog_is_read_lane_by_lane(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        rng = Random(7)
        for _ in range(60):
            bench.partition.append(10, lane=rng.randrange(3))
        bench.partition.append(10, lane=0)
        await bench.start()
        await until(lambda: bench.assigned.lanes[0].chunks or bench.subscription.total_bytes >= 8_000)
        found = await bench.take(610)
        shelf = bench.partition.shelf
        assert offsets(found) == shelf.offsets(2) + shelf.offsets(1) + shelf.offsets(0)

    on_bench(tmp_path, test, lanes=3, prefetch_bytes=8_000, fetch_bytes=4_000)
