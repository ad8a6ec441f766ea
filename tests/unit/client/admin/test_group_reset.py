"""Moving a group's positions: where to, who is fenced off, and what a member that joins meanwhile keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rayqueue.client.admin.group_reset import Target, moved, reset_group
from rayqueue.errors import (
    GroupNotEmptyError,
    InvalidInputError,
    NotLeaderError,
    ResetIncompleteError,
    StaleGenerationError,
    UnknownGenerationError,
    UnknownGroupError,
    UnknownPartitionError,
    UnknownTopicError,
)
from rayqueue.protocol.calls import Assignment, Bounds, Call, Commit, FenceGroup, GetPosition, JoinGroup, LeaveGroup
from rayqueue.protocol.topics import TopicPartition
from tests.unit.client.small_cluster import SEALS, LocalPartition, SmallCluster

P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)
EARLIEST, LATEST = Target(anchor="earliest"), Target(anchor="latest")


# -- where to ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "before", "after", "told"),
    [
        (EARLIEST, {0: 7}, {0: 3}, ""),
        (LATEST, {}, {0: 9}, ""),
        (Target(offset=5), {0: 7}, {0: 5}, ""),
        (Target(offset=1), {0: 7}, {0: 3}, "no offset 1"),
        (Target(offset=99), {0: 7}, {0: 9}, "from 3 to 9"),
        (Target(by=-2), {0: 7}, {0: 5}, ""),
        (Target(by=-9), {0: 7}, {0: 3}, "no offset -2"),
        (Target(by=9), {0: 7}, {0: 9}, "no offset 16"),
        (Target(by=1), {}, {}, "nothing is committed"),
        (Target(time_ms=5), {0: 7}, {0: 6}, ""),
    ],
)
def test_where_a_position_goes(target: Target, before: dict[int, int], after: dict[int, int], told: str) -> None:
    found, note = moved(target, before, 1, Bounds(3, 9), 6)
    assert found == after
    assert told in note if told else not note


def test_lanes_go_together_or_each_by_the_number() -> None:
    assert moved(EARLIEST, {1: 5}, 3, Bounds(3, 9))[0] == {0: 3, 1: 3, 2: 3}
    assert moved(Target(by=2), {0: 4, 2: 6}, 3, Bounds(3, 9))[0] == {0: 6, 2: 8}, "a lane that has none gets none"


@pytest.mark.parametrize(
    "wrong",
    [
        (None, None, None),
        ("earliest", None, 3),
        ("soon", None, None),
        (-1, None, None),
        (True, None, None),
        (2**70, None, None),
        (None, -5, None),
        (None, None, 1.5),
    ],
)
def test_what_is_no_target_is_refused(wrong: tuple[Any, Any, Any]) -> None:
    with pytest.raises(InvalidInputError):
        Target.of(*wrong)


# -- against a real coordinator and real partitions ------------------------------------------------


class Desk:
    """A process that does by hand what consumers do."""

    def __init__(self, cluster: SmallCluster) -> None:
        self.cluster = cluster
        self.process = cluster.process()

    def at(self, place: TopicPartition = P0) -> LocalPartition:
        return self.cluster.partitions[place]

    async def join(self, member: str) -> int:
        call = JoinGroup(group="g", member=member, topics=("orders",), session_timeout_ms=60_000)
        joined: Assignment = await self.process.coordinator.call(call)
        return joined.grants[0].generation

    async def leave(self, member: str) -> None:
        await self.process.coordinator.call(LeaveGroup(group="g", member=member))

    async def commit(self, generation: int, offset: int | None, place: TopicPartition = P0) -> None:
        seal = SEALS.grant("g", self.at(place).group_id, generation) if generation else b""
        offsets = {} if offset is None else {0: offset}
        await self.at(place).call(Commit(group="g", generation=generation, offsets=offsets, seal=seal))

    async def positions(self) -> dict[str, int]:
        found = {}
        for place, partition in self.cluster.partitions.items():
            position = await partition.call(GetPosition(group="g"))
            if position is not None and position.offsets:
                found[str(place)] = position.offsets[0]
        return found

    async def read_and_left(self, offset: int = 6) -> int:
        """A member came, committed in both partitions, and went. The generation of its grants."""
        generation = await self.join("a")
        for place in (P0, P1):
            await self.commit(generation, None, place)
            await self.commit(generation, offset, place)
        await self.leave("a")
        return generation


def at_desk(test: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        cluster = SmallCluster()
        await cluster.create("orders", partitions=2)
        for place in (P0, P1):
            cluster.partitions[place].append(10)
        try:
            await asyncio.wait_for(test(Desk(cluster)), 20)
        finally:
            cluster.close()

    asyncio.run(run())


def test_a_dry_run_changes_nothing_and_the_reset_does_what_it_said() -> None:
    async def test(desk: Desk) -> None:
        await desk.read_and_left()
        before = desk.cluster.machine.checkpoint()
        said = await reset_group(desk.process, "g", Target(by=-2), dry_run=True)
        assert not said.executed
        assert [(each.before, each.after, each.note) for each in said.positions] == [({0: 6}, {0: 4}, "")] * 2
        assert await desk.positions() == {"orders-0": 6, "orders-1": 6}
        assert desk.cluster.machine.checkpoint() == before, "not even a generation is used"
        done = await reset_group(desk.process, "g", Target(by=-2))
        assert (done.executed, done.positions) == (True, said.positions)
        assert await desk.positions() == {"orders-0": 4, "orders-1": 4}
        await reset_group(desk.process, "g", LATEST, topic="orders", partitions=[1])
        assert await desk.positions() == {"orders-0": 4, "orders-1": 10}
        assert (await desk.join("b")) > 0

    at_desk(test)


def test_a_member_of_before_that_wakes_up_late_is_fenced_off_and_the_next_goes_on_where_it_was_put() -> None:
    async def test(desk: Desk) -> None:
        zombie = await desk.read_and_left()
        await reset_group(desk.process, "g", EARLIEST)
        with pytest.raises(StaleGenerationError):
            await desk.commit(zombie, 9)
        again = await desk.join("b")
        await desk.commit(again, None)
        assert await desk.positions() == {"orders-0": 0, "orders-1": 0}
        await desk.commit(again, 1)
        assert (await desk.positions())["orders-0"] == 1

    at_desk(test)


def test_a_group_with_members_is_refused_also_in_a_dry_run() -> None:
    async def test(desk: Desk) -> None:
        generation = await desk.join("a")
        await desk.commit(generation, 3)
        for dry_run in (True, False):
            with pytest.raises(GroupNotEmptyError, match="stop its consumers"):
                await reset_group(desk.process, "g", EARLIEST, dry_run=dry_run)
        born = desk.cluster.machine.groups["g"].born
        with pytest.raises(GroupNotEmptyError):  # the coordinator decides, not what the client has seen
            await desk.process.coordinator.call(FenceGroup(group="g", born=born))
        await desk.commit(generation, 4)
        assert await desk.positions() == {"orders-0": 4}

    at_desk(test)


@pytest.mark.parametrize("when", ["before it is fenced", "after one position was moved"])
def test_a_member_that_joins_meanwhile_keeps_its_positions(when: str) -> None:
    async def test(desk: Desk) -> None:
        await desk.read_and_left()
        joined: list[int] = []

        async def join_and_claim() -> None:
            joined.append(await desk.join("b"))
            await desk.commit(joined[0], None, P1)
            await desk.commit(joined[0], 8, P1)

        if when.startswith("before"):
            _first(desk.process.coordinator, FenceGroup, join_and_claim)
            with pytest.raises(GroupNotEmptyError):
                await reset_group(desk.process, "g", EARLIEST)
            assert await desk.positions() == {"orders-0": 6, "orders-1": 8}
            return
        _first(desk.at(P1), Commit, join_and_claim)
        with pytest.raises(ResetIncompleteError, match="not orders-1: a consumer has joined") as told:
            await reset_group(desk.process, "g", EARLIEST)
        assert "1 of 2 positions" in str(told.value)
        assert (told.value.details["moved"], told.value.details["left"]) == (["orders-0"], ["orders-1"])
        assert await desk.positions() == {"orders-0": 0, "orders-1": 8}
        await desk.commit(joined[0], 9, P1)

    at_desk(test)


def _first(where: Any, kind: type[Call], action: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do this just before the first call of this kind is carried out."""
    call_before = where.call

    async def call(call: Call, **options: Any) -> Any:
        if isinstance(call, kind):
            where.call = call_before
            await action()
        return await call_before(call, **options)

    where.call = call


