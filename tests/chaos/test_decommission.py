"""A broker is emptied and a replica moved while producers go on; nothing is lost, and the command says how it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rayqueue
from rayqueue.config import Settings
from rayqueue.errors import InvalidInputError, UnknownBrokerError
from rayqueue.testing import wait_for
from tests.chaos.test_replacement import (
    PATIENCE_S,
    brokers,
    coordinators,
    group_of,
    only,
    read_back,
    traffic,
    whole,
)
from tests.chaos.traffic import Record, step
from tests.integration.ray_clusters import RayCluster, ray_cluster

pytestmark = pytest.mark.timeout(300)


def directories(data_dir: Path, group_id: str) -> int:
    """Of the group's replicas."""
    return sum(path.is_dir() for path in data_dir.rglob(f"{group_id}/r*"))


def known(rq: rayqueue.RayQueue) -> set[str]:
    return {each.broker for each in rq.cluster().brokers}


def check_history(rq: rayqueue.RayQueue, acked: list[int]) -> None:
    found = read_back(rq, len(acked))
    assert found == sorted(set(found)), "in order, and nothing is doubled"
    assert set(acked) <= set(found), "nothing acknowledged is lost"


def command(cluster: RayCluster, data_dir: Path, *words: str) -> str:
    where = ("--address", cluster.address, "--data-dir", str(data_dir))
    run = [sys.executable, "-m", "rayqueue.cli", *words, *where]
    done = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_replica_is_moved_and_a_broker_emptied_while_it_serves(tmp_path: Path, record_property: Record) -> None:
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
            with step(record_property, sending, "the leading replica is moved"):
                said = command(cluster, tmp_path, "partitions", "move", "orders", "0", "--from", leader, "--to", free)
            assert f"is on {free} now" in said
            assert brokers(rq) == {"b1", "b2", "b3", "b4"} - {leader}
            wait_for(lambda: whole(rq), "the moved replica", PATIENCE_S)

            # Another is emptied: not Ray's head, which is this test's own way to the cluster.
            leaving = next(each for each in sorted(brokers(rq)) if each != "b1")
            with step(record_property, sending, "a broker is decommissioned"):
                assert "is empty" in command(cluster, tmp_path, "brokers", "decommission", leaving)
            assert leaving not in brokers(rq)
            assert not [*tmp_path.glob(f"{leaving}/*/r*")]
            told = json.loads(command(cluster, tmp_path, "brokers", "list", "--json"))
            (state,) = (each for each in told["brokers"] if each["broker"] == leaving)
            assert (state["draining"], state["holds"], state["alive"]) == (True, 0, True)
            late = rq.create_topic("late", partitions=3, replication=3)
            assert leaving not in {replica.broker for each in late.partitions for replica in each.replicas}
            wait_for(lambda: len(coordinators(rq)) == 3, "three coordinators", PATIENCE_S)

            with step(record_property, sending, "its node is stopped, and it is forgotten"):
                cluster.kill(leaving)
                wait_for(lambda: leaving not in known(rq), "it is forgotten", PATIENCE_S)
                before = len(sending.acked)
                wait_for(lambda: len(sending.acked) > before + 100, "acknowledgements", PATIENCE_S)
        check_history(rq, sending.acked)
        rq.shutdown()


def test_a_broker_that_is_gone_is_decommissioned_forgotten_and_may_come_back(
    tmp_path: Path, record_property: Record
) -> None:
    """``cluster.replace_after_ms`` is off: nobody replaces it but the operator."""
    settings = Settings(data_dir=tmp_path, cluster={"broker_wait_ms": 3_000})
    with ray_cluster("b1", "b2", "b3", "b4") as cluster:
        rq = rayqueue.connect(settings=settings)
        rq.create_topic("orders", replication=3)
        wait_for(lambda: whole(rq), "the topic", PATIENCE_S)
        wait_for(lambda: len(coordinators(rq)) == 3, "three coordinators", PATIENCE_S)
        group = group_of(rq)
        with traffic(rq) as sending:
            wait_for(lambda: len(sending.acked) > 200, "some records", PATIENCE_S)
            gone = next(each for each in sorted(brokers(rq)) if each != "b1")
            with step(record_property, sending, "a node is lost"):
                cluster.kill(gone)
                before = len(sending.acked)
                wait_for(lambda: len(sending.acked) > before + 200, "acknowledgements", PATIENCE_S)
            assert gone in brokers(rq), "it may come back"
            with step(record_property, sending, "the lost one is decommissioned"):
                assert f"{gone} is empty and" in command(cluster, tmp_path, "brokers", "decommission", gone)
            assert brokers(rq) == {"b1", "b2", "b3", "b4"} - {gone}
            assert gone not in known(rq)
            wait_for(lambda: whole(rq), "three replicas that have it all", PATIENCE_S)
            wait_for(lambda: len(coordinators(rq)) == 3, "three coordinators", PATIENCE_S)
            command(cluster, tmp_path, "status")  # and all is well
            assert {"broker_draining", "broker_given_up", "replica_replaced", "broker_forgotten"} <= {
                event.kind for event in rq.events()
            }

            # It comes back after all: a broker as any other, without its old replica.
            assert directories(tmp_path, group) == 4
            cluster.add(gone)
            wait_for(lambda: gone in known(rq), "it is known again", PATIENCE_S)
            wait_for(lambda: directories(tmp_path, group) == 3, "what it had to be deleted", PATIENCE_S)
            (state,) = (each for each in rq.cluster().brokers if each.broker == gone)
            assert (state.alive, state.draining) == (True, False)
        check_history(rq, sending.acked)
        rq.shutdown()
