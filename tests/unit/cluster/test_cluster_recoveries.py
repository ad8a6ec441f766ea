"""Recoveries in the coordinator's metadata: one replica stays, the others are doomed, and it is never forgotten."""

from __future__ import annotations

import pytest

from rayqueue.cluster.brokers import recover_command
from rayqueue.cluster.catalog import ReplicaKey
from rayqueue.cluster.commands import (
    BeginMove,
    CreateTopic,
    PlaceCoordinator,
    PutBroker,
    RecoverGroup,
    RecoverySettled,
    ReplicaFound,
    ReplicaLost,
    ReplicasMade,
)
from rayqueue.cluster.moves import Move, Reason, needs
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.recoveries import Recovery
from rayqueue.cluster.repairs import only_and_lost, stuck
from rayqueue.cluster.sites import Sites
from rayqueue.config import ClusterSettings
from rayqueue.errors import InvalidInputError, MembershipError, UnknownBrokerError
from rayqueue.ids import COORDINATOR
from rayqueue.protocol.calls import RecoverPartition
from rayqueue.protocol.topics import TopicSettings
from tests.unit.cluster.cluster_state import ClusterLog, view_of


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


# -- nobody is left --------------------------------------------------------------------------------


def made_alone() -> tuple[ClusterLog, str]:
    log = ClusterLog()
    for broker in ("b1", "b2"):
        log.apply(PutBroker(broker, f"host-{broker}", f"node-{broker}"))
    info = log.apply(CreateTopic("orders", TopicSettings(replication=1), (("b1",),)))
    log.apply(ReplicasMade(tuple(log.machine.unmade)))
    return log, info.partitions[0].group_id


def test_a_partition_of_which_nothing_is_left_begins_anew_under_an_id_that_nobody_had() -> None:
    log, group_id = made_alone()
    log.apply(ReplicaLost(group_id, "r1", "no store"))
    recovery = log.apply(RecoverGroup(group_id, "", (("r1", "b1"),), 77, "all", begins_at=5000, broker="b2"))
    assert isinstance(recovery, Recovery)
    assert (recovery.survivor, recovery.begins_at, recovery.epoch, recovery.settled) == ("r1.1", 5000, 1, False)
    for _ in range(2):
        machine = log.machine
        (replica,) = machine.topics["orders"].partitions[0].replicas
        assert (replica.replica_id, replica.broker) == ("r1.1", "b2")
        assert set(machine.unmade) == {ReplicaKey(group_id, "r1.1")}, "the keeper makes it"
        assert set(machine.doomed) == {ReplicaKey(group_id, "r1")}
        assert dict(machine.lost) == {}
        assert machine.recoveries[group_id] == recovery
        log.restart()
    log.apply(ReplicasMade(tuple(log.machine.unmade)))
    log.apply(RecoverySettled(group_id, 1))
    log.apply(ReplicaLost(group_id, "r1.1", "again"))
    again = log.apply(RecoverGroup(group_id, "", (("r1.1", "b2"),), 78, "all", begins_at=9000, broker="b1"))
    assert (again.survivor, again.epoch) == ("r1.2", 2)


def test_it_does_not_begin_anew_where_nobody_is_or_for_replicas_that_are_others_by_now() -> None:
    log, group_id = made_alone()
    wrong = RecoverGroup(group_id, "", (("r1", "b1"),), 1, "", begins_at=1, broker="b9")
    assert isinstance(log.apply(wrong), UnknownBrokerError)
    others = RecoverGroup(group_id, "", (("r1.4", "b1"),), 1, "", begins_at=1, broker="b1")
    assert isinstance(log.apply(others), MembershipError)
    assert log.machine.recoveries == {}


def asked(log: ClusterLog, *alive: str, **rest: object) -> RecoverGroup:
    sites = Sites(log.machine, ClusterSettings())
    sites.set_alive(0.0, [AliveBroker(each, f"host-{each}") for each in alive])
    info = log.machine.topics["orders"]
    facts: dict[str, object] = {"survivor": "", "replicas": ("r1",), "said": "all", "begins_at": 7}
    call = RecoverPartition(topic="orders", topic_id=info.topic_id, partition=0, **(facts | rest))  # type: ignore[arg-type]
    return recover_command(log.machine, sites, call, 1)


def test_it_begins_where_it_was_or_elsewhere_if_that_broker_is_away() -> None:
    log, _ = made_alone()
    assert asked(log, "b1", "b2").broker == "b1"
    assert asked(log, "b2").broker == "b2"
    assert asked(log, "b1", "b2", broker="b2") == RecoverGroup(
        log.machine.topics["orders"].partitions[0].group_id, "", (("r1", "b1"),), 1, "all", begins_at=7, broker="b2"
    )
    assert asked(log, "b1", survivor="r1", begins_at=None).broker == ""
    with pytest.raises(InvalidInputError, match="b1 is not there"):
        asked(log, "b2", broker="b1")
    for begins_at in (None, -1, 2**63):
        with pytest.raises(InvalidInputError, match="an offset to begin at"):
            asked(log, "b1", begins_at=begins_at)


def test_what_is_said_of_a_partition_that_cannot_be_made_whole_says_what_to_do() -> None:
    log, group_id = made_alone()
    assert stuck(view_of(log.machine), {}) == {}
    log.apply(ReplicaLost(group_id, "r1", "no store. The records before offset 30 were acknowledged"))
    told = stuck(view_of(log.machine), {})[group_id]
    assert "no copy is left" in told
    assert "r1: no store. The records before offset 30 were acknowledged" in told
    assert "rayqueue recover orders 0 --unsafe" in told
    assert "b1 is gone" in stuck(view_of(made_alone()[0].machine), {"b1": "b1 is gone"})[group_id]
    log, group_id = made()
    log.apply(ReplicasMade(tuple(log.machine.unmade)))
    for node in ("r2", "r3"):
        log.apply(ReplicaLost(group_id, node, "no store"))
    told = stuck(view_of(log.machine), {})[group_id]
    assert told.startswith("1 of 3 copies are left, which decide nothing: bring r2, r3 back")
    assert "rayqueue recover orders 0 --unsafe" in told
    assert only_and_lost(view_of(log.machine)) == []


def test_an_only_replica_whose_data_is_back_is_lost_no_more() -> None:
    log, group_id = made_alone()
    log.apply(ReplicaLost(group_id, "r1", "no store"))
    assert only_and_lost(view_of(log.machine)) == [(group_id, "r1")]
    assert needs(log.machine.topics["orders"].partitions, view_of(log.machine).lost, {}, ()) == []
    log.apply(ReplicaFound(group_id, "r9"))
    assert len(log.machine.lost) == 1
    log.apply(ReplicaFound(group_id, "r1"))
    for _ in range(2):
        assert dict(log.machine.lost) == {}
        log.restart()


def test_one_of_several_that_was_lost_stays_lost() -> None:
    """It may have forgotten what it promised to the others."""
    log, group_id = made()
    log.apply(ReplicasMade(tuple(log.machine.unmade)))
    log.apply(ReplicaLost(group_id, "r2", "no store"))
    log.apply(ReplicaFound(group_id, "r2"))
    assert len(log.machine.lost) == 1
