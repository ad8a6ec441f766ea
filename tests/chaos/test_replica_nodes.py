"""One replica on each of three Ray nodes: pinned where it belongs, and the group outlives a node."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from rayqueue.client.embedded import RAY_SYSTEM_SETTINGS, loopback_only
from rayqueue.testing import wait_for
from tests.integration.actor_groups import ActorGroup, actor_settings, check_history, wait_for_more
from tests.integration.history import Writer

pytestmark = pytest.mark.timeout(240)

_SMALL = {"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    temporary = tempfile.mkdtemp(prefix="rq-")  # short: see embedded_ray
    # The cluster also leaves its address here, for whoever looks for one; nobody else should find it.
    monkeypatch.setenv("RAY_TMPDIR", temporary)
    with loopback_only():
        made: Any = Cluster()
        try:
            made.add_node(include_dashboard=False, _system_config=RAY_SYSTEM_SETTINGS, **_SMALL)
            for _ in range(2):
                made.add_node(**_SMALL)
            ray.init(address=made.address, log_to_driver=False, logging_level=logging.ERROR)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()
            shutil.rmtree(temporary, ignore_errors=True)


def test_group_outlives_a_node(cluster: Any, tmp_path: Path) -> None:
    workers = {node.node_id: node for node in cluster.worker_nodes}
    places = [cluster.head_node.node_id, *workers]
    with ActorGroup("nodes-0", actor_settings(data_dir=tmp_path), ray_node_ids=places) as group:
        assert [group.process(node).ray_node_id for node in group.replica_ids] == places
        # The node that dies must not be the driver's.
        doomed = group.replica_ids[1]
        if group.leader() != doomed:
            group.transfer_leadership(doomed)
            wait_for(lambda: group.leader() == doomed, f"{doomed} to lead")
        with Writer(group.client, 1) as writer:
            wait_for_more(writer, 50)
            cluster.remove_node(workers[places[1]], allow_graceful=False)
            # Its replica leads on for a moment: a worker notices the death of its raylet only after a while.
            wait_for(lambda: group.leader() != doomed, "another leader", 30.0)
            wait_for_more(writer, 50)
            wait_for(lambda: doomed not in group.statuses(), f"the end of {doomed}", 30.0)
        check_history(group, writer, replicas=2)
