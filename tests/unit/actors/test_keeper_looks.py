"""Looks of the keeper, without Ray: who is given up, what is moved, who is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayqueue.actors.keeper.plan import ReplicaKey
from rayqueue.cluster.commands import (
    BeginMove,
    BeginRebalance,
    CancelMove,
    CreateTopic,
    DrainBroker,
    DropPlanned,
    EndRebalance,
    FinishMove,
    ForgetBroker,
    NoteEvents,
    ReplicasMade,
    ReplicasRemoved,
)
from rayqueue.cluster.moves import Reason
from rayqueue.ids import ReplicaId
from rayqueue.protocol.topics import TopicSettings
from rayqueue.replica.status import Status
from tests.unit.actors.kept_cluster import GROUP, KeptCluster, nothing, run, status_of


def test_a_broker_that_is_gone_can_be_decommissioned_and_is_forgotten_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cluster.replace_after_ms`` is off."""

    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch, broker_wait_ms=10_000)
        machine = kept.log.machine
        await kept.look()
        kept.here("b1", "b2", "b4")
        kept.log.apply(DrainBroker("b3", True))
        for _ in range(9):
            await kept.look()
        assert kept.of(BeginMove) == [], "its node may just be restarting"
        await kept.look(3)
        (begun,) = kept.of(BeginMove)
        assert (begun.remove, begun.broker, begun.reason) == ("r3", "b4", Reason.AWAY)
        assert begun.why == "broker b3 has been decommissioned and is away"

        for _ in range(5):
            await kept.look()
        assert kept.of(ForgetBroker) == [], "what cannot be yet is not written to the log"
        kept.log.apply(FinishMove(GROUP, machine.moves[GROUP].add))
        assert machine.holds("b3") == 1
        await kept.look()
        assert "b3" not in machine.brokers
        await kept.look()
        assert kept.of(ForgetBroker) == [ForgetBroker("b3", away=True)]

        # It comes back after all: it is a broker as any other, and its old replica is deleted.
        kept.here("b1", "b2", "b3", "b4")
        await kept.look()
        assert not machine.brokers["b3"].draining
        assert [each.key for each in kept.doomed] == [(GROUP, "r3")]
        kept.log.apply(ReplicasRemoved(((GROUP, "r3"),)))
        assert machine.holds("b3") == 0

    run(scenario())


def test_a_broker_that_is_back_after_it_was_given_up_is_still_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch, broker_wait_ms=0)
        kept.here("b1", "b2", "b4")
        kept.log.apply(DrainBroker("b3", True))
        await kept.look()
        kept.here("b1", "b2", "b3", "b4")
        await kept.look()
        assert len(kept.of(CancelMove)) == 1, "what it has is worth more than what would be copied"
        await kept.look()
        assert [each.reason for each in kept.of(BeginMove)] == [Reason.AWAY, Reason.DRAIN]

    run(scenario())


def test_a_decommissioned_broker_that_restarts_is_neither_given_up_nor_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch, broker_wait_ms=10_000)
        kept.log.apply(DrainBroker("b3", True))
        await kept.look()
        (begun,) = kept.of(BeginMove)
        assert begun.reason is Reason.DRAIN
        kept.log.apply(FinishMove(GROUP, kept.log.machine.moves[GROUP].add))
        kept.here("b1", "b2", "b4")
        await kept.look()
        await kept.look(5)
        kept.here("b1", "b2", "b3", "b4")
        await kept.look(5)
        await kept.look(5)
        assert kept.log.machine.brokers["b3"].draining
        assert kept.of(ForgetBroker) == []

    run(scenario())


