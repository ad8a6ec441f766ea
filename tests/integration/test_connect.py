"""``rayqueue.connect`` from everywhere, and a queue that outlives whoever started it."""

from __future__ import annotations

import asyncio
import pickle  # noqa: TID251  # Ray pickles handles: what comes out must still work
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

import rayqueue
from rayqueue.actors.nodes import found_actors
from rayqueue.config import Settings
from rayqueue.errors import ClosedError, ClusterNotFoundError, ConfigError, RayQueueError, TopicExistsError
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import RayCluster, ray_cluster, run_driver

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
import sys, rayqueue
rq = rayqueue.connect(data_dir=sys.argv[1])
rq.create_topic("kept", replication=1, if_missing=True)
print(rq.cluster().cluster_id, [info.name for info in rq.topics()])
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


def test_a_ray_that_does_not_let_us_in_says_so_at_once() -> None:
    assert run_driver(_WITH_TOKEN, _STRANGER) == "True True"


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
    left.shutdown()
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
    settings = Settings(data_dir=rq.settings.data_dir, cluster={"start_timeout_ms": 3000})
    with pytest.raises(RayQueueError):
        rayqueue.connect(namespace="thief", settings=settings)
    wait_for(lambda: not found_actors("thief"), "nothing to be left of it", 20.0)
    with pytest.raises(TopicExistsError):
        rq.create_topic("orders")


def test_embedded_ray_ends_with_its_process_and_data_does_not(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # whoever else runs a Ray here is not found
    first = run_driver(_EMBEDDED, tmp_path / "data")
    assert first.endswith("['kept']")
    assert run_driver(_EMBEDDED, tmp_path / "data") == first
