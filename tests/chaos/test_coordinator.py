"""Three coordinators on three nodes: the active one dies, another goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError

import rayqueue
from rayqueue.actors.keeper.nodes import found_actors
from rayqueue.actors.names import actor_name
from rayqueue.ids import COORDINATOR, ReplicaId
from rayqueue.protocol.calls import NewProducerIds
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(240)


def coordinator(node: str) -> Any:
    return ray.get_actor(actor_name(COORDINATOR, ReplicaId(node)), "rayqueue")


def kill(node: str) -> None:
    os.kill(ray.get(coordinator(node).process.remote()).pid, signal.SIGKILL)


def running() -> dict[str, str] | None:
    """The Ray nodes of the three; None while one of them is being restarted."""
    try:
        return {node: ray.get(coordinator(node).process.remote()).ray_node_id for node in ("c1", "c2", "c3")}
    except ActorUnavailableError:
        return None


def test_another_coordinator_takes_over_and_calls_continue(tmp_path: Path) -> None:
    with ray_cluster("b1", "b2", "b3"):
        rq = rayqueue.connect(data_dir=tmp_path)
        places = running()
        assert places is not None
        assert len(set(places.values())) == 3
        rq.create_topic("before", replication=1)
        before = rq.cluster()
        ids = [rq.io.call(rq.routes.coordinator.call(NewProducerIds(count=3)))]

        kill(before.coordinator)
        began_s = time.monotonic()
        after = rq.cluster()
        print(f"took over after {time.monotonic() - began_s:.2f} s")
        assert after.coordinator != before.coordinator
        assert after.term > before.term
        assert after.cluster_id == before.cluster_id
        assert [info.name for info in rq.topics()] == ["before"]
        ids.append(rq.io.call(rq.routes.coordinator.call(NewProducerIds(count=3))))
        assert ids[1] >= ids[0] + 3
        # The new one keeps the cluster: it knows the brokers and starts replicas.
        rq.create_topic("after", partitions=3, replication=1)
        assert {each.leader for each in rq.topic("after").partitions} == {"b1", "b2", "b3"}

        # Two of three at once: Ray restarts them where they were, and they find a leader again.
        kill("c1")
        kill("c2")
        assert rq.cluster().cluster_id == before.cluster_id
        assert wait_for(running, "all three", 30.0) == places
        assert rq.delete_topic("before")
        rq.shutdown()
        assert found_actors("rayqueue") == set()
