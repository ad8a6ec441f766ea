"""A keeper without Ray: a real machine below it, and brokers that are here or away as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayqueue.actors.coordinator_actor import CoordinatorSpec
from rayqueue.actors.keeper import mover
from rayqueue.actors.keeper.home import ClusterManifest, Home
from rayqueue.actors.keeper.keeper import Keeper
from rayqueue.actors.keeper.plan import Doomed
from rayqueue.actors.keeper.scout import Disk
from rayqueue.cluster.commands import AnyCommand, CreateTopic, PutBroker, ReplicasMade
from rayqueue.config import Settings
from rayqueue.errors import LearnerBehindError, NotLeaderError
from rayqueue.ids import COORDINATOR, GroupId, Index, Offset, ReplicaId, Term
from rayqueue.protocol.topics import TopicSettings
from rayqueue.replica.coordinator_service import ClusterView
from rayqueue.replica.status import Status
from tests.unit.cluster.cluster_state import ClusterLog, view_of

GROUP = GroupId("orders-0.1")
_MANIFEST = ClusterManifest("cluster-a", {ReplicaId("c1"): "b1"}, complete=True)


def status_of(
    node: str,
    role: str,
    voters: Iterable[str],
    learners: Iterable[str] = (),
    *,
    damaged: str | None = None,
) -> Status:
    return Status(
        GROUP,
        ReplicaId(node),
        role,
        leader=ReplicaId(node) if role == "leader" else None,
        term=Term(1),
        start_offset=Offset(0),
        high_watermark=Offset(0),
        base_index=Index(1),
        last_index=Index(1),
        commit=Index(1),
        applied=Index(1),
        voters=tuple(map(ReplicaId, voters)),
        learners=tuple(map(ReplicaId, learners)),
        address=("h", 1),
        size_bytes=0,
        read_only=False,
        damaged=damaged,
        forgetful=(),
        syncs=0,
        sync_ms=0.0,
    )


class KeptCluster:
    """Four brokers; one partition with a copy on each of the first three. Make it in a running loop."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, **cluster: Any) -> None:
        self.now_s = 100.0
        patch.setattr(mover, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        patch.setattr(mover, "_still_so", _yes)
        self.log = ClusterLog()
        for each in ("b1", "b2", "b3", "b4"):
            self.log.apply(PutBroker(each, f"h-{each}", f"ray-{each}", 1 << 30))
        self.log.apply(CreateTopic("orders", TopicSettings(partitions=1, replication=3), (("b1", "b2", "b3"),)))
        self.log.apply(ReplicasMade(tuple(self.log.machine.unmade)))
        settings = Settings(data_dir=path, cluster={"coordinators": 1, **cluster})
        self.keeper = keeper = Keeper(CoordinatorSpec(COORDINATOR, ReplicaId("c1"), settings, cluster=_MANIFEST))
        self.leads = True
        self.unconfirmed = False
        """No majority says that whoever believes to lead the partition does."""
        self.changed: list[AnyCommand] = []
        self.removed: list[str] = []
        """Replicas that their group's leader was asked to remove."""
        self.doomed: list[Doomed] = []
        """Of the last look, what is to be removed on brokers that are here."""
        self.statuses = {each: status_of(each, "follower", ("r1", "r2", "r3")) for each in ("r2", "r3")}
        self.statuses["r1"] = status_of("r1", "leader", ("r1", "r2", "r3"))
        service = SimpleNamespace(view=None, set_brokers=None, tell_seen=None)
        hands: Any = keeper._hands
        hands.replica = SimpleNamespace(service=service, run=lambda _: None)
        hands.change, hands.asked, hands.handle = self._change, self._asked, self._handle
        parts: Any = keeper
        parts._census.look = parts._herald.look = nothing
        parts._crew.act = self._act
        self._look_further = parts._look_further
        parts._look_further = lambda _: None
        parts._mover._statuses = self._statuses
        # The scout has looked: most tests are not about its first look.
        self.disks = {each: Disk(100 << 30, 90 << 30) for each in ("b1", "b2", "b3", "b4")}
        parts._scout.disks, parts._scout.sizes, parts._scout.leaders = dict(self.disks), {GROUP: 0}, {GROUP: "b1"}
        self.here("b1", "b2", "b3", "b4")

    @property
    def view(self) -> ClusterView:
        return view_of(self.log.machine, leads=self.leads)

    def looks_further(self) -> None:
        """For leaders and disks, too."""
        parts: Any = self.keeper
        parts._look_further = self._look_further

    def here(self, *brokers: str) -> None:
        census = self.keeper._census
        census.current = {each: f"ray-{each}" for each in brokers}
        census.homes = {
            f"ray-{each}": Home(each, f"h-{each}", f"ray-{each}", 0, _MANIFEST, None, 1 << 30) for each in brokers
        }

    async def look(self, after_s: float = 1.0) -> None:
        """And let everything that it begins come to its end."""
        self.now_s += after_s
        await self.keeper._round()
        steps = list(self.keeper._hands.steps.values())
        if steps:
            await asyncio.wait(steps, timeout=0.05)  # a step that has nothing to do, or failed, waits a little
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.changed if isinstance(each, kind)]

    async def _change(self, command: AnyCommand) -> Any:
        self.changed.append(command)
        return self.log.apply(command)

    async def _asked(self, ask: Callable[..., None]) -> ClusterView:
        return self.view

    async def _handle(self, key: object) -> Any:
        async def remove(node: str) -> None:
            self.removed.append(node)

        async def confirm() -> None:
            if self.unconfirmed:
                raise NotLeaderError("it was deposed a moment ago")

        async def promote(node: str) -> None:
            raise LearnerBehindError(f"{node} is far behind")

        calls = {"remove": remove, "confirm_leadership": confirm, "add_learner": nothing, "promote": promote}
        return SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})

    async def _act(self, wanted: object, view: ClusterView, doomed: list[Doomed], behind: object) -> None:
        self.doomed = [each for each in doomed if each.broker in self.keeper._census.current]

    async def _statuses(self, *_: object) -> dict[str, Status]:
        return self.statuses


async def nothing(*_: object) -> None:
    pass


async def _yes(*_: object) -> bool:
    return True


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)
