"""An actor whose replica cannot start: it answers why, has lost data replaced, and tries again what may pass."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayqueue.actors import base, loss
from rayqueue.actors.base import ReplicaActor, ReplicaSpec
from rayqueue.actors.keeper import crew as crew_module
from rayqueue.actors.keeper.crew import Crew
from rayqueue.actors.keeper.plan import ReplicaKey
from rayqueue.actors.partition_actor import PartitionActor, PartitionSpec
from rayqueue.cluster.commands import ReplicaFound
from rayqueue.config import Settings
from rayqueue.errors import (
    DamagedLogError,
    DiskFullError,
    RayQueueError,
    StorageError,
    StoreAbandonedError,
    StoreFormatError,
    StoreMissingError,
)
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.log.starts import note_start, read_starts
from rayqueue.log.waymark import Waymark, waymark_path, write_waymark
from tests.unit.actors.kept_cluster import status_of

REPLICA = object()


class Actor(ReplicaActor[Any]):
    """Without Ray. ``outcomes`` are those of its starts; the last one is repeated."""

    def __init__(self, spec: ReplicaSpec, outcomes: list[Any]) -> None:
        self.outcomes, self.starts, self.ran = outcomes, 0, False
        super().__init__(spec)

    def _start(self) -> Any:
        self.starts += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _run_beside(self, replica: Any) -> None:
        assert replica is REPLICA
        self.ran = True


def run(path: Path, patch: pytest.MonkeyPatch, *outcomes: Any, rounds: int = 8) -> tuple[Actor, list[str]]:
    """The actor after so many pauses, and what it has reported."""
    reports: list[str] = []

    async def report_loss(*told: Any, insist: bool, missing: bool) -> None:
        reports.append(f"{told[1]} {told[3]}")
        await asyncio.sleep(60)

    patch.setattr(loss, "report_loss", report_loss)
    patch.setattr(base, "_TRY_AGAIN_S", 0.01)
    spec = ReplicaSpec(GroupId("orders-0.1"), ReplicaId("r1"), Settings(data_dir=path))

    async def live() -> Actor:
        actor = Actor(spec, list(outcomes))
        for _ in range(rounds):
            await asyncio.sleep(0.02)
        return actor

    return asyncio.run(live()), reports


def refused(code: int, path: str | None = "/disk/r1/LOCK") -> OSError:
    return OSError(code, os.strerror(code), path)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES, errno.EISDIR])
def test_a_disk_that_refuses_is_said_and_after_some_tries_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    actor, reports = run(tmp_path, monkeypatch, refused(code))
    assert actor.starts > base._TRIES
    with pytest.raises(StorageError, match=os.strerror(code)):
        _ = actor._replica
    assert len(reports) == 1, "and it goes on trying"
    assert os.strerror(code) in reports[0]
    assert not actor.ran


def test_a_disk_that_refuses_for_a_moment_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, reports = run(tmp_path, monkeypatch, refused(errno.EIO), refused(errno.EROFS), REPLICA)
    assert (actor.ran, actor._replica, reports, actor.starts) == (True, REPLICA, [], 3)


def test_a_directory_that_is_brought_back_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss is reported at once; but it may be the only one, and then nobody replaces it."""
    missing = StoreMissingError("there is no store")
    actor, reports = run(tmp_path, monkeypatch, missing, missing, REPLICA)
    assert actor.ran
    assert reports == ["r1 there is no store"]


@pytest.mark.parametrize("problem", [DiskFullError("no space"), refused(errno.ENOSPC), refused(errno.EMFILE, None)])
def test_what_is_no_fault_of_the_data_is_tried_for_ever_and_never_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    actor, reports = run(tmp_path, monkeypatch, *[problem] * 6, REPLICA)
    assert (actor.ran, reports) == (True, [])


@pytest.mark.parametrize(
    ("problem", "reported"),
    [
        (DamagedLogError("a checksum"), True),
        (StoreAbandonedError("of before"), True),
        (StoreFormatError("a newer release"), False),
    ],
)
def test_what_cannot_pass_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: RayQueueError, reported: bool
) -> None:
    actor, reports = run(tmp_path, monkeypatch, problem, REPLICA)
    assert (actor.starts, bool(reports)) == (1, reported)
    with pytest.raises(type(problem)):
        _ = actor._replica


def test_a_replica_that_its_disk_ends_leaves_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr(base, "die", ended.append)
    actor, _ = run(tmp_path, monkeypatch, REPLICA)
    path = actor._spec.path
    path.parent.mkdir(parents=True)
    errors = [StorageError("the log cannot be written: EIO"), refused(errno.EIO), ValueError("a bug")]
    for number, error in enumerate(errors):
        note_start(path, number)
        actor._die(error)
    assert ended == errors
    assert ["" if not each.failure else each.failure.split()[-1] for each in read_starts(path)] == [
        "EIO",
        "'/disk/r1/LOCK'",
        "",
    ]


# -- the only one of its group ------------------------------------------------------------------------


def test_an_only_replica_that_is_gone_says_how_far_it_had_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "restarted", lambda: True)
    settings = Settings(data_dir=tmp_path, transport={"secret": "only for this test"})
    spec = PartitionSpec(GroupId("orders-0.1"), ReplicaId("r1"), settings, create=True)
    actor: Any = PartitionActor.__new__(PartitionActor)
    actor._spec = spec
    found = actor._attempt()
    assert isinstance(found, StoreMissingError)
    assert "acknowledged" not in found.details, "nobody knows"
    waymark_path(spec.path).parent.mkdir(parents=True)
    write_waymark(spec.path, Waymark(3, 17, 30))
    found = actor._attempt()
    assert isinstance(found, StoreMissingError)
    assert found.details["acknowledged"] == 30
    assert str(found).endswith("The records before offset 30 were acknowledged")


@pytest.mark.parametrize(
    ("answer", "well"),
    [
        (status_of("r1", "leader", ("r1",)), True),
        (status_of("r1", "follower", ("r1",)), False),
        (status_of("r1", "leader", ("r1",), damaged="a bit"), False),
        (StoreMissingError("no store"), False),
    ],
)
def test_one_that_serves_again_is_struck_from_the_lost(
    monkeypatch: pytest.MonkeyPatch, answer: Any, well: bool
) -> None:
    key = ReplicaKey(GroupId("orders-0.1"), ReplicaId("r1"))
    crew: Any = Crew.__new__(Crew)
    told: list[Any] = []

    async def status() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def handle(_: ReplicaKey) -> Any:
        return SimpleNamespace(status=SimpleNamespace(remote=status))

    async def change(command: Any) -> None:
        told.append(command)

    crew._hands = SimpleNamespace(handle=handle, change=change)
    monkeypatch.setattr(crew_module, "_FIND_AGAIN_S", 0.0)
    assert asyncio.run(crew.find_again(key)) == well
    assert told == ([ReplicaFound(*key)] if well else [])
