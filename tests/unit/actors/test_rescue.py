"""Unsafe recovery of the coordinator, on real data directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayqueue.actors.keeper.files import replace
from rayqueue.actors.keeper.home import CLUSTER_FILE, ClusterManifest, load_cluster, newness
from rayqueue.actors.keeper.rescue import recover_coordinator
from rayqueue.cluster.tables import COORDINATOR as SCHEMA
from rayqueue.config import Settings
from rayqueue.errors import RecoveryRefusedError, StorageError, StoreAbandonedError
from rayqueue.ids import COORDINATOR, ReplicaId
from rayqueue.log.lmdb_store import LmdbStore
from rayqueue.raft.recovery import replica_set_of
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.replica.coordinator_service import CoordinatorReplica, start_coordinator
from rayqueue.replica.start import create_replica
from rayqueue.testing import wait_for

SETTINGS = Settings(transport={"secret": "only for this test"})
VOTERS = [ReplicaId(node) for node in ("c1", "c2", "c3")]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Of a node that has one of three coordinators."""
    path = tmp_path / COORDINATOR / "c1"
    create_replica(path, COORDINATOR, VOTERS[0], ReplicaSet.of(VOTERS), SETTINGS)
    manifest = {"cluster_id": "cluster-1", "coordinators": {"c1": "b1", "c2": "b2", "c3": "b3"}, "complete": True}
    replace(tmp_path / CLUSTER_FILE, json.dumps(manifest | {"version": 900}))
    return tmp_path


def started(data_dir: Path, epoch: int) -> CoordinatorReplica:
    return start_coordinator(
        data_dir / COORDINATOR / "c1",
        COORDINATOR,
        VOTERS[0],
        SETTINGS,
        host="127.0.0.1",
        epoch=epoch,
        on_change=lambda: None,
        on_fatal=print,
    )


def test_looking_changes_nothing(data_dir: Path) -> None:
    before = load_cluster(data_dir)
    plan = recover_coordinator(data_dir, None, unsafe=False)
    assert (plan.survivor, plan.broker, plan.epoch) == ("c1", "b1", 1)
    assert plan.abandoned == (("c2", "b2"), ("c3", "b3"))
    assert "c2 on b2, c3 on b3" in plan.said
    assert load_cluster(data_dir) == before


def test_it_leads_alone_and_remembers_what_was_given_up(data_dir: Path) -> None:
    old = load_cluster(data_dir)
    plan = recover_coordinator(data_dir, None, unsafe=True)
    new = load_cluster(data_dir)
    assert new is not None
    assert old is not None
    assert new.coordinators == {"c1": "b1"}
    assert newness(new) > newness(old), "whatever other nodes have in their files"
    replica = started(data_dir, new.epoch)
    try:
        wait_for(lambda: replica.status.role == "leader", "it to lead", 20)
        assert replica.status.epoch == 1
        wait_for(lambda: replica.service.machine.recoveries, "the audit record", 20)
        audit = replica.service.machine.recoveries[COORDINATOR]
        assert (audit.survivor, audit.abandoned, audit.said) == ("c1", plan.abandoned, plan.said)
        with pytest.raises(StorageError) as used:
            recover_coordinator(data_dir, None, unsafe=False)
        assert used.value.details["reason"] == "locked"
    finally:
        replica.close()
    with pytest.raises(RecoveryRefusedError, match="start the queue instead"):
        recover_coordinator(data_dir, None, unsafe=True)


def test_one_that_was_interrupted_is_finished_by_the_next(data_dir: Path) -> None:
    before = (data_dir / CLUSTER_FILE).read_text()
    recover_coordinator(data_dir, None, unsafe=True)
    replace(data_dir / CLUSTER_FILE, before)  # as if the process had died before it wrote the file
    recover_coordinator(data_dir, None, unsafe=True)
    found = load_cluster(data_dir)
    assert found is not None
    assert (found.coordinators, found.epoch) == ({"c1": "b1"}, 1)
    store = LmdbStore.open(data_dir / COORDINATOR / "c1", COORDINATOR, VOTERS[0], schema=SCHEMA)
    assert replica_set_of(store).epoch == 1, "not recovered twice"
    store.close()


def test_data_from_before_a_recovery_is_not_served(data_dir: Path) -> None:
    with pytest.raises(StoreAbandonedError):
        started(data_dir, 1)


def test_a_majority_is_started_not_recovered(data_dir: Path) -> None:
    path = data_dir / "brokers" / "b2" / COORDINATOR / "c2"
    path.parent.mkdir(parents=True)
    create_replica(path, COORDINATOR, VOTERS[1], ReplicaSet.of(VOTERS), SETTINGS)
    with pytest.raises(RecoveryRefusedError, match="start the queue instead"):
        recover_coordinator(data_dir, None, unsafe=True)
    with pytest.raises(RecoveryRefusedError, match="no cluster"):
        recover_coordinator(data_dir / "elsewhere", None, unsafe=True)


def test_of_two_files_the_later_epoch_is_right() -> None:
    alone = ClusterManifest("x", {VOTERS[0]: "b1"}, True, 10, 1)
    assert newness(alone) > newness(ClusterManifest("x", dict.fromkeys(VOTERS, "b"), True, 5000, 0))
