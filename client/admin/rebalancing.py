"""Rebalancing, as its operator sees it: the plan, how far it is, and what is on its way to each broker.

A plan is made here, of what the coordinator and the replicas say now, and changes
nothing. The coordinator gets it as it was shown, and writes it down
(``rayqueue.cluster.plans``); what has changed meanwhile is left out of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayqueue.errors import ChangeInProgressError
from rayqueue.net.interfaces import Routes
from rayqueue.protocol.calls import (
    BeginRebalance,
    ClusterInfo,
    DescribeCluster,
    GetTopics,
    MoveInfo,
    RebalanceMove,
    StopRebalance,
    Topics,
)
from rayqueue.protocol.topics import TopicInfo

if TYPE_CHECKING:
    from rayqueue.cluster.placement import AliveBroker
    from rayqueue.cluster.rebalance import PlannedMove

_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class LeaderMove:
    topic: str
    partition: int
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """The moves of a rebalance. ``RayQueue.rebalance`` carries it out."""

    moves: tuple[PlannedMove, ...]
    leaders: tuple[LeaderMove, ...]
    """Leaderships that would move once the replicas are where they should be; they move by themselves then."""
    before: Mapping[str, int]
    """Replicas by broker."""
    after: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        """The bytes that are copied, about."""
        return sum(move.size_bytes for move in self.moves)


@dataclass(frozen=True, slots=True)
class RebalanceProgress:
    """The progress of the rebalance that is under way."""

    number: int
    moves: int
    moves_left: int
    size_bytes: int
    copied_bytes: int
    bytes_per_s: int

    @property
    def left_s(self) -> float | None:
        """The seconds that the rest takes at this pace; None if nothing can be said."""
        left_bytes = max(0, self.size_bytes - self.copied_bytes)
        return left_bytes / self.bytes_per_s if self.bytes_per_s else None


@dataclass(frozen=True, slots=True)
class JoinStatus:
    """A broker, and what is on its way to it."""

    broker: str
    host: str
    rack: str
    joined: bool
    """It is here, and takes part."""
    draining: bool
    replicas: int
    leaders: int | None
    arriving: tuple[MoveInfo, ...]
    """Replicas that are being copied to it."""
    planned: int
    """Replicas that a rebalance is still to move there."""
    planned_bytes: int

    @property
    def left_ms(self) -> int | None:
        """Until what is being copied to it is there, at this pace; None if nothing is, or nothing can be said."""
        told = [move.left_ms for move in self.arriving if move.left_ms is not None]
        return max(told) if told and len(told) == len(self.arriving) else None


async def make_plan(routes: Any) -> RebalancePlan:
    """``routes``: those of ``rayqueue.client.admin.admin.Admin``."""
    from rayqueue.cluster.placement import AliveBroker  # no other client needs it
    from rayqueue.cluster.rebalance import plan

    info: ClusterInfo = await routes.coordinator.call(DescribeCluster())
    found: Topics = await routes.coordinator.call(GetTopics())
    sizes, leaders = await looked_up(routes, found.topics)
    here = [each for each in info.brokers if each.alive]
    alive = [
        AliveBroker(each.broker, each.host, draining=each.draining, rack=each.rack, disk_bytes=each.disk_bytes)
        for each in here
    ]
    moving = {(move.topic, move.partition) for move in info.moves}
    skip = {part.group_id for topic in found.topics for part in topic.partitions if (topic.name, part.number) in moving}
    moves = plan(
        found.topics,
        alive,
        sizes=sizes,
        room={each.broker: each.room for each in info.brokers if each.room is not None},
        spare_bytes={
            each.broker: max(0, each.disk_spare_bytes - each.disk_promised_bytes)
            for each in info.brokers
            if each.disk_spare_bytes is not None
        },
        skip=skip,
    )
    before = Counter({each.broker: each.replicas for each in info.brokers})
    after = Counter(before)
    for move in moves:
        after[move.source] -= 1
        after[move.target] += 1
    return RebalancePlan(tuple(moves), _leader_moves(found.topics, moves, leaders, alive), dict(before), dict(after))


async def looked_up(routes: Any, topics: Sequence[TopicInfo]) -> tuple[dict[str, int], dict[str, str]]:
    """By Raft group: bytes, and the broker that leads."""
    sizes: dict[str, int] = {}
    leaders: dict[str, str] = {}
    terms: dict[str, int] = {}
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(topic: TopicInfo) -> None:
        async with gate:
            statuses = await routes.statuses(topic)
        for part in topic.partitions:
            for replica in part.replicas:
                told = statuses[part.group_id, replica.replica_id]
                if isinstance(told, Exception):
                    continue
                sizes[part.group_id] = max(sizes.get(part.group_id, 0), told.size_bytes)
                if told.role == "leader" and told.term >= terms.get(part.group_id, 0):
                    terms[part.group_id] = told.term
                    leaders[part.group_id] = replica.broker

    await asyncio.gather(*map(one, topics))
    return sizes, leaders


def _leader_moves(
    topics: Sequence[TopicInfo], moves: Sequence[PlannedMove], leaders: Mapping[str, str], alive: Sequence[AliveBroker]
) -> tuple[LeaderMove, ...]:
    """As they would be shared out over the replicas after the moves: a leader that is moved is its successor first."""
    from rayqueue.cluster.leaders import spread

    to = {(move.group_id, move.source): move.target for move in moves}
    stay = {each.broker for each in alive if not each.draining}
    held: dict[str, list[str]] = {}
    names: dict[str, tuple[str, int]] = {}
    for topic in topics:
        if topic.settings.prefer_leader is not None:
            continue
        for part in topic.partitions:
            brokers = [to.get((part.group_id, each.broker), each.broker) for each in part.replicas]
            held[part.group_id] = [each for each in brokers if each in stay]
            names[part.group_id] = topic.name, part.number
    led = {group_id: to.get((group_id, broker), broker) for group_id, broker in leaders.items()}
    return tuple(LeaderMove(*names[each.group_id], each.source, each.target) for each in spread(held, led))


async def begin(routes: Routes, wanted: RebalancePlan) -> ClusterInfo:
    """``ChangeInProgressError`` at once if another one is under way: to repeat the call would not end that."""
    info: ClusterInfo = await routes.coordinator.call(DescribeCluster())
    if info.rebalance is not None:
        raise ChangeInProgressError("a rebalance is under way already; stop it, or wait for its end")
    moves = tuple(RebalanceMove(each.group_id, each.remove, each.target, each.size_bytes) for each in wanted.moves)
    return await routes.coordinator.call(BeginRebalance(moves=moves), idempotent=False)  # type: ignore[no-any-return]


async def stop(routes: Routes) -> ClusterInfo:
    return await routes.coordinator.call(StopRebalance())  # type: ignore[no-any-return]


def progress_of(info: ClusterInfo) -> RebalanceProgress | None:
    """None if no rebalance is under way."""
    under_way = info.rebalance
    if under_way is None:
        return None
    moving = [move for move in info.moves if move.reason == "balance"]
    waiting_bytes = sum(share.size_bytes for share in under_way.waiting)
    copying_bytes = sum(max(0, (move.size_bytes or 0) - move.copied_bytes) for move in moving)
    return RebalanceProgress(
        under_way.number,
        under_way.moves,
        sum(share.moves for share in under_way.waiting) + len(moving),
        under_way.size_bytes,
        max(0, under_way.size_bytes - waiting_bytes - copying_bytes),
        sum(move.bytes_per_s for move in moving),
    )


def joins_of(info: ClusterInfo) -> list[JoinStatus]:
    shares = {} if info.rebalance is None else {share.broker: share for share in info.rebalance.waiting}
    return [
        JoinStatus(
            each.broker,
            each.host,
            each.rack,
            each.alive,
            each.draining,
            each.replicas,
            each.leaders,
            tuple(move for move in info.moves if move.broker == each.broker),
            shares[each.broker].moves if each.broker in shares else 0,
            shares[each.broker].size_bytes if each.broker in shares else 0,
        )
        for each in info.brokers
    ]
