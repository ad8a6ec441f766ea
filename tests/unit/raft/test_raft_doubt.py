"""A replica whose store may be an older copy of itself: it asks everybody before it promises anything."""

from __future__ import annotations

from copy import deepcopy
from itertools import permutations

import pytest

from rayqueue.errors import DiskFullError, RayQueueError
from rayqueue.ids import Index, ReplicaId, Term
from rayqueue.log.memory_store import MemoryDisk
from rayqueue.log.waymark import Waymark
from rayqueue.raft.doubt import Doubt, Membership
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.messages import Account, PreVote, RequestVote
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.transport import Received
from tests.unit.raft.engines import Engines

END = Term(1), Index(3)


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


A, B, C = (ReplicaId(each) for each in "abc")


def _copy_of_the_only_voter(net: Engines) -> MemoryDisk:
    """As of a moment in which nothing was going on: all that it ever acknowledged alone is in it."""
    _propose(net, net.leader, "alone")
    net.run(1)
    store = net.stores[A]
    store.set_waymark(Waymark(store.last_term, store.last_index, 1))  # as the replica does once a second
    return deepcopy(store.disk)


def _change(net: Engines, members: ReplicaSet) -> None:
    net.leader.change_replicas(members, members)
    assert not isinstance(net.answer(members), RayQueueError)
    net.run(1)


def _join(net: Engines, *nodes: ReplicaId) -> None:
    for node in nodes:
        net.add(node)
        _change(net, net.leader.replica_set.with_learner(node))
        _change(net, net.leader.replica_set.with_voter(node))


def _restore_beside(net: Engines, node: ReplicaId, old: MemoryDisk) -> None:
    old.waymark = net.stores[node].waymark  # no copy takes it along
    _restore(net, node, old)


def test_a_copy_from_before_others_joined_leads_nobody_and_asks_them_once_they_call() -> None:
    """Found by trying: it led alone beside the leader of the others, and both acknowledged."""
    net = Engines("a")
    old = _copy_of_the_only_voter(net)
    _join(net, B, C)
    for number in range(20):
        _propose(net, net.leader, f"acknowledged {number}")
    total = net.machines[net.leader.replica_id].total
    net.cut = {A}  # it knows nobody, and the others look for it where it was
    _restore_beside(net, A, old)
    net.run(5)
    copy = net.engines[A]
    assert not copy.is_leader
    assert copy.peers == set()
    assert "before offset 1 (entry 4)" in str(copy.doubted)
    assert "If others have joined its group since, it waits for them" in str(copy.doubted)
    net.cut = set()
    net.run(20, lambda: net.engines[A].doubted is None)
    assert net.engines[A].doubted is None
    assert net.stores[A].disk.copied is None
    _propose(net, net.leader, "more")
    net.run(1)
    assert {machine.total for machine in net.machines.values()} == {total + len(b"\x20more")}


def test_a_copy_from_before_others_joined_waits_for_each_of_them() -> None:
    """The mark says how far it had come when they joined, and not what it has promised them since."""
    net = Engines("a")
    old = _copy_of_the_only_voter(net)
    _join(net, B, C)
    leader = net.leader
    other, away = (B, C) if leader.replica_id != B else (A, C)
    if leader.replica_id != A:
        net.leader.transfer_leadership(A, net.now, "transfer")
        net.answer("transfer")
        other, away = B, C
    net.run(1)
    net.cut = {away}
    _propose(net, net.leader, "acknowledged by two")
    net.run(0.5)
    net.cut = {other}
    _restore_beside(net, A, old)
    net.run(20)
    assert not any(net.engines[node].is_leader for node in (A, away)), "they would lose what was acknowledged"
    assert f"before {other} answered" in str(net.engines[A].doubted)
    assert net.engines[A].peers == {B, C}
    net.cut = set()
    net.run(20, lambda: net.engines[A].doubted is None)
    assert net.engines[A].doubted is None


def test_that_others_joined_is_marked_before_it_counts_also_by_a_process_that_follows() -> None:
    net = Engines("a")
    _copy_of_the_only_voter(net)
    net.add(B)
    _change(net, net.leader.replica_set.with_learner(B))
    before = net.stores[A].waymark

    def fail() -> None:
        raise _KilledError  # the entry is on the disk, the mark is not

    net.stores[A].disk.before_mark = fail
    net.leader.change_replicas(net.leader.replica_set.with_voter(B), "voter")
    with pytest.raises(_KilledError):
        net.run(1)
    joined = net.stores[A].last_index
    assert net.stores[A].waymark == before
    assert net.engines[A].commit < joined
    net.stores[A].disk.before_mark = None
    net.restart(A)
    assert net.engines[A].must_mark
    net.step(A)
    assert not net.engines[A].must_mark
    assert net.stores[A].waymark.entry == joined
    _propose(net, net.leader, "by both")