def test_of_two_resets_at_once_the_later_generation_wins() -> None:
    async def test(desk: Desk) -> None:
        await desk.read_and_left()
        other = desk.cluster.process()

        async def overtake() -> None:
            await reset_group(other, "g", LATEST)

        _first(desk.at(P0), Commit, overtake)
        with pytest.raises(ResetIncompleteError):
            await reset_group(desk.process, "g", EARLIEST, topic="orders", partitions=[0])
        assert await desk.positions() == {"orders-0": 10, "orders-1": 10}

    at_desk(test)


def test_a_group_that_is_deleted_and_made_again_meanwhile_is_left_alone() -> None:
    async def test(desk: Desk) -> None:
        await desk.read_and_left()
        born = desk.cluster.machine.groups["g"].born
        with pytest.raises(UnknownGroupError):
            await desk.process.coordinator.call(FenceGroup(group="g", born=born - 1))
        with pytest.raises(UnknownGroupError):
            await desk.process.coordinator.call(FenceGroup(group="never", born=0))

    at_desk(test)


def test_readers_without_membership_are_moved_without_a_generation_and_can_go_on() -> None:
    async def test(desk: Desk) -> None:
        await desk.commit(0, 6)
        done = await reset_group(desk.process, "g", EARLIEST)
        assert [str(each.topic_partition) for each in done.positions] == ["orders-0"], "only where it has a position"
        assert await desk.positions() == {"orders-0": 0}
        await desk.commit(0, 5)
        assert await desk.positions() == {"orders-0": 5}
        # A topic that is named is moved everywhere: so a group can be given its place before it begins.
        await reset_group(desk.process, "g", Target(offset=7), topic="orders")
        assert await desk.positions() == {"orders-0": 7, "orders-1": 7}
        generation = await desk.join("a")
        await desk.commit(generation, None)
        assert await desk.positions() == {"orders-0": 7, "orders-1": 7}

    at_desk(test)


