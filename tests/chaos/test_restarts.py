"""Restarts on purpose, one broker after the other, and of everything at once: nothing acknowledged is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import ray

import rayqueue
from rayqueue.actors.keeper.nodes import found_actors
from rayqueue.actors.names import PREFIX, STARTER
from rayqueue.testing import wait_for
from tests.chaos.traffic import Record, check, step, traffic
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 90.0
PARTITIONS = 3
BROKERS = ("b1", "b2", "b3")
BUSY_S = 15.0
"""A machine that does other things beside: how short it is on a quiet one is ``benchmarks/recovery.py``'s to say."""


def processes(namespace: str = "rayqueue") -> dict[str, int]:
    names = [name for name in found_actors(namespace) if name.startswith(PREFIX) and name != STARTER]
    asked = {name: ray.get_actor(name, namespace).process.remote() for name in names}
    return {name: ray.get(ref, timeout=30).pid for name, ref in asked.items()}


def test_a_rolling_restart_under_load_loses_nothing_and_leaves_nobody_without_a_leader(
    tmp_path: Path, record_property: Record
) -> None:
    with ray_cluster(*BROKERS) as cluster:
        rq = rayqueue.connect(data_dir=tmp_path)
        rq.create_topic("orders", partitions=PARTITIONS, replication=3)
        wait_for(lambda: len(processes()) == 3 * PARTITIONS + 3, "all replicas", PATIENCE_S)
        with traffic(rq, "orders", PARTITIONS) as sending:
            wait_for(lambda: sending.least > 100, "some records", PATIENCE_S)
            for broker in BROKERS:
                before, began_s = processes(), time.monotonic()
                with step(record_property, sending, f"restart of {broker}"):
                    done = rq.restart_broker(broker)
                pauses = sending.pauses(began_s)
                after = processes()
                assert after.keys() == before.keys()
                assert sum(after[name] != before[name] for name in after) == done.replicas == PARTITIONS + 1
                assert done.left_without == ()
                assert max(pauses) < BUSY_S

            # SIGTERM is a planned stop, too: whoever leads hands over before its process ends.
            leader = next(each for each in rq.topic("orders").partitions[0].replicas if each.role == "leader")
            name = next(name for name in processes() if name.endswith(f"/{leader.replica_id}") and "/orders-0." in name)
            term = rq.topic("orders").partitions[0].term
            with step(record_property, sending, "SIGTERM of the first one's leader"):
                os.kill(processes()[name], signal.SIGTERM)
                wait_for(lambda: rq.topic("orders").partitions[0].term > term, "another leader", PATIENCE_S)
                least = sending.least
                wait_for(lambda: sending.least > least + 50, "acknowledgements", PATIENCE_S)

            # A node is stopped as a whole, which nothing on it is asked about: it leads nothing by then.
            rq.transfer_leader("orders", 0, "b3", timeout_ms=30_000)
            handed = rq.hand_over("b3")
            assert handed.handed_over >= 1
            assert handed.still_leads == ()
            assert rq.topic("orders").partitions[0].leader != "b3"
            least = sending.least
            with step(record_property, sending, "node killed after hand-over"):
                cluster.kill("b3")
                wait_for(lambda: sending.least > least + 50, "acknowledgements", PATIENCE_S)
        check(rq, "orders", sending)
        rq.shutdown()


def test_everything_is_killed_at_once_and_started_again_elsewhere(tmp_path: Path, record_property: Record) -> None:
    with ray_cluster(*BROKERS):
        rq = rayqueue.connect(data_dir=tmp_path)
        rq.create_topic("orders", partitions=PARTITIONS, replication=3)
        cluster_id = rq.cluster().cluster_id
        with traffic(rq, "orders", PARTITIONS) as sending:
            wait_for(lambda: sending.least > 200, "some records", PATIENCE_S)
        for pid in processes().values():
            os.kill(pid, signal.SIGKILL)
    # Other ports and other Ray nodes, in another order; the last one is late.
    with ray_cluster("b3", "b1") as cluster:
        began_s = time.monotonic()
        rq = rayqueue.connect(data_dir=tmp_path)
        assert rq.cluster().cluster_id == cluster_id
        with traffic(rq, "orders", PARTITIONS) as after:
            wait_for(lambda: after.least > 0, "acknowledgements", PATIENCE_S)
            took_s = time.monotonic() - began_s
            record_property("all killed, until all partitions serve, from a Ray on", f"{took_s:.1f} s")
            cluster.add("b2")
            wait_for(lambda: len(processes()) == 3 * PARTITIONS + 3, "all replicas", PATIENCE_S)
        # The numbers of the second traffic began anew: behind the first one's, in each partition.
        with rq.consumer("orders", start="earliest") as consumer:
            found: list[list[int]] = [[] for _ in range(PARTITIONS)]
            while any(len(each) < len(sending.acked[at]) + len(after.acked[at]) for at, each in enumerate(found)):
                records = consumer.poll(timeout_ms=20_000)
                assert records
                for record in records:
                    found[record.partition].append(int(record.value or b""))
        for at, numbers in enumerate(found):
            first, second = ([number for number, _ in each.acked[at]] for each in (sending, after))
            assert numbers == first + second
        rq.shutdown()
