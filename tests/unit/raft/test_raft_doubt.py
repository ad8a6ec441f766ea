"""A replica whose store may be an older copy of itself: it asks everybody before it promises anything."""

from __future__ import annotations

from copy import deepcopy
from itertools import permutations

import pytest

from rayqueue.ids import Index, ReplicaId, Term
from rayqueue.log.memory_store import MemoryDisk
from rayqueue.log.waymark import Waymark
from rayqueue.raft.doubt import Doubt, Membership
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.messages import Account, PreVote, RequestVote
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.transport import Received
from tests.unit.raft.engines import Engines


def _propose(net: Engines, leader: RaftEngine, name: str) -> None:
    leader.propose(b"\x20" + name.encode(), name)
    assert isinstance(net.answer(name), int)


def _restore(net: Engines, node: ReplicaId, old: MemoryDisk) -> None:
    old.copied = "restored"
    net.stores[node].disk = old
    net.restart(node)


def test_an_old_copy_beside_a_lost_leader_decides_nothing_until_that_leader_is_back() -> None:
    """Of three, one was away while the other two acknowledged. Then the leader goes and the other is an old copy."""
    net = Engines("a", "b", "c")
    leader = net.leader
    forgetful, away = sorted(set(net.engines) - {leader.replica_id})
    net.run(0.5)
    old = deepcopy(net.stores[forgetful].disk)
    net.cut = {away}
    _propose(net, leader, "acknowledged")
    total = net.machines[leader.replica_id].total
    net.run(0.5)
    net.cut = {leader.replica_id}
    _restore(net, forgetful, old)
    net.run(20)
    for node in (forgetful, away):
        assert not net.engines[node].is_leader, "they would lose what was acknowledged"
    doubted = net.engines[forgetful].doubted
    assert doubted is not None
    assert f"before {leader.replica_id} answered" in doubted
    net.cut = set()
    net.run(20, lambda: net.engines[forgetful].doubted is None)
    assert net.engines[forgetful].doubted is None
    assert net.stores[forgetful].disk.copied is None
    _propose(net, net.leader, "more")
    net.run(1)
    assert {machine.total for machine in net.machines.values()} == {total + len(b"\x20more")}


def test_a_voter_that_was_lost_is_waited_for_until_it_has_left_the_group() -> None:
    net = Engines("a", "b", "c", "d", "e")
    leader = net.leader
    copy, lost, *_ = sorted(set(net.engines) - {leader.replica_id})
    old = deepcopy(net.stores[copy].disk)
    _propose(net, leader, "acknowledged")
    net.cut = {lost}
    _restore(net, copy, old)
    net.run(5)
    assert f"before {lost} answered" in str(net.engines[copy].doubted), "all others have answered, long ago"
    leader.change_replicas(leader.replica_set.without(lost), "replaced")
    net.answer("replaced")
    net.run(5, lambda: net.engines[copy].doubted is None)
    assert net.engines[copy].doubted is None
    assert net.stores[copy].last_index == leader.store.last_index


def test_a_copy_that_lacks_nothing_goes_on_at_once_and_so_do_three_of_them() -> None:
    """A whole cluster that was stopped, copied and started elsewhere."""
    net = Engines("a", "b", "c")
    _propose(net, net.leader, "first")
    net.run(1)
    for node in list(net.engines):
        _restore(net, node, deepcopy(net.stores[node].disk))
    net.run(5, lambda: all(engine.doubted is None for engine in net.engines.values()))
    assert [engine.doubted for engine in net.engines.values()] == [None] * 3
    _propose(net, net.leader, "second")


def test_the_only_voter_has_nobody_to_ask() -> None:
    net = Engines("a")
    leader = net.leader
    _propose(net, leader, "first")
    _restore(net, leader.replica_id, deepcopy(net.stores[leader.replica_id].disk))
    _propose(net, net.leader, "second")
    assert net.leader.doubted is None


