"""A rebalance in whose middle the coordinator that leads it and a whole node are killed ends complete, under load."""

from __future__ import annotations

from pathlib import Path

import pytest

import rayqueue
from rayqueue.config import Settings
from rayqueue.testing import wait_for
from tests.chaos.test_coordinator import kill
from tests.chaos.test_rebalance import check_history, has_copies, held, shares
from tests.chaos.test_replacement import PATIENCE_S, traffic
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)


def test_it_ends_complete_whoever_is_killed_in_the_middle(tmp_path: Path) -> None:
    with ray_cluster("b1", "b2", "b3") as cluster:
        rq = rayqueue.connect(settings=Settings(data_dir=tmp_path, cluster={"moves_at_once": 1}))
        rq.create_topic("orders", partitions=4, replication=3)
        wait_for(lambda: all(len(each) == 3 for each in held(rq)), "all copies", PATIENCE_S)
        with traffic(rq) as sending:
            wait_for(lambda: len(sending.acked) > 100, "some records", PATIENCE_S)
            cluster.add("b4")
            wait_for(lambda: sum(each.alive for each in rq.cluster().brokers) == 4, "the new broker", PATIENCE_S)
            begun = rq.rebalance()
            assert begun is not None
            wait_for(lambda: rq.cluster().moves, "the first move", PATIENCE_S)
            kill(rq.cluster().coordinator)
            wait_for(lambda: any("b4" in each for each in held(rq)), "the first that has moved", PATIENCE_S)
            cluster.kill("b3")  # gives some away, has some, and holds a coordinator
            before = len(sending.acked)
            wait_for(lambda: len(sending.acked) > before + 20, "acknowledgements without it", PATIENCE_S)
            cluster.add("b3")
            wait_for(lambda: rq.rebalance_progress() is None, "the end of the rebalance", PATIENCE_S)
            wait_for(lambda: has_copies(rq, 3), "three copies of each", PATIENCE_S)
            assert shares(rq) == {"b1": 3, "b2": 3, "b3": 3, "b4": 3}
        check_history(rq, sending.acked)
        rq.shutdown()
