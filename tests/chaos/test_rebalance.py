"""A broker joins, replicas and leaders are spread, copies become more and fewer, all under load; nothing is lost."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import rayqueue
from rayqueue.config import Settings
from rayqueue.errors import CapacityError, InvalidInputError
from rayqueue.testing import wait_for
from tests.chaos.test_decommission import command
from tests.chaos.test_replacement import PATIENCE_S, traffic
from tests.chaos.traffic import Record, step
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)

RACKS = {"b1": "left", "b2": "left", "b3": "right", "b4": "right"}


def held(rq: rayqueue.RayQueue) -> list[set[str]]:
    """By partition, the brokers of its copies that are well; none of a partition that has no leader."""
    return [
        {replica.broker for replica in each.replicas if replica.problem is None} if each.leader else set()
        for each in rq.topic("orders").partitions
    ]


def shares(rq: rayqueue.RayQueue) -> Counter[str]:
    return Counter(broker for each in held(rq) for broker in each)


def leaders(rq: rayqueue.RayQueue) -> Counter[str | None]:
    return Counter(each.leader for each in rq.topic("orders").partitions)


def has_copies(rq: rayqueue.RayQueue, copies: int) -> bool:
    moves = rq.cluster().moves
    return not moves and all(len(each) == copies for each in held(rq))


def check_history(rq: rayqueue.RayQueue, acked: list[int]) -> None:
    """All that was acknowledged is there, once, and in each partition in the order in which it was sent."""
    found: dict[int, list[int]] = {}
    with rq.consumer("orders", start="earliest") as consumer:
        while sum(map(len, found.values())) < len(acked):
            records = consumer.poll(timeout_ms=20_000)
            assert records, f"{sum(map(len, found.values()))} of {len(acked)}"
            for record in records:
                found.setdefault(record.partition, []).append(int(record.value or b""))
    assert len(found) == 4
    assert all(each == sorted(set(each)) for each in found.values()), "in order, and nothing is doubled"
    assert set(acked) <= {number for each in found.values() for number in each}, "nothing acknowledged is lost"


def follows_its_readers(rq: rayqueue.RayQueue) -> None:
    """This process is on the first broker's node."""
    rq.create_topic("near", replication=4, prefer_leader="consumer")
    wait_for(lambda: rq.topic("near").partitions[0].healthy == 4, "its copies", PATIENCE_S)
    rq.transfer_leader("near", 0, "b3")
    with rq.consumer("near", group="readers") as consumer:

        def is_near() -> bool:
            consumer.poll(timeout_ms=100)
            return rq.topic("near").partitions[0].leader == "b1"

        wait_for(is_near, "a leader next to its reader", PATIENCE_S)


def test_a_broker_joins_and_replicas_leaders_and_copies_follow(tmp_path: Path, record_property: Record) -> None:
    settings = Settings(data_dir=tmp_path, cluster={"leaders_look_ms": 1_000, "leader_rest_ms": 1_000})
    with ray_cluster("b1", "b2", "b3", racks=RACKS) as cluster:
        rq = rayqueue.connect(settings=settings)
        rq.create_topic("orders", partitions=4, replication=2)
        assert all("b3" in each for each in held(rq)), "one copy in each rack"
        with traffic(rq) as sending:
            wait_for(lambda: len(sending.acked) > 100, "some records", PATIENCE_S)
            cluster.add("b4")
            wait_for(lambda: len(rq.cluster().brokers) == 4, "the new broker", PATIENCE_S)
            plan = rq.plan_rebalance()
            assert {(each.source, each.target) for each in plan.moves} == {("b3", "b4")}
            assert len(plan.moves) == 2
            assert rq.rebalance_progress() is None, "a dry run begins nothing"
            with step(record_property, sending, "a rebalance over a broker that joined"):
                assert json.loads(command(cluster, tmp_path, "rebalance", "--yes", "--json"))["done"]
            assert shares(rq) == {"b1": 2, "b2": 2, "b3": 2, "b4": 2}
            assert all({RACKS[broker] for broker in each} == {"left", "right"} for each in held(rq))
            assert rq.plan_rebalance().moves == ()
            assert max(leaders(rq).values()) == 1, "each of the four brokers leads one"
            joins = {each.broker: each for each in rq.join_status()}
            assert (joins["b4"].joined, joins["b4"].replicas, joins["b4"].arriving) == (True, 2, ())
            assert joins["b4"].rack == "right"
            assert all(each.disk_bytes > each.disk_free_bytes > 0 for each in rq.cluster().brokers)

            with step(record_property, sending, "a copy more of each partition"):
                rq.alter_topic("orders", replication=3)
                wait_for(lambda: has_copies(rq, 3), "a copy more of each", PATIENCE_S)
            target = next(iter(held(rq)[0] - {rq.topic("orders").partitions[0].leader or ""}))
            with step(record_property, sending, "a leader is transferred"):
                rq.transfer_leader("orders", 0, target)
            with pytest.raises(InvalidInputError, match="none on b9"):
                rq.transfer_leader("orders", 0, "b9")
            with step(record_property, sending, "two copies less of each partition"):
                command(cluster, tmp_path, "topics", "alter", "orders", "--replication", "1")
                wait_for(lambda: has_copies(rq, 1), "one copy of each", PATIENCE_S)
            follows_its_readers(rq)
            with pytest.raises(CapacityError, match=r"MiB of disk free.*cluster\.replica_memory_bytes"):
                rq.create_topic("huge", partitions=5_000, replication=3)
            before = len(sending.acked)
            wait_for(lambda: len(sending.acked) > before + 100, "acknowledgements", PATIENCE_S)
        check_history(rq, sending.acked)
        rq.shutdown()
