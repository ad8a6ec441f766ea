"""The engine's rules one by one. What faults do to them is the simulator's business."""

from __future__ import annotations

import importlib
import sys
from copy import deepcopy

import pysyncobj.version
import pytest

from rayqueue.errors import (
    ChangeInProgressError,
    InvalidInputError,
    LeadershipLostError,
    LearnerBehindError,
    MembershipError,
    NotInSyncError,
    NotLeaderError,
    QueueFullError,
    TransferFailedError,
)
from rayqueue.ids import Index, ReplicaId, Term
from rayqueue.raft.engine import RaftEngine
from rayqueue.raft.messages import AppendEntries, AppendReply
from rayqueue.raft.replica_set import ReplicaSet
from rayqueue.raft.transport import PeerDown, PeerUp, Received
from tests.unit.raft.engines import Engines

A, B, C, D = ReplicaId("a"), ReplicaId("b"), ReplicaId("c"), ReplicaId("d")


def test_a_proposal_is_applied_everywhere_and_answered_once() -> None:
    group = Engines("a", "b", "c")
    group.leader.propose(b"\x20hello", "first")
    assert group.answer("first") == 6
    group.run(1)
    assert {machine.total for machine in group.machines.values()} == {6}


def test_only_the_leader_takes_proposals_and_says_who_that_is() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    group.run(1)
    follower = next(engine for engine in group.engines.values() if not engine.is_leader)
    with pytest.raises(NotLeaderError) as refused:
        follower.propose(b"\x20x", "x")
    assert refused.value.details["leader"] == leader.replica_id


def test_too_much_that_waits_is_refused_before_it_is_written() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    last = leader.store.last_index
    for number in range(4):
        leader.propose(b"\x20" + b"x" * 499, number)
    with pytest.raises(QueueFullError):
        leader.propose(b"\x20x", "too much")
    assert group.answer(3) == 2000
    leader.propose(b"\x20x", "again")
    assert group.answer("again") == 2002
    assert leader.store.last_index == last + 5 + (1 if last == 0 else 0)


def test_a_single_voter_commits_only_what_it_has_synced() -> None:
    group = Engines("a")
    leader = group.leader
    leader.propose(b"\x20x", "x")
    ready = leader.step(group.now)
    assert not ready.done
    group.stores[A].sync()
    leader.synced()
    assert leader.busy
    assert [done.context for done in leader.step(group.now).done] == ["x"]


def test_a_single_voter_leads_as_soon_as_it_runs() -> None:
    group = Engines("a")
    for _ in range(2):  # new, and again after a restart
        engine = group.engines[A]
        assert engine.next_deadline < group.now
        for _ in range(3):
            engine.step(group.now)
        assert engine.is_leader, "though no time has passed"
        group.restart(A)


def test_a_restart_applies_nothing_twice() -> None:
    group = Engines("a", "b", "c")
    group.leader.propose(b"\x20hello", "first")
    group.answer("first")
    group.run(1)
    for node in (A, B, C):
        group.restart(node)
    group.leader.propose(b"\x20hello", "second")
    assert group.answer("second") == 12


def test_an_exception_in_apply_comes_out_of_the_step() -> None:
    group = Engines("a")
    group.leader.propose(b"\x20fail", "x")
    with pytest.raises(ValueError, match="told to fail"):
        group.run(1)


def test_a_leader_that_lost_its_majority_answers_unknown_and_steps_down() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    group.run(1)
    group.cut = {leader.replica_id}
    leader.propose(b"\x20x", "x")
    assert isinstance(group.answer("x"), LeadershipLostError)
    assert not leader.is_leader
    group.leader.propose(b"\x20y", "y")
    assert group.answer("y") == 2
    group.cut = set()
    group.run(2)
    assert {machine.total for machine in group.machines.values()} == {2}


def test_a_dead_leader_is_replaced_without_waiting_for_the_timeout() -> None:
    group = Engines("a", "b", "c")
    old = group.leader
    group.run(1)
    group.cut = {old.replica_id}
    for engine in group.engines.values():
        if engine is not old:
            engine.receive(group.now, PeerDown(old.replica_id, dead=True))
    died = group.now
    assert group.leader is not old
    assert group.now - died < 0.7


