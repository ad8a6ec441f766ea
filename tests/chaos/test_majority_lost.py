"""A majority lost for good: what is left goes on, partition and coordinator; what was given up never joins again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import rayqueue
from rayqueue.actors.keeper.home import ABANDONED, load_cluster
from rayqueue.actors.keeper.rescue import recover_coordinator
from rayqueue.config import Settings
from rayqueue.errors import ClusterStartError, RecoveryRefusedError
from rayqueue.ids import COORDINATOR
from rayqueue.log.waymark import read_waymark
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 90.0
BROKERS = ("b1", "b2", "b3")


def replicas(rq: rayqueue.RayQueue) -> dict[str, str]:
    return {each.replica_id: each.broker for each in rq.topic("orders").partitions[0].replicas}


def values(rq: rayqueue.RayQueue, count: int) -> list[bytes | None]:
    with rq.consumer("orders", start="earliest") as consumer:
        found: list[bytes | None] = []
        while len(found) < count:
            records = consumer.poll(timeout_ms=20_000)
            assert records
            found += [record.value for record in records]
    return found


@pytest.mark.long
def test_two_of_three_nodes_are_lost_and_what_is_left_goes_on(tmp_path: Path) -> None:
    with ray_cluster(*BROKERS) as cluster:
        rq = rayqueue.connect(data_dir=tmp_path)
        rq.create_topic("orders", replication=3)
        with rq.producer() as producer:
            for number in range(50):
                producer.send("orders", b"%d" % number).result(timeout_ms=20_000)
        wait_for(
            lambda: all(each.high_watermark == 50 for each in rq.topic("orders").partitions[0].replicas),
            "all three to have everything",
            PATIENCE_S,
        )
        with pytest.raises(RecoveryRefusedError, match="needs no recovery"):
            rq.recover_partition("orders", 0, unsafe=True)
        cluster_id = rq.cluster().cluster_id
        assert cluster.nodes.keys() == set(BROKERS)

    # The other two nodes, and what they had, are gone. Their replicas' data comes back later in this test.
    with ray_cluster("b1") as cluster:
        impatient = Settings(data_dir=tmp_path, cluster={"start_timeout_ms": 2000, "replica_memory_percent": 90})
        with pytest.raises(ClusterStartError, match="needs 2 of its 3 coordinators"):
            rayqueue.connect(settings=impatient)
        # All three share a directory here, so that a majority of coordinators is found in it. Two are not.
        aside = tmp_path / "aside"
        aside.mkdir()
        here = sorted(path for path in (tmp_path / COORDINATOR).iterdir() if path.is_dir())
        known = recover_refused(tmp_path)
        for path in here:
            if path.name != known:
                path.rename(aside / path.name)
        plan = recover_coordinator(tmp_path, None, unsafe=True)
        assert (plan.survivor, plan.topics, plan.partitions) == (known, 1, 1)
        for path in aside.iterdir():
            path.rename(tmp_path / COORDINATOR / path.name)

        rq = rayqueue.connect(settings=Settings(data_dir=tmp_path))
        assert rq.cluster().cluster_id == cluster_id
        assert [each.group_id for each in rq.cluster().recoveries] == [COORDINATOR]
        wait_for(
            lambda: any(each.problem is None for each in rq.topic("orders").partitions[0].replicas), "r1", PATIENCE_S
        )
        told = rq.recover_partition("orders", 0)
        assert (told.broker, told.kept_records, told.done) == ("b1", 50, None)
        assert len(replicas(rq)) == 3, "nothing was done yet"
        done = rq.recover_partition("orders", 0, survivor=told.survivor, unsafe=True)
        assert done.done is not None
        assert {broker for _, broker in done.done.abandoned} == {"b2", "b3"}
        wait_for(lambda: all(each.settled for each in rq.cluster().recoveries), "the survivor to lead", PATIENCE_S)
        # Further copies are made from it, perhaps already, under ids that nobody had.
        assert told.survivor in replicas(rq)
        assert not set(dict(done.done.abandoned)) & replicas(rq).keys()
        with rq.producer() as producer:
            assert producer.send("orders", b"50").result(timeout_ms=30_000).offset == 50
        assert values(rq, 51) == [b"%d" % number for number in range(51)]

        # The others come back, with all they had: it is set aside, and nobody of them takes part any more.
        cluster.add("b2")
        cluster.add("b3")
        group_id = done.done.group_id
        gone = {f"{group_id}.{node}" for node, _ in done.done.abandoned}
        wait_for(lambda: gone <= {each.name for each in (tmp_path / ABANDONED).glob("*")}, "it set aside", PATIENCE_S)
        wait_for(lambda: len(rq.cluster().brokers) == 3, "the brokers", PATIENCE_S)
        assert not set(dict(done.done.abandoned)) & replicas(rq).keys()
        assert values(rq, 51) == [b"%d" % number for number in range(51)]
        rq.shutdown()


@pytest.mark.long
def test_an_older_copy_of_the_only_replica_is_noticed_and_given_up_in_figures(tmp_path: Path) -> None:
    """Nobody could be asked what it lacks: it is remembered beside its directory."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    with ray_cluster("b1"):
        rq = rayqueue.connect(data_dir=data)
        rq.create_topic("orders", replication=1)
        with rq.producer() as producer:
            producer.send("orders", b"0").result(timeout_ms=20_000)
        rq.shutdown()
    (path,) = (each for each in data.rglob("r1") if each.is_dir())
    shutil.copytree(path, backup)
    with ray_cluster("b1"):
        rq = rayqueue.connect(data_dir=data)
        with rq.producer() as producer:
            for number in range(1, 30):
                producer.send("orders", b"%d" % number).result(timeout_ms=20_000)
        wait_for(lambda: read_waymark(path).records == 30, "the mark", PATIENCE_S)
        rq.shutdown()
    shutil.rmtree(path)
    shutil.copytree(backup, path)
    with ray_cluster("b1"):
        rq = rayqueue.connect(data_dir=data)

        def problem() -> str:
            return str(rq.topic("orders").partitions[0].replicas[0].problem)

        wait_for(lambda: "rayqueue recover --unsafe" in problem(), "the copy to say so", PATIENCE_S)
        assert "the records before offset 30" in problem()
        told = rq.recover_partition("orders", 0)
        assert (told.kept_records, told.known_lost_records, told.done) == (1, 29, None)
        rq.recover_partition("orders", 0, unsafe=True)
        wait_for(lambda: all(each.settled for each in rq.cluster().recoveries), "the survivor to lead", PATIENCE_S)
        with rq.producer() as producer:
            assert producer.send("orders", b"1").result(timeout_ms=30_000).offset == 1
        assert values(rq, 2) == [b"0", b"1"]
        rq.shutdown()


def recover_refused(data_dir: Path) -> str:
    """The coordinator on b1. A majority is in the directory, so that nothing is recovered."""
    with pytest.raises(RecoveryRefusedError, match="start the queue instead"):
        recover_coordinator(data_dir, None, unsafe=True)
    known = load_cluster(data_dir)
    assert known is not None
    return next(node for node, broker in known.coordinators.items() if broker == "b1")
