"""Ray nodes without labels that share one data directory: each is a broker, also after a restart of everything."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

import rayqueue
from rayqueue.actors.names import actor_name
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import ray_cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def alive(rq: rayqueue.RayQueue) -> set[str]:
    return {broker.broker for broker in rq.cluster().brokers if broker.alive}


def all_serve(rq: rayqueue.RayQueue, end_offset: int) -> bool:
    return all(
        replica.problem is None and replica.high_watermark == end_offset
        for partition in rq.topic("orders").partitions
        for replica in partition.replicas
    )


def values(rq: rayqueue.RayQueue, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    with rq.consumer("orders", start="earliest") as consumer:

        def read() -> bool:
            found.extend(record.value for record in consumer.poll(timeout_ms=500))
            return len(found) >= count

        wait_for(read, "the records", 60.0)
    return found


def test_every_node_is_a_broker_with_its_own_directory_whatever_dies(tmp_path: Path) -> None:
    with ray_cluster("head", "w1", "w2", labels=False) as cluster:
        rq = rayqueue.connect(data_dir=tmp_path)
        partition = rq.create_topic("orders", replication=3).partitions[0]
        brokers = {replica.broker for replica in partition.replicas}
        assert brokers == alive(rq)
        assert len(brokers) == 3
        first = (tmp_path / "broker_id").read_text()
        for replica in partition.replicas:
            home = tmp_path if replica.broker == first else tmp_path / "brokers" / replica.broker
            assert (home / partition.group_id / replica.replica_id / "data.mdb").is_file()
        with rq.producer() as producer:
            producer.send("orders", b"0").result(30)

            cluster.kill("w1")
            cluster.add("w3")  # before Ray has noticed: a dial that is refused says it earlier
            wait_for(lambda: alive(rq) == brokers, "the new node to be the broker that died", 60.0)
            wait_for(lambda: all_serve(rq, 1), "its replica", 60.0)
            where = {
                ray.get(
                    ray.get_actor(
                        actor_name(GroupId(partition.group_id), ReplicaId(each.replica_id)), "rayqueue"
                    ).process.remote()
                ).ray_node_id
                for each in partition.replicas
            }
            assert where == {node.node_id for node in cluster.nodes.values()}

            cluster.add("w4")
            wait_for(lambda: len(alive(rq)) == 4, "a fourth broker", 60.0)
            producer.send("orders", b"1").result(30)
        brokers = alive(rq)

    # Everything was killed. The new nodes have other ids, and take what is there, each broker once.
    with ray_cluster("x1", "x2", "x3", "x4", labels=False):
        rq = rayqueue.connect(data_dir=tmp_path)
        wait_for(lambda: alive(rq) == brokers, "all brokers", 60.0)
        wait_for(lambda: all_serve(rq, 2), "all replicas", 60.0)
        assert values(rq, 2) == [b"0", b"1"]
        assert rq.delete_topic("orders")
        left = ("orders-*", "brokers/*/orders-*")
        wait_for(lambda: not any(list(tmp_path.glob(each)) for each in left), "its data to be deleted everywhere", 60.0)
        rq.shutdown()