def test_a_topic_that_goes_meanwhile_takes_its_positions_along() -> None:
    async def test(desk: Desk) -> None:
        await desk.read_and_left()

        async def delete() -> None:
            await desk.cluster.delete("orders")

        _first(desk.process.coordinator, FenceGroup, delete)
        done = await reset_group(desk.process, "g", EARLIEST)
        assert done.positions == ()

    at_desk(test)


def test_a_partition_without_a_leader_is_told_and_the_others_are_moved() -> None:
    async def test(desk: Desk) -> None:
        await desk.read_and_left()

        async def refuse() -> None:
            raise NotLeaderError("nobody leads orders-0")

        _first(desk.at(P0), Commit, refuse)
        with pytest.raises(ResetIncompleteError, match="not orders-0: nobody leads"):
            await reset_group(desk.process, "g", EARLIEST)
        assert await desk.positions() == {"orders-0": 6, "orders-1": 0}
        await reset_group(desk.process, "g", EARLIEST)
        assert await desk.positions() == {"orders-0": 0, "orders-1": 0}

    at_desk(test)


def test_what_is_not_there_is_refused() -> None:
    async def test(desk: Desk) -> None:
        with pytest.raises(UnknownGroupError, match="name a topic"):
            await reset_group(desk.process, "g", EARLIEST)
        with pytest.raises(UnknownTopicError):
            await reset_group(desk.process, "g", EARLIEST, topic="nothing")
        with pytest.raises(UnknownPartitionError, match="orders has 2 partitions; there is no 2"):
            await reset_group(desk.process, "g", EARLIEST, topic="orders", partitions=[2])
        for seal in (b"", SEALS.fence("g", 6), SEALS.fence("other", 7), SEALS.floor(7)):
            with pytest.raises(UnknownGenerationError):  # a generation is given by the coordinator, not made up
                await desk.at().call(Commit(group="g", generation=7, offsets={0: 3}, rewind=True, seal=seal))

    at_desk(test)


def test_a_time_is_looked_up_in_each_partition() -> None:
    async def test(desk: Desk) -> None:
        await desk.read_and_left()
        desk.at(P1).append(5, timestamp=9_000)
        await reset_group(desk.process, "g", Target(time_ms=5_000))
        assert await desk.positions() == {"orders-0": 10, "orders-1": 10}
        await reset_group(desk.process, "g", Target(time_ms=10))
        assert await desk.positions() == {"orders-0": 0, "orders-1": 0}

    at_desk(test)
