"""Two Ray nodes that are one broker, by their labels: the keeper leaves it where its coordinator runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from rayqueue.actors.coordinator_actor import CoordinatorSpec
from rayqueue.actors.keeper import nodes
from rayqueue.actors.keeper.home import ClusterManifest, Home
from rayqueue.actors.keeper.keeper import Keeper
from rayqueue.actors.keeper.nodes import RayNode
from rayqueue.config import Settings
from rayqueue.ids import COORDINATOR, ReplicaId

CLUSTER = ClusterManifest("cluster-a", {ReplicaId("c1"): "b"}, complete=True)


def alive(*names: str) -> dict[str, RayNode]:
    return {name: RayNode(name, "127.0.0.1", 1, None) for name in names}


def home(node: str) -> Home:
    return Home("b", "127.0.0.1", node, 0, CLUSTER, None)


def test_a_broker_stays_on_its_coordinators_node_whoever_is_found_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "answers", lambda _: True)

    async def look() -> None:
        spec = CoordinatorSpec(COORDINATOR, ReplicaId("c1"), Settings(data_dir=tmp_path), cluster=CLUSTER)
        keeper = Keeper(spec)
        keeper.runs_on("n1")
        known = keeper._census
        known.homes = {"n2": home("n2"), **known.homes}  # another one is identified before
        for _ in range(2):
            known.current = await known._current_nodes(alive("n1", "n2"))
            assert known.current == {"b": "n1"}
        del known.homes["n1"]  # it died
        assert await known._current_nodes(alive("n2")) == {"b": "n2"}

    with caplog.at_level(logging.WARNING):
        asyncio.run(look())
    (told,) = [record.getMessage() for record in caplog.records]  # once
    assert "nodes n1 and n2 are both broker b" in told
    assert "--labels rayqueue.broker=NAME" in told
