"""``rayqueue.connect`` from everywhere, and a queue that outlives whoever started it."""

from __future__ import annotations

import asyncio
import pickle  # noqa: TID251  # Ray pickles handles: what comes out must still work
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

import rayqueue
from rayqueue.actors.keeper.nodes import found_actors
from rayqueue.config import Settings
from rayqueue.errors import (
    ClosedError,
    ClusterNotFoundError,
    ConfigError,
    StorageError,
    StoreFormatError,
    TopicExistsError,
)
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.lmdb_codec import FORMAT_VERSION
from rayqueue.log.lmdb_file import holder
from rayqueue.replica.start import create_replica
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import RayCluster, ray_cluster, run_driver, run_program

pytestmark = pytest.mark.timeout(180)

_STARTS_AND_EXITS = """
import sys, rayqueue
rq = rayqueue.connect(sys.argv[1], namespace="left", data_dir=sys.argv[2])
rq.create_topic("left", replication=1, if_missing=True)
print(rq.cluster().cluster_id)
"""

_LISTS = """
import sys, rayqueue
print([info.name for info in rayqueue.connect(sys.argv[1], namespace=sys.argv[2], create=False).topics()])
"""

_EMBEDDED = """
import os, subprocess, sys, tempfile
from pathlib import Path
import ray, rayqueue
before = dict(os.environ)
rq = rayqueue.connect(data_dir=sys.argv[1])
rq.create_topic("kept", replication=1, if_missing=True)
assert dict(os.environ) == before, dict(os.environ).items() ^ before.items()
(ours,) = Path(tempfile.gettempdir()).glob("rayqueue-*")
assert ours.stat().st_mode & 0o777 == 0o700  # whatever Ray does to the directory in it
if len(sys.argv) > 2:  # another program that wants the same data, while this one runs
    other = subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]], capture_output=True, text=True)
    assert other.stdout == "joined 1\\n", other
print(rq.cluster().cluster_id, [info.name for info in rq.topics()])
"""

_JOINS = """
import sys, rayqueue
rq = rayqueue.connect(data_dir=sys.argv[1])
with rq.producer() as producer:
    producer.send("kept", b"of another program").result(30_000)
print("joined", rq.topic("kept").records)
"""

_CALM = """
import sys, time, ray, rayqueue
from rayqueue.client.embedded import loopback_only
with loopback_only():
    ray.init(sys.argv[1])  # as people do: Ray prints what it has to say
rq = rayqueue.connect(namespace="calm", data_dir=sys.argv[2])
time.sleep(6)  # the starter has ended
rq.shutdown()
"""


_STRANGER = """
import os, sys, time
import rayqueue
began_s = time.monotonic()
try:
    rayqueue.connect(os.environ["THEIR_RAY"], create=False)
except rayqueue.errors.ClusterNotFoundError as error:
    print("another token" in str(error), time.monotonic() - began_s < 10)
"""

_WITH_TOKEN = """
import os, subprocess, sys
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 40)
import ray
from rayqueue.client.embedded import start_embedded_ray
start_embedded_ray(cpus=1)
stranger = {**os.environ, "RAY_AUTH_TOKEN": "b" * 40, "THEIR_RAY": ray.get_runtime_context().gcs_address}
print(subprocess.run([sys.executable, "-c", sys.argv[1]], env=stranger, capture_output=True, text=True).stdout)
"""


_HAD_A_TOKEN = """
import os, sys
import ray
import rayqueue
from rayqueue.client.embedded import embedded_ray
with embedded_ray(cpus=1):  # asks for a token
    pass
rayqueue.connect(sys.argv[1], create=False)  # does not
@ray.remote(num_cpus=0)
def numbers():
    for number in range(3):
        yield number
print([ray.get(each, timeout=30) for each in numbers.options(num_returns="streaming").remote()])
"""


