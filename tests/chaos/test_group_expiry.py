"""A group that nobody uses is gone after a while, from the coordinator and from its partitions."""

from __future__ import annotations

from pathlib import Path

import pytest

import rayqueue
from rayqueue.config import Settings
from rayqueue.errors import UnknownGroupError
from rayqueue.testing import wait_for
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(240)


@pytest.mark.long
def test_an_unused_group_expires_with_its_positions(tmp_path: Path) -> None:
    with ray_cluster("b1"):
        rq = rayqueue.connect(settings=Settings(data_dir=tmp_path, cluster={"group_retention_ms": 3_000}))
        rq.create_topic("orders", partitions=2, replication=1)
        with rq.producer() as producer:
            for number in range(20):
                producer.send("orders", b"%d" % number)
        with rq.consumer("orders", group="weekly") as consumer:
            read = 0

            def read_all() -> bool:
                nonlocal read
                read += len(consumer.poll())
                return read >= 20

            wait_for(read_all, "the records", 30.0)
        left = rq.group("weekly")
        assert left.state == "empty"
        assert left.empty_since_ms is not None
        assert left.expires_at_ms == left.empty_since_ms + 3_000
        assert left.lag == 0

        def is_gone() -> bool:
            try:
                rq.group("weekly")  # asks the partitions too
            except UnknownGroupError:
                return True
            return False

        wait_for(is_gone, "the group to expire", 120.0)
        assert rq.groups() == []
        with rq.consumer("orders", group="weekly") as consumer:
            read = 0
            wait_for(read_all, "a new life that begins anew", 30.0)
        rq.shutdown()
