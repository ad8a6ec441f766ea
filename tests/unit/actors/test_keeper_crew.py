"""The keeper's crew: brokers that are gone, or elsewhere, when a step is taken, and replicas damaged too early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayqueue.actors.keeper import crew as crews
from rayqueue.actors.keeper.crew import Crew
from rayqueue.actors.keeper.home import Home
from rayqueue.actors.keeper.plan import Confirm, Remove, ReplicaKey, Start
from rayqueue.cluster.commands import BeginMove
from rayqueue.cluster.moves import Reason
from rayqueue.errors import DamagedLogError, DiskFullError, NoBrokerError
from rayqueue.ids import ReplicaId
from tests.unit.actors.kept_cluster import GROUP, KeptCluster, run, status_of

KEY = ReplicaKey(GROUP, ReplicaId("r3"))


def partitions(kept: KeptCluster) -> Any:
    (info,) = kept.view.topics.values()
    return {part.group_id: (info, part) for part in info.partitions}


def actor(answer: Callable[[], Awaitable[Any]]) -> Any:
    return SimpleNamespace(address=SimpleNamespace(remote=answer))


def test_a_replica_is_started_where_its_broker_is_when_its_turn_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch, starts_at_once=1)
        crew: Crew = kept.keeper._crew
        started: list[tuple[str, str, str]] = []
        first, let = asyncio.Event(), asyncio.Event()

        async def answers() -> None:
            first.set()
            await let.wait()

        def start(spec: Any, *, ray_node_id: str) -> Any:
            started.append((spec.replica_id, ray_node_id, spec.host))
            return actor(answers)

        monkeypatch.setattr(crews, "start_actor", start)
        steps = [
            asyncio.create_task(crew._take(Start(ReplicaKey(GROUP, ReplicaId(node)), "b3", True), partitions(kept)))
            for node in ("r1", "r2", "r3")
        ]
        await first.wait()
        # Its node is started anew while two of them wait for their turn; then it is gone.
        census = kept.keeper._census
        census.current["b3"] = "ray-new"
        census.homes["ray-new"] = Home("b3", "h-b3", "ray-new", 0, None, None)
        del census.homes["ray-b3"]
        let.set()
        await steps[1]
        kept.here("b1", "b2")
        assert started[:2] == [("r1", "ray-b3", "h-b3"), ("r2", "ray-new", "h-b3")]
        with pytest.raises(NoBrokerError, match="b3"):
            await crew._take(Start(KEY, "b3", False), partitions(kept))
        await asyncio.gather(*steps, return_exceptions=True)

    run(scenario())


def test_a_broker_that_goes_while_a_replica_is_ended_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        crew: Any = kept.keeper._crew

        async def end(*_: object, close: bool) -> None:
            kept.here("b1", "b2")

        crew._end = end
        with pytest.raises(NoBrokerError, match="broker b3 is gone; retry when it is back"):
            await crew._take(Remove(KEY, "b3"), partitions(kept))

    run(scenario())


def test_a_new_replica_that_is_damaged_before_it_is_known_to_be_made_is_lost_and_its_move_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        hands: Any = kept.keeper._hands
        kept.log.apply(BeginMove(GROUP, "r3", "b4", Reason.ASKED))
        new = ReplicaKey(GROUP, ReplicaId(kept.log.machine.moves[GROUP].add))

        async def damaged() -> None:
            raise DamagedLogError("a checksum")

        async def handle(_: object) -> Any:
            return actor(damaged)

        handles = hands.handle
        hands.handle = handle
        await kept.keeper._crew._take(Confirm(new, "b4"), partitions(kept))
        assert dict(kept.log.machine.lost) == {tuple(new): "a checksum"}
        hands.handle = handles
        await kept.look()
        assert list(kept.log.machine.doomed) == [tuple(new)]
        await kept.look()
        assert kept.log.machine.moves == {}, "an operator asked for it, and may ask again"

    run(scenario())


def test_why_a_replica_cannot_be_made_is_remembered_until_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        crew: Crew = kept.keeper._crew
        full: list[Exception] = [DiskFullError("a traceback\nno space left"), NoBrokerError("b3 is gone")]

        async def answers() -> None:
            if full:
                raise full[0]

        monkeypatch.setattr(crews, "start_actor", lambda *_, **__: actor(answers))
        for expected in ({KEY: "no space left"}, {KEY: "no space left"}):
            with pytest.raises((DiskFullError, NoBrokerError)):
                await crew._take(Start(KEY, "b3", True), partitions(kept))
            assert crew.failing == expected, "that a broker is gone is no failure of its disk"
            del full[0]
        await crew._take(Start(KEY, "b3", True), partitions(kept))
        assert (crew.failing, crew.made) == ({}, {KEY})
        full.append(DiskFullError("no space left"))
        await crew._take(Start(KEY, "b3", False), partitions(kept))
        assert crew.failing == {}, "it was made before, and says itself why it does not run"

    run(scenario())


def test_a_new_replica_that_runs_and_has_found_damage_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said so while it was not known to be made, which was void."""

    async def scenario() -> None:
        kept = KeptCluster(tmp_path, monkeypatch)
        kept.log.apply(BeginMove(GROUP, "r3", "b4", Reason.ASKED))
        add = kept.log.machine.moves[GROUP].add
        kept.statuses[add] = status_of(add, "follower", ("r1", "r2", "r3"), damaged="a checksum")
        await kept.look()
        assert add not in {move.add for move in kept.log.machine.moves.values()}

    run(scenario())
