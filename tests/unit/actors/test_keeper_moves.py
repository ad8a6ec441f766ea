"""Moves of the keeper, without Ray: what is begun on which disk, what is given up, and who was not lost after all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayqueue.actors.keeper.plan import ReplicaKey
from rayqueue.actors.keeper.scout import Disk
from rayqueue.cluster.commands import (
    BeginMove,
    CancelMove,
    CreateTopic,
    FinishMove,
    ReplicaFound,
    ReplicaLost,
    ReplicasMade,
)
from rayqueue.cluster.moves import Reason
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.protocol.topics import TopicSettings
from tests.unit.actors.kept_cluster import GROUP, KeptCluster, run, status_of

GIB = 1 << 30


def lose(kept: KeptCluster, *nodes: str, missing: bool = False, group_id: str = GROUP) -> None:
    for node in nodes:
        assert kept.log.apply(ReplicaLost(group_id, node, f"{node} is lost", missing)) is True


def add_topic(kept: KeptCluster, name: str, *brokers: str) -> GroupId:
    info = kept.log.apply(CreateTopic(name, TopicSettings(partitions=1, replication=len(brokers)), (brokers,)))
    kept.log.apply(ReplicasMade(tuple(kept.log.machine.unmade)))
    group_id = GroupId(info.partitions[0].group_id)
    scout: Any = kept.keeper._scout
    scout.sizes[group_id], scout.leaders[group_id] = 0, brokers[0]
    return group_id


# -- reported lost, and back ---------------------------------------------------------------------------------


def test_disks_that_were_mounted_late_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an audit: two of three were reported, and nobody ever took that back: no move was made any more."""

    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        lose(kept, "r2", "r3", missing=True)
        kept.keeper._scout.leaders = {}
        await kept.look()
        assert kept.of(BeginMove) + kept.of(ReplicaFound) == []
        assert "1 of 3 copies are left" in kept.keeper._mover.waiting[GROUP]
        kept.keeper._scout.leaders = {GROUP: "b1"}
        kept.statuses["r1"] = replace(kept.statuses["r1"], in_sync=(ReplicaId("r1"), ReplicaId("r2")))
        for _ in range(3):
            await kept.look()
        assert kept.of(ReplicaFound) == [ReplicaFound(GROUP, "r2")]
        assert kept.keeper._mover.waiting[GROUP] == "r3 is back, and catches up"
        kept.statuses["r1"] = replace(kept.statuses["r1"], in_sync=(ReplicaId("r1"), ReplicaId("r3")))
        await kept.look()
        await kept.look()
        assert (kept.log.machine.lost, kept.keeper._mover.waiting, kept.of(BeginMove)) == ({}, {}, [])

    run(scenario())


def test_a_replica_that_is_back_before_it_was_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        lose(kept, "r3", missing=True)
        r3 = kept.statuses.pop("r3")
        await kept.look()
        (move,) = kept.log.machine.moves.values()
        kept.statuses["r3"] = r3
        await kept.look()
        assert kept.of(ReplicaFound) == [], "it lacks what came meanwhile"
        kept.statuses["r1"] = replace(kept.statuses["r1"], in_sync=(ReplicaId("r1"), ReplicaId("r3")))
        await kept.look()
        await kept.look()
        assert kept.of(ReplicaFound) == [ReplicaFound(GROUP, "r3")]
        assert kept.of(CancelMove) == [CancelMove(GROUP, move.add)]
        assert (kept.log.machine.moves, kept.log.machine.lost) == ({}, {})

    run(scenario())


def test_an_only_copy_that_is_back_needs_no_second_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        alone = add_topic(kept, "alone", "b3")
        lose(kept, "r1", missing=True, group_id=alone)
        kept.statuses = {"r1": replace(status_of("r1", "leader", ["r1"]), in_sync=(ReplicaId("r1"),))}
        kept.keeper._scout.disks = {each: Disk(100 * GIB, 6 * GIB) for each in kept.disks}
        kept.keeper._scout.sizes[alone] = 50 * GIB
        await kept.look()
        await kept.look()
        assert kept.of(ReplicaFound) == [ReplicaFound(alone, "r1")]
        assert (kept.log.machine.lost, kept.of(BeginMove)) == ({}, [])

    run(scenario())


