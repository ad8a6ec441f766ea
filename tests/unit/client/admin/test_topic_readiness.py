"""A topic whose partitions get no leader: given up soon, with the reason, and not left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayqueue.client.admin import admin, readiness
from rayqueue.client.admin.readiness import wait_for_leaders
from rayqueue.client.io import IoThread
from rayqueue.errors import DiskFullError, NotLeaderError, RayQueueError, TopicExistsError, TopicNotReadyError
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicInfo, TopicPartition, TopicSettings
from tests.unit.client.small_cluster import Process, SmallCluster, quick_settings

BROKERS = ("b1", "b2", "b3")


class Route:
    def __init__(self, led: bool) -> None:
        self.led = led

    async def leader(self) -> None:
        if not self.led:
            await asyncio.sleep(0.01)
            raise NotLeaderError("nobody leads")


class Ways:
    """The routes to a topic of which only some partitions have a leader."""

    def __init__(self, *led: int) -> None:
        self.led = led

    async def partition(self, partition: TopicPartition) -> Any:
        return Route(partition.partition in self.led)


def topic(partitions: int) -> TopicInfo:
    replicas = tuple(ReplicaInfo(f"r{at}", broker) for at, broker in enumerate(BROKERS, 1))
    made = tuple(PartitionInfo(number, f"t-{number}.1", replicas) for number in range(partitions))
    return TopicInfo("t", 1, TopicSettings(partitions=partitions), made)


def all_say(info: TopicInfo, *answers: Any) -> Callable[[], Any]:
    async def statuses() -> dict[tuple[str, str], Any]:
        return {
            (partition.group_id, replica.replica_id): answer
            for partition in info.partitions
            for replica, answer in zip(partition.replicas, answers, strict=True)
        }

    return statuses


def wait(led: tuple[int, ...], *answers: Any, stall_s: float = 60.0, partitions: int = 2) -> list[tuple[int, int]]:
    info = topic(partitions)
    told: list[tuple[int, int]] = []
    ways: Any = Ways(*led)

    async def waiting() -> None:
        await asyncio.wait_for(
            wait_for_leaders(
                ways,
                info,
                info.partitions,
                all_say(info, *answers),
                stall_s=stall_s,
                look_s=0.02,
                on_progress=lambda *each: told.append(each),
            ),
            30,
        )

    asyncio.run(waiting())
    return told


STARTING = RayQueueError("is being started")
FULL = DiskFullError("no space left")


def test_progress_is_told() -> None:
    assert wait((0, 1), STARTING, STARTING, STARTING) == [(1, 2), (2, 2)]


def test_a_majority_of_full_disks_is_found_out_at_once_and_named() -> None:
    with pytest.raises(TopicNotReadyError) as refused:
        wait((0,), FULL, STARTING, FULL)  # the stall would be a minute
    assert refused.value.details["led"] == 1
    assert refused.value.details["missing"] == list(BROKERS)
    for word in ("t-1", "disk_full", "r1 on b1", "r2 on b2", "1 of 2"):
        assert word in str(refused.value)


def test_without_a_majority_it_is_given_up_once_nothing_goes_on() -> None:
    with pytest.raises(TopicNotReadyError) as refused:
        wait((), STARTING, STARTING, FULL, stall_s=0.1)  # one full disk of three is no reason by itself
    assert "is being started" in str(refused.value)


@pytest.mark.parametrize(("led", "left"), [((), False), ((0,), True)])
def test_what_nobody_can_have_written_to_is_not_left_behind(
    led: tuple[int, ...], left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(Process):
        async def partition(self, partition: TopicPartition, topic_id: int | None = None) -> Any:
            return Route(partition.partition in led)

        async def statuses(self, info: TopicInfo) -> dict[tuple[str, str], Any]:
            return {(each.group_id, replica.replica_id): FULL for each in info.partitions for replica in each.replicas}

    monkeypatch.setattr(readiness, "_LOOK_S", 0.02)
    monkeypatch.setattr(wait_for_leaders, "__kwdefaults__", {"on_progress": None, "look_s": 0.02})
    io = IoThread()

    async def made() -> SmallCluster:
        return SmallCluster()

    cluster = io.call(made())
    queue = admin.Admin(Stuck(cluster, 99), quick_settings(tmp_path))

    def create(if_missing: bool = False) -> TopicInfo:
        return io.call(queue.create_topic("t", {"partitions": 2}, if_missing=if_missing))

    with pytest.raises(TopicNotReadyError, match="taken back" if not left else "the topic is there"):
        create()
    assert ("t" in cluster.machine.topics) is left
    if left:
        with pytest.raises(TopicExistsError):
            create()
        with pytest.raises(TopicNotReadyError, match="the topic is there"):
            create(if_missing=True)  # it is another call's: never taken back
        assert "t" in cluster.machine.topics
    else:
        info = io.call(queue.create_topic("t", {}, if_missing=True, wait=False))
        assert info.topic_id == 2  # the name is free again
    io.call(_close(cluster))
    io.close()


async def _close(cluster: SmallCluster) -> None:
    cluster.close()
