"""An operator's view: the figures that Prometheus scrapes, and the dashboard's tables of actors and tasks."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.state import list_actors, list_tasks

import rayqueue
from rayqueue.client.embedded import RAY_SYSTEM_SETTINGS, loopback_only
from rayqueue.config import MIB
from rayqueue.testing import wait_for
from rayqueue.testing.faults import kill_leader

pytestmark = pytest.mark.timeout(180)

_SAMPLE = re.compile(r"ray_(rayqueue_\w+)\{(.*)\} (\S+)")
_TAG = re.compile(r'(\w+)="([^"]*)"')

Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Ray with its dashboard, for this machine only; its address."""
    temporary = Path(tempfile.mkdtemp(prefix="rq-"))
    try:
        with loopback_only():
            context = ray.init(
                address="local",
                num_cpus=2,
                object_store_memory=80 * MIB,
                include_dashboard=True,
                dashboard_host="127.0.0.1",
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(temporary),
                # Ray's own default is ten seconds, which is a long time for a test.
                _system_config={**RAY_SYSTEM_SETTINGS, "metrics_report_interval_ms": 500},
            )
        yield f"http://{context.dashboard_url}"
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def rq(dashboard: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[rayqueue.RayQueue]:
    made = rayqueue.connect(data_dir=tmp_path_factory.mktemp("data"))
    made.create_topic("orders", replication=3)
    yield made
    made.shutdown()


def scraped() -> Samples:
    """RayQueue's figures, as Prometheus reads them from the node."""
    [node] = ray.nodes()  # type: ignore[no-untyped-call]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    samples: Samples = {}
    for name, tags, value in _SAMPLE.findall(text):
        samples.setdefault(name, []).append((dict(_TAG.findall(tags)), float(value)))
    return samples


def of_orders(samples: Samples, name: str, **tags: str) -> dict[str, float]:
    """By replica."""
    wanted = {"topic": "orders", "partition": "0", **tags}
    return {
        found["replica"]: value
        for found, value in samples.get(f"rayqueue_{name}", [])
        if wanted.items() <= found.items()
    }


def read(consumer: rayqueue.Consumer, count: int) -> None:
    """So many records, and commit them."""
    left = count

    def polled() -> bool:
        nonlocal left
        left -= len(consumer.poll(max_records=left))
        return not left

    wait_for(polled, f"{count} records", timeout_s=30)
    consumer.commit()


def test_figures_are_exported_and_exact(rq: rayqueue.RayQueue) -> None:
    with rq.producer() as producer:
        producer.send_many("orders", [b"x" * 100] * 100)
        producer.flush()
    with rq.consumer("orders", group="billing") as consumer:
        read(consumer, 40)

        def exported() -> bool:
            now = scraped()
            return (
                of_orders(now, "high_watermark") == {"r1": 100, "r2": 100, "r3": 100}
                and sum(of_orders(now, "produced_records_total").values()) == 100
                and sum(of_orders(now, "lag_records", group="billing").values()) == 60
                and sum(of_orders(now, "backlog_records").values()) == 60
            )

        wait_for(exported, "100 records, 60 of them not committed", timeout_s=30)
        now = scraped()
        assert sum(of_orders(now, "leader").values()) == 1
        assert sum(of_orders(now, "elections_total").values()) >= 1
        assert sum(of_orders(now, "produced_bytes_total").values()) > 100 * 100
        assert sum(of_orders(now, "fetched_records_total").values()) >= 40
        assert sum(of_orders(now, "fetched_bytes_total").values()) >= 40 * 100
        assert sum(of_orders(now, "backlog_bytes").values()) > 0
        for name in ("disk_bytes", "fsyncs_total", "fsync_seconds_total", "term"):
            assert min(of_orders(now, name).values()) > 0, name
        for name in ("start_offset", "read_only", "damaged"):
            assert of_orders(now, name) == {"r1": 0, "r2": 0, "r3": 0}
        assert of_orders(now, "fsync_longest_seconds").keys() == {"r1", "r2", "r3"}
        coordinators = [tags for tags, value in now["rayqueue_leader"] if tags["topic"] == "coordinator" and value]
        assert [tags["replica"] for tags in coordinators] == ["c1"]
        read(consumer, 60)
    lags = "lag_records"
    wait_for(lambda: not any(of_orders(scraped(), lags, group="billing").values()), "a lag of 0", timeout_s=30)


def test_every_figure_is_in_the_documentation(rq: rayqueue.RayQueue) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    documented = set(re.findall(r"`ray_(rayqueue_\w+)`", text))
    exported = set(scraped())
    assert exported
    # Ray exports a counter once it has counted something: here nobody was turned away, no leader made way, and nothing
    # had to go for room.
    not_counted = {
        "rayqueue_clients_refused_total",
        "rayqueue_clients_hung_up_total",
        "rayqueue_unacked_refused_total",
        "rayqueue_leaders_handed_over_total",
        "rayqueue_results_evicted_total",
    }
    assert exported | not_counted == documented


def test_the_table_of_actors_reads_like_a_console(rq: rayqueue.RayQueue, dashboard: str) -> None:
    [node] = ray.nodes()  # type: ignore[no-untyped-call]
    host = node["NodeManagerAddress"]
    shown = {
        actor.name: (actor.class_name, actor.repr_name)
        for actor in list_actors(address=dashboard, detail=True, filters=[("state", "=", "ALIVE")])
    }
    topic_id = rq.topic("orders").topic_id
    assert shown == {
        "rayqueue/coordinator/c1": ("CoordinatorActor", f"coordinator c1 on {host}"),
        **{
            f"rayqueue/orders-0.{topic_id}/{node}": ("PartitionActor", f"orders-0 {node} on {host}")
            for node in ("r1", "r2", "r3")
        },
    }


def test_red_means_wrong(rq: rayqueue.RayQueue, dashboard: str) -> None:
    """On a healthy queue no task is FAILED, and no actor is DEAD but the one that started the queue and has ended."""
    rq.topic("orders")
    assert not list_tasks(address=dashboard, filters=[("state", "=", "FAILED")], limit=1000)
    dead = list_actors(address=dashboard, filters=[("state", "=", "DEAD")])
    assert [actor.class_name for actor in dead] == ["StarterActor"]


def titles(dashboard: str) -> set[str]:
    """What the processes of all replicas are called, as the dashboard's table of workers shows them."""
    alive = list_actors(address=dashboard, filters=[("state", "=", "ALIVE")])
    paths = [Path(f"/proc/{actor.pid}/cmdline") for actor in alive if actor.class_name == "PartitionActor"]
    return {path.read_bytes().rstrip(b"\0 ").decode() for path in paths if path.exists()}


def roles(rq: rayqueue.RayQueue) -> dict[str, str]:
    """What the replicas say of themselves. To be asked is a call, after which Ray titles the process for a moment."""
    [partition] = rq.topic("orders").partitions
    return {each.replica_id: each.role for each in partition.replicas}


def test_a_process_is_called_by_its_replica_and_role(rq: rayqueue.RayQueue, dashboard: str) -> None:
    def called(told: dict[str, str]) -> None:
        wanted = {f"ray::orders-0 {node} {role}" for node, role in told.items()}
        wait_for(lambda: titles(dashboard) == wanted, f"the processes to be called {wanted}", timeout_s=30)

    called(roles(rq))
    killed = kill_leader(rq, "orders", 0)

    def succeeded() -> dict[str, str] | None:
        told = roles(rq)
        return told if told[killed.replica_id] == "follower" and "leader" in told.values() else None

    called(wait_for(succeeded, "the next leader, and the former one as a follower", timeout_s=60))
