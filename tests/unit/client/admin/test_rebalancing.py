"""Rebalancing on the queue in memory: plans, what is written down, how far it is, and its stop."""

from __future__ import annotations

import asyncio

import pytest

from rayqueue.client.admin.rebalancing import joins_of, progress_of
from rayqueue.errors import ChangeInProgressError, InvalidInputError
from rayqueue.protocol.calls import Broker, ClusterInfo, MoveInfo, RebalanceInfo, Share
from rayqueue.testing import memory


def test_a_plan_is_made_shown_begun_and_stopped() -> None:
    with memory.connect(brokers=4) as rq:
        for each in range(12):
            rq.create_topic(f"t{each}", replication=1)
        assert rq.plan_rebalance().moves == (), "new topics are spread"
        assert rq.rebalance_progress() is None
        emptied = rq.cluster().brokers[0].broker
        for info in rq.topics():
            if info.partitions[0].replicas[0].broker == emptied:
                rq.delete_topic(info.name)
        plan = rq.plan_rebalance()
        assert {each.target for each in plan.moves} == {emptied}
        assert len(plan.moves) == 2
        assert max(plan.after.values()) - min(plan.after.values()) <= 1
        assert plan.size_bytes == sum(each.size_bytes for each in plan.moves)
        begun = rq.rebalance(plan)
        assert begun is not None
        assert (begun.moves, begun.moves_left, begun.size_bytes) == (len(plan.moves), len(plan.moves), plan.size_bytes)
        with pytest.raises(ChangeInProgressError):
            rq.rebalance(plan)
        assert asyncio.run(rq.rebalance_progress_async()) == begun
        (waiting,) = (each for each in rq.join_status() if each.broker == emptied)
        assert (waiting.planned, waiting.planned_bytes, waiting.joined) == (len(plan.moves), plan.size_bytes, True)
        rq.stop_rebalance()
        rq.stop_rebalance()
        assert rq.rebalance_progress() is None
        assert rq.plan_rebalance().moves == plan.moves, "what was stopped is planned again"


def test_another_replication_is_wished_for_and_said() -> None:
    with memory.connect(brokers=4) as rq:
        rq.create_topic("orders", partitions=2, replication=2)
        assert rq.alter_topic("orders", replication=3).settings.replication == 3
        assert rq.alter_topic("orders", replication=1, retention_ms=5).settings.retention_ms == 5
        assert rq.alter_topic("orders", prefer_leader="consumer").settings.prefer_leader == "consumer"
        with pytest.raises(InvalidInputError, match="prefer_leader is 'consumer' or none"):
            rq.alter_topic("orders", prefer_leader="nobody")  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError):
            rq.alter_topic("orders", replication=0)


def move(broker: str, size: int, copied: int, rate: int, reason: str = "balance") -> MoveInfo:
    left_ms = (size - copied) * 1000 // rate if rate else None
    return MoveInfo("orders", 0, "r1", "r1.1", broker, reason, "", "b1", size, copied, rate, left_ms)


def test_how_far_it_is_is_what_waits_and_what_is_being_copied() -> None:
    info = ClusterInfo(
        "c",
        "c1",
        1,
        (Broker("b1", "h1", True, 9), Broker("b2", "h2", True, 1), Broker("b3", "h3", False, 1)),
        1,
        1,
        0,
        (move("b2", 100, 40, 10), move("b2", 50, 0, 10), move("b1", 999, 0, 1, "lost")),
        rebalance=RebalanceInfo(3, 5, 1000, 0, (Share("b2", 2, 300),)),
    )
    progress = progress_of(info)
    assert progress is not None
    assert (progress.moves, progress.moves_left, progress.size_bytes, progress.copied_bytes) == (5, 4, 1000, 590)
    assert (progress.bytes_per_s, progress.left_s) == (20, 20.5)
    joins = {each.broker: each for each in joins_of(info)}
    assert (len(joins["b2"].arriving), joins["b2"].planned, joins["b2"].left_ms) == (2, 2, 6_000)
    assert (joins["b1"].planned, joins["b3"].joined, joins["b3"].left_ms) == (0, False, None)
