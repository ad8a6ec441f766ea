"""The coordinator's group on a cluster that grows: which step is next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

import pytest

from rayqueue.cluster.growth import (
    AddLearner,
    Picture,
    Place,
    Promote,
    Remove,
    Retire,
    Step,
    Transfer,
    coordinators_for,
    next_step,
)
from rayqueue.cluster.placement import AliveBroker
from rayqueue.ids import ReplicaId
from rayqueue.raft.replica_set import ReplicaSet


def alive(*brokers: str) -> list[AliveBroker]:
    """``b2@h2`` is the broker b2 on the host h2."""
    pairs = [broker.partition("@") for broker in brokers]
    return [AliveBroker(broker, host or broker, f"ray-{broker}") for broker, _, host in pairs]


def step(
    places: dict[str, str],
    members: ReplicaSet,
    brokers: Sequence[AliveBroker],
    *,
    unmade: Collection[str] = (),
    wanted: int = 3,
    leader: str = "c1",
    lost: Collection[str] = (),
    given_up: Collection[str] = (),
) -> Step | None:
    coordinators = {ReplicaId(node): broker for node, broker in places.items()}
    ids = [frozenset(map(ReplicaId, each)) for each in (unmade, lost)]
    picture = Picture(coordinators, members, ReplicaId(leader), ids[0], brokers, ids[1], given_up)
    return next_step(wanted, picture)


ONE = {"c1": "b1"}
THREE = {"c1": "b1", "c2": "b2", "c3": "b3"}


def test_one_on_fewer_than_three_brokers_and_no_more_than_are_wanted() -> None:
    assert [coordinators_for(brokers, 3) for brokers in range(1, 6)] == [1, 1, 3, 3, 3]
    assert [coordinators_for(brokers, 5) for brokers in range(1, 7)] == [1, 1, 3, 4, 5, 5]
    assert coordinators_for(9, 1) == 1


def test_nothing_happens_before_there_are_three_brokers() -> None:
    assert step(ONE, ReplicaSet.of(["c1"]), alive("b1")) is None
    assert step(ONE, ReplicaSet.of(["c1"]), alive("b1", "b2")) is None
    assert step(ONE, ReplicaSet.of(["c1"]), alive("b1", "b2", "b3"), wanted=1) is None


def test_new_ones_get_a_place_each_on_another_host_if_there_is_one() -> None:
    assert step(ONE, ReplicaSet.of(["c1"]), alive("b1", "b2", "b3")) == Place(ReplicaId("c2"), "b2")
    spread = alive("b1@h1", "b2@h1", "b3@h3")
    assert step(ONE, ReplicaSet.of(["c1"]), spread) == Place(ReplicaId("c2"), "b3")
    assert step({"c1": "b1", "c2": "b3"}, ReplicaSet.of(["c1"]), spread) == Place(ReplicaId("c3"), "b2")


def test_a_new_one_joins_once_its_data_is_made_and_while_its_broker_is_there() -> None:
    brokers = alive("b1", "b2", "b3")
    assert step(THREE, ReplicaSet.of(["c1"]), brokers, unmade=["c2", "c3"]) is None
    assert step(THREE, ReplicaSet.of(["c1"]), brokers, unmade=["c3"]) == AddLearner(ReplicaId("c2"))
    assert step(THREE, ReplicaSet.of(["c1"]), alive("b1", "b3")) == AddLearner(ReplicaId("c3"))


def test_nobody_votes_before_all_can_follow_at_once() -> None:
    brokers = alive("b1", "b2", "b3")
    assert step(THREE, ReplicaSet.of(["c1"], ["c2"]), brokers, unmade=["c3"]) is None
    assert step(THREE, ReplicaSet.of(["c1"], ["c2", "c3"]), alive("b1", "b2")) is None
    both = (ReplicaId("c2"), ReplicaId("c3"))
    assert step(THREE, ReplicaSet.of(["c1"], ["c2", "c3"]), brokers) == Promote(ReplicaId("c2"), both)
    assert step(THREE, ReplicaSet.of(["c1", "c2"], ["c3"]), brokers) == Promote(ReplicaId("c3"), (ReplicaId("c3"),))


def test_a_group_that_is_large_enough_stays_as_it_is() -> None:
    members = ReplicaSet.of(THREE)
    assert step(THREE, members, alive("b1", "b2", "b3", "b4")) is None
    # A broker that is away still has its coordinator: none is made instead of it.
    assert step(THREE, members, alive("b1", "b2", "b4")) is None


def test_every_step_leads_on_to_three_voters() -> None:
    """Carry out what it says until it says nothing: one step at a time, and never two voters for longer than one."""
    places, members, brokers, voters = dict(ONE), ReplicaSet.of(["c1"]), alive("b1", "b2", "b3"), []
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
    assert members == ReplicaSet.of(["c1", "c2", "c3"])
    assert sorted(places.values()) == ["b1", "b2", "b3"]
    assert voters.count(2) == 1


C1, C2, C3, C4 = map(ReplicaId, ("c1", "c2", "c3", "c4"))
FOUR = {**THREE, "c4": "b4"}


def test_one_whose_broker_is_given_up_is_replaced_and_leaves_last() -> None:
    here, gone = alive("b1", "b2", "b4"), ("b3",)
    assert step(THREE, ReplicaSet.of(THREE), here, given_up=gone) == Place(C4, "b4")
    assert step(FOUR, ReplicaSet.of(THREE), here, given_up=gone, unmade=["c4"]) is None
    assert step(FOUR, ReplicaSet.of(THREE), here, given_up=gone) == AddLearner(C4)
    assert step(FOUR, ReplicaSet.of(THREE, ["c4"]), here, given_up=gone) == Promote(C4, (C4,))
    assert step(FOUR, ReplicaSet.of(FOUR), here, given_up=gone) == Remove(C3)
    assert step(FOUR, ReplicaSet.of(["c1", "c2", "c4"]), here, given_up=gone) == Retire(C3)
    assert step({"c1": "b1", "c2": "b2", "c4": "b4"}, ReplicaSet.of(["c1", "c2", "c4"]), here) is None


def test_one_that_lost_its_data_is_replaced_on_its_own_broker() -> None:
    brokers = alive("b1", "b2", "b3")
    assert step(THREE, ReplicaSet.of(THREE), brokers, lost=["c3"]) == Place(C4, "b3")


def test_a_learner_whose_broker_dies_in_the_middle_is_not_waited_for() -> None:
    here, gone = alive("b1", "b2", "b5"), ("b3", "b4")
    assert step(FOUR, ReplicaSet.of(THREE, ["c4"]), here, given_up=gone) == Remove(C4)
    assert step(FOUR, ReplicaSet.of(THREE), here, given_up=gone) == Retire(C4)
    assert step(THREE, ReplicaSet.of(THREE), here, given_up=gone) == Place(C4, "b5")
    away = alive("b1", "b2", "b5")
    assert step(FOUR, ReplicaSet.of(THREE, ["c4"]), away, given_up=["b3"]) is None, "only away: it may come back"


def test_on_two_brokers_that_are_left_one_is_enough() -> None:
    here, gone = alive("b1", "b2"), ("b3",)
    assert step(THREE, ReplicaSet.of(THREE), here, given_up=gone) == Remove(C3)
    assert step(THREE, ReplicaSet.of(["c1", "c2"]), here, given_up=gone) == Retire(C3)
    two = {"c1": "b1", "c2": "b2"}
    assert step(two, ReplicaSet.of(two), here) == Remove(C2)
    assert step(two, ReplicaSet.of(two), here, leader="c2") == Remove(C1), "whoever leads stays"
    assert step(two, ReplicaSet.of(["c1"]), here) == Retire(C2)
    assert step(ONE, ReplicaSet.of(["c1"]), here) is None


def test_a_leader_that_is_to_leave_hands_over_first() -> None:
    here = alive("b1", "b2", "b3", "b4")
    assert step(FOUR, ReplicaSet.of(FOUR), here, leader="c3", given_up=["b3"]) == Transfer(C1)
    assert step(FOUR, ReplicaSet.of(FOUR), here, leader="c1", given_up=["b3"]) == Remove(C3)


class World:
    """Brokers that come and go for good, disks that are lost, and a keeper that takes one step at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.places = {C1: "b1"}
        self.members = ReplicaSet.of(["c1"])
        self.disks = {C1}
        self.unmade: set[ReplicaId] = set()
        self.lost: set[ReplicaId] = set()
        self.here = {"b1"}
        self.given_up: set[str] = set()
        self.last_number = self.brokers = 1
        self.ids = {C1}

    def decides(self, here: set[str]) -> bool:
        return self.members.is_majority(node for node in self.disks if self.places.get(node) in here)

    def fault(self) -> None:
        kind = self.rng.choice(("join", "join", "go", "lose", "return"))
        if kind == "join" and len(self.here) < 6:
            self.brokers += 1
            self.here.add(f"b{self.brokers}")
        elif kind == "return" and self.given_up:
            broker = self.rng.choice(sorted(self.given_up))
            self.given_up.discard(broker)
            self.here.add(broker)
        elif kind == "go":
            broker = self.rng.choice(sorted(self.here))
            if self.decides(self.here - {broker}):
                self.here.discard(broker)
                self.given_up.add(broker)
        elif kind == "lose" and self.disks - {C1}:
            node = self.rng.choice(sorted(self.disks))
            self.disks.discard(node)
            if self.decides(self.here):
                self.lost.add(node)
            else:
                self.disks.add(node)

    def step(self) -> bool:
        able = sorted(node for node in self.members.voters & self.disks if self.places.get(node) in self.here)
        assert self.decides(self.here), "a step has cost the group its majority"
        leader = self.rng.choice(able)
        for node in sorted(self.unmade):
            if self.places[node] in self.here and self.rng.random() < 0.7:
                self.unmade.discard(node)
                self.disks.add(node)
        brokers = alive(*sorted(self.here))
        picture = Picture(
            self.places, self.members, leader, self.unmade, brokers, self.lost, self.given_up, self.last_number
        )
        match next_step(3, picture):
            case Place(node, broker):
                assert node not in self.ids, "an id that another one had"
                self.ids.add(node)
                self.last_number = max(self.last_number, int(node[1:]))
                self.places[node] = broker
                self.unmade.add(node)
            case AddLearner(node):
                self.members = self.members.with_learner(node)
            case Promote(node, ready):
                if all(each in self.disks and self.places[each] in self.here for each in ready):
                    self.members = self.members.with_voter(node)
            case Remove(node):
                assert node != leader
                self.members = self.members.without(node)
            case Retire(node):
                assert node not in self.members.everyone, "its data would be deleted"
                del self.places[node]
                for each in (self.unmade, self.disks, self.lost):
                    each.discard(node)
            case Transfer(to):
                assert to in self.members.voters
            case None:
                return False
        return True

    def is_as_it_should_be(self) -> bool:
        count = coordinators_for(len(self.here), 3)
        return (
            self.members == ReplicaSet.of(self.places)
            and len(self.places) == count == len(set(self.places.values()) & self.here)
            and self.members.voters <= self.disks
        )


@pytest.mark.parametrize("seed", range(200))
def test_whatever_comes_and_goes_the_group_is_as_it_should_be_in_the_end(seed: int) -> None:
    world = World(seed)
    for _ in range(80):
        if world.rng.random() < 0.3:
            world.fault()
        world.step()
    for _ in range(100):
        world.step()
    assert world.is_as_it_should_be(), (world.places, world.members, world.here, world.given_up, world.lost)
