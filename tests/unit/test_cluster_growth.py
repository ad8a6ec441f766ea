"""The coordinator's group on a cluster that grows: which step is next."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rayqueue.cluster.growth import AddLearner, Place, Promote, Step, coordinators_for, next_step
from rayqueue.cluster.placement import AliveBroker
from rayqueue.ids import NodeId
from rayqueue.raft.members import Members


def alive(*brokers: str) -> list[AliveBroker]:
    """``b2@h2`` is the broker b2 on the host h2."""
    pairs = [broker.partition("@") for broker in brokers]
    return [AliveBroker(broker, host or broker, f"ray-{broker}") for broker, _, host in pairs]


def step(
    places: dict[str, str],
    members: Members,
    brokers: Sequence[AliveBroker],
    *,
    unmade: Collection[str] = (),
    wanted: int = 3,
) -> Step | None:
    coordinators = {NodeId(node): broker for node, broker in places.items()}
    return next_step(wanted, coordinators, members, {NodeId(node) for node in unmade}, brokers)


ONE = {"c1": "b1"}
THREE = {"c1": "b1", "c2": "b2", "c3": "b3"}


def test_one_on_fewer_than_three_brokers_and_no_more_than_are_wanted() -> None:
    assert [coordinators_for(brokers, 3) for brokers in range(1, 6)] == [1, 1, 3, 3, 3]
    assert [coordinators_for(brokers, 5) for brokers in range(1, 7)] == [1, 1, 3, 4, 5, 5]
    assert coordinators_for(9, 1) == 1


def test_nothing_happens_before_there_are_three_brokers() -> None:
    assert step(ONE, Members.of(["c1"]), alive("b1")) is None
    assert step(ONE, Members.of(["c1"]), alive("b1", "b2")) is None
    assert step(ONE, Members.of(["c1"]), alive("b1", "b2", "b3"), wanted=1) is None


def test_new_ones_get_a_place_each_on_another_host_if_there_is_one() -> None:
    assert step(ONE, Members.of(["c1"]), alive("b1", "b2", "b3")) == Place(NodeId("c2"), "b2")
    spread = alive("b1@h1", "b2@h1", "b3@h3")
    assert step(ONE, Members.of(["c1"]), spread) == Place(NodeId("c2"), "b3")
    assert step({"c1": "b1", "c2": "b3"}, Members.of(["c1"]), spread) == Place(NodeId("c3"), "b2")


def test_a_new_one_joins_once_its_data_is_made_and_while_its_broker_is_there() -> None:
    brokers = alive("b1", "b2", "b3")
    assert step(THREE, Members.of(["c1"]), brokers, unmade=["c2", "c3"]) is None
    assert step(THREE, Members.of(["c1"]), brokers, unmade=["c3"]) == AddLearner(NodeId("c2"))
    assert step(THREE, Members.of(["c1"]), alive("b1", "b3")) == AddLearner(NodeId("c3"))


def test_nobody_votes_before_all_can_follow_at_once() -> None:
    brokers = alive("b1", "b2", "b3")
    assert step(THREE, Members.of(["c1"], ["c2"]), brokers, unmade=["c3"]) is None
    assert step(THREE, Members.of(["c1"], ["c2", "c3"]), alive("b1", "b2")) is None
    both = (NodeId("c2"), NodeId("c3"))
    assert step(THREE, Members.of(["c1"], ["c2", "c3"]), brokers) == Promote(NodeId("c2"), both)
    assert step(THREE, Members.of(["c1", "c2"], ["c3"]), brokers) == Promote(NodeId("c3"), (NodeId("c3"),))


def test_a_group_that_is_large_enough_stays_as_it_is() -> None:
    members = Members.of(THREE)
    assert step(THREE, members, alive("b1", "b2", "b3", "b4")) is None
    # A broker that is away still has its coordinator: none is made instead of it.
    assert step(THREE, members, alive("b1", "b2", "b4")) is None


def test_every_step_leads_on_to_three_voters() -> None:
    """Carry out what it says until it says nothing: one step at a time, and never two voters for longer than one."""
    places, members, brokers, voters = dict(ONE), Members.of(["c1"]), alive("b1", "b2", "b3"), []
    for _ in range(20):
        match step(places, members, brokers):
            case Place(node, broker):
                places[node] = broker
            case AddLearner(node):
                members = members.with_learner(node)
            case Promote(node, _):
                members = members.with_voter(node)
            case None:
                break
        voters.append(len(members.voters))
    assert members == Members.of(["c1", "c2", "c3"])
    assert sorted(places.values()) == ["b1", "b2", "b3"]
    assert voters.count(2) == 1
