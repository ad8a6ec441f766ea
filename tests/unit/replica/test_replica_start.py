"""Making a replica's data, and finding it again: there completely or not at all, for nobody else's eyes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayqueue.actors import base as member
from rayqueue.actors.coordinator_actor import CoordinatorActor, CoordinatorSpec
from rayqueue.actors.keeper import home
from rayqueue.actors.keeper.crew import Crew
from rayqueue.actors.keeper.home import ClusterManifest
from rayqueue.actors.keeper.nodes import Neighbours, RayNode
from rayqueue.actors.keeper.plan import Confirm, ReplicaKey
from rayqueue.actors.partition_actor import PartitionActor, PartitionSpec
from rayqueue.config import Settings
from rayqueue.errors import DiskFullError, RayQueueError, StoreMissingError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.lmdb_file import half_made
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.partition.tables import PARTITION
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.start import create_replica

ROOT = Path(__file__).parents[3]
GROUP, NODE = GroupId("orders-0"), ReplicaId("r1")


@pytest.fixture
def fast_directory() -> Iterator[Path]:
    """In memory where possible: this is about what there is, not about fsync."""
    shared = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(dir=shared if os.access(shared, os.W_OK) else None))
    yield directory
    shutil.rmtree(directory)


def settings(data_dir: Path) -> Settings:
    return Settings(data_dir=data_dir, transport={"secret": "only for this test"})


@pytest.mark.slow
def test_a_process_that_dies_at_any_step_of_the_making_leaves_nothing_that_cannot_be_used(fast_directory: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.log.creation_worker", str(fast_directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert outcomes["steps"] > 40
    assert outcomes["half made"] > 20
    assert outcomes["complete"] > 2


# -- which restart may make data ----------------------------------------------------------------


def actor_of(spec: PartitionSpec | CoordinatorSpec, monkeypatch: pytest.MonkeyPatch, *, restarted: bool) -> Any:
    """The actor before it has started; no Ray is needed for that."""
    monkeypatch.setattr(member, "restarted", lambda: restarted)
    kind = CoordinatorActor if isinstance(spec, CoordinatorSpec) else PartitionActor
    actor: Any = kind.__new__(kind)
    actor._spec = spec
    return actor


def test_a_restart_makes_anew_what_was_half_made_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = PartitionSpec(GROUP, NODE, settings(tmp_path), create=True, voters=(NODE,))
    again = actor_of(spec, monkeypatch, restarted=True)
    again._make_data()
    assert not spec.path.exists(), "it may have voted: nobody here knows"
    half_made(spec.path).mkdir(parents=True)
    again._make_data()
    LmdbStore.open(spec.path, GROUP, NODE, schema=PARTITION).close()
    shutil.rmtree(spec.path)
    again._make_data()
    assert not spec.path.exists(), "it was used, and is lost"
    actor_of(spec, monkeypatch, restarted=False)._make_data()
    assert spec.path.exists()


def test_a_coordinator_of_a_cluster_that_was_never_complete_is_made_in_any_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterManifest("cluster-1", {ReplicaId("c1"): "b1"}, complete=False)
    spec = CoordinatorSpec(
        GroupId("coordinator"),
        ReplicaId("c1"),
        settings(tmp_path),
        create=True,
        voters=(ReplicaId("c1"),),
        cluster=cluster,
    )
    again = actor_of(spec, monkeypatch, restarted=True)
    again._make_data()
    assert not spec.path.exists(), "nothing here says that the cluster is new"
    home.settle(tmp_path, cluster, home.new_secret())
    again._make_data()
    assert spec.path.exists()
    shutil.rmtree(spec.path)
    home.settle(tmp_path, ClusterManifest("cluster-1", cluster.coordinators, complete=True), home.new_secret())
    again._make_data()
    assert not spec.path.exists()


class Answers:
    """An actor's handle whose ``address`` answers with this."""

    def __init__(self, answer: Any) -> None:
        self.address, self._answer = self, answer

    async def remote(self) -> Any:
        if isinstance(self._answer, RayQueueError):
            raise self._answer
        return self._answer


@pytest.mark.parametrize("answer", [StoreMissingError("no data"), DiskFullError("no space"), ("127.0.0.1", 1)])
def test_the_keeper_starts_anew_what_was_never_made(answer: Any) -> None:
    """Ray counts the death of a process that had made nothing as a restart, and a restart alone may not make data."""
    key = ReplicaKey(GROUP, NODE)
    done: list[tuple[Any, ...]] = []
    crew: Any = Crew.__new__(Crew)
    crew._hands, crew.made, crew.failing = SimpleNamespace(), set(), {}

    async def handle(_: ReplicaKey) -> Any:
        return Answers(answer)

    async def end(key: ReplicaKey, **_: Any) -> None:
        done.append(("end", key))

    async def start(key: ReplicaKey, broker: str, create: bool, _: Any) -> None:
        done.append(("start", key, broker, create))

    crew._hands.handle, crew._end, crew._start = handle, end, start
    asyncio.run(crew._take(Confirm(key, "b1"), {}))
    if isinstance(answer, tuple):
        assert (done, crew.made) == ([], {key})
    else:
        assert (done, crew.made) == ([("end", key), ("start", key, "b1", True)], set())


# -- whose eyes ------------------------------------------------------------------------------------


def modes(directory: Path) -> dict[str, int]:
    return {str(each.relative_to(directory)): stat.S_IMODE(each.stat().st_mode) for each in directory.rglob("*")}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_made_is_its_owners_only_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o755)
    path = data_dir / GROUP / NODE
    old = os.umask(umask)
    try:
        nobody = Neighbours(RayNode("ray1", "localhost", 1, None), {})
        home.look(data_dir, label=None, host="localhost", ray_node="ray1", neighbours=lambda: nobody)
        home.settle(data_dir, ClusterManifest("cluster-1", {}, complete=True), home.new_secret())
        create_replica(path, GROUP, NODE, ReplicaSet.of([NODE]), settings(data_dir))
        store = LmdbStore.open(path, GROUP, NODE, schema=PARTITION)
        store.mark_damaged("for the file of that name")
        store.close()
    finally:
        os.umask(old)
    found = modes(data_dir)
    assert {"cluster.json", "secret", "broker_id", f"{GROUP}/{NODE}/data.mdb", f"{GROUP}/{NODE}/WAL"} <= found.keys()
    wrong = {
        name: oct(mode) for name, mode in found.items() if mode != (0o700 if (data_dir / name).is_dir() else 0o600)
    }
    assert wrong == {}
    assert stat.S_IMODE(data_dir.stat().st_mode) == 0o755, "what was there is its owner's business"


def test_a_store_that_others_could_read_is_closed_to_them_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "r1"
    create_replica(path, GROUP, NODE, ReplicaSet.of([NODE]), settings(tmp_path))
    path.chmod(0o755)
    for each in path.iterdir():
        each.chmod(0o644)
    LmdbStore.open(path, GROUP, NODE, schema=PARTITION).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert set(modes(path).values()) == {0o600}