def test_the_only_voter_does_not_go_on_below_what_it_remembers_to_have_acknowledged() -> None:
    net = Engines("a")
    leader = net.leader
    _propose(net, leader, "first")
    older = deepcopy(net.stores[leader.replica_id].disk)
    for number in range(3):
        _propose(net, net.leader, f"later {number}")
    store = net.stores[leader.replica_id]
    store.set_waymark(Waymark(store.last_term, store.last_index, 30))
    newest = deepcopy(store.disk)
    older.waymark = store.waymark  # it is beside the disk
    _restore(net, leader.replica_id, older)
    net.run(10)
    engine = net.engines[leader.replica_id]
    assert not engine.is_leader
    assert engine.doubted is not None
    assert "before offset 30" in engine.doubted
    assert f"ends at entry {older.last_index}" in engine.doubted
    assert "rayqueue recover --unsafe" in engine.doubted
    _restore(net, leader.replica_id, newest)  # a newer copy lacks nothing
    _propose(net, net.leader, "second")
    assert net.leader.doubted is None


def test_a_vote_that_may_have_been_forgotten_is_not_given_again() -> None:
    net = Engines("a", "b", "c")
    old = {node: deepcopy(store.disk) for node, store in net.stores.items()}
    other = ReplicaId("b")
    net.cut = {other}
    leader = net.leader
    (voter,) = set(net.engines) - {leader.replica_id, other}
    assert net.engines[voter].vote == leader.replica_id
    term = leader.term
    _restore(net, voter, old[voter])
    net.cut = set()
    net.run(3, lambda: net.engines[voter].term == term)
    engine = net.engines[voter]
    assert engine.term == term
    engine.receive(net.now, Received(other, RequestVote(term, Index(99), Term(99), transfer=True)))
    assert engine.vote == voter, "who has lost its vote counts as having voted"


def test_a_log_below_the_floor_gets_no_vote() -> None:
    net = Engines("a", "b", "c")
    leader = net.leader
    old = deepcopy(net.stores[leader.replica_id].disk)
    forgetful = leader.replica_id
    _propose(net, leader, "acknowledged")
    net.run(0.5)
    _restore(net, forgetful, old)
    engine = net.engines[forgetful]
    doubt = engine._doubt
    assert doubt is not None
    others = sorted(set(net.engines) - {forgetful})
    for node in others:
        store = net.stores[node]
        end = store.last_index, store.last_term
        account = Account(Term(9), doubt.nonce, *end, Index(0), ReplicaSet.of("abc").encode())
        engine.receive(net.now, Received(node, account))
    assert (engine.term, engine.vote) == (9, forgetful)
    short = PreVote(Term(10), Index(engine.store.last_index), engine.store.last_term)
    engine.receive(net.now + 60, Received(others[0], short))
    net.sent.clear()
    net.now += 60
    net.step(forgetful)
    replies = [message for _, peer, message in net.sent if peer == others[0]]
    assert [getattr(reply, "granted", None) for reply in replies].count(True) == 0
    assert not engine.is_leader
    assert engine.doubted is not None


def test_who_must_answer_is_said_by_the_newest_membership() -> None:
    doubt = Doubt("restored", 7)
    own = Membership(Index(3), frozenset(map(ReplicaId, "abc")))
    me = ReplicaId("a")
    newer = Account(Term(4), 7, Index(9), Term(4), Index(8), ReplicaSet.of("abd").encode())
    assert not doubt.take(ReplicaId("b"), Account(Term(4), 6, Index(9), Term(4), Index(8), newer.members)), "old nonce"
    assert doubt.take(ReplicaId("b"), newer)
    assert doubt.missing(me, own) == {"d"}
    assert doubt.resolve(me, own) is None
    assert doubt.take(ReplicaId("d"), Account(Term(5), 7, Index(8), Term(4), Index(8), newer.members))
    assert doubt.resolve(me, own) == 5
    assert doubt.floor == (4, 9)


@pytest.mark.parametrize("order", list(permutations("bcd", 2)))
def test_who_may_vote_by_any_of_the_newest_memberships_must_answer_in_whatever_order(order: tuple[str, str]) -> None:
    """The others agree on what is committed; one of them has the promotion of the fourth in its log besides."""
    told = {"b": "abc", "c": "abcd", "d": "abcd"}
    own = Membership(Index(3), frozenset(map(ReplicaId, "abc")))
    doubt = Doubt("restored", 7)
    for node in order:
        members = ReplicaSet.of(told[node]).encode()
        assert doubt.take(ReplicaId(node), Account(Term(4), 7, Index(11), Term(4), Index(10), members))
    assert doubt.missing(ReplicaId("a"), own) == set("bcd") - set(order)
    assert doubt.resolve(ReplicaId("a"), own) is None
