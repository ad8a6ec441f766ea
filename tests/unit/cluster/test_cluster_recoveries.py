"""Recoveries in the coordinator's metadata: one replica stays, the others are doomed, and it is never forgotten."""

from __future__ import annotations

from rayqueue.cluster.catalog import ReplicaKey
from rayqueue.cluster.commands import BeginMove, CreateTopic, PlaceCoordinator, PutBroker, RecoverGroup, RecoverySettled
from rayqueue.cluster.moves import Move, Reason
from rayqueue.cluster.recoveries import Recovery
from rayqueue.errors import MembershipError
from rayqueue.ids import COORDINATOR
from rayqueue.protocol.topics import TopicSettings
from tests.unit.cluster.cluster_state import ClusterLog


def made() -> tuple[ClusterLog, str]:
    log = ClusterLog()
    for broker in ("b1", "b2", "b3", "b4"):
        log.apply(PutBroker(broker, f"host-{broker}", f"node-{broker}"))
    info = log.apply(CreateTopic("orders", TopicSettings(replication=3), (("b1", "b2", "b3"),)))
    return log, info.partitions[0].group_id


def test_a_partition_goes_on_with_one_replica_in_a_new_epoch() -> None:
    log, group_id = made()
    moved = log.apply(BeginMove(group_id, "r2", "b4", Reason.ASKED))
    assert isinstance(moved, Move)
    version = log.machine.version
    recovery = log.apply(RecoverGroup(group_id, "r1", (("r2", "b2"), ("r3", "b3")), 77, "much"))
    assert recovery == Recovery(group_id, 1, "r1", (("r2", "b2"), ("r3", "b3")), 77, "much", False)
    for _ in range(2):  # and again after a restart
        machine = log.machine
        assert [each.replica_id for each in machine.topics["orders"].partitions[0].replicas] == ["r1"]
        assert machine.topics["orders"].settings.replication == 3, "as many are wanted as before"
        assert machine.moves == {}
        assert set(machine.doomed) == {ReplicaKey(group_id, node) for node in ("r2", "r3", moved.add)}
        assert machine.version > version, "clients learn it"
        assert machine.recoveries == {group_id: recovery}
        log.restart()
    log.apply(RecoverySettled(group_id, 2))
    assert not log.machine.recoveries[group_id].settled, "that is another one"
    log.apply(RecoverySettled(group_id, 1))
    assert log.machine.recoveries[group_id].settled


def test_a_recovery_of_replicas_that_are_others_by_now_is_refused() -> None:
    log, group_id = made()
    for survivor, abandoned in (("r1", (("r2", "b2"),)), ("r9", (("r2", "b2"), ("r3", "b3")))):
        assert isinstance(log.apply(RecoverGroup(group_id, survivor, abandoned, 1, "")), MembershipError)
    assert len(log.machine.topics["orders"].partitions[0].replicas) == 3
    assert isinstance(log.apply(RecoverGroup("nothing-0.9", "r1", (), 1, "")), MembershipError)
    assert log.machine.recoveries == {}


def test_the_coordinators_that_were_given_up_have_no_place_and_no_id_any_more() -> None:
    log, _ = made()
    log.apply(PlaceCoordinator(COORDINATOR, "c4", "b4"))
    log.apply(RecoverGroup(COORDINATOR, "c1", (("c2", "b2"), ("c3", "b3"), ("c4", "b4")), 5, "all", 1))
    for _ in range(2):
        assert dict(log.machine.coordinators) == {"c2": "", "c3": "", "c4": ""}
        assert {key.replica_id for key in log.machine.doomed} == {"c2", "c3", "c4"}
        assert log.machine.recoveries[COORDINATOR].settled
        log.restart()
