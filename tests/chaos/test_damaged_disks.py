"""Disks that rot and disks that are restored, under load: what is wrong is found, rebuilt, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import ray

import rayqueue
from rayqueue.actors.keeper.home import ABANDONED
from rayqueue.actors.names import actor_name
from rayqueue.client.admin.recovery import SKIPPED
from rayqueue.config import Settings
from rayqueue.errors import DeliveryFailedError
from rayqueue.ids import ReplicaId
from rayqueue.log.lmdb_file import DATA_FILE
from rayqueue.log.waymark import read_waymark
from rayqueue.testing import wait_for
from tests.chaos.test_replacement import PATIENCE_S, group_of, killed, only, read_back, traffic, whole, wipe
from tests.chaos.traffic import Record, step
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)

COLD = b"written first, and read by nobody"
PAGE, P_LEAF = 4096, 0x02


def flip(file: Path) -> None:
    """One bit of each copy that LMDB's file has of a cold record."""
    data = file.read_bytes()
    with file.open("r+b") as writing:
        at = data.find(COLD)
        assert at >= 0
        while at >= 0:
            writing.seek(at + 3)
            writing.write(bytes([data[at + 3] ^ 1]))
            at = data.find(COLD, at + 1)


def test_a_flipped_bit_in_cold_data_and_a_restored_disk_beside_a_killed_leader(
    tmp_path: Path, record_property: Record
) -> None:
    scrub = {"scrub_bytes_per_second": 50 << 20, "scrub_every_ms": 500}
    with ray_cluster("b1", "b2", "b3"):
        rq = rayqueue.connect(settings=Settings(data_dir=tmp_path, log=scrub))
        rq.create_topic("orders", replication=3)
        rq.create_topic("cold", replication=3)
        with rq.producer() as producer:
            producer.send("cold", COLD).result(timeout_ms=60_000)
        wait_for(lambda: whole(rq), "the topic", PATIENCE_S)

        def cold_nodes() -> dict[str, str]:
            return {each.replica_id: each.role for each in rq.topic("cold").partitions[0].replicas}

        with traffic(rq) as sending:
            # One bit flips on the disk of a follower, in what nobody reads.
            victim = wait_for(
                lambda: next((node for node, role in cold_nodes().items() if role == "follower"), None), "a follower"
            )
            cold_group = rq.io.call(rq.routes.topic("cold")).partitions[0].group_id
            (path,) = tmp_path.rglob(f"{cold_group}/{victim}")
            wait_for(lambda: COLD in (path / DATA_FILE).read_bytes(), "the record to be in LMDB's file", PATIENCE_S)
            with step(record_property, sending, "a bit flips on a follower's disk (beside)"):
                flip(path / DATA_FILE)
                wait_for(
                    lambda: victim not in cold_nodes(), "the scrub to find it, and another in its place", PATIENCE_S
                )
                wait_for(lambda: rq.topic("cold").partitions[0].in_sync == 3, "the new one to be in sync", PATIENCE_S)

            # A follower's disk is replaced by an older copy, and its leader is killed at the same time.
            victim = next(each.replica_id for each in only(rq).replicas if each.role == "follower")
            with killed(tmp_path, group_of(rq), victim) as path:
                copy = path.with_name("copy")
                shutil.copytree(path, copy)
            acked = len(sending.acked)
            wait_for(lambda: len(sending.acked) > acked + 200, "records that the copy does not have", PATIENCE_S)
            wait_for(lambda: whole(rq), "it to have them", PATIENCE_S)
            leader = next(each.replica_id for each in only(rq).replicas if each.role == "leader")
            process = ray.get(ray.get_actor(actor_name(group_of(rq), ReplicaId(leader)), "rayqueue").process.remote())
            with step(record_property, sending, "a follower's disk is an older copy, its leader is killed"):
                with killed(tmp_path, group_of(rq), victim) as path:
                    os.kill(process.pid, signal.SIGKILL)
                    path.rename(path.with_name("newer"))
                    copy.rename(path)
                shutil.rmtree(path.with_name("newer"))
                acked = len(sending.acked)
                wait_for(lambda: len(sending.acked) > acked + 100, "acknowledgements", PATIENCE_S)
                wait_for(lambda: only(rq).in_sync == 3, "three replicas in sync", PATIENCE_S)
        found = read_back(rq, len(sending.acked))
        assert found == sorted(found), "in order"
        assert set(sending.acked) <= set(found), "nothing acknowledged is lost"
        assert len(set(found)) == len(found), "nothing is doubled"
        rq.shutdown()