def test_leadership_moves_to_a_chosen_voter_and_no_proposal_is_lost_on_the_way() -> None:
    group = Engines("a", "b", "c")
    old = group.leader
    target = next(node for node in (A, B, C) if node != old.replica_id)
    old.propose(b"\x20hello", "first")
    old.transfer_leadership(target, group.now, "transfer")
    with pytest.raises(NotLeaderError):
        old.propose(b"\x20x", "late")
    assert group.answer("transfer") is None
    assert group.answer("first") == 6
    assert group.leader.replica_id == target


def test_a_transfer_to_somebody_who_is_away_is_given_up_and_the_leader_goes_on() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    group.run(1)
    target = next(node for node in (A, B, C) if node != leader.replica_id)
    group.cut = {target}
    leader.transfer_leadership(target, group.now, "transfer")
    assert isinstance(group.answer("transfer"), TransferFailedError)
    leader.propose(b"\x20x", "x")
    assert group.answer("x") == 2
    with pytest.raises(MembershipError):
        leader.transfer_leadership(D, group.now, "nobody")


def test_a_transfer_to_somebody_far_behind_is_refused_and_stops_no_write() -> None:
    group = Engines("a", "b", "c", settings=Engines().settings.model_copy(update={"promote_lag_entries": 3}))
    leader = group.leader
    group.run(1)
    target = next(node for node in (A, B, C) if node != leader.replica_id)
    group.cut = {target}
    for number in range(5):
        leader.propose(b"\x20x", number)
        group.answer(number)
    with pytest.raises(NotInSyncError) as refused:
        leader.transfer_leadership(target, group.now, "transfer")
    assert refused.value.details == {"replica_id": target, "lag": 5}
    leader.propose(b"\x20x", "x")
    assert isinstance(group.answer("x"), int)
    group.cut = set()
    group.run(1)
    leader.receive(group.now, PeerDown(target, dead=False))
    with pytest.raises(NotInSyncError, match="cannot be reached"):
        leader.transfer_leadership(target, group.now, "transfer")
    leader.receive(group.now, PeerUp(target))
    group.run(1)
    leader.transfer_leadership(target, group.now, "transfer")
    assert group.answer("transfer") is None


def test_a_leader_is_confirmed_by_a_majority_and_not_without() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    leader.confirm_leadership("yes")
    assert group.answer("yes") is None
    group.cut = {leader.replica_id}
    leader.confirm_leadership("no")
    assert isinstance(group.answer("no"), LeadershipLostError)


def test_an_answer_to_an_older_term_confirms_no_leadership() -> None:
    """Found by the simulator, once in 20,000 schedules: the sender led the newer term itself when the answer came."""
    group = Engines("a", "b", "c")
    leader = group.leader
    group.run(1)
    follower = next(engine for engine in group.engines.values() if not engine.is_leader)
    old = AppendEntries(Term(leader.term - 1), Index(0), Term(0), Index(0), 13, ())
    follower.receive(group.now, Received(leader.replica_id, old))
    (reply,) = [message for _, message in follower.step(group.now).late if isinstance(message, AppendReply)]
    assert (reply.term, reply.success, reply.round) == (leader.term, False, 0)


def test_a_learner_is_sent_no_more_than_the_bound_and_still_catches_up_with_who_writes_faster() -> None:
    settings = Engines().settings.model_copy(update={"catch_up_bytes_per_s": 11_240, "promote_lag_entries": 2})
    group = Engines("a", "b", "c", settings=settings)
    leader = group.leader
    for number in range(60):
        leader.propose(b"\x20" + b"x" * 99, number)
        group.answer(number)
    group.add("d")
    leader.change_replicas(leader.replica_set.with_learner(D), "learner")
    group.answer("learner")
    began_s, start = group.now, leader.match_of(D)
    while leader.match_of(D) < 55:
        leader.propose(b"\x20" + b"y" * 99, object())  # 100 entries per second, ten times the bound: 1,124 bytes each
        group.run(0.01)
        assert group.now - began_s < 30, "it never catches up"
    assert (55 - start) / (group.now - began_s) < 130, "more than the bound and what was written"
    group.run(8)
    leader.change_replicas(leader.replica_set.with_voter(D), "voter")
    assert group.answer("voter") is None
    free = Engines("a", "b", "c", settings=settings.model_copy(update={"catch_up_bytes_per_s": None}))
    for number in range(60):
        free.leader.propose(b"\x20" + b"x" * 99, number)
        free.answer(number)
    free.add("d")
    free.leader.change_replicas(free.leader.replica_set.with_learner(D), "learner")
    free.run(1)
    assert free.leader.match_of(D) >= 60