@pytest.fixture(scope="module")
def one_node() -> Iterator[RayCluster]:
    with ray_cluster("b1") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def rq(one_node: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> rayqueue.RayQueue:
    made = rayqueue.connect(data_dir=tmp_path_factory.mktemp("data"))
    made.create_topic("orders", replication=1)
    return made


def names(rq: rayqueue.RayQueue) -> list[str]:
    return [info.name for info in rq.topics()]


@ray.remote(num_cpus=0)
def connected_in_a_task() -> list[str]:
    return names(rayqueue.connect(create=False))


@ray.remote(num_cpus=0)
def given_to_a_task(rq: rayqueue.RayQueue) -> list[str]:
    return names(rq)


@ray.remote(num_cpus=0)
class Sync:
    def __init__(self) -> None:
        self._rq = rayqueue.connect(create=False)

    def names(self) -> list[str]:
        return names(self._rq)


@ray.remote(num_cpus=0)
class Async:
    """Its event loop goes on while it connects."""

    async def names(self) -> tuple[list[str], list[str], int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.001)

        beating = asyncio.create_task(beat())
        later = await rayqueue.connect_async(create=False)
        beating.cancel()
        return names(later), names(rayqueue.connect(create=False)), beats


def test_connects_in_driver_task_actor_and_async_actor(rq: rayqueue.RayQueue) -> None:
    actor: Any = Sync.remote()  # type: ignore[attr-defined]
    async_actor: Any = Async.remote()  # type: ignore[attr-defined]
    found = ray.get([connected_in_a_task.remote(), given_to_a_task.remote(rq), actor.names.remote()])
    assert found == [["orders"]] * 3
    later, at_once, beats = ray.get(async_actor.names.remote())
    assert (later, at_once) == (["orders"], ["orders"])
    assert beats > 1
    assert names(rayqueue.connect()) == ["orders"]


def test_a_second_program_finds_it_by_address(one_node: RayCluster, rq: rayqueue.RayQueue) -> None:
    assert run_driver(_LISTS, one_node.address, "rayqueue") == "['orders']"


@pytest.mark.long
def test_a_ray_that_does_not_let_us_in_says_so_at_once() -> None:
    assert run_driver(_WITH_TOKEN, _STRANGER) == "True True"


def test_the_token_of_one_ray_is_not_asked_of_the_next(one_node: RayCluster, rq: rayqueue.RayQueue) -> None:
    assert run_driver(_HAD_A_TOKEN, one_node.address) == "[0, 1, 2]"


def test_handles_share_connections_and_say_what_they_are(rq: rayqueue.RayQueue, one_node: RayCluster) -> None:
    copy = pickle.loads(pickle.dumps(rq))
    assert copy.routes is rq.routes
    assert repr(copy) == f"RayQueue(namespace='rayqueue', ray='{one_node.address}')"
    copy.close()
    with pytest.raises(ClosedError):
        copy.topics()
    assert names(rq) == ["orders"]


def test_nothing_is_started_unless_wanted(rq: rayqueue.RayQueue) -> None:
    with pytest.raises(ClusterNotFoundError, match="'other'"):
        rayqueue.connect(namespace="other", create=False)
    assert found_actors("other") == set()
    with pytest.raises(ConfigError, match="already"):
        rayqueue.connect("127.0.0.1:1")


@pytest.mark.long
def test_the_queue_outlives_its_drivers_of_whom_one_started_it_and_shutdown_keeps_its_data(
    one_node: RayCluster, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as both:  # at once
        told = list(both.map(lambda _: run_driver(_STARTS_AND_EXITS, one_node.address, tmp_path), range(2)))
    left = rayqueue.connect(namespace="left", create=False)
    before = left.cluster()
    assert told == [before.cluster_id] * 2
    assert names(left) == ["left"]
    assert left.topic("left").partitions[0].leader == "b1"
    closed: list[tuple[int, int]] = []
    left.shutdown(on_progress=lambda count, total: closed.append((count, total)))
    assert closed == [(1, 2), (2, 2)], "the coordinator, then the replica"
    assert found_actors("left") == set()
    with pytest.raises(ClusterNotFoundError):
        rayqueue.connect(namespace="left", create=False)
    again = rayqueue.connect(namespace="left", data_dir=tmp_path)
    assert names(again) == ["left"]
    assert again.cluster().cluster_id == before.cluster_id
    again.shutdown()


def test_another_data_directory_than_the_running_queues_is_refused(rq: rayqueue.RayQueue, tmp_path: Path) -> None:
    running = rq.settings.data_dir
    with pytest.raises(ConfigError, match="leave data_dir out") as refused:
        rayqueue.connect(data_dir=tmp_path)
    assert refused.value.details == {"running": str(running), "wanted": str(tmp_path)}
    link = tmp_path / "link"
    link.symlink_to(running)
    for same in (running, str(running), link):
        with rayqueue.connect(data_dir=same) as again:
            assert names(again) == names(rq)


def test_a_data_directory_of_another_namespaces_cluster_is_locked(rq: rayqueue.RayQueue) -> None:
    """It is the same data: a second set of actors must not open it."""
    began_s = time.monotonic()
    with pytest.raises(StorageError, match=r"is in use by process \d+: a queue runs on it already") as refused:
        rayqueue.connect(namespace="thief", settings=Settings(data_dir=rq.settings.data_dir))
    assert time.monotonic() - began_s < 25
    assert Path(f"/proc/{refused.value.details['pid']}").exists()
    wait_for(lambda: not found_actors("thief"), "nothing to be left of it", 20.0)
    with pytest.raises(TopicExistsError):
        rq.create_topic("orders")


@pytest.mark.long
def test_a_first_connect_on_ones_own_ray_reports_no_dead_worker(one_node: RayCluster, tmp_path: Path) -> None:
    told = run_program(_CALM, one_node.address, tmp_path)
    assert "died" not in told.stdout + told.stderr


@pytest.mark.long
def test_data_of_a_newer_release_is_refused_at_once(
    one_node: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rayqueue.connect(namespace="newer", data_dir=tmp_path)
    made.shutdown()
    store = tmp_path / "coordinator" / "c1"
    wait_for(lambda: holder(store) is None, "its process to end")
    with monkeypatch.context() as later:
        later.setattr("rayqueue.log.lmdb_codec.FORMAT_VERSION", FORMAT_VERSION + 1)
        shutil.rmtree(store)
        create_replica(store, GroupId("coordinator"), ReplicaId("c1"), None, made.settings)
    began_s = time.monotonic()
    with pytest.raises(StoreFormatError, match=f"has format {FORMAT_VERSION + 1}, this release reads"):
        rayqueue.connect(namespace="newer", data_dir=tmp_path)
    assert time.monotonic() - began_s < 30
    wait_for(lambda: not found_actors("newer"), "nothing to be left of it", 20.0)


@pytest.mark.long
def test_embedded_ray_ends_with_its_process_and_data_does_not(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # whoever else runs a Ray here is not found
    with tempfile.TemporaryDirectory(prefix="rq-") as temporary:  # short: see embedded_ray
        monkeypatch.setenv("TMPDIR", temporary)
        first = run_program(_EMBEDDED, tmp_path / "data", _JOINS)
        assert first.stdout.endswith("['kept']\n")
        assert not (tmp_path / "data" / "ray.json").exists()
        again = run_program(_EMBEDDED, tmp_path / "data")
        assert again.stdout == first.stdout
        assert first.stdout.count("\n") == 1  # nothing of Ray's, and nothing that frightens
        said = [*first.stderr.splitlines(), *again.stderr.splitlines()]
        assert [line for line in said if not line.startswith("waiting for")] == []  # that may be, on a slow machine