def zero_a_page(file: Path) -> None:
    """In the middle of the index of batches: LMDB ends whoever walks over it."""
    data = file.read_bytes()
    found: list[int] = []
    for at in range(2 * PAGE, len(data), PAGE):
        flags, lower = (int.from_bytes(data[at + each : at + each + 2], "little") for each in (10, 12))
        if flags == P_LEAF and lower > 100 and COLD not in data[at : at + PAGE]:
            found.append(at)
    with file.open("r+b") as writing:
        writing.seek(found[len(found) // 2])
        writing.write(bytes(PAGE))


@pytest.mark.long
def test_a_replica_whose_every_process_is_ended_by_its_file_is_rebuilt(tmp_path: Path) -> None:
    scrub = {"scrub_bytes_per_second": 50 << 20, "scrub_every_ms": 200}
    with ray_cluster("b1", "b2", "b3"):
        rq = rayqueue.connect(settings=Settings(data_dir=tmp_path, log=scrub))
        rq.create_topic("orders", replication=3)
        with rq.producer(linger_ms=0) as producer:
            for _ in range(1500):
                producer.send("orders", COLD).result(timeout_ms=60_000)
        wait_for(lambda: whole(rq), "three replicas", PATIENCE_S)
        victim = next(each.replica_id for each in only(rq).replicas if each.role == "follower")
        with killed(tmp_path, group_of(rq), victim) as path:
            zero_a_page(path / DATA_FILE)
        wait_for(lambda: victim not in {each.replica_id for each in only(rq).replicas}, "another one", PATIENCE_S)
        wait_for(lambda: only(rq).in_sync == 3, "three replicas in sync", PATIENCE_S)
        (lost,) = (each.text for each in rq.events() if each.kind == "replica_lost")
        assert f"{victim}: whoever reads the store is ended by it: SIGABRT" in lost
        rq.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("how", ["a flipped bit", "a deleted directory"])
def test_an_only_replica_that_is_lost_begins_anew_and_gives_no_offset_twice(tmp_path: Path, how: str) -> None:
    scrub = {"scrub_bytes_per_second": 50 << 20, "scrub_every_ms": 500}
    with ray_cluster("b1"):
        rq = rayqueue.connect(settings=Settings(data_dir=tmp_path, log=scrub, client={"call_timeout_ms": 3000}))
        rq.create_topic("orders", replication=1)
        with rq.producer() as producer:
            for _ in range(30):
                producer.send("orders", COLD).result(timeout_ms=60_000)
        (path,) = (each for each in tmp_path.rglob("r1") if each.is_dir() and "orders" in str(each))
        wait_for(lambda: read_waymark(path).records == 30, "the mark", PATIENCE_S)
        if how == "a flipped bit":
            wait_for(lambda: COLD in (path / DATA_FILE).read_bytes(), "a record in LMDB's file", PATIENCE_S)
            flip(path / DATA_FILE)
        else:
            wipe(tmp_path, group_of(rq), "r1")
        lost = wait_for(lambda: rq.cluster().lost, "it to be reported", PATIENCE_S)
        assert [each.replica_id for each in lost] == ["r1"]
        told = wait_for(lambda: [each.why for each in rq.cluster().waiting], "what to do", PATIENCE_S)
        assert "no copy is left" in told[0]
        assert "rayqueue recover orders 0 --unsafe" in told[0]
        if how == "a deleted directory":
            assert "before offset 30 were acknowledged" in told[0]

        plan = rq.recover_partition("orders", 0)
        assert (plan.survivor, plan.begins_at, plan.done) == ("", 2 * SKIPPED, None)
        assert (plan.kept_records, plan.known_lost_records) == (0, 30)
        why = "checksum" if how == "a flipped bit" else "offset 30 were acknowledged"
        with pytest.raises(DeliveryFailedError, match=why), rq.producer(delivery_timeout_ms=4_000) as producer:
            producer.send("orders", b"nobody leads")
        done = rq.recover_partition("orders", 0, unsafe=True, begin_at=plan.begins_at)
        assert done.done is not None
        wait_for(lambda: all(each.settled for each in rq.cluster().recoveries), "the new one to lead", PATIENCE_S)
        (replica,) = only(rq).replicas
        assert (replica.replica_id, replica.broker) == (done.survivor, "b1")
        with rq.producer() as producer:
            for number in range(10):
                sent = producer.send("orders", b"%d" % number).result(timeout_ms=60_000)
                assert sent.offset == 2 * SKIPPED + number
        assert read_back(rq, 10) == list(range(10))
        wait_for(lambda: not rq.cluster().lost, "nothing to be lost any more", PATIENCE_S)
        if how == "a flipped bit":
            kept = tmp_path / ABANDONED / f"{group_of(rq)}.r1"
            wait_for(kept.exists, "what is left to be set aside", PATIENCE_S)
        (recovery,) = rq.cluster().recoveries
        assert recovery.begins_at == 2 * SKIPPED
        assert "30" in recovery.said
        rq.shutdown()


@pytest.mark.long
def test_the_directory_of_an_only_replica_is_brought_back(tmp_path: Path) -> None:
    with ray_cluster("b1"):
        rq = rayqueue.connect(data_dir=tmp_path)
        rq.create_topic("orders", replication=1)
        with rq.producer() as producer:
            for number in range(20):
                producer.send("orders", b"%d" % number).result(timeout_ms=60_000)
        with killed(tmp_path, group_of(rq), "r1") as path:
            path.rename(path.with_name("elsewhere"))
        wait_for(lambda: rq.cluster().lost, "it to be reported", PATIENCE_S)
        path.with_name("elsewhere").rename(path)
        wait_for(lambda: not rq.cluster().lost, "it to be found", PATIENCE_S)
        assert only(rq).replicas[0].replica_id == "r1"
        assert read_back(rq, 20) == list(range(20))
        rq.shutdown()


@pytest.mark.long
def test_a_damaged_only_replica_goes_on_with_an_intact_copy_of_itself(tmp_path: Path) -> None:
    """As docs/operations.md tells its operator to."""
    scrub = {"scrub_bytes_per_second": 50 << 20, "scrub_every_ms": 500}
    data, backup = tmp_path / "data", tmp_path / "backup"
    with ray_cluster("b1"):
        rq = rayqueue.connect(settings=Settings(data_dir=data, log=scrub))
        rq.create_topic("orders", replication=1)
        with rq.producer() as producer:
            for _ in range(30):
                producer.send("orders", COLD).result(timeout_ms=60_000)
        group_id = group_of(rq)
        with killed(data, group_id, "r1") as path:
            shutil.copytree(path, backup)
        wait_for(lambda: COLD in (path / DATA_FILE).read_bytes(), "a record in LMDB's file", PATIENCE_S)
        flip(path / DATA_FILE)
        wait_for(lambda: rq.cluster().lost, "it to be reported", PATIENCE_S)
        with killed(data, group_id, "r1") as path:
            path.rename(tmp_path / "damaged")
            shutil.copytree(backup, path)
        # It lacks the entry of the start since, and nobody else can say that it was no more.
        wait_for(lambda: "rayqueue recover" in str(only(rq).replicas[0].problem), "it to say so", PATIENCE_S)
        told = rq.recover_partition("orders", 0)
        assert (told.survivor, told.begins_at) == ("r1", None)
        assert told.known_lost_records <= told.open_entries, "it does not know that its last entry is committed, either"
        rq.recover_partition("orders", 0, survivor=told.survivor, unsafe=True)
        wait_for(lambda: not rq.cluster().lost, "it to be found", PATIENCE_S)
        with rq.producer() as producer:
            assert producer.send("orders", b"more").result(timeout_ms=60_000).offset == 30
        with rq.consumer("orders", start="earliest") as consumer:
            found: list[bytes | None] = []
            while len(found) < 31:
                found += [record.value for record in consumer.poll(timeout_ms=20_000)]
        assert found == [COLD] * 30 + [b"more"]
        rq.shutdown()
