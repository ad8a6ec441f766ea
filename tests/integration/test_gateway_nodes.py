"""One gateway on each node, on a real Ray cluster: also on a node that joins later, and on one that comes back."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

import rayqueue
from rayqueue.config import GatewaySettings
from rayqueue.gateway import fleet
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import ray_cluster

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


def test_a_node_that_joins_later_or_comes_back_gets_its_gateway(tmp_path: Path) -> None:
    with ray_cluster("b1") as cluster, rayqueue.connect(data_dir=tmp_path) as rq:
        (first,) = fleet.start(rq, GatewaySettings(rest_port=0, grpc_port=0))

        def healthy(count: int) -> list[str]:
            found = fleet.running(rq)
            urls = [each["rest"] for each in found if "rest" in each]
            try:
                live = [url for url in urls if httpx.get(f"{url}/healthz").status_code == 200]
            except httpx.TransportError:  # its node has just died
                return []
            return urls if len(live) == len(found) == count else []

        cluster.add("b2")
        two = wait_for(lambda: healthy(2), "a gateway on the new node", 90)
        cluster.kill("b2")
        wait_for(lambda: healthy(1), "its gateway to be gone with it", 90)
        assert fleet.running(rq) == [first]
        cluster.add("b2")
        again = wait_for(lambda: healthy(2), "a gateway on the node that came back", 90)
        assert first["rest"] in again
        assert set(again) != set(two)
        assert fleet.stop(rq) == 2
        assert fleet.running(rq) == []
