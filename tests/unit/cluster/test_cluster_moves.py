"""Replicas that are replaced: the steps one by one, and a model in which everything happens in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import pytest

from rayqueue.cluster import catalog, moves
from rayqueue.cluster.catalog import ReplicaKey
from rayqueue.cluster.commands import (
    AlterTopic,
    AnyCommand,
    BeginMove,
    BeginRebalance,
    CancelMove,
    CreateTopic,
    DeleteTopic,
    DrainBroker,
    DropPlanned,
    EndRebalance,
    FinishMove,
    ForgetBroker,
    PlaceCoordinator,
    PutBroker,
    ReplicaFound,
    ReplicaLost,
    ReplicasMade,
    ReplicasRemoved,
    ResizeTopic,
    RetireCoordinator,
    encode_command,
)
from rayqueue.cluster.machine import ClusterMachine
from rayqueue.cluster.moves import Found, Move, Need, Planned, Reason, Wishes
from rayqueue.cluster.placement import AliveBroker
from rayqueue.cluster.plans import Rebalance
from rayqueue.cluster.rebalance import plan
from rayqueue.cluster.repairs import Absences, forgettable, found_of, needs_of
from rayqueue.cluster.tables import COORDINATOR, META
from rayqueue.config import ClusterSettings
from rayqueue.errors import ChangeInProgressError, InvalidInputError, MembershipError, UnknownBrokerError
from rayqueue.ids import GroupId, Index, ReplicaId
from rayqueue.log.memory_store import MemoryStore
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicSettings
from rayqueue.raft.replica_set import ReplicaSet
from tests.unit.cluster.cluster_state import view_of

GROUP = "orders-0.1"
R1, R2, R3 = map(ReplicaId, ("r1", "r2", "r3"))
NEW = ReplicaId("r3.1")
MOVE = Move(GROUP, NEW, "b4", "r3", Reason.LOST)
ALL_HERE = ("b1", "b2", "b3", "b4")


def step(
    move: Move = MOVE,
    voters: tuple[str, ...] = ("r1", "r2", "r3"),
    learners: tuple[str, ...] = (),
    leader: ReplicaId = R1,
    unmade: bool = False,
    lost: bool = False,
    here: tuple[str, ...] = ALL_HERE,
) -> moves.Step | None:
    return moves.next_step(move, Found(ReplicaSet.of(voters, learners), leader, unmade, lost, "b3"), here)


def test_the_steps_of_a_move_in_their_order() -> None:
    assert step(unmade=True) is None, "the keeper makes its data first"
    assert step() == moves.AddLearner(NEW)
    assert step(learners=("r3.1",)) == moves.Promote(NEW)
    assert step(voters=("r1", "r2", "r3", "r3.1")) == moves.RemoveVoter(R3)
    assert step(voters=("r1", "r2", "r3", "r3.1"), leader=R3) == moves.Transfer(NEW)
    assert step(voters=("r1", "r2", "r3.1")) == moves.Finish()


def test_a_move_ends_only_with_a_membership_that_cannot_be_undone() -> None:
    """Found by reading, for the simulator: whose data is doomed might have been in its group again."""
    for voters in (("r1", "r2", "r3.1"), ("r1", "r2", "r3")):
        here = ALL_HERE if "r3.1" in voters else ALL_HERE[:3]
        found = Found(ReplicaSet.of(voters), R1, False, False, "b3")
        assert isinstance(moves.next_step(MOVE, found, here), moves.Finish | moves.Cancel)
        assert moves.next_step(MOVE, found._replace(settled=False), here) is None


def test_a_learner_without_a_place_is_removed_first() -> None:
    """Found by the simulator: a request to add it came when its move had been undone."""
    found = Found(ReplicaSet.of(("r1", "r2", "r3"), ("r3.0",)), R1, False, False, "b3", strangers=[ReplicaId("r3.0")])
    assert moves.next_step(MOVE, found, ALL_HERE) == moves.RemoveLearner(ReplicaId("r3.0"))


def test_a_move_to_a_broker_that_is_gone_is_undone_before_the_new_one_votes_and_finished_after() -> None:
    gone = ("b1", "b2", "b3")
    assert step(here=gone, unmade=True) == moves.Cancel()
    assert step(here=gone, learners=("r3.1",)) == moves.RemoveLearner(NEW)
    assert step(here=gone) == moves.Cancel()
    assert step(lost=True, learners=("r3.1",)) == moves.RemoveLearner(NEW), "as if its broker were gone"
    assert step(here=gone, voters=("r1", "r2", "r3", "r3.1")) == moves.RemoveVoter(R3)


def test_an_old_one_that_leads_does_not_wait_for_a_new_one_that_is_gone() -> None:
    """Found by the simulator: it was to hand over to the new one, for ever."""
    four = ("r1", "r2", "r3", "r3.1")
    assert step(voters=four, leader=R3) == moves.Transfer(NEW)
    assert step(voters=four, leader=R3, here=("b1", "b2", "b3")) == moves.RemoveVoter(NEW)
    assert step(voters=four, leader=R3, lost=True) == moves.RemoveVoter(NEW)


def test_a_move_that_is_undone_when_the_old_one_is_out_leaves_it_to_be_replaced() -> None:
    """Found by the simulator: a request to remove the new one came when it voted, and the old one had left."""
    neither = ("r1", "r2")
    assert step(voters=neither) == moves.AddLearner(NEW)
    assert step(voters=neither, lost=True, learners=("r3.1",)) == moves.RemoveLearner(NEW)
    assert step(voters=neither, lost=True) == moves.Cancel(old_is_out=True)
    assert step(voters=neither, here=("b1", "b2", "b3")) == moves.Cancel(old_is_out=True)


def test_a_broker_that_is_back_in_time_keeps_its_replica() -> None:
    away = Move(GROUP, NEW, "b4", "r3", Reason.AWAY)
    assert step(away, learners=("r3.1",)) == moves.RemoveLearner(NEW)
    assert step(away) == moves.Cancel()
    assert step(away, here=("b1", "b2", "b4")) == moves.AddLearner(NEW)
    assert step(away, voters=("r1", "r2", "r3", "r3.1")) == moves.RemoveVoter(R3)
    assert step(MOVE, learners=("r3.1",)) == moves.Promote(NEW), "what is lost does not come back with its broker"


def test_a_replica_that_was_only_missing_and_is_found_in_time_stays() -> None:
    def next_step(voters: str, learners: str = "", *, lost: tuple[str, ...] = ()) -> moves.Step | None:
        members, places = ReplicaSet.of(voters.split(), learners.split()), {R1: "b1", R2: "b2", R3: "b3"}
        return moves.next_step(MOVE, found_of(MOVE, R1, members, [], places, ALL_HERE, (), lost=lost), ALL_HERE)

    assert next_step("r1 r2 r3", "r3.1", lost=("r3",)) == moves.Promote(NEW)
    assert next_step("r1 r2 r3", "r3.1") == moves.RemoveLearner(NEW)
    assert next_step("r1 r2 r3") == moves.Cancel()
    assert next_step("r1 r2 r3 r3.1") == moves.RemoveVoter(R3), "now it is finished"


def partition(number: int, *brokers: str) -> PartitionInfo:
    replicas = tuple(ReplicaInfo(f"r{each + 1}", broker) for each, broker in enumerate(brokers))
    return PartitionInfo(number, f"orders-{number}.1", replicas)


def test_who_can_afford_no_further_loss_is_first_and_who_has_no_majority_is_left_alone() -> None:
    five = partition(0, "b1", "b2", "b3", "b4", "b5")
    three = partition(1, "b1", "b2", "b3")
    alone = partition(2, "b3")
    torn = partition(3, "b3", "b9", "b1")
    away = {"b3": "gone", "b9": "gone"}
    found = moves.needs([five, three, alone, torn], {}, away, ())
    assert [(need.partition.number, need.remove, need.reason) for need in found] == [
        (1, "r3", Reason.AWAY),
        (0, "r3", Reason.AWAY),
    ]
    assert [need.partition.number for need in moves.needs([five, three], {}, away, {three.group_id})] == [0]
    (need,) = moves.needs([three], {(three.group_id, "r2"): "no store"}, {}, ())
    assert (need.remove, need.reason, need.why) == ("r2", Reason.LOST, "no store")


def test_the_place_of_the_new_replica() -> None:
    brokers = [AliveBroker(f"b{each}", f"h{each % 3}") for each in range(1, 6)]
    lost = Need(partition(0, "b1", "b2", "b3"), "r3", Reason.LOST, "")
    assert moves.choose_broker(lost, brokers, {}, {}) == "b3", "only its data is gone"
    without = [each for each in brokers if each.broker != "b3"]
    # b4 shares a host with b1, b5 with b2: any of them, but the one with fewer replicas.
    assert moves.choose_broker(lost, without, {"b4": 2, "b5": 1}, {}) == "b5"
    assert moves.choose_broker(lost, without, {"b4": 2, "b5": 1}, {"b5": 0}) == "b4"
    other_host = [*without, AliveBroker("b6", "h9")]
    assert moves.choose_broker(lost, other_host, {"b6": 50}, {}) == "b6", "a host of its own counts more than the load"
    assert moves.choose_broker(lost, [*brokers[:2]], {}, {}) is None, "never a second copy on one broker"
    away = Need(partition(0, "b1", "b2", "b3"), "r3", Reason.AWAY, "")
    assert moves.choose_broker(away, brokers, {}, {}) in ("b3", "b4", "b5")


def test_whoever_leads_can_replace_whatever_was_reported() -> None:
    """Found by an audit: a report was never taken back, and two of three kept a partition from all changes for ever."""
    three, alone, tight = partition(0, "b1", "b2", "b3"), partition(1, "b1"), partition(2, "b1", "b2")
    lost = {(three.group_id, "r2"): "no store", (three.group_id, "r3"): "no store", (alone.group_id, "r1"): "no store"}
    lost[tight.group_id, "r2"] = "no store"
    assert [need.partition.number for need in moves.needs([three, alone, tight], lost, {}, ())] == [2]
    found = moves.needs([three, alone, tight], lost, {}, (), led={three.group_id, alone.group_id})
    assert [(need.partition.number, need.remove) for need in found] == [(2, "r2"), (0, "r2"), (1, "r1")]
    fewer = Wishes({three.group_id: 2})
    (need,) = moves.needs([three], lost, {}, (), wishes=fewer, led={three.group_id})
    assert need.reason is Reason.LOST, "which of the two may be given up nobody knows"


def test_a_lost_replica_goes_elsewhere_if_its_own_disk_has_no_space_or_failed_a_moment_ago() -> None:
    """Found by an audit: 50 GB went to the disk with 1 GB free, for it was its own."""
    brokers = [AliveBroker(f"b{each}", f"h{each}") for each in range(1, 6)]
    lost = Need(partition(0, "b1", "b2", "b3"), "r3", Reason.LOST, "")
    spare = dict.fromkeys(("b1", "b2", "b4", "b5"), 60) | {"b3": 1}
    assert moves.choose_broker(lost, brokers, {}, {}, spare, 1) == "b3"
    assert moves.choose_broker(lost, brokers, {"b4": 1}, {}, spare, 50) == "b5"
    assert moves.choose_broker(lost, brokers, {"b4": 1}, {}, spare, 1, {"b3", "b5"}) == "b4"
    assert moves.choose_broker(lost, brokers[:3], {}, {}, spare, 50) is None


def test_what_was_only_missing_may_be_found_and_nothing_else() -> None:
    metadata = made(Metadata())
    for node, missing in (("r1", True), ("r2", False), ("r3", True), ("r3", False), ("r3", True)):
        metadata.apply(ReplicaLost(GROUP, node, "no store", missing))
    assert metadata.machine.missing == {(GROUP, "r1")}, "what was damaged once is never trusted again"
    metadata.reopened()
    assert [metadata.apply(ReplicaFound(GROUP, node)) for node in ("r1", "r2", "r3")] == [True, False, False]
    assert metadata.apply(ReplicaFound(GROUP, "r1")) is False
    assert set(metadata.machine.lost) == {(GROUP, "r2"), (GROUP, "r3")}
    metadata.apply(ReplicaLost(GROUP, "r1", "no store", True))
    metadata.apply(BeginMove(GROUP, "r1", "b4", Reason.LOST))
    metadata.apply(FinishMove(GROUP, "r1.1"))
    assert metadata.machine.missing == set()
    metadata.reopened()


def test_a_row_of_before_it_was_known_what_is_missing_can_be_read() -> None:
    metadata = made(Metadata())
    metadata.store.put(META, b"x" + GROUP.encode() + b"\0r1", b"\x93\xaaorders-0.1\xa2r1\xa8no store")
    machine = ClusterMachine(metadata.store)
    assert (dict(machine.lost), machine.missing) == ({(GROUP, "r1"): "no store"}, set())


def test_a_broker_that_is_to_be_emptied_can_wait_and_gets_nothing() -> None:
    three, other = partition(1, "b1", "b2", "b3"), partition(2, "b4", "b5", "b6")
    found = moves.needs([three, other], {(other.group_id, "r3"): "no store"}, {}, (), {"b1", "b6"})
    assert [(need.partition.number, need.remove, need.reason) for need in found] == [
        (2, "r3", Reason.LOST),
        (1, "r1", Reason.DRAIN),
    ]
    brokers = [AliveBroker(f"b{each}", f"h{each}", draining=each in (1, 6)) for each in range(1, 8)]
    lost, leaving = found
    assert moves.choose_broker(lost, brokers, {"b2": 9, "b3": 9}, {}) == "b7", "neither b6 itself nor b1"
    assert moves.choose_broker(leaving, brokers, {"b4": 1, "b5": 2, "b7": 3}, {}) == "b4"
    assert moves.choose_broker(leaving, brokers[:3], {}, {}) is None, "it stays until there is another place"


def test_a_broker_is_emptied_then_gone_then_forgotten() -> None:
    metadata = made(Metadata())
    assert isinstance(metadata.apply(DrainBroker("b9", True)), UnknownBrokerError)
    metadata.apply(DrainBroker("b3", True))
    metadata.apply(PutBroker("b3", "elsewhere", "ray9"))
    assert metadata.machine.brokers["b3"].draining, "a restart of its node does not change that"
    metadata.apply(ForgetBroker("b3"))
    assert "b3" in metadata.machine.brokers, "it has a replica"
    metadata.apply(BeginMove(GROUP, "r3", "b4", Reason.DRAIN))
    metadata.apply(FinishMove(GROUP, "r3.1"))
    metadata.apply(ForgetBroker("b3"))
    assert metadata.machine.holds("b3") == 1, "data that is still to be deleted"
    assert "b3" in metadata.machine.brokers
    metadata.apply(ReplicasRemoved(((GROUP, "r3"),)))
    metadata.apply(ForgetBroker("b4"))
    metadata.apply(ForgetBroker("b3"))
    assert set(metadata.machine.brokers) == {"b1", "b2", "b4"}
    metadata.reopened()


def test_a_broker_that_is_gone_is_forgotten_with_what_is_doomed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = made(Metadata())
    metadata.apply(ForgetBroker("b3", away=True))
    metadata.apply(DrainBroker("b3", True))
    metadata.apply(ForgetBroker("b3", away=True))
    assert "b3" in metadata.machine.brokers, "it has a replica"
    metadata.apply(BeginMove(GROUP, "r3", "b4", Reason.AWAY))
    metadata.apply(FinishMove(GROUP, "r3.1"))
    metadata.apply(PlaceCoordinator("coordinator", "c4", "b2"))
    metadata.apply(ForgetBroker("b3", away=True))
    assert "b3" not in metadata.machine.brokers
    assert [each.broker for each in metadata.machine.doomed.values()] == ["b3"], "deleted should it come back"
    metadata.reopened()
    metadata.apply(DrainBroker("b2", True))
    metadata.apply(BeginMove(GROUP, "r2", "b1", Reason.AWAY))
    metadata.apply(FinishMove(GROUP, "r2.2"))
    metadata.apply(ForgetBroker("b2", away=True))
    assert "b2" in metadata.machine.brokers, "it has a coordinator"
    metadata.apply(RetireCoordinator("coordinator", "c4", "b2"))
    monkeypatch.setattr(catalog, "MAX_LEFT_BEHIND", 2)
    metadata.apply(ForgetBroker("b2", away=True))
    assert sorted(metadata.machine.doomed) == [(GROUP, "r2"), (GROUP, "r3")], "two of three are remembered"
    metadata.reopened()


class Metadata:
    """A machine and its store, which may be opened again at any time."""

    def __init__(self, brokers: int = 4) -> None:
        self.store = MemoryStore(GroupId("coordinator"), ReplicaId("c1"), COORDINATOR)
        self.machine = ClusterMachine(self.store)
        self._index = 0
        for each in range(1, brokers + 1):
            self.apply(PutBroker(f"b{each}", f"h{each}", f"ray{each}"))

    def apply(self, command: AnyCommand) -> object:
        self._index += 1
        return self.machine.apply(Index(self._index), encode_command(command))

    def reopened(self) -> None:
        before = self.picture()
        self.machine = ClusterMachine(self.store)
        assert self.picture() == before
        elsewhere = ClusterMachine(MemoryStore(GroupId("coordinator"), ReplicaId("c2"), COORDINATOR))
        elsewhere.restore(self.machine.checkpoint())
        assert picture_of(elsewhere) == before

    def picture(self) -> object:
        return picture_of(self.machine)


def picture_of(machine: ClusterMachine) -> object:
    counts = {broker: count for broker, count in machine.replica_counts().items() if count}
    leaders = {broker: count for broker, count in machine.leader_counts().items() if count}
    return (
        dict(machine.topics),
        dict(machine.lost),
        set(machine.missing),
        dict(machine.moves),
        dict(machine.unmade),
        dict(machine.doomed),
        dict(machine.planned),
        machine.rebalance,
        counts,
        leaders,
    )


def made(metadata: Metadata) -> Metadata:
    metadata.apply(CreateTopic("orders", TopicSettings(partitions=1, replication=3), (("b1", "b2", "b3"),)))
    metadata.apply(ReplicasMade(tuple(metadata.machine.unmade)))
    return metadata


def test_what_the_metadata_says_of_a_move() -> None:
    metadata = made(Metadata())
    machine = metadata.machine
    assert metadata.apply(ReplicaLost(GROUP, "r3", "no store")) is True
    assert metadata.apply(ReplicaLost(GROUP, "r9", "no store")) is False
    move = metadata.apply(BeginMove(GROUP, "r3", "b4", Reason.LOST, "no store"))
    assert move == Move(GROUP, "r3.1", "b4", "r3", Reason.LOST, "no store")
    assert isinstance(metadata.apply(BeginMove(GROUP, "r2", "b4", Reason.LOST)), ChangeInProgressError)
    new = ReplicaKey(GROUP, "r3.1")
    assert new in machine.unmade
    assert new in machine.replicas("b4")
    assert metadata.apply(ReplicaLost(GROUP, "r3.1", "no store")) is False, "it was never made"
    metadata.reopened()
    metadata.apply(ReplicasMade((new,)))
    version = metadata.machine.version
    metadata.apply(FinishMove(GROUP, "r3.1"))
    metadata.apply(FinishMove(GROUP, "r3.1"))
    machine = metadata.machine
    assert machine.version > version, "clients must learn of it"
    (partition,) = machine.topics["orders"].partitions
    assert partition.replicas == (ReplicaInfo("r1", "b1"), ReplicaInfo("r2", "b2"), ReplicaInfo("r3.1", "b4"))
    assert (machine.moves, machine.lost, list(machine.doomed)) == ({}, {}, [ReplicaKey(GROUP, "r3")])
    assert machine.replica_counts()["b3"] == 0
    metadata.reopened()


def test_the_first_replica_keeps_the_first_place_and_an_id_is_never_given_twice() -> None:
    metadata = made(Metadata())
    metadata.apply(BeginMove(GROUP, "r1", "b4", Reason.AWAY))
    metadata.apply(CancelMove(GROUP, "r1.1"))
    assert list(metadata.machine.doomed) == [ReplicaKey(GROUP, "r1.1")], "a process may have made its data"
    assert metadata.machine.unmade == {}
    metadata.apply(ReplicasRemoved(tuple(metadata.machine.doomed)))
    metadata.apply(BeginMove(GROUP, "r1", "b4", Reason.AWAY))
    metadata.apply(FinishMove(GROUP, "r1.1"))
    assert GROUP in metadata.machine.moves, "the end of an earlier move is not the end of this one"
    metadata.apply(FinishMove(GROUP, "r1.2"))
    (partition,) = metadata.machine.topics["orders"].partitions
    assert partition.replicas[0] == ReplicaInfo("r1.2", "b4")
    assert metadata.machine.leader_counts() == {"b1": 0, "b4": 1}
    metadata.apply(BeginMove(GROUP, "r1.2", "b1", Reason.AWAY))
    assert metadata.machine.moves[GROUP].add == "r1.3"


def test_a_topic_that_is_deleted_takes_its_move_along() -> None:
    metadata = made(Metadata())
    metadata.apply(ReplicaLost(GROUP, "r2", "no store"))
    metadata.apply(BeginMove(GROUP, "r2", "b2", Reason.LOST))
    metadata.apply(DeleteTopic("orders", 1))
    machine = metadata.machine
    assert (machine.moves, machine.lost, machine.unmade) == ({}, {}, {})
    assert {key.replica_id for key in machine.doomed} == {"r1", "r2", "r3", "r2.1"}
    assert set(machine.replica_counts().values()) == {0}
    assert isinstance(metadata.apply(BeginMove(GROUP, "r2", "b2", Reason.LOST)), MembershipError)
    metadata.apply(FinishMove(GROUP, "r2.1"))
    metadata.reopened()


def test_one_copy_more_and_one_less() -> None:
    grow = Move(GROUP, "r4.1", "b4", "", Reason.GROW)
    four = ReplicaId("r4.1")
    assert step(grow, unmade=True) is None
    assert step(grow) == moves.AddLearner(four)
    assert step(grow, learners=("r4.1",)) == moves.Promote(four)
    assert step(grow, voters=("r1", "r2", "r3", "r4.1")) == moves.Finish()
    assert step(grow, learners=("r4.1",), here=("b1", "b2", "b3")) == moves.RemoveLearner(four)


def test_a_copy_on_which_the_group_hangs_stays_until_the_others_are_back() -> None:
    """Found by the worlds below: with an even number of voters, one of them away, the removal cannot be decided."""

    def last_step(voters: str, well: str, *, lost: bool = False, here: tuple[str, ...] = ALL_HERE) -> object:
        members, told = ReplicaSet.of(voters.split()), [ReplicaId(each) for each in well.split()]
        found = Found(members, R1, False, lost, "b3", told)
        return moves.next_step(Move(GROUP, NEW, "b4", "r3", Reason.DRAIN), found, here)

    assert last_step("r1 r3 r3.1", "r3 r3.1") is None
    assert last_step("r1 r3 r3.1", "r1 r3 r3.1") == moves.RemoveVoter(R3)
    assert last_step("r1 r2 r3 r3.1", "r1 r3 r3.1") == moves.RemoveVoter(R3), "two of three are left"
    assert last_step("r1 r2 r3 r3.1", "r1 r2 r3.1") == moves.RemoveVoter(R3), "it is not well itself"
    assert last_step("r1 r3 r3.1", "r1 r3", lost=True) == moves.RemoveVoter(NEW), "the new one is lost: undone"
    assert last_step("r1 r3 r3.1", "r1 r3", here=("b1", "b2", "b3")) == moves.RemoveVoter(NEW)
    assert last_step("r1 r3", "r1 r3", lost=True) == moves.Cancel()
    members, two = ReplicaSet.of(("r2", "r3", "r3.1")), [R3, NEW]
    found = Found(members, NEW, False, False, "b3", two, [R2], [R2])
    drain = Move(GROUP, NEW, "b4", "r3", Reason.DRAIN)
    assert moves.next_step(drain, found, ALL_HERE) == moves.RemoveVoter(R2), "it is lost, and in the way"
    assert moves.next_step(drain, found._replace(gone=()), ALL_HERE) is None, "it may come back"


def give_up(
    voters: tuple[str, ...] = ("r1", "r2", "r3"),
    leader: str = "r1",
    well: str = "r1 r2 r3",
    away: str = "",
    gone: str = "",
) -> moves.Step | None:
    shrink = Move(GROUP, "none.1", "", "r3", Reason.SHRINK)
    is_well, is_away, is_gone = ([ReplicaId(each) for each in ids.split()] for ids in (well, away, gone))
    members = ReplicaSet.of(voters)
    found = Found(members, ReplicaId(leader), False, False, "b3", is_well, is_away, is_gone)
    return moves.next_step(shrink, found, ALL_HERE)


def test_a_copy_is_given_up_only_while_the_others_are_well() -> None:
    assert give_up() == moves.RemoveVoter(R3)
    assert give_up(voters=("r1", "r2")) == moves.Finish()
    assert give_up(leader="r3") == moves.Transfer(R1), "never the leader"
    assert give_up(leader="r3", well="r2 r3") is None, "r1 does not answer just now"
    assert give_up(well="r1 r3") is None
    assert give_up(well="r1 r3", away="r2") == moves.Cancel(), "the one that is away goes first"
    assert give_up(well="r1 r2", away="r3") == moves.RemoveVoter(R3)
    assert give_up(voters=("r3",), leader="r3") == moves.Cancel(), "the last one stays"
    assert give_up(away="r2 r3") == moves.Cancel()
    assert give_up(away="r2 r3", gone="r2 r3") == moves.RemoveVoter(R3), "it is as lost as the other one"
    assert give_up(well="r1 r3", away="r2 r3", gone="r2 r3") == moves.Cancel(), "and still needed"


def test_which_copy_is_given_up_and_what_comes_first() -> None:
    alive = [AliveBroker(f"b{each}", f"h{each}", rack="k1" if each < 3 else "k2") for each in range(1, 6)]
    three, other = partition(1, "b1", "b2", "b3"), partition(2, "b3", "b4", "b5")

    def found(**rest: Any) -> list[tuple[int, str, Reason]]:
        wishes = Wishes(rest.pop("replication", {}), rest.pop("planned", ()), rest.pop("unmade", ()), alive)
        arguments = {"lost": {}, "away": {}, "moving": (), "draining": (), **rest}
        needs = moves.needs([three, other], **arguments, wishes=wishes)
        return [(need.partition.number, need.remove, need.reason) for need in needs]

    fewer = {three.group_id: 2}
    assert found(replication=fewer) == [(1, "r2", Reason.SHRINK)], "b1 and b2 are in one rack, and r1 was first"
    assert found(replication=fewer, lost={(three.group_id, "r3"): "no store"}) == [(1, "r3", Reason.SHRINK)]
    assert found(replication=fewer, draining={"b1"}) == [(1, "r1", Reason.SHRINK)]
    more = {three.group_id: 4, other.group_id: 4}
    assert found(replication=more) == [(1, "", Reason.GROW), (2, "", Reason.GROW)]
    assert found(replication=more, unmade={three.group_id}) == [(2, "", Reason.GROW)], "it is being made"
    mixed = found(replication={three.group_id: 4}, lost={(other.group_id, "r1"): "no store"})
    assert mixed == [(2, "r1", Reason.LOST), (1, "", Reason.GROW)], "what is lost comes first"
    planned = (Planned(three.group_id, "r1", "b5"),)
    assert found(planned=planned, draining={"b4"}) == [(2, "r2", Reason.DRAIN), (1, "r1", Reason.BALANCE)]


def test_racks_and_disks_decide_where_a_replica_goes() -> None:
    alive = [AliveBroker(f"b{each}", f"h{each}", rack=f"k{each % 2}") for each in range(1, 7)]
    away = Need(partition(0, "b1", "b2", "b3"), "r3", Reason.AWAY, "")
    # b1 and b2 are in k1 and k0: both racks have one. b5 would make k1 two, b4 and b6 k0: then the fewest replicas.
    assert moves.choose_broker(away, alive, {"b4": 3, "b5": 1, "b6": 2}, {}) == "b5"
    same = Need(partition(0, "b1", "b3", "b2"), "r3", Reason.AWAY, "")
    assert moves.choose_broker(same, alive, {"b4": 9, "b6": 9, "b5": 0}, {}) == "b4", "another rack counts more"
    spare = {"b4": 99, "b6": 100}
    assert moves.choose_broker(same, alive, {}, {}, spare, 100) == "b6", "b4 has no space for it"
    grow = Need(partition(0, "b1", "b2"), "", Reason.GROW, "")
    assert moves.choose_broker(grow, alive[:2], {}, {}) == "b1", "two brokers, three copies"
    assert moves.choose_broker(grow, alive[:3], {}, {}) == "b3"
    assert moves.choose_broker(grow, alive[:3], {}, {"b3": 0}) is None, "it waits rather than share needlessly"
    planned = Need(partition(0, "b1", "b2"), "r1", Reason.BALANCE, "", "b6")
    assert moves.choose_broker(planned, alive, {"b6": 50}, {}) == "b6"
    assert moves.choose_broker(planned, alive, {}, {"b6": 0}) is None


def test_what_the_metadata_says_of_more_and_fewer_copies() -> None:
    metadata = made(Metadata())
    refused = metadata.apply(AlterTopic("orders", {"replication": 4}))
    assert isinstance(refused, InvalidInputError), "what earlier releases refuse must not mean something else"
    metadata.apply(ResizeTopic("orders", {"replication": 4}, (), 1))
    machine = metadata.machine
    assert machine.topics["orders"].settings.replication == 4
    move = metadata.apply(BeginMove(GROUP, "", "b4", Reason.GROW))
    assert move == Move(GROUP, "r4.1", "b4", "", Reason.GROW)
    metadata.reopened()
    metadata.apply(ReplicasMade(((GROUP, "r4.1"),)))
    metadata.apply(FinishMove(GROUP, "r4.1"))
    (part,) = metadata.machine.topics["orders"].partitions
    assert [each.replica_id for each in part.replicas] == ["r1", "r2", "r3", "r4.1"]
    metadata.apply(ResizeTopic("orders", {"replication": 3}, (), 1))
    gone = metadata.apply(BeginMove(GROUP, "r2", "", Reason.SHRINK))
    assert gone == Move(GROUP, "none.2", "", "r2", Reason.SHRINK)
    metadata.reopened()
    metadata.apply(FinishMove(GROUP, "none.1"))
    assert GROUP in metadata.machine.moves, "another move's end"
    metadata.apply(FinishMove(GROUP, "none.2"))
    (part,) = metadata.machine.topics["orders"].partitions
    assert [each.replica_id for each in part.replicas] == ["r1", "r3", "r4.1"]
    assert list(metadata.machine.doomed) == [ReplicaKey(GROUP, "r2")]
    assert metadata.machine.replica_counts() == {"b1": 1, "b2": 0, "b3": 1, "b4": 1}
    metadata.apply(BeginMove(GROUP, "r3", "", Reason.SHRINK))
    metadata.apply(CancelMove(GROUP, "none.3"))
    assert len(metadata.machine.topics["orders"].partitions[0].replicas) == 3
    for wrong in (BeginMove(GROUP, "", "", Reason.GROW), BeginMove("orders-7.1", "", "b1", Reason.GROW)):
        assert isinstance(metadata.apply(wrong), MembershipError)
    assert isinstance(metadata.apply(BeginMove(GROUP, "", "b9", Reason.GROW)), UnknownBrokerError)
    metadata.reopened()


def test_a_plan_is_written_down_begun_piece_by_piece_and_stopped() -> None:
    metadata = made(Metadata())
    told = (
        (GROUP, "r3", "b4", 10),
        (GROUP, "r3", "b4", 10),
        (GROUP, "r1", "b2", 10),  # there is a copy already
        (GROUP, "r9", "b4", 10),
        (GROUP, "r2", "b9", 10),
        ("orders-1.1", "r1", "b4", 10),
    )
    begun = metadata.apply(BeginRebalance(told, 5))
    assert begun == Rebalance(1, 1, 10, 5), "what is out of date is left out"
    assert isinstance(metadata.apply(BeginRebalance((), 6)), ChangeInProgressError)
    metadata.reopened()
    metadata.apply(BeginMove(GROUP, "r3", "b4", Reason.BALANCE))
    assert metadata.machine.planned == {}
    metadata.apply(EndRebalance(9))
    assert metadata.machine.rebalance == begun, "another one's end"
    metadata.apply(EndRebalance(1))
    assert metadata.machine.rebalance is None
    assert GROUP in metadata.machine.moves, "what was begun goes on"
    metadata.apply(FinishMove(GROUP, metadata.machine.moves[GROUP].add))
    metadata.apply(BeginRebalance(((GROUP, "r1", "b3", 10), (GROUP, "r2", "b3", 10)), 7))
    metadata.reopened()
    metadata.apply(DropPlanned(((GROUP, "r1"),)))
    metadata.apply(DeleteTopic("orders", 1))
    assert metadata.machine.planned == {}
    metadata.reopened()


@dataclass
class Group:
    """A partition's Raft group as the mover can see and change it: its membership, and who has the log."""

    members: ReplicaSet
    has_log: set[str] = field(default_factory=set)
    """Replicas whose disk has all that was acknowledged."""

    def can_decide(self, running: set[str]) -> bool:
        return self.members.is_majority(ReplicaId(each) for each in self.has_log & running)


