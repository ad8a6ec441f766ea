"""Nodes that die, come back and join; and a whole cluster that is started again on its data."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

import rayqueue
from rayqueue.actors.names import actor_name
from rayqueue.config import Settings
from rayqueue.errors import ClusterStartError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.protocol.topics import PartitionInfo
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)

BROKERS = ("b1", "b2", "b3")


def replica_on(partition: PartitionInfo, broker: str) -> Any:
    node = next(replica.replica_id for replica in partition.replicas if replica.broker == broker)
    return ray.get_actor(actor_name(GroupId(partition.group_id), ReplicaId(node)), "rayqueue")


def alive(rq: rayqueue.RayQueue) -> set[str]:
    return {broker.broker for broker in rq.cluster().brokers if broker.alive}


def all_serve(rq: rayqueue.RayQueue, topic: str, end_offset: int) -> bool:
    """Every replica answers and has everything."""
    return all(
        replica.problem is None and replica.high_watermark == end_offset
        for partition in rq.topic(topic).partitions
        for replica in partition.replicas
    )


@pytest.mark.long
def test_nodes_die_come_back_and_join_and_everything_is_started_again(tmp_path: Path) -> None:
    with ray_cluster(*BROKERS) as cluster:
        rq = rayqueue.connect(data_dir=tmp_path)
        partition = rq.create_topic("orders", replication=3).partitions[0]
        assert {replica.broker for replica in partition.replicas} == set(BROKERS)
        cluster_id = rq.cluster().cluster_id
        with rq.producer() as producer:
            producer.send("orders", b"0").result(timeout_ms=20_000)

            cluster.kill("b3")
            wait_for(lambda: alive(rq) == {"b1", "b2"}, "b3 to be missed", 30.0)
            producer.send("orders", b"1").result(timeout_ms=20_000)
            told = {each.broker: each for each in rq.topic("orders").partitions[0].replicas}
            assert (told["b3"].role, told["b3"].problem is None) == ("absent", False)
            # New topics go where there are nodes.
            small = rq.create_topic("meanwhile", replication=2).partitions[0]
            assert {replica.broker for replica in small.replicas} == {"b1", "b2"}

            cluster.add("b3")
            wait_for(lambda: alive(rq) == set(BROKERS), "b3 to come back", 30.0)
            wait_for(lambda: all_serve(rq, "orders", 2), "its replica", 30.0)
            process = ray.get(replica_on(partition, "b3").process.remote())
            assert process.ray_node_id == cluster.nodes["b3"].node_id

            cluster.add("b4")
            wait_for(lambda: "b4" in alive(rq), "b4 to join", 30.0)
            joined = rq.create_topic("late", replication=1).partitions[0]
            assert joined.replicas[0].broker == "b4"
            assert producer.send("orders", b"2").result(timeout_ms=20_000).offset == 2

    # Everything was killed. Two of the coordinator's three nodes are enough, one is not.
    with ray_cluster("b1", "b5") as cluster:
        impatient = Settings(data_dir=tmp_path, cluster={"start_timeout_ms": 3000})
        with pytest.raises(ClusterStartError, match=r"needs 2 of its 3 coordinators.*b2, b3") as refused:
            rayqueue.connect(settings=impatient)
        assert refused.value.details["missing"] == ["b2", "b3"]
        cluster.add("b2")
        patient = Settings(data_dir=tmp_path, cluster={"broker_wait_ms": 120_000})
        rq = rayqueue.connect(settings=patient)
        assert rq.cluster().cluster_id == cluster_id
        assert [info.name for info in rq.topics()] == ["late", "meanwhile", "orders"]
        consumer = rq.consumer("orders", group="billing")
        values: list[bytes | None] = []

        def read_all() -> bool:
            values.extend(record.value for record in consumer.poll())
            return len(values) >= 3

        wait_for(read_all, "the records", 30.0)
        assert values == [b"0", b"1", b"2"]
        consumer.close()
        with ThreadPoolExecutor(1) as waiting:
            # Three brokers are there, and the metadata knows of more: the fourth copy waits for one of them.
            made = waiting.submit(rq.create_topic, "spread", replication=4)
            cluster.add("b3")
            copies = [replica.broker for replica in made.result(120).partitions[0].replicas]
        assert sorted(copies) == ["b1", "b2", "b3", "b5"]
        wait_for(lambda: all_serve(rq, "orders", 3), "all replicas", 30.0)
        rq.shutdown()
