"""Unsafe recovery: one replica goes on alone, keeps what it has, and those of before never join it again."""

from __future__ import annotations

import pytest

from rayqueue.errors import InvalidInputError, MembershipError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.waymark import Waymark
from rayqueue.raft.recovery import begin_anew, replica_set_of, stand_alone, standing, wire_name
from rayqueue.raft.replica_set import ReplicaSet
from tests.unit.raft.engines import Engines

A, B, C, D = ReplicaId("a"), ReplicaId("b"), ReplicaId("c"), ReplicaId("d")


def lost_majority() -> tuple[Engines, ReplicaId]:
    """A group of three of which one follower is left; it has what was committed, and something more."""
    group = Engines("a", "b", "c")
    leader = group.leader
    leader.propose(b"\x20hello", "first")
    assert group.answer("first") == 6
    group.run(1)
    survivor = next(node for node in (A, B, C) if node != leader.replica_id)
    group.cut = {A, B, C} - {survivor}
    for gone in group.cut:
        del group.engines[gone]
    group.run(5)
    assert not group.engines[survivor].is_leader
    return group, survivor


def test_the_survivor_leads_alone_with_all_that_its_log_has() -> None:
    group, survivor = lost_majority()
    before = standing(group.stores[survivor])
    stand_alone(group.stores[survivor], 1, [b"\x20done"])
    group.restart(survivor)
    assert group.leader.replica_id == survivor
    assert group.leader.term > before.term + 1
    group.leader.propose(b"\x20x", "more")
    assert group.answer("more") == 6 + 5 + 2, "what it had, what was written behind, what is new"
    assert replica_set_of(group.stores[survivor]) == ReplicaSet(frozenset({survivor}), epoch=1)


def test_an_older_copy_goes_on_in_a_term_above_those_that_are_remembered_beside_it() -> None:
    """Found by trying: in a term that it had forgotten, it went on doubting itself."""
    group, survivor = lost_majority()
    store = group.stores[survivor]
    store.set_waymark(Waymark(store.hard.term + 5, store.last_index + 100, 1000))
    stand_alone(store, 1)
    group.restart(survivor)
    group.run(5)
    assert group.leader.replica_id == survivor
    assert group.leader.doubted is None


def test_the_epoch_stays_through_later_changes_and_reaches_new_replicas() -> None:
    group, survivor = lost_majority()
    stand_alone(group.stores[survivor], 1)
    group.restart(survivor)
    leader = group.leader
    group.add("d")
    leader.change_replicas(leader.replica_set.with_learner(D), "learner")
    group.answer("learner")
    group.run(1)
    leader.change_replicas(leader.replica_set.with_voter(D), "voter")
    group.answer("voter")
    group.run(1)
    assert replica_set_of(group.stores[D]) == ReplicaSet(frozenset({survivor, D}), epoch=1)
    assert group.machines[D].total == 6


def test_another_epoch_is_another_group_on_the_wire() -> None:
    names = [wire_name(GroupId("orders-0.1"), epoch) for epoch in range(3)]
    assert names[0] == "orders-0.1", "as releases that know no epochs say it"
    assert len(set(names)) == 3


def test_who_cannot_go_on_alone_is_refused_and_nothing_is_written() -> None:
    group, survivor = lost_majority()
    store = group.stores[survivor]
    end = store.last_index
    with pytest.raises(InvalidInputError):
        stand_alone(store, 0)
    stranger = Engines()
    with pytest.raises(MembershipError, match="does not vote"):
        stand_alone(stranger.stores[stranger.add("z")], 1)
    store.mark_damaged("a bit")
    with pytest.raises(MembershipError, match="damaged"):
        stand_alone(store, 1)
    assert store.last_index == end


def test_a_membership_without_an_epoch_has_the_bytes_of_before() -> None:
    plain = ReplicaSet.of(["a"], ["b"])
    assert plain.encode() == b'{"voters": ["a"], "learners": ["b"]}'
    assert ReplicaSet.decode(plain.encode()) == plain
    later = ReplicaSet(frozenset({A}), epoch=3)
    assert ReplicaSet.decode(later.encode()) == later


def test_only_a_new_store_begins_anew() -> None:
    group, survivor = lost_majority()
    with pytest.raises(MembershipError, match="is not new"):
        begin_anew(group.stores[survivor], 1, b"state")
