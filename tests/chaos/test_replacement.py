"""Replicas that lost their disk, or their broker for good, are replaced while the queue serves; nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import ray

import rayqueue
from rayqueue.actors.keeper.home import load_cluster
from rayqueue.actors.names import actor_name
from rayqueue.client.admin.admin import PartitionDescription
from rayqueue.config import Settings
from rayqueue.errors import StorageError
from rayqueue.ids import COORDINATOR, GroupId, ReplicaId
from rayqueue.log.lmdb_file import DirectoryLock
from rayqueue.testing import wait_for
from tests.chaos.traffic import Record, longest_pause, step
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 90.0


class Traffic:
    """Numbered records, sent all the time, and those among them that were acknowledged."""

    def __init__(self, rq: rayqueue.RayQueue) -> None:
        self.acked: list[int] = []
        self._acked_s: list[float] = []
        self._rq = rq
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        with self._rq.producer() as producer:
            number = 0
            while not self._stop.wait(0.005):
                producer.send("orders", b"%d" % number).result(timeout_ms=60_000)
                self.acked.append(number)
                self._acked_s.append(time.monotonic())
                number += 1

    def pauses(self, since_s: float) -> list[float]:
        """One by one, to all partitions."""
        return [longest_pause(list(self._acked_s), since_s)]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(70)
        assert not self._thread.is_alive()


@contextmanager
def traffic(rq: rayqueue.RayQueue) -> Iterator[Traffic]:
    sending = Traffic(rq)
    try:
        yield sending
    finally:
        sending.stop()


def only(rq: rayqueue.RayQueue) -> PartitionDescription:
    (partition,) = rq.topic("orders").partitions
    return partition


def brokers(rq: rayqueue.RayQueue) -> set[str]:
    return {replica.broker for replica in only(rq).replicas}


def whole(rq: rayqueue.RayQueue) -> bool:
    """Three replicas that answer and are near the end."""
    replicas = only(rq).replicas
    end = max((each.high_watermark or 0) for each in replicas)
    return len(replicas) == 3 and all(
        each.problem is None and each.high_watermark is not None and end - each.high_watermark < 500
        for each in replicas
    )


def read_back(rq: rayqueue.RayQueue, count: int) -> list[int]:
    with rq.consumer("orders", start="earliest") as consumer:
        found: list[int] = []
        while len(found) < count:
            records = consumer.poll(timeout_ms=20_000)
            assert records, f"{len(found)} of {count}"
            found += [int(record.value or b"") for record in records]
    return found


def group_of(rq: rayqueue.RayQueue) -> GroupId:
    return GroupId(rq.io.call(rq.routes.topic("orders")).partitions[0].group_id)


def coordinators(rq: rayqueue.RayQueue) -> tuple[str, ...]:
    """Those who vote, as the one that leads knows them."""
    leader = ray.get_actor(actor_name(COORDINATOR, ReplicaId(rq.cluster().coordinator)), "rayqueue")
    return tuple(ray.get(leader.status.remote(), timeout=10).voters)


def file_says(path: Path, voters: tuple[str, ...]) -> bool:
    known = load_cluster(path)
    return known is not None and tuple(sorted(known.coordinators)) == voters and len(voters) == 3


@contextmanager
def killed(path: Path, group_id: GroupId, node: str) -> Iterator[Path]:
    """The directory of a replica whose process was killed; the next one waits for the lock as long as this lasts."""
    process = ray.get(ray.get_actor(actor_name(group_id, ReplicaId(node)), "rayqueue").process.remote())
    (found,) = path.rglob(f"{group_id}/{node}")
    os.kill(process.pid, signal.SIGKILL)
    locks: list[DirectoryLock] = []

    def locked() -> bool:
        with suppress(StorageError):
            locks.append(DirectoryLock(found))
        return bool(locks)

    wait_for(locked, "the lock of a dead process", PATIENCE_S)
    try:
        yield found
    finally:
        locks[0].release()


def wipe(path: Path, group_id: GroupId, node: str) -> Path:
    """kill -9 of a replica whose directory was deleted under it."""
    process = ray.get(ray.get_actor(actor_name(group_id, ReplicaId(node)), "rayqueue").process.remote())
    (found,) = path.rglob(f"{group_id}/{node}")
    shutil.rmtree(found)
    os.kill(process.pid, signal.SIGKILL)
    return found


def test_a_wiped_disk_is_rebuilt_and_a_lost_node_replaced_under_load(tmp_path: Path, record_property: Record) -> None:
    settings = Settings(data_dir=tmp_path, cluster={"replace_after_ms": 3000})
    with ray_cluster("b1", "b2", "b3", "b4") as cluster:
        rq = rayqueue.connect(settings=settings)
        rq.create_topic("orders", replication=3)
        wait_for(lambda: whole(rq), "the topic", PATIENCE_S)
        with traffic(rq) as sending:
            wait_for(lambda: len(sending.acked) > 200, "some records", PATIENCE_S)

            # The disk of a follower is wiped under it.
            with step(record_property, sending, "a follower's disk is wiped"):
                victim = next(each for each in only(rq).replicas if each.role == "follower")
                path = wipe(tmp_path, group_of(rq), victim.replica_id)
                wait_for(
                    lambda: victim.replica_id not in {each.replica_id for each in only(rq).replicas},
                    "a new one",
                    PATIENCE_S,
                )
                wait_for(lambda: whole(rq), "the new replica to have it all", PATIENCE_S)
            assert victim.broker in brokers(rq), "its broker is well, so the new one is there"
            assert not path.exists()

            # A follower comes back with an older copy of its disk: it lacks what it has acknowledged.
            victim = next(each for each in only(rq).replicas if each.role == "follower")
            with killed(tmp_path, group_of(rq), victim.replica_id) as path:
                copy = path.with_name("copy")
                shutil.copytree(path, copy)
            wait_for(lambda: whole(rq), "it to be back", PATIENCE_S)
            acked = len(sending.acked)
            wait_for(lambda: len(sending.acked) > acked + 200, "records that the copy does not have", PATIENCE_S)
            wait_for(lambda: whole(rq), "it to have them", PATIENCE_S)
            with step(record_property, sending, "a follower's disk is an older copy"):
                with killed(tmp_path, group_of(rq), victim.replica_id) as path:
                    path.rename(path.with_name("newer"))
                    copy.rename(path)
                shutil.rmtree(path.with_name("newer"))
                wait_for(
                    lambda: victim.replica_id not in {each.replica_id for each in only(rq).replicas},
                    "a new one",
                    PATIENCE_S,
                )
                wait_for(lambda: whole(rq), "the new replica to have it all", PATIENCE_S)

            # And that of a coordinator.
            before = coordinators(rq)
            assert before == ("c1", "c2", "c3")
            wiped = next(each for each in before if each != rq.cluster().coordinator)
            left = [each for each in before if each != wiped]
            with step(record_property, sending, "a coordinator's disk is wiped"):
                old = wipe(tmp_path, COORDINATOR, wiped)
                wait_for(lambda: coordinators(rq) == (*left, "c4"), "a new coordinator", PATIENCE_S)
                wait_for(lambda: not old.exists(), "the old one's data to be deleted", PATIENCE_S)

            # A node is lost for good: not Ray's head, which is this test's own way to the cluster.
            gone = next(each for each in sorted(brokers(rq)) if each != "b1")
            with step(record_property, sending, "a node is lost for good, and replaced"):
                cluster.kill(gone)
                wait_for(lambda: gone not in brokers(rq), "its replica to be replaced", PATIENCE_S)
                wait_for(lambda: whole(rq), "the replacement to have it all", PATIENCE_S)
            assert brokers(rq) == {"b1", "b2", "b3", "b4"} - {gone}
            known = load_cluster(tmp_path)
            assert known is not None
            held = [node for node, broker in known.coordinators.items() if broker == gone]
            wait_for(lambda: not set(held) & set(coordinators(rq)), "its coordinator to be replaced", PATIENCE_S)
            wait_for(lambda: file_says(tmp_path, coordinators(rq)), "cluster.json to say so", PATIENCE_S)

            # So one more may be lost, which would have been the end of the partition.
            second = next(each for each in sorted(brokers(rq)) if each != "b1")
            acked = len(sending.acked)
            with step(record_property, sending, "a second node is lost"):
                cluster.kill(second)
                wait_for(lambda: len(sending.acked) > acked + 200, "acknowledgements without it", PATIENCE_S)

            # The first one comes back: it has no place here any more, and cleans up.
            cluster.add(gone)
            leftover = [path for path in tmp_path.rglob(f"{group_of(rq)}/*") if path.is_dir()]
            assert leftover
            in_service = {each.replica_id for each in only(rq).replicas}
            wait_for(
                lambda: {each.replica_id for each in only(rq).replicas} != in_service and whole(rq),
                "the second one's replica on the first one's broker",
                PATIENCE_S,
            )
        told = {event.kind for event in rq.events()}
        assert {"replica_lost", "move_begun", "replica_replaced", "broker_away", "under_replicated"} <= told
        found = read_back(rq, len(sending.acked))
        assert found == sorted(found), "in order"
        assert set(sending.acked) <= set(found), "nothing acknowledged is lost"
        assert len(set(found)) == len(found), "nothing is doubled"
        rq.shutdown()