def test_where_it_cannot_be_marked_nobody_joins() -> None:
    net = Engines("a")
    _copy_of_the_only_voter(net)
    net.add(B)
    _change(net, net.leader.replica_set.with_learner(B))
    end, mark = net.stores[A].last_index, net.stores[A].waymark

    def fail() -> None:
        raise DiskFullError("no space")

    net.stores[A].disk.before_mark = fail
    net.leader.change_replicas(net.leader.replica_set.with_voter(B), "voter")
    net.step(A)
    assert net.stores[A].last_index == end, "given up, as what a full disk did not take"
    assert isinstance(net.answer("voter"), RayQueueError)
    assert net.stores[A].waymark == mark
    net.stores[A].disk.before_mark = None
    net.run(1)
    _change(net, net.leader.replica_set.with_voter(B))
    _propose(net, net.leader, "by both")
    assert net.stores[A].waymark > mark


def test_a_group_that_grew_under_a_release_without_marks_is_marked_at_the_next_start() -> None:
    """Also where the log was trimmed since: then the mark is where it begins."""
    net = Engines("a")
    _copy_of_the_only_voter(net)
    _join(net, B)
    grown, store = net.stores[A].waymark, net.stores[A]
    for trimmed in (False, True):
        if trimmed:
            _propose(net, net.leader, "to be trimmed")
            net.run(1)
            net.machines[A].needed = Index(store.applied + 1)
            assert not net.engines[A].maintain(0, 100)
            store.sync()
            assert store.base_index > grown.entry
        store.disk.waymark = Waymark()
        net.restart(A)
        store = net.stores[A]
        net.step(A)
        assert store.waymark[:2] == ((store.base_term, store.base_index) if trimmed else grown[:2])
    store.disk.waymark = Waymark()
    net.restart(B)
    assert not net.engines[B].must_mark, "it never was alone"


class _KilledError(Exception):
    """In the middle of a turn."""


def _two_and_a_learner() -> tuple[Engines, RaftEngine, MemoryDisk]:
    """And the follower of the two is away. The disk is the leader's, from before the learner came."""
    net = Engines("a", "b")
    leader = net.leader
    net.run(1)
    old = deepcopy(net.stores[leader.replica_id].disk)
    net.add(C)
    _change(net, leader.replica_set.with_learner(C))
    net.cut = {A, B} - {leader.replica_id}
    return net, leader, old


def test_who_is_a_learner_as_far_as_anybody_remembers_is_asked_too() -> None:
    """Found by the simulator: of two that vote one is away while a third becomes a voter. What it then acknowledges,
    and that it votes, only the leader knows besides; and the leader is restored from an older copy."""
    net, leader, old = _two_and_a_learner()
    _change(net, leader.replica_set.with_voter(C))
    _propose(net, leader, "acknowledged by two")
    net.run(1)
    net.cut = {C}
    _restore(net, leader.replica_id, old)
    net.run(20)
    assert not any(net.engines[node].is_leader for node in (A, B)), "they would lose what was acknowledged"
    assert f"before {C} answered" in str(net.engines[leader.replica_id].doubted)
    net.cut = set()
    net.run(20, lambda: net.engines[leader.replica_id].doubted is None)
    assert net.engines[leader.replica_id].doubted is None
    total = max(machine.total for machine in net.machines.values())
    _propose(net, net.leader, "more")
    net.run(1)
    assert {machine.total for machine in net.machines.values()} == {total + len(b"\x20more")}


def test_a_new_voter_counts_once_it_knows_that_it_is_one() -> None:
    """Before, it would answer to an older copy of the leader that it only learns."""
    net, leader, _ = _two_and_a_learner()
    leader.propose(b"\x20confirmed by a learner", "confirmed")
    net.run(0.1)
    confirmed = leader.store.last_index
    assert leader.match_of(C) == confirmed > leader.commit
    leader.change_replicas(leader.replica_set.with_voter(C), "voter")
    for _ in range(3):
        net.step(leader.replica_id)  # it hears nothing meanwhile
    assert leader.replica_set.voters == {A, B, C}
    assert leader.commit < confirmed
    assert not isinstance(net.answer("voter"), RayQueueError)
    assert leader.commit > confirmed


def test_a_learner_that_has_more_than_all_voters_keeps_nobody_from_leading() -> None:
    """A copy that voted only for who has as much would vote for nobody who may lead."""
    net, leader, old = _two_and_a_learner()
    leader.propose(b"\x20never acknowledged", "open")
    net.run(0.1)
    assert leader.match_of(C) == leader.store.last_index > leader.commit
    net.cut = set()
    _restore(net, leader.replica_id, old)
    net.run(30, lambda: net.engines[leader.replica_id].doubted is None)
    assert net.engines[leader.replica_id].doubted is None
    _propose(net, net.leader, "more")


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
    assert doubt.resolve(me, own, END) is None
    assert doubt.take(ReplicaId("d"), Account(Term(5), 7, Index(8), Term(4), Index(8), newer.members))
    assert doubt.resolve(me, own, END) == 5
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
    assert doubt.resolve(ReplicaId("a"), own, END) is None