def test_a_learner_catches_up_is_promoted_and_votes() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    for number in range(3):
        leader.propose(b"\x20hello", number)
        group.answer(number)
    group.add("d")
    with pytest.raises(InvalidInputError):
        leader.replica_set.with_voter(D)
    leader.change_replicas(leader.replica_set.with_learner(D), "learner")
    with pytest.raises(ChangeInProgressError):
        leader.change_replicas(leader.replica_set.with_learner(ReplicaId("e")), "too soon")
    group.answer("learner")
    group.run(1)
    assert group.machines[D].total == 18
    leader.change_replicas(leader.replica_set.with_voter(D), "voter")
    group.answer("voter")
    group.run(1)
    # Two of four old voters away: only with the new one is there a majority.
    assert all(engine.replica_set.voters == {A, B, C, D} for engine in group.engines.values())
    group.cut = {next(node for node in (A, B, C) if node != leader.replica_id)}
    leader.propose(b"\x20x", "x")
    assert group.answer("x") == 20


def test_a_learner_that_never_answered_or_does_not_answer_now_is_not_promoted() -> None:
    """Found by the simulator: beside a lost voter, a dead one more leaves no majority, and the group stands still."""
    group = Engines("a", "b", "c")
    leader = group.leader
    node = group.add("d")
    group.cut = {node}
    group.run(0.5)
    leader.change_replicas(leader.replica_set.with_learner(node), "learner")
    group.answer("learner")
    with pytest.raises(LearnerBehindError, match="lacks all"):
        leader.change_replicas(leader.replica_set.with_voter(node), "voter")
    group.cut = set()
    group.run(2, lambda: group.stores[node].last_index == leader.store.last_index)
    group.run(0.5)
    group.cut = {node}
    group.run(2)
    with pytest.raises(LearnerBehindError, match="has not answered"):
        leader.change_replicas(leader.replica_set.with_voter(node), "voter")
    group.cut = set()
    group.run(0.5)
    leader.change_replicas(leader.replica_set.with_voter(node), "voter")
    group.answer("voter")
    assert node in leader.replica_set.voters


def test_a_voter_does_not_leave_while_too_few_of_the_others_answer() -> None:
    """Found by the simulator: the coordinator's group shrank beside a lost disk, and the rest could not decide it."""
    group = Engines("a", "b", "c")
    leader = group.leader
    group.run(0.5)
    dead, well = sorted(leader.replica_set.voters - {leader.replica_id})
    group.cut = {dead}
    group.run(2)
    with pytest.raises(NotInSyncError, match="no majority of the rest"):
        leader.change_replicas(leader.replica_set.without(well), "healthy")
    leader.change_replicas(leader.replica_set.without(dead), "dead")
    group.answer("dead")
    assert leader.replica_set.voters == {leader.replica_id, well}


def test_an_answer_from_before_a_pause_says_nothing_about_who_is_there_now() -> None:
    """A paused leader reads it when it goes on. Whoever gave it may be dead, and the voter that is to leave the only
    other one."""
    group = Engines("a", "b", "c")
    leader = group.leader
    group.run(0.5)
    dead, well = sorted(leader.replica_set.voters - {leader.replica_id})
    old: list[AppendReply] = []
    while not old:
        for node in (leader.replica_id, dead):
            group.step(node)
        old = [said for sender, _, said in group.sent if sender == dead and isinstance(said, AppendReply)]
        group.run(0.01)
    group.now += 1.5
    leader.receive(group.now, Received(dead, old[-1]))
    with pytest.raises(NotInSyncError, match="no majority of the rest"):
        leader.change_replicas(leader.replica_set.without(well), "healthy")
    group.run(0.5)
    leader.change_replicas(leader.replica_set.without(well), "healthy")
    group.answer("healthy")
    assert leader.replica_set.voters == {leader.replica_id, dead}