@pytest.mark.parametrize("trouble", ["damaged", "doubted", "forgetful", "damaged before", "removed"])
def test_who_was_damaged_or_has_forgotten_is_replaced_though_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        lose(kept, "r2", "r3", missing=True)
        r2, leader = ReplicaId("r2"), kept.statuses["r1"]
        leader = replace(leader, in_sync=(r2,), forgetful=(r2,) if trouble == "forgetful" else ())
        kept.statuses["r1"] = replace(leader, voters=leader.voters[::2]) if trouble == "removed" else leader
        if trouble == "damaged":
            kept.statuses["r2"] = replace(kept.statuses["r2"], damaged="a checksum")
        if trouble == "doubted":
            kept.statuses["r2"] = replace(kept.statuses["r2"], doubted="an older copy")
        if trouble == "damaged before":
            lose(kept, "r2", missing=False)
            lose(kept, "r2", missing=True)  # and then its disk was away, too
        await kept.look()
        assert kept.of(ReplicaFound) == []
        (begun,) = kept.of(BeginMove)
        assert (begun.remove, begun.broker, begun.reason) == ("r2", "b2", Reason.LOST)

    run(scenario())


def test_those_that_are_reported_and_run_are_replaced_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage that was found in two of three, which run: whoever leads has a majority, whatever the reports say."""

    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        lose(kept, "r2", "r3")
        for _ in range(2):
            await kept.look()
            (move,) = kept.log.machine.moves.values()
            kept.log.apply(FinishMove(GROUP, move.add))
        await kept.look()
        assert [each.remove for each in kept.of(BeginMove)] == ["r2", "r3"]
        assert kept.log.machine.lost == {}

    run(scenario())


def test_a_leader_that_nobody_confirms_begins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        lose(kept, "r2", "r3")
        kept.unconfirmed = True
        await kept.look()
        await kept.look()
        assert kept.of(BeginMove) == []
        assert kept.keeper._mover.waiting == {GROUP: "r2 is lost; nobody leads it"}

    run(scenario())


def test_a_move_that_is_undone_when_the_old_one_is_out_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        kept.log.apply(BeginMove(GROUP, "r3", "b4", Reason.ASKED))
        kept.statuses = {"r1": status_of("r1", "leader", ("r1", "r2")), "r2": kept.statuses["r2"]}
        kept.here("b1", "b2", "b3")
        await kept.look()
        assert len(kept.of(CancelMove)) == 1
        await kept.look()
        (begun,) = kept.of(BeginMove)
        assert (begun.remove, begun.reason, begun.why) == ("r3", Reason.LOST, "it is not in its group any more")

    run(scenario())


# -- disks ---------------------------------------------------------------------------------------------------


def test_nothing_is_begun_before_anybody_has_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an audit: a new leader knew neither sizes nor disks, and took 0 for any number."""

    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        scout: Any = kept.keeper._scout
        scout.leaders, scout.sizes, scout.disks = None, {}, {}
        lose(kept, "r3")
        await kept.look()
        assert (kept.of(BeginMove), kept.keeper._mover.waiting) == ([], {}), "nor is anything said"
        scout.leaders, scout.disks = {GROUP: "b1"}, {"b1": Disk(100 * GIB, 90 * GIB)}
        await kept.look()
        assert kept.keeper._mover.waiting == {GROUP: "r3 is lost; b3 has just come"}
        scout.disks = {"b1": Disk(100 * GIB, 90 * GIB), "b3": Disk(0, 0), "b4": Disk(100 * GIB, 50 * GIB)}
        kept.statuses["r1"] = replace(kept.statuses["r1"], size_bytes=50 * GIB)
        await kept.look()
        assert kept.of(BeginMove) == []
        assert scout.sizes == {GROUP: 50 * GIB}, "asked of the leader"
        await kept.look()
        assert "no broker has a place for it now (51,200 MiB)" in kept.keeper._mover.waiting[GROUP]
        scout.disks["b4"] = Disk(100 * GIB, 60 * GIB)
        await kept.look()
        assert [each.broker for each in kept.of(BeginMove)] == ["b4"], "the disk of b3 cannot be looked at"

    run(scenario())