class Answering(NamedTuple):
    replica_id: ReplicaId
    damaged: str | None = None
    doubted: str | None = None


class World:
    """Brokers that go and come back, are emptied and forgotten, disks that are lost, operators who want more copies,
    fewer, or others elsewhere, and a mover that acts on old pictures and dies anywhere."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.metadata = Metadata(brokers=6)
        self.here = {f"b{each}" for each in range(1, 7)}
        brokers = sorted(self.here)
        placement = tuple(tuple(self.rng.sample(brokers, 3)) for _ in range(3))
        self.metadata.apply(CreateTopic("orders", TopicSettings(partitions=3, replication=3), placement))
        self.metadata.apply(ReplicasMade(tuple(self.metadata.machine.unmade)))
        self.groups = {
            part.group_id: Group(
                ReplicaSet.of(each.replica_id for each in part.replicas), {each.replica_id for each in part.replicas}
            )
            for part in self.partitions()
        }
        self.ids: dict[str, set[str]] = {group_id: set(group.has_log) for group_id, group in self.groups.items()}
        after_ms = self.rng.choice((None, 1, 2_000))
        self.absences = Absences(ClusterSettings(replace_after_ms=after_ms, broker_wait_ms=self.rng.choice((0, 3_000))))
        self.now_s = 0.0

    def partitions(self) -> list[PartitionInfo]:
        return list(self.metadata.machine.topics["orders"].partitions)

    def broker_of(self, group_id: str, node: str) -> str:
        key = ReplicaKey(group_id, node)
        machine = self.metadata.machine
        return next(broker for broker in machine.brokers if key in machine.replicas(broker))

    def running(self, group_id: str) -> set[str]:
        machine = self.metadata.machine
        return {key.replica_id for broker in self.here for key in machine.replicas(broker) if key.group_id == group_id}

    def fault(self) -> None:
        """Never so much that a group loses its majority: then there would be nothing to save."""
        kind = self.rng.choice(("lose", "late", "away", "back", "drain", "reopen", "resize", "rebalance", "stop"))
        if kind == "reopen":
            self.metadata.reopened()
        elif kind == "resize":
            copies = self.rng.randint(1, 4)
            assert not isinstance(self.metadata.apply(ResizeTopic("orders", {"replication": copies}, (), 1)), Exception)
        elif kind == "rebalance":
            planned = plan(self.metadata.machine.topics.values(), self.alive(), skip=self.metadata.machine.moves)
            told = tuple((each.group_id, each.remove, each.target, 7) for each in planned)
            self.metadata.apply(BeginRebalance(told, 1))
        elif kind == "stop":
            self.metadata.apply(EndRebalance(0))
            assert not self.metadata.machine.planned
        elif kind == "back" and self.away:
            self.here.add(self.rng.choice(sorted(self.away)))
        elif kind == "away":
            broker = self.rng.choice(sorted(self.here))
            self.here.discard(broker)
            if not all(group.can_decide(self.running(each)) for each, group in self.groups.items()) or self.is_tight():
                self.here.add(broker)
        elif kind == "drain":
            broker = self.rng.choice(sorted(self.metadata.machine.brokers))
            draining = self.metadata.machine.brokers[broker].draining
            self.metadata.apply(DrainBroker(broker, not draining))
            if self.is_tight():
                self.metadata.apply(DrainBroker(broker, draining))
        elif kind == "late":
            # Disks that are mounted late, or checksums that are wrong once: what is reported is there.
            part = self.rng.choice(self.partitions())
            for each in self.rng.sample(part.replicas, self.rng.randint(1, len(part.replicas))):
                missing = self.rng.random() < 0.7
                self.metadata.apply(ReplicaLost(part.group_id, each.replica_id, "no store", missing))
        elif kind == "lose":
            group_id, group = self.rng.choice(sorted(self.groups.items(), key=lambda each: each[0]))
            had = set(group.has_log)
            node = self.rng.choice(sorted(had | group.members.learners))
            group.has_log.discard(node)
            if group.can_decide(self.running(group_id)):
                self.metadata.apply(ReplicaLost(group_id, node, "no store"))
            else:
                group.has_log = had

    @property
    def away(self) -> set[str]:
        return {f"b{each}" for each in range(1, 7)} - self.here

    def is_tight(self) -> bool:
        """Fewer brokers would be left than a partition may be to have copies."""
        return sum(each.stays for each in self.alive()) < 4

    def alive(self) -> list[AliveBroker]:
        known = self.metadata.machine.brokers
        return [
            AliveBroker(
                each,
                f"h{each[1:]}",
                rack=f"k{int(each[1:]) % 2}",
                draining=each in known and known[each].draining,
            )
            for each in sorted(self.here)
        ]

    def look(self) -> None:
        self.now_s += 1
        self.keep_brokers()
        machine, alive = self.metadata.machine, self.alive()
        for move in list(machine.moves.values()):
            if self.rng.random() < 0.7:
                self.go_on(move)
        # No fault of this world takes a group's majority.
        for need in needs_of(view_of(machine), alive, self.absences.given_up, led=self.groups.keys()):
            group_id = need.partition.group_id
            key = ReplicaKey(group_id, need.remove)
            whole = need.remove in self.groups[group_id].has_log & self.running(group_id)
            if key in machine.missing and whole and self.rng.random() < 0.8:
                assert self.metadata.apply(ReplicaFound(*key)) is True
                continue
            broker: str | None = ""
            if need.reason is not Reason.SHRINK:
                avoid = {each for each in sorted(self.here) if self.rng.random() < 0.1}
                broker = moves.choose_broker(need, alive, machine.replica_counts(), {}, avoid=avoid)
            if broker is None and need.target is not None:
                self.metadata.apply(DropPlanned(((group_id, need.remove),)))
            elif broker is not None and self.rng.random() < 0.7:
                begun = self.metadata.apply(BeginMove(group_id, need.remove, broker, need.reason))
                assert isinstance(begun, Move)
                assert begun.add not in self.ids[begun.group_id], "an id that another replica had"
                self.ids[begun.group_id].add(begun.add)
        doomed = [key for key, replica in machine.doomed.items() if replica.broker in self.here]
        for key in doomed:
            assert key.replica_id not in self.groups[key.group_id].members.voters, f"{key} votes and would be deleted"
            self.groups[key.group_id].has_log.discard(key.replica_id)
        self.metadata.apply(ReplicasRemoved(tuple(doomed)))

    def keep_brokers(self) -> None:
        machine = self.metadata.machine
        for broker in sorted(self.here - machine.brokers.keys()):
            self.metadata.apply(PutBroker(broker, f"h{broker[1:]}", "ray9"))
        draining = {broker: row.draining for broker, row in machine.brokers.items()}
        self.absences.look(self.now_s, draining, self.here)
        gone = forgettable(
            (broker for broker in draining if draining[broker]),
            self.here,
            self.absences.given_up,
            machine.replica_counts(),
            (),
            machine.doomed.values(),
        )
        for command in gone:
            self.metadata.apply(command)
            assert command.broker not in machine.brokers, "what is void is not proposed"

    def go_on(self, move: Move) -> None:
        group, machine = self.groups[move.group_id], self.metadata.machine
        key = ReplicaKey(move.group_id, move.add)
        if key in machine.unmade and move.broker in self.here and self.rng.random() < 0.8:
            self.metadata.apply(ReplicasMade((key,)))
        running = self.running(move.group_id)
        able = sorted(group.members.voters & group.has_log & running)
        assert group.can_decide(running), "a step of the mover has cost the group its majority"
        leader = ReplicaId(self.rng.choice(able))
        part = next(each for each in self.partitions() if each.group_id == move.group_id)
        old = ReplicaKey(move.group_id, move.remove)
        if old in machine.missing and move.remove in group.has_log & running and self.rng.random() < 0.5:
            self.metadata.apply(ReplicaFound(*old))
        lost = {each.replica_id for each in machine.lost if each.group_id == move.group_id}
        if move.add not in group.members.voters and self.rng.random() < 0.05:
            lost.add(move.add)  # it is waited for no longer (``patience``)
        able_or_new = group.has_log | ({move.add} - lost)
        well = {ReplicaId(each) for each in group.has_log & running}
        found = found_of(
            move,
            leader,
            group.members,
            [Answering(ReplicaId(each)) for each in sorted(able_or_new & running)],
            {ReplicaId(each.replica_id): each.broker for each in part.replicas},
            self.here,
            self.absences.given_up,
            lost=lost,
            unmade=key in machine.unmade,
        )
        before = group.members
        match moves.next_step(move, found, self.here):
            case moves.AddLearner(node):
                group.members = group.members.with_learner(node)
            case moves.Promote(node):
                if key in machine.lost:
                    return  # it never catches up
                if move.broker in self.here and self.rng.random() < 0.5:
                    group.has_log.add(node)
                    group.members = group.members.with_voter(node)
            case moves.RemoveVoter(node) | moves.RemoveLearner(node):
                assert node != leader
                group.members = group.members.without(node)
                assert group.can_decide(running), "this step has cost the group its majority"
                if move.reason is Reason.SHRINK and node in well - lost:
                    assert group.members.voters <= well, "a copy that is well goes though another one is not"
            case moves.Transfer(to):
                assert to in group.members.voters
                assert to != leader
            case moves.Finish():
                self.metadata.apply(FinishMove(move.group_id, move.add))
            case moves.Cancel(old_is_out):
                if old_is_out:
                    self.metadata.apply(ReplicaLost(move.group_id, move.remove, "it is not in its group any more"))
                self.metadata.apply(CancelMove(move.group_id, move.add))
            case None:
                pass
        assert len(before.voters ^ group.members.voters) <= 1

    def whole(self) -> bool:
        machine = self.metadata.machine
        busy = machine.moves or machine.lost or machine.planned
        doomed = {each.broker for each in machine.doomed.values()} & self.here
        leaving = any(row.draining for broker, row in machine.brokers.items() if broker not in self.here)
        return not busy and not doomed and not leaving and all(map(self.is_whole, self.partitions()))

    def is_whole(self, part: PartitionInfo) -> bool:
        group, brokers = self.groups[part.group_id], {each.broker for each in part.replicas}
        return (
            {each.replica_id for each in part.replicas}
            == group.members.everyone
            == group.members.voters
            <= group.has_log
            and len(brokers) == len(part.replicas) == self.metadata.machine.topics["orders"].settings.replication
            and brokers <= self.here
        )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_whatever_is_lost_every_group_is_whole_in_the_end_and_could_decide_all_the_time(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        if world.rng.random() < 0.3:
            world.fault()
        world.look()
    # What is away by now comes back, or never will, as an operator says then.
    for broker in sorted(world.away):
        if world.rng.random() < 0.5:
            world.here.add(broker)
        elif broker in world.metadata.machine.brokers:
            world.metadata.apply(DrainBroker(broker, True))
    for _ in range(400):
        world.look()
        if world.whole():
            break
    assert world.whole()
    assert not world.away & world.metadata.machine.brokers.keys(), "who is gone for good is forgotten"
    world.here |= world.away
    world.look()
    world.look()
    assert not world.metadata.machine.doomed, "and cleans up should it come back"


def test_only_a_coordinator_can_be_a_lost_one() -> None:
    metadata = made(Metadata())
    assert metadata.apply(ReplicaLost("coordinator", "nobody", "no store")) is False
    assert metadata.apply(ReplicaLost("coordinator", "c9", "no store")) is False
    assert metadata.apply(ReplicaLost("coordinator", "c4", "no store")) is True, "a first one, for all that is known"
    metadata.apply(PlaceCoordinator("coordinator", "c4", "b4"))
    assert metadata.machine.lost == {}, "what was said before it had a place does not concern it"
    assert metadata.apply(ReplicaLost("coordinator", "c4", "no store")) is False, "it was never made"
    metadata.apply(ReplicasMade((("coordinator", "c4"),)))
    assert metadata.apply(ReplicaLost("coordinator", "c4", "no store")) is True
    metadata.apply(RetireCoordinator("coordinator", "c4", "b4"))
    assert metadata.apply(ReplicaLost("coordinator", "c4", "no store")) is False, "it has left"
    metadata.reopened()