def test_who_answers_is_known_though_the_leader_is_asked_many_times_in_a_round_trip() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    group.run(0.5)
    leaves, _ = sorted(leader.replica_set.voters - {leader.replica_id})
    for _ in range(30):
        for _ in range(10):
            leader.confirm_leadership(object())
            group.step(leader.replica_id)
        group.run(0.01)
    leader.change_replicas(leader.replica_set.without(leaves), "leaves")
    assert group.answer("leaves") is None


def test_a_learner_that_is_behind_is_not_promoted() -> None:
    group = Engines("a", settings=Engines().settings.model_copy(update={"promote_lag_entries": 0}))
    leader = group.leader
    leader.change_replicas(leader.replica_set.with_learner(D), "learner")
    group.answer("learner")
    with pytest.raises(LearnerBehindError):
        leader.change_replicas(leader.replica_set.with_voter(D), "voter")


def test_one_voter_at_a_time_and_never_the_leader_itself() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    group.run(1)
    others = sorted({A, B, C} - {leader.replica_id})
    with pytest.raises(MembershipError, match="one voter"):
        leader.change_replicas(ReplicaSet.of([leader.replica_id]), "two")
    with pytest.raises(MembershipError, match="transfer"):
        leader.change_replicas(leader.replica_set.without(leader.replica_id), "self")
    leader.change_replicas(leader.replica_set.without(others[0]), "one")
    group.answer("one")
    group.cut = {others[0]}
    leader.propose(b"\x20x", "x")
    assert group.answer("x") == 2


def test_a_follower_behind_the_retained_log_gets_the_checkpoint_and_the_rest() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    group.run(1)
    away = next(node for node in (A, B, C) if node != leader.replica_id)
    group.cut = {away}
    for number in range(5):
        leader.propose(b"\x20hello", number)
        group.answer(number)
    group.machines[leader.replica_id].needed = Index(leader.applied - 1)
    assert leader.maintain(1, 100) is False  # the checkpoint is at the end, where entries are still needed
    leader.propose(b"\x20hello", "after")
    group.answer("after")
    group.machines[leader.replica_id].needed = Index(leader.applied)
    leader.maintain(10_000, 100)
    assert leader.store.base_index > group.stores[away].last_index
    group.cut = set()
    group.run(3)
    assert group.machines[away].total == 36
    assert group.stores[away].base_index == leader.store.base_index
    group.restart(away)
    assert group.machines[away].total == 36


def test_a_full_disk_ends_leadership_until_a_sync_succeeds() -> None:
    group = Engines("a")
    leader = group.leader
    leader.propose(b"\x20x", "x")
    leader.step(group.now)
    leader.disk_full()
    assert not leader.is_leader
    assert isinstance(leader.step(group.now).done[0].result, LeadershipLostError)
    group.stores[A].sync()
    leader.synced()
    again = group.leader
    group.run(1)
    assert again.applied == group.stores[A].last_index
    assert group.machines[A].total == 0  # it was given up: nobody was promised that it is here


def test_a_group_begins_once() -> None:
    group = Engines("a")
    assert group.leader.is_leader
    with pytest.raises(MembershipError):
        RaftEngine.bootstrap(group.stores[A], ReplicaSet.of(["a"]))


def test_another_pysyncobj_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pysyncobj.version, "VERSION", "0.4.0")
    monkeypatch.delitem(sys.modules, "rayqueue.raft._pysyncobj")
    with pytest.raises(ImportError, match=r"0\.3\.17.*0\.4\.0"):
        importlib.import_module("rayqueue.raft._pysyncobj")


