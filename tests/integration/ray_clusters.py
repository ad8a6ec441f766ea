"""Ray clusters for tests: several nodes on this machine, reachable from it only, each a broker by its label."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from rayqueue.actors._ray import forget_token_mode
from rayqueue.client.embedded import RAY_SYSTEM_SETTINGS, loopback_only
from rayqueue.client.shared import SharedConnections

ROOT = Path(__file__).resolve().parents[2]

_SMALL = {"num_cpus": 2, "object_store_memory": 80 * 1024 * 1024}
# A killed raylet refuses the next checks at once and is missed after a second. One that is only slow, as on a busy
# machine every raylet that starts, has Ray's own ten seconds to answer.
_NOTICE_DEATH_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 3,
}


class RayCluster:
    """Brokers by name, each on a Ray node of its own. The first one is Ray's head, and the driver's.

    Without ``labels`` the names are the test's only: the nodes find out by themselves which brokers they are.
    """

    def __init__(self, *brokers: str, labels: bool = True, racks: Mapping[str, str] | None = None) -> None:
        """``racks``: by broker, the label that its node has for it."""
        self._labels = labels
        self._racks = racks or {}
        self._temporary = tempfile.mkdtemp(prefix="rq-")  # short: see embedded_ray
        self._before = os.environ.get("RAY_TMPDIR")
        # The cluster also leaves its address here, for whoever looks for one; nobody else should find it.
        os.environ["RAY_TMPDIR"] = self._temporary
        forget_token_mode()  # of a Ray that another test had in this process
        self.cluster: Any = Cluster()
        self.nodes: dict[str, Any] = {}
        for broker in brokers:
            self.add(broker)
        with loopback_only():
            ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, broker: str) -> None:
        labels = {"rayqueue.broker": broker} if self._labels else {}
        if broker in self._racks:
            labels["rayqueue.rack"] = self._racks[broker]
        options: dict[str, Any] = dict(_SMALL, labels=labels)
        if not self.nodes:
            options |= {"include_dashboard": False, "_system_config": RAY_SYSTEM_SETTINGS | _NOTICE_DEATH_SOON}
        with loopback_only():
            self.nodes[broker] = self.cluster.add_node(**options)

    def kill(self, broker: str) -> None:
        """kill -9 of the node's raylet."""
        self.cluster.remove_node(self.nodes.pop(broker), allow_graceful=False)

    def stop(self) -> None:
        try:
            # A test that failed left its handles open, and Ray ends a process that asks it now.
            SharedConnections.end_all()
            ray.shutdown()
            self.cluster.shutdown()
        finally:
            if self._before is None:
                del os.environ["RAY_TMPDIR"]
            else:
                os.environ["RAY_TMPDIR"] = self._before
            shutil.rmtree(self._temporary, ignore_errors=True)


@contextlib.contextmanager
def ray_cluster(*brokers: str, labels: bool = True, racks: Mapping[str, str] | None = None) -> Iterator[RayCluster]:
    made = RayCluster(*brokers, labels=labels, racks=racks)
    try:
        yield made
    finally:
        made.stop()


def run_driver(code: str, *arguments: str | Path, timeout_s: float = 90.0) -> str:
    """Another program, to its end. The last line that it printed; Ray may have had something to say before."""
    return run_program(code, *arguments, timeout_s=timeout_s).stdout.rstrip().rpartition("\n")[2]


def run_program(code: str, *arguments: str | Path, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
    """Another program, to its good end, and all that it said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