def test_a_broker_that_is_back_in_time_is_not_said_to_be_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch, replace_after_ms=3_000)
        await kept.look()
        kept.here("b1", "b2", "b4")
        await kept.look()
        await kept.look(2)
        kept.here("b1", "b2", "b3", "b4")
        await kept.look(2)
        await kept.look()
        told = [kind for noted in kept.of(NoteEvents) for _, kind, *_ in noted.events]
        assert "broker_back" in told
        assert "broker_given_up" not in told
        kept.here("b1", "b2", "b4")
        await kept.look()
        await kept.look(4)
        told = [kind for noted in kept.of(NoteEvents) for _, kind, *_ in noted.events]
        assert told.count("broker_given_up") == 1, "at the same look at which its replica is made anew"
        assert len(kept.of(BeginMove)) == 1

    run(scenario())


def test_what_is_known_of_actors_and_rebalances_ends_with_the_leadership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        crew = kept.keeper._crew
        kept.leads = False
        await kept.look()
        crew.made.add(ReplicaKey(GROUP, ReplicaId("r9")))
        crew.removed.add(ReplicaKey(GROUP, ReplicaId("r9")))
        await kept.look()
        kept.leads = True
        await kept.look()
        assert kept.of(ReplicasMade) + kept.of(ReplicasRemoved) == []

    run(scenario())


def test_leaders_that_were_settled_for_one_rebalance_are_looked_at_again_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        scout: Any = kept.keeper._scout
        scout._look_at_disks = scout._look_at_leaders = nothing
        kept.looks_further()

        async def look_for_leaders() -> None:
            await scout.look(kept.view, kept.keeper._alive(), eager=True)

        scout.is_due = lambda *, eager: False
        await kept.look()
        await look_for_leaders()  # in a hurry, for Ray drains a node
        kept.log.apply(BeginRebalance(((GROUP, "r3", "b4", 1),), 1))
        first = kept.log.machine.rebalance
        kept.log.apply(DropPlanned(((GROUP, "r3"),)))
        await kept.look()
        assert kept.of(EndRebalance) == [], "nobody has looked for it yet"
        await look_for_leaders()
        await kept.look()
        assert first is not None
        assert kept.of(EndRebalance) == [EndRebalance(first.number)]
        kept.log.apply(BeginRebalance(((GROUP, "r3", "b4", 1),), 1))
        kept.log.apply(DropPlanned(((GROUP, "r3"),)))
        await kept.look()
        await look_for_leaders()
        kept.leads = False
        await kept.look()
        kept.leads = True
        await kept.look()
        assert len(kept.of(EndRebalance)) == 1, "what was said before somebody else led is forgotten"

    run(scenario())


def test_a_learner_without_a_place_is_sent_away_without_a_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        scout: Any = kept.keeper._scout
        leader = status_of("r1", "leader", ("r1", "r2", "r3"), ("r3.1", "r9.9"))
        kept.statuses["r1"] = leader

        async def statuses(_: object) -> dict[tuple[str, str], Status]:
            return {(GROUP, "r1"): leader}

        scout._directory.statuses = statuses
        kept.log.apply(BeginMove(GROUP, "r3", "b4", Reason.ASKED))
        partitions = {part.group_id: part for part in kept.view.topics["orders"].partitions}
        await scout._look_at_leaders(partitions, {"b1", "b2", "b3", "b4"})
        await kept.look()
        assert kept.removed == ["r9.9"], "the move that is under way sees to it"
        kept.removed.clear()
        kept.log.apply(FinishMove(GROUP, "r3.1"))
        await kept.look()
        assert kept.removed == ["r9.9"], "the other has a place"

    run(scenario())


def test_what_cannot_be_moved_from_a_broker_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch, broker_wait_ms=0)
        kept.log.apply(CreateTopic("alone", TopicSettings(partitions=1, replication=1), (("b3",),)))
        kept.here("b1", "b2", "b4")
        kept.log.apply(DrainBroker("b3", True))
        await kept.look()
        (why,) = (why for group_id, why in kept.keeper._mover.waiting.items() if group_id.startswith("alone"))
        assert why.startswith("no copy is left to make another one from (r1: broker b3 has been decommissioned and is")

    run(scenario())