def test_a_follower_whose_disk_was_replaced_by_an_older_copy_is_noticed_and_gets_everything_again() -> None:
    """The leader goes on meanwhile, in the same term: it alone knows what the follower has acknowledged."""
    net = Engines("a", "b", "c")
    leader = net.leader
    follower = next(node for node in sorted(net.engines) if node != leader.replica_id)
    for number in range(3):
        leader.propose(b"\x20%d" % number, number)
        net.answer(number)
    net.run(0.5)
    old = deepcopy(net.stores[follower].disk)
    for number in range(3, 30):
        leader.propose(b"\x20%d" % number, number)
        net.answer(number)
    net.run(0.5)
    assert net.stores[follower].last_index == leader.store.last_index > max(old.entries)
    assert leader.forgetful == frozenset()
    net.stores[follower].disk = old
    net.restart(follower)
    net.run(5, lambda: net.stores[follower].last_index == leader.store.last_index and bool(leader.forgetful))
    assert leader.is_leader
    assert leader.forgetful == {follower}
    assert net.stores[follower].last_index == leader.store.last_index
    leader.propose(b"\x20more", "more")
    net.answer("more")
    net.run(1)
    assert net.machines[follower].total == net.machines[leader.replica_id].total


def test_what_a_forgetful_follower_has_confirmed_counts_no_more() -> None:
    """Two of five have an entry; one of them forgets it. A third one that confirms it makes no majority."""
    net = Engines("a", "b", "c", "d", "e")
    leader = net.leader
    first, *others = (node for node in sorted(net.engines) if node != leader.replica_id)
    net.run(0.5)
    old = deepcopy(net.stores[first].disk)
    net.cut = set(others)
    leader.propose(b"\x20lonely", "lonely")
    net.run(0.1)
    assert net.stores[first].last_index == leader.store.last_index
    assert leader.commit < leader.store.last_index
    net.cut = {first, *others}
    net.stores[first].disk = old
    net.restart(first)
    net.cut = set(others)
    net.run(0.15, lambda: bool(leader.forgetful))
    assert leader.forgetful == {first}
    assert net.stores[first].last_index < leader.store.last_index, "it was not sent again yet"
    second = others[0]
    net.cut = {first, *others[1:]}
    net.run(0.3)
    assert net.stores[second].last_index == leader.store.last_index
    assert leader.commit < leader.store.last_index, "the leader and one other have it: two of five"


def test_a_planned_stop_hands_over_to_the_voter_that_has_most() -> None:
    group = Engines("a", "b", "c")
    old = group.leader
    group.run(1)
    behind, heir = sorted(node for node in (A, B, C) if node != old.replica_id)
    group.cut = {behind}
    old.propose(b"\x20hello", "first")
    assert group.answer("first") == 6
    old.hand_over(group.now, "handed")
    began = group.now
    assert group.answer("handed") is None
    assert not old.is_leader
    assert group.leader.replica_id == heir
    assert group.now - began < 0.5, "nobody waits for a timeout"
    group.engines[behind].hand_over(group.now, "nothing to hand over")
    group.cut = set()
    assert group.answer("nothing to hand over") is None


def test_a_planned_stop_without_anybody_to_take_over_says_so() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    for peer in {A, B, C} - {leader.replica_id}:
        leader.receive(group.now, PeerDown(peer, dead=True))
    with pytest.raises(TransferFailedError):
        leader.hand_over(group.now, "handed")
    alone = Engines("a").leader
    with pytest.raises(TransferFailedError):
        alone.hand_over(0.0, "handed")


def test_a_restarted_group_elects_as_soon_as_a_majority_has_met() -> None:
    group = Engines("a", "b", "c")
    group.leader.propose(b"\x20hello", "first")
    group.answer("first")
    group.run(1)
    for node in (A, B, C):
        group.restart(node)
    # Alone for so long that the quick rounds of a start are over.
    group.cut = {A, B, C}
    group.run(20)
    assert all(engine._hurried_elections == 0 for engine in group.engines.values())
    group.cut = {C}
    met = group.now
    for node, peer in ((A, B), (B, A)):
        group.engines[node].receive(met, PeerUp(peer))
    assert group.leader.replica_id in (A, B)
    assert group.now - met < 0.5


def test_a_replica_that_meets_others_disturbs_no_leader() -> None:
    group = Engines("a", "b", "c")
    leader = group.leader
    group.run(1)
    term = leader.term
    newcomer = next(node for node in (A, B, C) if node != leader.replica_id)
    group.restart(newcomer)
    for peer in {A, B, C} - {newcomer}:
        group.engines[newcomer].receive(group.now, PeerUp(peer))
    group.run(3)
    assert leader.is_leader
    assert leader.term == term