def test_a_second_move_does_not_get_the_space_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an audit: space was reserved within one look only."""

    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        scout: Any = kept.keeper._scout
        other = add_topic(kept, "other", "b1", "b2", "b3")
        scout.sizes = {GROUP: 50 * GIB, other: 50 * GIB}
        scout.disks = {each: Disk(100 * GIB, (1 if each != "b4" else 70) * GIB) for each in kept.disks}
        kept.statuses["r1"] = replace(kept.statuses["r1"], size_bytes=50 * GIB)
        lose(kept, "r3")
        await kept.look()
        lose(kept, "r2", group_id=other)
        await kept.look()
        await kept.look()
        assert [(each.group_id, each.broker) for each in kept.of(BeginMove)] == [(GROUP, "b4")]
        assert "no broker has a place" in kept.keeper._mover.waiting[other]

    run(scenario())


# -- moves that get nowhere ------------------------------------------------------------------------------------


def test_a_replica_that_cannot_be_made_is_made_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an audit: an unmade move waited for ever, and two of them kept all others from being begun."""

    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch, moves_at_once=1)
        other = add_topic(kept, "other", "b1", "b2", "b4")
        lose(kept, "r3")
        await kept.look()
        (move,) = kept.log.machine.moves.values()
        assert move.broker == "b3", "only its data is gone"
        crew: Any = kept.keeper._crew
        crew.failing[ReplicaKey(GROUP, ReplicaId(move.add))] = "the disk is full"
        lose(kept, "r2", group_id=other)
        await kept.look()
        assert "waits for its turn" in kept.keeper._mover.waiting[other]
        await kept.look(10)
        await kept.look()
        assert other in kept.log.machine.moves, "what cannot be made is nobody's turn"
        kept.log.apply(FinishMove(other, kept.log.machine.moves[other].add))
        await kept.look(5)
        assert kept.of(CancelMove) == [CancelMove(GROUP, move.add)]
        await kept.look()
        assert kept.log.machine.moves[GROUP].broker == "b4", "not b3 again"

    run(scenario())


def test_a_replica_of_a_new_topic_that_cannot_be_made_is_made_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as with moves: what was never made was tried on the same disk for ever."""

    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        info = kept.log.apply(CreateTopic("new", TopicSettings(partitions=1, replication=3), (("b1", "b2", "b3"),)))
        group_id, scout, crew = info.partitions[0].group_id, kept.keeper._scout, kept.keeper._crew
        kept.log.apply(ReplicasMade(((group_id, "r1"), (group_id, "r2"))))
        scout.sizes[group_id] = 0
        crew.failing[ReplicaKey(GroupId(group_id), ReplicaId("r3"))] = "the disk is full"
        await kept.look()
        await kept.look(10)
        assert kept.of(BeginMove) == []
        await kept.look(6)
        (begun,) = kept.of(BeginMove)
        assert (begun.group_id, begun.remove, begun.broker) == (group_id, "r3", "b4")
        assert begun.why == "it cannot be made on b3: the disk is full"
        kept.log.apply(ReplicasMade(((group_id, kept.log.machine.moves[group_id].add),)))
        await kept.look()
        assert kept.of(CancelMove) == []
        kept.log.apply(ReplicasMade(((group_id, "r3"),)))
        await kept.look()
        assert len(kept.of(CancelMove)) == 1, "it was made after all"

    run(scenario())


@pytest.mark.parametrize("silent", [True, False])
def test_a_new_replica_that_falls_silent_or_has_no_space_is_given_up_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, silent: bool
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        lose(kept, "r3")
        await kept.look()
        (move,) = kept.log.machine.moves.values()
        kept.log.apply(ReplicasMade(((GROUP, move.add),)))
        kept.statuses["r1"] = status_of("r1", "leader", ("r1", "r2", "r3"), (move.add,))
        if not silent:
            kept.statuses[move.add] = replace(status_of(move.add, "learner", ()), read_only=True)
        for _ in range(5):
            await kept.look(10)
        assert kept.removed == []
        await kept.look(20)
        assert kept.removed == [move.add]

    run(scenario())


def test_a_group_that_cannot_begin_its_move_does_not_take_the_turn_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch, moves_at_once=1)
        first = add_topic(kept, "a-first", "b1", "b2")  # one of two: more urgent than one of three
        lose(kept, "r2", group_id=first)
        lose(kept, "r3")
        parts: Any = kept.keeper._mover

        async def statuses(partition: Any, _: object) -> Any:
            return {} if partition.group_id == first else kept.statuses

        parts._statuses = statuses
        await kept.look()
        assert kept.of(BeginMove) == []
        await kept.look()
        assert [each.group_id for each in kept.of(BeginMove)] == [GROUP]

    run(scenario())


def test_a_disk_that_has_just_come_is_looked_at_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        asked: list[bool] = []
        scout: Any = kept.keeper._scout
        scout.is_due = lambda *, eager: asked.append(eager)
        kept.looks_further()
        await kept.look()
        del scout.disks["b3"]
        await kept.look()
        kept.here("b1", "b2", "b4")
        await kept.look()
        assert asked == [False, True, False]

    run(scenario())
