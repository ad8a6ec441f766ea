"""Consumer groups of several processes: sharing, moving, dying, stopping, and a coordinator that dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from rayqueue.client.handle import RayQueue
from rayqueue.testing import wait_for
from tests.integration.consumers import Member, coordinator_pid, running_queue

PARTITIONS = 6

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def rq() -> Iterator[RayQueue]:
    with running_queue() as queue:
        queue.create_topic("orders", partitions=PARTITIONS, replication=1)
        yield queue


@pytest.fixture(scope="module")
def lanes(rq: RayQueue) -> str:
    rq.create_topic("lanes", partitions=2, replication=1, lanes=3)
    return "lanes"


class GroupMembers:
    """Members of one group. Those that were not killed are closed at the end."""

    def __init__(self, rq: RayQueue, group: str, topic: str = "orders") -> None:
        self._rq = rq
        self._group = group
        self._topic = topic
        self.all: list[Member] = []

    def join(self, *, start: bool = True, **options: Any) -> Member:
        member = Member(self._rq, [self._topic], self._group, **options)
        self.all.append(member)
        if start:
            member.start()
        return member

    def kill(self, member: Member) -> None:
        self.all.remove(member)
        os.kill(member.pid, signal.SIGKILL)

    def __enter__(self) -> GroupMembers:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.all:
            member.close()

    def shares(self) -> list[set[int]]:
        return [member.reads for member in self.all]

    def balanced(self) -> bool:
        shares = self.shares()
        whole = Counter(each for share in shares for each in share) == Counter(range(PARTITIONS))
        return whole and max(map(len, shares)) - min(map(len, shares)) <= 1


def send(rq: RayQueue, count: int, topic: str = "orders", partitions: int = PARTITIONS, **options: Any) -> None:
    with rq.producer() as producer:
        for partition in range(partitions):
            producer.send_many(topic, [b"x"] * count, partition=partition, **options)


def until(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> float:
    """How long it took."""
    started_s = time.monotonic()
    wait_for(lambda: condition() or None, what, timeout_s)
    return time.monotonic() - started_s


def test_members_share_and_a_late_joiner_takes_no_more_than_its_share(rq: RayQueue) -> None:
    send(rq, 100)
    with GroupMembers(rq, "sharing") as members:
        first = members.join()
        until(members.balanced, "one member to read everything")
        second = members.join()
        until(members.balanced, "two members to share")
        kept = {member: member.reads for member in (first, second)}
        third = members.join()
        until(members.balanced, "three members to share")
        for member, before in kept.items():
            assert member.reads < before, "a partition moved between those that were there"
        until(lambda: sum(len(member.seen) for member in members.all) >= 100 * PARTITIONS, "all records")
        send(rq, 10)
        until(lambda: sum(len(member.seen) for member in members.all) >= 110 * PARTITIONS, "the new records")
        seen = Counter(each for member in members.all for each in member.seen)
        assert set(seen.values()) == {1}, "in a group that nobody leaves by accident nothing comes twice"
        assert third.told == [("assigned", sorted(third.reads))] or len(third.told) > 1
        leaving = third.reads
        members.all.remove(third)
        third.close()
        took_s = until(members.balanced, "those who stay to take over")
        assert took_s < 5
        assert {each for member in members.all for each in member.reads} >= leaving


@pytest.mark.alone
def test_a_killed_member_is_replaced_within_a_second_and_a_stopped_one_within_three(rq: RayQueue) -> None:
    with GroupMembers(rq, "dying") as members:
        heir = members.join()
        killed = members.join()
        stopped = members.join(auto_commit=False)
        until(members.balanced, "three members")
        send(rq, 50)
        until(lambda: sum(len(member.seen) for member in members.all) >= 50 * PARTITIONS, "all records")
        until(lambda: rq.group("dying").state == "stable", "nothing to be moving")

        orphans = killed.reads
        members.kill(killed)
        killed_s = until(lambda: orphans <= heir.reads | stopped.reads, "the killed one's partitions to be read")
        assert killed_s < 1.0, killed_s

        orphans = stopped.reads
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            stopped_s = until(lambda: heir.reads == set(range(PARTITIONS)), "the stopped one's partitions to be read")
            # It had committed nothing. Of the killed one nobody knows how much it had.
            until(lambda: orphans <= {each[0] for each in heir.seen}, "their records")
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        assert stopped_s < 3.0, stopped_s
        until(lambda: any(kind == "lost" for kind, _ in stopped.told), "the stopped one to learn of it")
        until(members.balanced, "the stopped one to have its share again")


def test_a_zombie_cannot_commit(rq: RayQueue) -> None:
    send(rq, 20)
    with GroupMembers(rq, "zombies") as members:
        zombie = members.join(start=False, auto_commit=False)
        pid = int(ray.get(zombie.handle.pid.remote(), timeout=60))
        until(lambda: ray.get(zombie.handle.poll.remote(200), timeout=30), "its records")
        os.kill(pid, signal.SIGSTOP)
        try:
            heir = members.join()
            until(lambda: heir.reads == set(range(PARTITIONS)), "the heir to read everything")
            until(lambda: len({each[0] for each in heir.seen}) == PARTITIONS, "the heir's records")
            commit = zombie.handle.commit.remote()  # carried out as soon as it wakes up
        finally:
            os.kill(pid, signal.SIGCONT)
        assert ray.get(commit, timeout=30) == "stale_generation"


def test_a_coordinator_killed_during_a_rebalance_moves_everything_once(rq: RayQueue) -> None:
    send(rq, 100)
    with GroupMembers(rq, "orphans") as members:
        first = members.join()
        until(members.balanced, "one member")
        second = members.join(start=False)
        ray.get(second.handle.poll.remote(0), timeout=60)  # it joins
        os.kill(coordinator_pid(rq), signal.SIGKILL)
        second.start()
        send(rq, 10)  # nobody needs a coordinator for that
        until(lambda: first.seen or second.seen, "records, with or without a coordinator", 10)
        until(members.balanced, "the rebalance to end", 40)
        send(rq, 1)
        until(lambda: len({*first.seen, *second.seen}) >= 111 * PARTITIONS, "all records")
        doubled = Counter([*first.seen, *second.seen])
        assert max(doubled.values()) == 1


def test_lanes_through_rebalances(rq: RayQueue, lanes: str) -> None:
    for priority in (0, 1, 2):
        send(rq, 300, lanes, 2, priority=priority)
    with GroupMembers(rq, "lanes", lanes) as members:
        first = members.join(max_poll_records=50)
        until(lambda: first.seen, "the first records")
        second = members.join(max_poll_records=50)
        until(lambda: len(first.reads) == len(second.reads) == 1, "the two to share")
        members.all.remove(first)
        first_seen = first.seen
        first.close()
        until(lambda: len({*first_seen, *second.seen}) >= 1800, "all records")
        seen = Counter([*first_seen, *second.seen])
        assert len(seen) == 1800
        assert max(seen.values()) == 1
        for partition in range(2):
            order = [lane for number, lane, _ in first_seen if number == partition]
            assert order == sorted(order, reverse=True)
