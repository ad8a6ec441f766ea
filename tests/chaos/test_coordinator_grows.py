"""A queue that began on one node: its coordinator becomes three when nodes join, and one may die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

import rayqueue
from rayqueue.actors.keeper.home import load_cluster
from rayqueue.actors.names import actor_name
from rayqueue.config import Settings
from rayqueue.errors import ClusterStartError, RayQueueError
from rayqueue.ids import COORDINATOR, ReplicaId
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)

THREE = ("c1", "c2", "c3")


def coordinator(node: str) -> Any:
    return ray.get_actor(actor_name(COORDINATOR, ReplicaId(node)), "rayqueue")


def votes_of_three(nodes: tuple[str, ...] = THREE) -> bool:
    """Each of them knows three voters."""
    try:
        return all(ray.get(coordinator(node).status.remote(), timeout=5).voters == THREE for node in nodes)
    except (ValueError, ray.exceptions.RayError, RayQueueError):
        return False


@pytest.mark.long
def test_the_coordinator_grows_with_its_cluster_and_survives_its_first(tmp_path: Path) -> None:
    with ray_cluster("b1") as cluster:
        rq = rayqueue.connect(data_dir=tmp_path)
        rq.create_topic("orders", replication=1)
        assert ray.get(coordinator("c1").status.remote()).voters == ("c1",)
        consumer = rq.consumer("orders", group="billing")
        producer = rq.producer()
        values: list[bytes | None] = []

        def sent_and_read(value: bytes) -> None:
            producer.send("orders", value).result(timeout_ms=20_000)

            def read() -> bool:
                values.extend(record.value for record in consumer.poll(timeout_ms=100))
                return value in values

            wait_for(read, f"{value!r}", 30.0)
            consumer.commit()

        sent_and_read(b"alone")
        cluster.add("b2")
        cluster.add("b3")
        wait_for(votes_of_three, "three coordinators that vote", 60.0)
        places = {ray.get(coordinator(node).process.remote()).ray_node_id for node in THREE}
        assert places == {node.node_id for node in cluster.nodes.values()}
        wait_for(lambda: len((load_cluster(tmp_path) or _none()).coordinators) == 3, "the file to say so", 30.0)

        before = rq.cluster()
        leader = before.coordinator
        os.kill(ray.get(coordinator(leader).process.remote()).pid, signal.SIGKILL)
        after = rq.cluster()
        assert after.coordinator != leader
        assert after.term > before.term
        assert [info.name for info in rq.topics()] == ["orders"]
        sent_and_read(b"after")
        # A new member is let in, and what there is is shared: the group's state is with the new one too.
        with rq.consumer("orders", group="billing") as second:

            def joined() -> bool:
                consumer.poll(timeout_ms=100)
                second.poll(timeout_ms=100)
                return len(rq.group("billing").members) == 2

            wait_for(joined, "the second member", 30.0)
        assert values == [b"alone", b"after"]
        consumer.close()
        producer.close()

    # Everything was killed. Two of the three are enough, whichever they are; one is not.
    with ray_cluster("b2") as cluster:
        impatient = Settings(data_dir=tmp_path, cluster={"start_timeout_ms": 3000})
        with pytest.raises(ClusterStartError, match="needs 2 of its 3 coordinators"):
            rayqueue.connect(settings=impatient)
        cluster.add("b3")
        rq = rayqueue.connect(data_dir=tmp_path)
        assert rq.cluster().cluster_id == before.cluster_id
        assert [info.name for info in rq.topics()] == ["orders"]
        assert votes_of_three(("c2", "c3"))
        cluster.add("b1")
        wait_for(votes_of_three, "the first one", 60.0)
        rq.shutdown()


def _none() -> Any:
    raise AssertionError("cluster.json is gone")
