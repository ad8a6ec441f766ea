"""A node's home: who it is, which cluster it belongs to; and what a starter makes of several homes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from rayqueue.actors.keeper import home as homes
from rayqueue.actors.keeper.claims import Standing
from rayqueue.actors.keeper.home import (
    ClusterManifest,
    Home,
    erase,
    load_cluster,
    load_secret,
    memory_bytes,
    refuse_used,
    settle,
)
from rayqueue.actors.starter import known_cluster, new_cluster
from rayqueue.errors import InvalidInputError, StorageError, StoreIdentityError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.lmdb_file import DirectoryLock, Holder, holder

SECRET = SecretStr("x" * 32)
CLUSTER = ClusterManifest("cluster-a", {ReplicaId("c1"): "b1"}, complete=True)


class Nobody:
    """No other Ray node is there."""

    labels: tuple[str, ...] = ()

    def standing(self, ray_node: str) -> Standing:
        return Standing.GONE


def look(data_dir: Path, *, label: str | None, host: str, ray_node: str, cluster_id: str | None = None) -> Home:
    return homes.look(data_dir, label=label, host=host, ray_node=ray_node, neighbours=Nobody, cluster_id=cluster_id)


def home(broker: str, host: str = "h1", cluster: ClusterManifest | None = None, free_bytes: int = 1 << 40) -> Home:
    return Home(broker, host, f"ray-{broker}", free_bytes, cluster, None)


def test_a_broker_keeps_its_id_over_restarts_and_a_label_overrides_it(tmp_path: Path) -> None:
    first = look(tmp_path, label=None, host="h", ray_node="n1")
    again = look(tmp_path, label=None, host="h", ray_node="n2")
    assert first.broker == again.broker
    assert again.ray_node == "n2"
    assert look(tmp_path, label="b7", host="h", ray_node="n3").broker == "b7"
    assert first.free_bytes > 0
    with pytest.raises(InvalidInputError):
        look(tmp_path, label="../b", host="h", ray_node="n4")


def test_a_node_tells_its_memory_or_its_containers_limit(tmp_path: Path) -> None:
    machine = memory_bytes(tmp_path)
    assert look(tmp_path, label=None, host="h", ray_node="n").memory_bytes == memory_bytes() <= machine
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == machine
    (tmp_path / "memory.max").write_text("1000000\n")
    assert memory_bytes(tmp_path) == 1_000_000
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2000000")
    assert memory_bytes(tmp_path) == 2_000_000


def test_a_data_directory_that_cannot_be_used_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"):
        look(tmp_path / "file", label="b1", host="h", ray_node="n")


def test_a_node_belongs_to_one_cluster_and_keeps_its_secret(tmp_path: Path) -> None:
    assert load_cluster(tmp_path) is None
    settle(tmp_path, ClusterManifest("cluster-a", {ReplicaId("c1"): "b1"}, complete=False), SECRET)
    settle(tmp_path, CLUSTER, SecretStr("y" * 32))
    assert load_cluster(tmp_path) == CLUSTER
    assert load_secret(tmp_path) == SECRET
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    with pytest.raises(StorageError, match="cluster-a, not cluster-b"):
        settle(tmp_path, ClusterManifest("cluster-b", {}, complete=False), SECRET)
    assert load_cluster(tmp_path) == CLUSTER


def test_a_directory_of_another_cluster_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    settle(tmp_path, CLUSTER, SECRET)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StoreIdentityError, match="belongs to cluster cluster-a, not cluster-b"):
        look(tmp_path, label=None, host="h", ray_node="n", cluster_id="cluster-b")
    assert sorted(tmp_path.iterdir()) == before
    assert look(tmp_path, label=None, host="h", ray_node="n", cluster_id="cluster-a").cluster == CLUSTER


def test_a_manifest_that_cannot_be_read_is_no_missing_one(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(StorageError, match=r"cluster\.json cannot be read"):
        load_cluster(tmp_path)


def test_erasing_a_replica_leaves_others(tmp_path: Path) -> None:
    group = GroupId("orders-0.1")
    for node in ("r1", "r2"):
        (tmp_path / group / node).mkdir(parents=True)
    erase(tmp_path, group, ReplicaId("r1"))
    erase(tmp_path, group, ReplicaId("r1"))
    assert [path.name for path in (tmp_path / group).iterdir()] == ["r2"]
    erase(tmp_path, group, ReplicaId("r2"))
    assert not (tmp_path / group).exists()


def test_a_new_cluster_has_three_coordinators_on_three_brokers_and_one_on_fewer() -> None:
    def brokers(*homes: Home, coordinators: int = 3) -> list[str]:
        return list(new_cluster(homes, coordinators, "id").coordinators.values())

    assert brokers(home("b1")) == ["b1"]
    assert brokers(home("b1"), home("b2", "h2")) == ["b1"]
    assert brokers(home("b1"), home("b2"), home("b3")) == ["b1", "b2", "b3"]
    assert brokers(home("b1"), home("b2"), home("b3"), coordinators=1) == ["b1"]
    assert brokers(*(home(f"b{number}") for number in range(1, 5)), coordinators=5) == ["b1", "b2", "b3", "b4"]
    spread = brokers(home("a1"), home("a2"), home("b1", "h2"), home("c1", "h3"))
    assert spread == ["a1", "b1", "c1"]


def test_known_cluster_is_the_one_all_nodes_tell(tmp_path: Path) -> None:
    draft = ClusterManifest("cluster-a", {ReplicaId("c1"): "b1"}, complete=False)
    assert known_cluster([home("b1"), home("b2")]) is None
    assert known_cluster([home("b1", cluster=draft), home("b2")]) == draft
    assert known_cluster([home("b1", cluster=draft), home("b2", cluster=CLUSTER)]) == CLUSTER
    other = ClusterManifest("cluster-b", {ReplicaId("c1"): "b2"}, complete=True)
    with pytest.raises(StorageError, match="different clusters: cluster-a on b1; cluster-b on b2"):
        known_cluster([home("b1", cluster=CLUSTER), home("b2", cluster=other)])
    shutil.rmtree(tmp_path)


def test_a_node_that_has_not_heard_of_new_coordinators_takes_nothing_back(tmp_path: Path) -> None:
    grown = ClusterManifest(
        "cluster-a", {ReplicaId("c1"): "b1", ReplicaId("c2"): "b2", ReplicaId("c3"): "b3"}, complete=True
    )
    settle(tmp_path, ClusterManifest("cluster-a", {ReplicaId("c1"): "b1"}, complete=True), SECRET)
    settle(tmp_path, grown, SECRET)
    settle(tmp_path, ClusterManifest("cluster-a", {ReplicaId("c1"): "b1"}, complete=True), SECRET)
    assert load_cluster(tmp_path) == grown


def test_of_several_nodes_the_one_that_knows_most_coordinators_is_believed() -> None:
    old = ClusterManifest("cluster-a", {ReplicaId("c1"): "b1"}, complete=True)
    grown = ClusterManifest(
        "cluster-a", {ReplicaId("c1"): "b1", ReplicaId("c2"): "b2", ReplicaId("c3"): "b3"}, complete=True
    )
    homes = [home("b1", cluster=old), home("b2", cluster=grown), home("b3", cluster=old)]
    assert known_cluster(homes) == grown
    assert known_cluster(reversed(homes)) == grown


_HOLDS = """
import sys, time
from pathlib import Path
from rayqueue.log.lmdb_file import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("directory", ["", "brokers/b2"])
def test_a_directory_in_use_names_the_process_and_one_that_was_killed_is_free(tmp_path: Path, directory: str) -> None:
    replica = tmp_path / directory / "coordinator" / "c1"
    replica.mkdir(parents=True)
    refuse_used(tmp_path, "here")
    other = subprocess.Popen([sys.executable, "-c", _HOLDS, str(replica)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert str(holder(replica)) == f"process {other.pid}"
        with pytest.raises(StorageError, match=rf"on here is in use by process {other.pid}: .*rayqueue down") as in_use:
            refuse_used(tmp_path, "here")
        assert (in_use.value.details["reason"], in_use.value.details["pid"]) == ("locked", other.pid)
        with pytest.raises(StorageError, match=f"in use by process {other.pid}$") as refused:
            DirectoryLock(replica)
        assert (refused.value.details["reason"], refused.value.details["pid"]) == ("locked", other.pid)
        assert str(Holder(7, "elsewhere")) == "process 7 on elsewhere"
    finally:
        other.kill()
        other.wait()
    refuse_used(tmp_path, "here")
    DirectoryLock(replica).release()
    (replica / "LOCK").write_bytes(b"\xff" * 10)  # it says nothing; nor does it count
    refuse_used(tmp_path, "here")


_LOCKS = """
import resource, sys
from pathlib import Path
from rayqueue.errors import StorageError
from rayqueue.log.lmdb_file import DirectoryLock
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no byte can be written to any file, as on a full disk
lock = DirectoryLock(Path(sys.argv[1]))
try:
    DirectoryLock(Path(sys.argv[1]))
except StorageError as error:
    assert "in use" in str(error)
lock.release()  # raised the error of its note
"""


def test_a_lock_needs_no_space_on_the_disk(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _LOCKS, tmp_path], check=True, timeout=60)
