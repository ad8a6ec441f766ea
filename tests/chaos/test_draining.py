"""Ray drains a node, as it does with one that is taken back: it leads nothing and holds nothing before it is gone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import rayqueue
from rayqueue.actors._ray import _native
from rayqueue.config import Settings
from rayqueue.testing import wait_for
from tests.chaos.test_rebalance import check_history, held, leaders
from tests.chaos.test_replacement import PATIENCE_S, traffic
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)

_PREEMPTION = 2
"""``DrainNodeReason`` of Ray: the node is taken back, whatever runs there."""


def drain(address: str, node_id: str) -> None:
    """As ``ray drain-node`` does, which does not find a Ray that listens on loopback only."""
    deadline_ms = int((time.time() + 600) * 1000)
    accepted, why = _native.GcsClient(address=address).drain_node(node_id, _PREEMPTION, "a test", deadline_ms)
    assert accepted, why


@pytest.mark.long
def test_a_node_that_ray_drains_hands_over_and_is_emptied(tmp_path: Path) -> None:
    cluster_settings = {"replace_after_ms": 600_000, "leaders_look_ms": 600_000, "moves_at_once": 4}
    with ray_cluster("b1", "b2", "b3", "b4") as cluster:
        rq = rayqueue.connect(settings=Settings(data_dir=tmp_path, cluster=cluster_settings))
        rq.create_topic("orders", partitions=4, replication=3)
        wait_for(lambda: all(len(each) == 3 for each in held(rq)), "all copies", PATIENCE_S)
        for number, part in enumerate(rq.topic("orders").partitions):
            if "b4" in {each.broker for each in part.replicas} and part.leader != "b4":
                rq.transfer_leader("orders", number, "b4")
        assert leaders(rq)["b4"] > 1
        with traffic(rq) as sending:
            wait_for(lambda: len(sending.acked) > 100, "some records", PATIENCE_S)
            drain(cluster.address, cluster.nodes["b4"].node_id)
            wait_for(lambda: "b4" in {each.broker for each in rq.cluster().brokers if each.leaving}, "it", PATIENCE_S)
            wait_for(lambda: leaders(rq)["b4"] == 0 and None not in leaders(rq), "other leaders", PATIENCE_S)
            wait_for(lambda: all(len(each - {"b4"}) == 3 for each in held(rq)), "other copies", PATIENCE_S)
            wait_for(lambda: not rq.cluster().moves, "the moves", PATIENCE_S)
            cluster.kill("b4")
            before = len(sending.acked)
            wait_for(lambda: len(sending.acked) > before + 100, "acknowledgements", PATIENCE_S)
        check_history(rq, sending.acked)
        assert ("node_draining", "b4") in {(each.kind, each.subject) for each in rq.events()}
        rq.shutdown()
