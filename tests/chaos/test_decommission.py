"""A broker is emptied and a replica moved while producers go on; nothing is lost, and the command says how it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rayqueue
from rayqueue.errors import InvalidInputError, UnknownBrokerError
from rayqueue.testing import wait_for
from tests.chaos.test_replacement import PATIENCE_S, brokers, coordinators, only, read_back, traffic, whole
from tests.integration.ray_clusters import RayCluster, ray_cluster

pytestmark = pytest.mark.timeout(300)


def command(cluster: RayCluster, data_dir: Path, *words: str) -> str:
    where = ("--address", cluster.address, "--data-dir", str(data_dir))
    run = [sys.executable, "-m", "rayqueue.cli", *words, *where]
    done = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_replica_is_moved_and_a_broker_emptied_while_it_serves(tmp_path: Path) -> None:
    with ray_cluster("b1", "b2", "b3", "b4") as cluster:
        rq = rayqueue.connect(data_dir=tmp_path)
        rq.create_topic("orders", replication=3)
        wait_for(lambda: whole(rq), "the topic", PATIENCE_S)
        with traffic(rq) as sending:
            wait_for(lambda: len(sending.acked) > 200, "some records", PATIENCE_S)
            (free,) = {"b1", "b2", "b3", "b4"} - brokers(rq)
            leader = only(rq).leader
            assert leader is not None

            with pytest.raises(InvalidInputError, match="one of these can be moved"):
                rq.move_replica("orders", 0, source=free, target=leader)
            with pytest.raises(UnknownBrokerError, match="there are b1, b2, b3, b4"):
                rq.decommission("b9")

            # The one that leads, of all: it hands over first.
            said = command(cluster, tmp_path, "partitions", "move", "orders", "0", "--from", leader, "--to", free)
            assert f"is on {free} now" in said
            assert brokers(rq) == {"b1", "b2", "b3", "b4"} - {leader}
            wait_for(lambda: whole(rq), "the moved replica", PATIENCE_S)

            # Another is emptied: not Ray's head, which is this test's own way to the cluster.
            leaving = next(each for each in sorted(brokers(rq)) if each != "b1")
            assert "is empty" in command(cluster, tmp_path, "brokers", "decommission", leaving)
            assert leaving not in brokers(rq)
            assert not [*tmp_path.glob(f"{leaving}/*/r*")]
            told = json.loads(command(cluster, tmp_path, "brokers", "list", "--json"))
            (state,) = (each for each in told["brokers"] if each["broker"] == leaving)
            assert (state["draining"], state["holds"], state["alive"]) == (True, 0, True)
            late = rq.create_topic("late", partitions=3, replication=3)
            assert leaving not in {replica.broker for each in late.partitions for replica in each.replicas}
            wait_for(lambda: len(coordinators(rq)) == 3, "three coordinators", PATIENCE_S)

            cluster.kill(leaving)
            wait_for(
                lambda: leaving not in {each.broker for each in rq.cluster().brokers}, "it is forgotten", PATIENCE_S
            )
            before = len(sending.acked)
            wait_for(lambda: len(sending.acked) > before + 100, "acknowledgements", PATIENCE_S)
        found = read_back(rq, len(sending.acked))
        assert found == sorted(set(found)), "in order, and nothing is doubled"
        assert set(sending.acked) <= set(found), "nothing acknowledged is lost"
        rq.shutdown()
