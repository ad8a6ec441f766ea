"""A group that is deleted: its members of before stay out, and its next life begins where a new group does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rayqueue.client.admin.admin import _lags, forget_group
from rayqueue.errors import GroupNotEmptyError, StaleGenerationError
from rayqueue.partition import commit_command
from rayqueue.protocol.calls import (
    Assignment,
    Call,
    Commit,
    DescribeGroup,
    ForgetGroup,
    GetPosition,
    JoinGroup,
    LeaveGroup,
    Position,
)
from rayqueue.protocol.topics import TopicPartition
from tests.unit.client.small_cluster import SEALS, LocalPartition, Process, SmallCluster

P0 = TopicPartition("orders", 0)


class Desk:
    """A process that does by hand what consumers do."""

    def __init__(self, cluster: SmallCluster) -> None:
        self.cluster = cluster
        self.process: Process = cluster.process()

    @property
    def partition(self) -> LocalPartition:
        return self.cluster.partitions[P0]

    async def join(self, member: str) -> int:
        """The generation of its grant."""
        call = JoinGroup(group="g", member=member, topics=("orders",), session_timeout_ms=60_000)
        joined: Assignment = await self.process.coordinator.call(call)
        return joined.grants[0].generation

    async def leave(self, member: str) -> None:
        await self.process.coordinator.call(LeaveGroup(group="g", member=member))

    async def commit(self, generation: int, offset: int | None = None) -> Position:
        offsets = {} if offset is None else {0: offset}
        found: Position = await self.partition.call(self.sealed("g", generation, offsets))
        return found

    def sealed(self, group: str, generation: int, offsets: dict[int, int]) -> Commit:
        """As whoever was granted the partition commits, also if that is long ago."""
        seal = SEALS.grant(group, self.partition.group_id, generation)
        return Commit(group=group, generation=generation, offsets=offsets, seal=seal)

    async def position(self) -> Position | None:
        found: Position | None = await self.partition.call(GetPosition(group="g"))
        return found


def at_desk(test: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        cluster = SmallCluster()
        await cluster.create("orders")
        cluster.partitions[P0].append(10)
        try:
            await asyncio.wait_for(test(Desk(cluster)), 20)
        finally:
            cluster.close()

    asyncio.run(run())


def test_a_zombie_does_not_say_where_the_next_life_begins() -> None:
    async def test(desk: Desk) -> None:
        zombie = await desk.join("a")
        await desk.commit(zombie)
        await desk.commit(zombie, 4)
        await desk.leave("a")
        assert await forget_group(desk.process, "g")
        for offset in (None, 9):
            with pytest.raises(StaleGenerationError):
                await desk.commit(zombie, offset)
        assert await desk.position() is None
        again = await desk.join("b")
        assert again > zombie
        assert (await desk.commit(again)).offsets == {}
        with pytest.raises(StaleGenerationError):
            await desk.commit(zombie, 9)

    at_desk(test)


def test_a_zombie_that_never_claimed_is_out_too() -> None:
    async def test(desk: Desk) -> None:
        zombie = await desk.join("a")
        await desk.leave("a")
        assert await forget_group(desk.process, "g")
        with pytest.raises(StaleGenerationError):
            await desk.commit(zombie)
        assert not await forget_group(desk.process, "g")

    at_desk(test)


def test_another_group_that_comes_late_to_a_partition_is_let_in() -> None:
    """Its generation may be lower than that of the group that was deleted; the next one it gets is not."""

    async def test(desk: Desk) -> None:
        other = JoinGroup(group="other", member="x", topics=("orders",), session_timeout_ms=60_000)
        first: Assignment = await desk.process.coordinator.call(other)
        for name in ("a", "b", "c"):
            await desk.join(name)
            await desk.leave(name)
        await forget_group(desk.process, "g")
        claim = desk.sealed("other", first.grants[0].generation, {})
        with pytest.raises(StaleGenerationError):
            await desk.partition.call(claim)
        await desk.process.coordinator.call(LeaveGroup(group="other", member="x"))
        again: Assignment = await desk.process.coordinator.call(
            JoinGroup(group="other", member="y", topics=("orders",), session_timeout_ms=60_000)
        )
        await desk.partition.call(desk.sealed("other", again.grants[0].generation, {}))

    at_desk(test)


def test_a_life_that_began_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the coordinator's answer and the partition's turn somebody joins under the same name."""

    async def test(desk: Desk) -> None:
        await desk.commit(await desk.join("a"), 4)
        await desk.leave("a")
        real = LocalPartition.call
        began: list[int] = []

        async def late(self: LocalPartition, call: Call, **options: Any) -> Any:
            if isinstance(call, GetPosition) and not began:
                began.append(0)
                began[0] = await desk.join("b")
                await real(self, desk.sealed("g", began[0], {0: 7}))
            return await real(self, call, **options)

        monkeypatch.setattr(LocalPartition, "call", late)
        await forget_group(desk.process, "g")
        position = await desk.position()
        assert position is not None
        assert (position.generation, position.offsets) == (began[0], {0: 7})
        assert (await desk.process.coordinator.call(DescribeGroup(group="g"))).members

    at_desk(test)


def test_positions_without_a_membership_are_compared_before_they_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(desk: Desk) -> None:
        await desk.commit(0, 1)
        assert await forget_group(desk.process, "g")
        assert await desk.position() is None
        await desk.commit(0, 1)
        real = LocalPartition.call
        offset = 1

        async def busy(self: LocalPartition, call: Call, **options: Any) -> Any:
            nonlocal offset
            if isinstance(call, ForgetGroup):
                offset += 1
                await real(self, Commit(group="g", generation=0, offsets={0: offset}))
            return await real(self, call, **options)

        monkeypatch.setattr(LocalPartition, "call", busy)
        with pytest.raises(GroupNotEmptyError):
            await forget_group(desk.process, "g")
        monkeypatch.undo()
        assert await desk.position() is not None

    at_desk(test)


def test_a_position_that_no_coordinator_knows_of_can_be_deleted() -> None:
    """The coordinator's data was lost, or is older than the partition's."""

    async def test(desk: Desk) -> None:
        desk.partition.shelf.log.apply(commit_command("g", 1_000_000, {0: 4}))
        assert await forget_group(desk.process, "g")
        assert await desk.position() is None
        await desk.commit(await desk.join("a"), 2)

    at_desk(test)


def test_a_group_is_described_though_a_topic_goes_meanwhile() -> None:
    """The list of topics is older than the question: what is gone has no lag, and a new topic of its name is not it."""

    async def test(desk: Desk) -> None:
        await desk.cluster.create("payments")
        await desk.commit(0, 4)
        listed = list(desk.cluster.machine.topics.values())
        await desk.cluster.delete("payments")
        await desk.cluster.create("payments", partitions=3)
        lags = await _lags(desk.process, "g", listed, {})
        assert [(lag.topic, lag.partition, lag.committed, lag.lag) for lag in lags] == [("orders", 0, {0: 4}, 6)]

    at_desk(test)
