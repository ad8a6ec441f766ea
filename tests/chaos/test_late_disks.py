"""Disks that are mounted late: replicas that were reported lost go on under their ids, and nothing is copied."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

import rayqueue
from rayqueue.config import Settings
from rayqueue.ids import GroupId
from rayqueue.testing import wait_for
from tests.chaos.test_replacement import PATIENCE_S, group_of, killed, only, read_back, whole
from tests.integration.ray_clusters import ray_cluster

pytestmark = pytest.mark.timeout(300)

RECORDS = 200


def away(path: Path) -> Path:
    return path.with_name(f"{path.name}.not-mounted")


def test_two_disks_of_three_and_an_only_one_come_back_late(tmp_path: Path) -> None:
    """Found by an audit: what was reported was never taken back, and no such partition was ever changed again."""
    with ray_cluster("b1", "b2", "b3"):
        rq = rayqueue.connect(settings=Settings(data_dir=tmp_path))
        rq.create_topic("orders", replication=3)
        rq.create_topic("alone", replication=1)
        wait_for(lambda: whole(rq), "the topic", PATIENCE_S)
        with rq.producer() as producer:
            for number in range(RECORDS):
                producer.send("orders", b"%d" % number)
                producer.send("alone", b"%d" % number)
        alone = GroupId(rq.io.call(rq.routes.topic("alone")).partitions[0].group_id)
        late = [(group_of(rq), each.replica_id) for each in only(rq).replicas[1:]] + [(alone, "r1")]
        with ExitStack() as held:
            paths = [held.enter_context(killed(tmp_path, *each)) for each in late]
            for path in paths:
                path.rename(away(path))
        wait_for(lambda: len(rq.cluster().lost) == len(late), "all of them to be reported", PATIENCE_S)
        wait_for(lambda: len(rq.cluster().waiting) == 2, "status to say that nothing can be done", PATIENCE_S)
        for path in paths:
            away(path).rename(path)
        wait_for(lambda: not rq.cluster().lost, "them not to be lost", PATIENCE_S)
        wait_for(lambda: whole(rq) and not rq.cluster().waiting, "all to be well", PATIENCE_S)
        assert [each.replica_id for each in only(rq).replicas] == ["r1", "r2", "r3"], "nothing was replaced"
        assert rq.topic("alone").partitions[0].replicas[0].replica_id == "r1"
        kinds = [event.kind for event in rq.events()]
        assert kinds.count("replica_found") == len(late)
        assert "move_begun" not in kinds
        assert read_back(rq, RECORDS) == list(range(RECORDS))
        rq.alter_topic("alone", replication=2)
        wait_for(lambda: rq.topic("alone").partitions[0].in_sync == 2, "it to grow as any other", PATIENCE_S)
        rq.shutdown()
