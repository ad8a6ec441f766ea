"""Membership over the real coordinator and real partitions, in one event loop: who reads what, and who may commit."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rayqueue.client.consumer import group as member_module
from rayqueue.client.consumer.commits import Commits
from rayqueue.client.consumer.fetcher import Fetcher
from rayqueue.client.consumer.group import GroupMembership, LastPoll
from rayqueue.client.consumer.subscription import ChangeKind, Subscription
from rayqueue.client.consumer.wanted import Options
from rayqueue.config import Settings
from rayqueue.errors import InvalidInputError, OutcomeUnknownError, StaleGenerationError
from rayqueue.partition import commit_command
from rayqueue.protocol.calls import Heartbeat, LeaveGroup
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import Record
from tests.unit.client.consumer.consumer_parts import records_of
from tests.unit.client.small_cluster import SmallCluster, quick_settings, until


class Reader:
    """A consumer without its public face: a member, and an application that polls when it is told to."""

    def __init__(self, cluster: SmallCluster, settings: Settings, name: str, **options: Any) -> None:
        self.process = cluster.process()
        self.subscription = Subscription(settings.consumer)
        self.last_poll = LastPoll(time.monotonic())
        fetcher = Fetcher(self.subscription, self.process, settings, Random(name), grouped=True)
        self.commits = Commits("billing", self.subscription, self.process)
        self.member = GroupMembership(
            self.process,
            self.subscription,
            fetcher,
            self.commits,
            settings,
            Options(options.pop("topics", ("orders",)), group="billing", client=name, **options),
            self.last_poll,
            rng=Random(name),
        )
        self.told: list[tuple[str, list[str]]] = []
        self.seen: list[Record] = []
        self.member.start()

    @property
    def reads(self) -> set[int]:
        return {each.partition for each, assigned in self.subscription.assigned.items() if not assigned.letting_go}

    async def poll(self) -> list[Record]:
        """What ``Consumer.poll`` does, in short."""
        subscription = self.subscription
        self.last_poll.at_s = time.monotonic()
        if self.member.away:
            self.member.polled()
        subscription.asked_for_more()
        change = subscription.next_change()
        while change is not None:
            self.told.append((change.kind.value, sorted(str(assigned.partition) for assigned in change.partitions)))
            if change.kind is ChangeKind.REVOKED:
                subscription.ack_handed(change.partitions)
                await self.commits.commit_due(change.partitions)
                self.member.released(change.partitions)
            elif change.kind is ChangeKind.ASSIGNED:
                subscription.show(change.partitions)
            change = subscription.next_change()
        taken = subscription.take(100, records_of)
        found = [] if taken is None else taken[1]
        self.seen += found
        return found

    async def poll_until(self, condition: Callable[[], Any]) -> None:
        deadline_s = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline_s, "this did not come true in time"
            await self.poll()
            await asyncio.sleep(0.002)


class World:
    def __init__(self, tmp: Path, consumer: dict[str, Any]) -> None:
        self.settings = quick_settings(tmp, **consumer)
        self.cluster = SmallCluster()
        self.readers: list[Reader] = []

    def reader(self, name: str, **options: Any) -> Reader:
        self.readers.append(Reader(self.cluster, self.settings, name, **options))
        return self.readers[-1]

    def append(self, partitions: int, records: int = 10) -> None:
        for number in range(partitions):
            self.cluster.partitions[TopicPartition("orders", number)].append(records)

    def committed(self, number: int) -> dict[int, int]:
        position = self.cluster.partitions[TopicPartition("orders", number)].shelf.log.partition.position("billing")
        return {} if position is None else position.offsets


def in_world(
    tmp: Path, test: Callable[[World], Coroutine[Any, Any, None]], partitions: int = 4, **consumer: Any
) -> None:
    async def run() -> None:
        world = World(tmp, consumer)
        await world.cluster.create("orders", partitions=partitions)
        try:
            await test(world)
        finally:
            for reader in world.readers:
                reader.process.coordinator.stopped = False
                await asyncio.wait_for(reader.member.close(), 10)
            world.cluster.close()

    asyncio.run(run())


def test_a_member_claims_before_it_reads(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.append(4)
        reader = world.reader("a")
        await reader.poll_until(lambda: len(reader.seen) == 40)
        for partition in world.cluster.partitions.values():
            assert partition.commits[0].offsets == {}
            assert partition.commits[0].generation > 0
        assert reader.reads == {0, 1, 2, 3}

    in_world(tmp_path, test)


def test_a_late_joiner_gets_its_share_and_nobody_else_is_disturbed(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first = world.reader("a")
        await first.poll_until(lambda: first.reads == {0, 1, 2, 3})
        second = world.reader("b")
        await first.poll_until(lambda: len(first.reads) == len(second.reads) == 2)
        assert first.reads | second.reads == {0, 1, 2, 3}
        kept = first.reads
        third = world.reader("c")
        await first.poll_until(lambda: len(third.reads) == 1)
        assert sorted(len(each.reads) for each in world.readers) == [1, 1, 2]
        assert first.reads <= kept, "nothing moved from here that needed not"

    in_world(tmp_path, test)


def test_a_partition_moves_only_after_the_application_has_finished_with_it(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.append(2)
        first = world.reader("a")
        await first.poll_until(lambda: len(first.seen) == 20)
        second = world.reader("b")
        await until(lambda: len(first.reads) == 1)
        await asyncio.sleep(0.1)
        assert not second.reads, "the first one works on what it was given"
        await first.poll()
        await until(lambda: len(second.reads) == 1)
        moved = next(iter(second.reads))
        assert world.committed(moved) == {0: 10}, "and has committed it"
        await second.poll_until(lambda: True)
        world.append(2, records=1)
        await second.poll_until(lambda: second.seen)
        assert [(each.partition, each.offset) for each in second.seen] == [(moved, 10)]
        assert ("revoked", [f"orders-{moved}"]) in first.told

    in_world(tmp_path, test, partitions=2)


def test_without_anything_to_finish_a_partition_moves_without_a_poll(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first = world.reader("a")
        await until(lambda: len(first.reads) == 2)
        second = world.reader("b")
        await until(lambda: len(second.reads) == 1)
        assert len(first.reads) == 1

    in_world(tmp_path, test, partitions=2)


def test_a_listener_sees_every_change_before_records_are_handed_out(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.append(1)
        first = world.reader("a", listener=object())
        await until(lambda: first.subscription.changes)
        assert first.subscription.take(10, records_of) is None
        await first.poll()
        assert first.told == [("assigned", ["orders-0"])]
        await first.poll_until(lambda: len(first.seen) == 10)

    in_world(tmp_path, test, partitions=1)


@pytest.mark.slow
def test_a_stopped_member_is_replaced_and_cannot_commit_when_it_wakes_up(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.append(2)
        zombie = world.reader("a")
        await zombie.poll_until(lambda: len(zombie.seen) == 20)
        zombie.process.coordinator.stopped = True  # as SIGSTOP: nothing is closed, nothing is said
        partitions = list(zombie.subscription.assigned.values())
        heir = world.reader("b")
        started_s = time.monotonic()
        await heir.poll_until(lambda: heir.reads == {0, 1})
        assert time.monotonic() - started_s < 3
        await heir.poll_until(lambda: len(heir.seen) == 20)
        zombie.subscription.ack_handed()
        with pytest.raises(StaleGenerationError):
            await zombie.commits.commit(partitions[0])
        await heir.poll()
        await heir.commits.commit_due(heir.subscription.assigned.values())
        assert world.committed(0) == world.committed(1) == {0: 10}
        zombie.process.coordinator.stopped = False
        await zombie.poll_until(lambda: ("lost", [str(partitions[0].partition)]) in zombie.told)
        await heir.poll_until(lambda: len(zombie.reads) == len(heir.reads) == 1)
        assert not zombie.subscription.take(10, records_of), "what the heir has committed does not come again"

    in_world(tmp_path, test, partitions=2)


def test_a_cut_connection_frees_partitions_long_before_the_session_ends(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first = world.reader("a")
        await first.poll_until(lambda: first.reads == {0, 1})
        second = world.reader("b")
        await until(lambda: len(second.reads) == 1)
        started_s = time.monotonic()
        first.process.coordinator.stopped = True
        first.process.coordinator.cut()
        await until(lambda: second.reads == {0, 1})
        assert time.monotonic() - started_s < 2

    in_world(tmp_path, test, partitions=2, session_timeout_ms=60_000)


def test_a_coordinator_that_fails_over_moves_nothing(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first, second = world.reader("a"), world.reader("b")
        await until(lambda: len(first.reads) == len(second.reads) == 2)
        before = first.reads, second.reads
        world.cluster.fail_over()
        beats = len(first.process.coordinator.calls)
        world.append(4)
        await first.poll_until(lambda: len(first.seen) == 20)
        await until(lambda: len(first.process.coordinator.calls) > beats + 5)
        assert (first.reads, second.reads) == before
        assert all(kind == "assigned" for kind, _ in first.told)

    in_world(tmp_path, test)


def test_a_coordinator_that_fails_over_during_a_rebalance_finishes_it(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.append(4)
        first = world.reader("a")
        await first.poll_until(lambda: len(first.seen) == 40)
        second = world.reader("b")
        await until(lambda: len(first.reads) == 2)  # told to let go, and has not yet
        world.cluster.fail_over()
        await asyncio.sleep(0.05)
        await first.poll_until(lambda: len(second.reads) == 2)
        assert not first.reads & second.reads

    in_world(tmp_path, test)


@pytest.mark.slow
def test_an_application_that_does_not_poll_loses_its_partitions_until_it_does(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.append(2)
        first = world.reader("a")
        await first.poll_until(lambda: len(first.seen) == 20)
        second = world.reader("b")
        await second.poll_until(lambda: second.reads == {0, 1})
        assert first.member.away
        assert any(isinstance(call, LeaveGroup) for call in first.process.coordinator.calls)
        assert len([each for each in second.seen if each.partition == 0]) <= 10
        await first.poll_until(lambda: len(first.reads) == 1 or await_second(second))
        assert ("lost", ["orders-0", "orders-1"]) in [(kind, names) for kind, names in first.told]

    def await_second(second: Reader) -> bool:
        second.last_poll.at_s = time.monotonic()
        return False

    in_world(tmp_path, test, partitions=2, max_poll_interval_ms=300)


@pytest.mark.slow
def test_an_answer_that_is_older_than_the_leaving_gives_nothing_back(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.append(1)
        reader = world.reader("a")
        await reader.poll_until(lambda: len(reader.seen) == 10)
        coordinator, member = reader.process.coordinator, reader.member
        call, lose = coordinator.call, member._lose
        leaving = asyncio.Event()

        async def late(request: Any, **options: Any) -> Any:
            answer = await call(request, **options)
            if isinstance(request, Heartbeat):
                await leaving.wait()
            return answer

        def leave(partitions: Any) -> None:
            leaving.set()  # the answer is there in the same moment
            lose(partitions)

        coordinator.call, member._lose = late, leave  # type: ignore[method-assign,assignment]
        await until(lambda: member.away)
        for _ in range(20):
            await asyncio.sleep(0)
        assert reader.member.away
        assert not reader.member._held

    in_world(tmp_path, test, partitions=1, max_poll_interval_ms=300)


@pytest.mark.slow
def test_record_by_record_counts_as_polling(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.append(1)
        first = world.reader("a")
        await until(lambda: first.subscription.total_bytes)
        reading = first.subscription.read()
        assert reading is not None
        for _ in range(8):
            reading.index += 1
            await asyncio.sleep(0.1)
        assert not first.member.away

    in_world(tmp_path, test, partitions=1, max_poll_interval_ms=400)


def test_new_partitions_are_read_without_a_restart(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first = world.reader("a")
        await until(lambda: first.reads == {0})
        await world.cluster.grow("orders", 3)
        await until(lambda: first.reads == {0, 1, 2})

    in_world(tmp_path, test, partitions=1)


def test_a_group_that_begins_at_the_end_remembers_where_that_was(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.append(1)
        first = world.reader("a")
        await until(lambda: first.reads == {0})
        assert world.committed(0) == {0: 10}
        await first.member.close()
        world.append(1, records=5)  # while nobody reads
        second = world.reader("b")
        await second.poll_until(lambda: len(second.seen) == 5)

    in_world(tmp_path, test, partitions=1, start="latest")


def test_a_group_can_be_pinned(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first = world.reader("a", pin=True)
        await until(lambda: first.reads == {0})
        group = world.cluster.partitions[TopicPartition("orders", 0)].shelf.log.partition.position("billing")
        assert group is not None
        assert group.pinned

    in_world(tmp_path, test, partitions=1)


def test_an_impossible_wish_is_told_to_the_application(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first = world.reader("a")
        await until(lambda: first.reads)
        world.settings = world.settings.model_copy(
            update={"consumer": world.settings.consumer.model_copy(update={"assignor": "range"})}
        )
        second = world.reader("b")
        await until(lambda: second.member.error)
        assert isinstance(second.member.error, InvalidInputError)

    in_world(tmp_path, test, partitions=1)


@pytest.mark.slow
def test_a_partition_that_knows_a_newer_generation_makes_the_member_join_again(tmp_path: Path) -> None:
    """As after a coordinator that lost its memory of a group: joining again ends in generations that are accepted."""

    async def test(world: World) -> None:
        from rayqueue.partition import commit_command

        log = world.cluster.partitions[TopicPartition("orders", 0)].shelf.log
        log.apply(commit_command("billing", 5, {}))
        first = world.reader("a")
        await until(lambda: first.reads == {0})
        world.append(1)
        await first.poll_until(lambda: len(first.seen) == 10)
        beats = [call for call in first.process.coordinator.calls if isinstance(call, Heartbeat)]
        assert len({call.member for call in beats}) > 1

    in_world(tmp_path, test, partitions=1)


@pytest.mark.slow
def test_a_member_that_is_fenced_again_and_again_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A partition knows a generation that the coordinator will not reach: its data is older than the partition's."""
    monkeypatch.setattr(member_module, "_MAX_FENCINGS", 3)

    async def test(world: World) -> None:
        world.append(2)
        world.cluster.partitions[TopicPartition("orders", 1)].shelf.log.apply(commit_command("billing", 10**9, {}))
        reader = world.reader("a")
        await reader.poll_until(lambda: reader.member.error)
        error = reader.member.error
        assert isinstance(error, StaleGenerationError)
        assert "orders-1" in str(error)
        assert "1000000000" in str(error)

    in_world(tmp_path, test, partitions=2)
    told = [record.getMessage() for record in caplog.records if "is refused by" in record.getMessage()]
    assert len(told) == 3
    assert all("billing" in line and "orders-1" in line and "1000000000" in line for line in told)


@pytest.mark.slow
def test_a_heartbeat_that_fails_while_it_is_given_up_is_nobodys_surprise(tmp_path: Path) -> None:
    """Its error came in the moment in which the member was closed, and nobody asked for it any more."""
    surprises: list[dict[str, Any]] = []

    async def test(world: World) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: surprises.append(context))
        reader = world.reader("a")
        await reader.poll_until(lambda: reader.reads == {0, 1, 2, 3})
        real = reader.process.coordinator.call
        failing = asyncio.Event()

        async def call(call: Any, **options: Any) -> Any:
            if not isinstance(call, Heartbeat):
                return await real(call, **options)
            failing.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise OutcomeUnknownError("the connection is gone") from None

        reader.process.coordinator.call = call  # type: ignore[method-assign]
        reader.member._changed.set()
        await asyncio.wait_for(failing.wait(), 10)
        await reader.member.close()

    in_world(tmp_path, test)
    gc.collect()  # asyncio complains when a task goes whose error nobody has seen
    assert surprises == []
