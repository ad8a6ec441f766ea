"""Events: two looks at a cluster, and what is said of the difference; and the table that keeps the last ones."""

from __future__ import annotations

from rayqueue.cluster.commands import (
    BeginMove,
    CancelMove,
    CreateTopic,
    DeleteTopic,
    FinishMove,
    NoteEvents,
    PutBroker,
    RecoverGroup,
    ReplicaFound,
    ReplicaLost,
    ReplicasMade,
)
from rayqueue.cluster.events import KEPT, KINDS, Look, changes, line, under_replicated
from rayqueue.cluster.moves import Reason
from rayqueue.protocol.topics import TopicSettings
from tests.unit.cluster.cluster_state import ClusterLog

HERE = {"b1", "b2", "b3", "b4"}


class World:
    def __init__(self) -> None:
        self.log = ClusterLog()
        self.here = set(HERE)
        self.given_up: dict[str, str] = {}
        self.leaving: dict[str, str] = {}
        for broker in sorted(HERE):
            self.log.apply(PutBroker(broker, f"host-{broker}", f"node-{broker}"))
        info = self.log.apply(CreateTopic("orders", TopicSettings(replication=3), (("b1", "b2", "b3"),)))
        self.group_id = info.partitions[0].group_id
        self.log.apply(ReplicasMade(tuple((self.group_id, node) for node in ("r1", "r2", "r3"))))
        self.before = self.look()

    def look(self) -> Look:
        machine = self.log.machine
        lost = {(key.group_id, key.replica_id): why for key, why in machine.lost.items()}
        brokers = {name: row.draining for name, row in machine.brokers.items()}
        moves, recoveries = dict(machine.moves), dict(machine.recoveries)
        given_up, leaving = dict(self.given_up), dict(self.leaving)
        return Look(brokers, set(self.here), given_up, dict(machine.topics), lost, moves, recoveries, leaving)

    def happened(self) -> list[tuple[str, str]]:
        before, self.before = self.before, self.look()
        found = changes(before, self.before, 5)
        assert all(each.kind in KINDS for each in found)
        return [(each.kind, each.subject) for each in found]


def test_a_node_that_ray_drains_is_told_once_with_what_becomes_of_it() -> None:
    world = World()
    world.leaving = {"b2": "its replicas stay"}
    before, after = world.before, world.look()
    (event,) = changes(before, after, 5)
    assert (event.kind, event.subject, event.text) == ("node_draining", "b2", "Ray drains its node: its replicas stay")
    assert world.happened() == [("node_draining", "b2")]
    assert world.happened() == []
    world.leaving = {}
    assert world.happened() == []


def test_a_lost_node_and_its_replacement_are_told_from_beginning_to_end() -> None:
    world = World()
    group_id = world.group_id
    assert world.happened() == []
    world.here.discard("b3")
    assert world.happened() == [("broker_away", "b3"), ("under_replicated", group_id)]
    assert under_replicated(world.look()) == {group_id: "2 of 3 copies: b3 is away"}
    world.given_up = {"b3": "away for 3 s"}
    move = world.log.apply(BeginMove(group_id, "r3", "b4", Reason.AWAY, "away"))
    assert world.happened() == [("broker_given_up", "b3"), ("move_begun", group_id)]
    world.log.apply(ReplicasMade(((group_id, move.add),)))
    world.log.apply(FinishMove(group_id, move.add))
    assert world.happened() == [("replica_replaced", group_id), ("fully_replicated", group_id)]
    world.here.add("b3")
    assert world.happened() == [("broker_back", "b3")]


def test_damage_undone_moves_and_recoveries_are_told() -> None:
    world = World()
    group_id = world.group_id
    world.log.apply(ReplicaLost(group_id, "r2", "a bit was flipped"))
    assert world.happened() == [("replica_lost", group_id), ("under_replicated", group_id)]
    move = world.log.apply(BeginMove(group_id, "r2", "b2", Reason.LOST, "a bit"))
    world.happened()
    world.log.apply(CancelMove(group_id, move.add))
    assert world.happened() == [("move_undone", group_id)]
    world.log.apply(ReplicaLost(group_id, "r3", "there is no store", missing=True))
    world.happened()
    world.log.apply(ReplicaFound(group_id, "r3"))
    assert world.happened() == [("replica_found", group_id), ("under_replicated", group_id)], "r2 is still lost"
    world.log.apply(RecoverGroup(group_id, "r1", (("r2", "b2"), ("r3", "b3")), 7, "much is lost"))
    assert world.happened() == [("group_recovered", group_id), ("under_replicated", group_id)]
    world.log.apply(DeleteTopic("orders"))
    assert world.happened() == [], "a topic that is gone is not whole again"


def test_the_table_keeps_the_last_ones_through_restarts() -> None:
    log = ClusterLog()
    for number in range(KEPT + 10):
        log.apply(NoteEvents(((number, "broker_away", f"b{number}", "gone"),)))
    for _ in range(2):
        assert len(log.machine.events) == KEPT
        assert [each.number for each in log.machine.events] == list(range(11, KEPT + 11))
        assert line(log.machine.events[-1]) == f"event=broker_away subject=b{KEPT + 9} gone"
        log.restart()
    log.apply(NoteEvents(((1, "broker_back", "b1", "here"),)))
    assert log.machine.events[-1].number == KEPT + 11
