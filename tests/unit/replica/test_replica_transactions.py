"""Transactions by their calls: the real services of coordinator and partitions, real channels and frames."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rayqueue.config import Settings
from rayqueue.errors import (
    ProducerFencedError,
    TransactionAbortedError,
    TransactionPendingError,
    UnknownTransactionError,
)
from rayqueue.net.route import CoordinatorRoute, GroupRoute
from rayqueue.partition import reader
from rayqueue.protocol.calls import Bounds, Commit, CreateTopic, GetBounds, GetLag, GetPosition
from rayqueue.protocol.data import ANY_LANE, READ_COMMITTED, Cursor, FetchAnswer, FetchRequest
from rayqueue.protocol.topics import TopicSettings
from rayqueue.protocol.transactions import (
    Decided,
    EndTransaction,
    GetTransactions,
    InitTransactions,
    ListTransactions,
    MarkTransaction,
    StageOffsets,
    Transaction,
)
from rayqueue.records import RecordBatch
from rayqueue.testing.memory_cluster import MemoryCluster, with_secret


class World:
    """A cluster in memory, and what a producer does with it."""

    def __init__(self, *, log: dict[str, Any] | None = None, **cluster: Any) -> None:
        self.settings = with_secret(Settings.model_validate({"cluster": cluster, "log": log or {}}))
        self.cluster = MemoryCluster(self.settings, 1)
        self.coordinator = CoordinatorRoute(self.cluster, self.settings)
        self.routes: dict[str, GroupRoute] = {}

    async def begin(self, partitions: int = 2, **settings: Any) -> None:
        wanted = TopicSettings(partitions=partitions, replication=1, **settings)
        info = await self.coordinator.call(CreateTopic(name="t", settings=wanted))
        for part in info.partitions:
            ids = [replica.replica_id for replica in part.replicas]
            self.routes[part.group_id] = GroupRoute(part.group_id, ids, self.cluster, self.settings)
        self.groups = list(self.routes)

    async def init(self, attempt: str = "a", timeout_ms: int = 60_000) -> Any:
        call = InitTransactions(transactional_id="tx", attempt=attempt, timeout_ms=timeout_ms, owner="me")
        return await self.coordinator.call(call)

    async def send(self, group: str, at: Transaction | None, *values: bytes, sequence: int = 0) -> None:
        channel = await self.routes[group].leader()
        fields: dict[str, Any] = {} if at is None else {"producer_id": at.producer_id, "epoch": at.epoch}
        sent = RecordBatch.encode(list(values), timestamps=1, sequence=sequence, transactional=at is not None, **fields)
        await channel.append(sent)

    async def end(self, at: Transaction, commit: bool = True) -> Decided:
        call = EndTransaction(
            transactional_id="tx",
            producer_id=at.producer_id,
            epoch=at.epoch,
            commit=commit,
            participants=tuple(self.groups),
        )
        return await self.coordinator.call(call)  # type: ignore[no-any-return]

    async def mark(self, at: Transaction, decided: Decided) -> None:
        for group, seal in zip(self.groups, decided.seals, strict=True):
            await self.routes[group].call(
                MarkTransaction(producer_id=at.producer_id, epoch=at.epoch, commit=decided.committed, seal=seal)
            )

    async def fetch(self, group: str, offset: int = 0, wait_ms: int = 0, flags: int = READ_COMMITTED) -> FetchAnswer:
        channel = await self.routes[group].leader()
        return await channel.fetch(FetchRequest((Cursor(0, offset),), 1 << 20, wait_ms, flags))

    async def values(self, group: str, flags: int = READ_COMMITTED) -> list[bytes | None]:
        answer = await self.fetch(group, flags=flags)
        return [value for each in answer.batches for value in RecordBatch.decode(each.payload).values()]

    async def all_values(self) -> list[list[bytes | None]]:
        return [await self.values(group) for group in self.groups]

    def close(self) -> None:
        for route in (self.coordinator, *self.routes.values()):
            route.close()
        self.cluster.close()


def run(scenario: Callable[[World], Awaitable[None]], **cluster: Any) -> None:
    async def main() -> None:
        world = World(**cluster)
        try:
            await asyncio.wait_for(scenario(world), 60)
        finally:
            world.close()

    asyncio.run(main())


def test_all_of_it_or_nothing() -> None:
    async def scenario(world: World) -> None:
        await world.begin()
        p, q = world.groups
        first = await world.init()
        await world.send(p, first, b"a", b"b")
        await world.send(q, first, b"c")
        await world.send(q, None, b"plain")
        assert await world.all_values() == [[], []]
        assert await world.values(p, flags=0) == [b"a", b"b"]
        assert (await world.routes[q].call(GetBounds())) == Bounds(0, 2, 0)
        decided = await world.end(first)
        await world.mark(first, decided)
        assert await world.all_values() == [[b"a", b"b"], [b"c", b"plain"]]
        second = decided.next
        await world.send(p, second, b"x")
        gone = await world.end(second, commit=False)
        await world.mark(second, gone)
        assert await world.all_values() == [[b"a", b"b"], [b"c", b"plain"]]
        answer = await world.fetch(p, 2)
        assert (answer.batches, answer.cursors, answer.high_watermark) == ([], (Cursor(0, 3),), 3)
        with pytest.raises(ProducerFencedError):
            await world.send(p, second, b"late", sequence=1)
        with pytest.raises(TransactionAbortedError):
            await world.end(second)

    run(scenario)


def test_whoever_waits_for_a_transaction_is_woken_by_its_marker() -> None:
    async def scenario(world: World) -> None:
        await world.begin(1)
        (p,) = world.groups
        first = await world.init()
        await world.send(p, first, b"a")
        waiting = asyncio.ensure_future(world.fetch(p, wait_ms=20_000))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await world.mark(first, await world.end(first))
        assert len((await asyncio.wait_for(waiting, 10)).batches) == 1

    run(scenario)


def test_a_marker_must_be_the_coordinator_s() -> None:
    async def scenario(world: World) -> None:
        await world.begin(1)
        first = await world.init()
        await world.send(world.groups[0], first, b"a")
        for decided in (Decided(True, (b"made up",), first), Decided(False, (b"",), first)):
            with pytest.raises(UnknownTransactionError):
                await world.mark(first, decided)
        decided = await world.end(first)
        with pytest.raises(UnknownTransactionError):
            await world.mark(first, Decided(False, decided.seals, first))
        with pytest.raises(UnknownTransactionError):
            await world.mark(decided.next, decided)
        assert await world.all_values() == [[]]

    run(scenario)


def test_positions_and_records_end_together_and_a_new_owner_waits() -> None:
    async def scenario(world: World) -> None:
        await world.begin(1)
        (p,) = world.groups
        await world.send(p, None, b"in")
        first = await world.init()
        await world.send(p, first, b"out")
        stage = StageOffsets(producer_id=first.producer_id, epoch=0, group="g", generation=0, offsets={0: 1})
        await world.routes[p].call(stage)
        (info,) = await world.routes[p].call(GetTransactions())
        assert (info.records, info.first_offset, info.groups) == (1, 1, ("g",))
        channel = await world.routes[p].leader()
        fence = world.cluster._service._coordinator._seals.fence("g", 1)
        with pytest.raises(TransactionPendingError):
            await channel.call(Commit(group="g", generation=1, offsets={}, seal=fence))
        assert (await world.routes[p].call(GetPosition(group="g"))).offsets == {}
        assert (await world.routes[p].call(GetLag(group="g"))).unstable == 1
        await world.mark(first, await world.end(first))
        assert (await channel.call(Commit(group="g", generation=1, offsets={}, seal=fence))).offsets == {0: 1}
        with pytest.raises(ProducerFencedError):
            await world.routes[p].call(stage)

    run(scenario)


async def until(world: World, what: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(3000):
        if await what():
            return
        await asyncio.sleep(0.01)
        world.cluster.settle_transactions()
    raise AssertionError("it never happened")


def test_how_many_are_open_and_for_how_long_is_measured() -> None:
    async def scenario(world: World) -> None:
        await world.begin(2)
        p, _ = world.groups
        settlings = [each.settling for each in world.cluster.partitions("t", None)]
        assert [each.open_for() for each in settlings] == [(0, 0), (0, 0)]
        first = await world.init()
        await world.send(p, first, b"a")
        await asyncio.sleep(0.01)
        (opened, oldest_ms), nothing = [each.open_for() for each in settlings]
        assert (opened, nothing) == (1, (0, 0))
        assert 0 < oldest_ms < 60_000
        await world.mark(first, await world.end(first))
        assert [each.open_for() for each in settlings] == [(0, 0), (0, 0)]

    run(scenario)


def test_a_producer_that_dies_holds_up_nobody_for_longer_than_its_timeout() -> None:
    async def scenario(world: World) -> None:
        await world.begin(2)
        p, q = world.groups
        first = await world.init(timeout_ms=1)
        await world.send(p, first, b"a")
        await world.send(q, None, b"plain")

        async def over() -> bool:
            return not await world.routes[p].call(GetTransactions())

        await until(world, over)
        assert await world.all_values() == [[], [b"plain"]]
        with pytest.raises(TransactionAbortedError):
            await world.end(first)
        again = InitTransactions(transactional_id="tx", attempt="a", timeout_ms=1, resume=True)
        assert await world.coordinator.call(again) == Transaction(first.producer_id, 1)

    run(scenario, resolve_after_ms=1)


def test_a_commit_whose_producer_dies_before_its_markers_is_seen_everywhere() -> None:
    async def scenario(world: World) -> None:
        await world.begin(2)
        p, q = world.groups
        first = await world.init()
        await world.send(p, first, b"a")
        await world.send(q, first, b"b")
        await world.end(first)
        second = await world.init("b")  # its successor
        await world.send(p, second, b"c")

        async def seen() -> bool:
            return await world.all_values() == [[b"a"], [b"b"]]

        await until(world, seen)
        (info,) = await world.coordinator.call(ListTransactions())
        assert (info.transactional_id, info.epoch, info.owner) == ("tx", 2, "me")

    run(scenario, resolve_after_ms=1)


def test_any_lane_continues_as_any_lane() -> None:
    async def scenario(world: World) -> None:
        await world.begin(1)
        (p,) = world.groups
        await world.send(p, None, b"a")
        channel = await world.routes[p].leader()
        answer = await channel.fetch(FetchRequest((Cursor(ANY_LANE, 0),), 1 << 20, 0, READ_COMMITTED))
        assert answer.cursors == (Cursor(ANY_LANE, 1),)

    run(scenario)


def test_a_reader_gets_over_what_was_aborted_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that looks at all of it may take longer than its client waits, which then asks for all of it again."""
    monkeypatch.setattr(reader, "MAX_ABORTED_RUNS", 10)

    async def scenario(world: World) -> None:
        await world.begin(1)
        (p,) = world.groups
        at = await world.init()
        for _ in range(50):
            await world.send(p, at, b"never")
            decided = await world.end(at, commit=False)
            await world.mark(at, decided)
            at = decided.next
        for value in (b"a", b"b" * 2_000):
            await world.send(p, None, value)
        world.cluster._partitions[p]._service.tables_synced()  # so that only the last is in memory
        offsets = [0]
        while not (answer := await world.fetch(p, offsets[-1])).batches:
            offsets.append(answer.cursors[0].offset)
        assert offsets == [0, 11, 22, 33, 44]
        assert answer.batches[0].base_offset == 50
        assert (await world.fetch(p, wait_ms=5_000)).batches[0].base_offset == 50, "who waits is answered once"

    run(scenario, log={"cache_bytes": 1_000})
