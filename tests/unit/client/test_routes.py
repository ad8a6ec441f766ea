"""The routes of a client: topics that change under those who wait, leaders that cannot be found. No Ray, no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from rayqueue.actors.directory import RayDirectory
from rayqueue.client.consumer.assigned import AssignedPartition
from rayqueue.client.consumer.fetcher import Fetcher
from rayqueue.client.consumer.subscription import Subscription
from rayqueue.client.routes import ClusterRoutes
from rayqueue.config import ClusterSettings, Settings
from rayqueue.errors import (
    ClosedError,
    NotLeaderError,
    OutcomeUnknownError,
    RayQueueError,
    StoreMissingError,
    TopicRecreatedError,
    UnknownTopicError,
)
from rayqueue.net import route as router
from rayqueue.net.interfaces import ask
from rayqueue.protocol import calls
from rayqueue.protocol.calls import Bounds, GetBounds, GetStatus, GetTopics, ReplicaStatus, Topics
from rayqueue.protocol.data import FetchAnswer, FetchRequest
from rayqueue.protocol.topics import PartitionInfo, ReplicaInfo, TopicInfo, TopicPartition, TopicSettings
from tests.unit.client.small_cluster import quick_settings, until

P0 = TopicPartition("orders", 0)


class World:
    """What the coordinator says, and which replica of each Raft group leads."""

    def __init__(self) -> None:
        self.topics: dict[str, TopicInfo] = {}
        self.leaders: dict[str, str] = {}
        self.asked: list[calls.Call] = []
        self.fetches: list[str] = []

    def make(self, topic_id: int, *nodes: str, led: bool = True, partitions: int = 1) -> None:
        replicas = tuple(ReplicaInfo(node, "b") for node in nodes or ("r1", "r2"))
        parts = tuple(PartitionInfo(n, f"orders-{n}.{topic_id}", replicas) for n in range(partitions))
        self.topics["orders"] = TopicInfo("orders", topic_id, TopicSettings(partitions=partitions), parts)
        for part in parts if led else ():
            self.leaders[part.group_id] = replicas[0].replica_id

    async def call(self, call: calls.Call, **_: Any) -> Any:
        """The coordinator."""
        await asyncio.sleep(0)
        self.asked.append(call)
        if isinstance(call, calls.CreateTopic):
            self.make(9)
            return self.topics["orders"]
        assert isinstance(call, GetTopics)
        return Topics(1, tuple(self.topics[name] for name in call.names or () if name in self.topics))

    def close(self) -> None:
        """As a route is."""


class FakeReplicas:
    world: World

    def __init__(self, group_id: str, nodes: Any, directory: Any, settings: Settings, **_: Any) -> None:
        self.group_id = group_id
        self.replica_ids = tuple(nodes)

    async def refresh(self, *, force: bool = False) -> None:
        return None

    async def channel(self, node: str) -> FakeChannel:
        await asyncio.sleep(0.001)
        return FakeChannel(self.world, self.group_id, node)

    def keep_only(self, wanted: Any) -> None:
        return None

    def close(self) -> None:
        return None


class FakeChannel:
    def __init__(self, world: World, group_id: str, node: str) -> None:
        self.world, self.group_id, self.node = world, group_id, node

    async def call(self, call: calls.Call, **_: Any) -> Any:
        await asyncio.sleep(0)
        if isinstance(call, GetStatus):
            role = "leader" if self.world.leaders.get(self.group_id) == self.node else "follower"
            return ReplicaStatus(self.node, role, None, 1, 0, 0, 0)
        assert isinstance(call, GetBounds)
        return Bounds(0, int(self.group_id.rpartition(".")[2]))

    def fetch(self, request: FetchRequest) -> asyncio.Future[FetchAnswer]:
        self.world.fetches.append(f"{self.group_id} {self.node}")
        answer: asyncio.Future[FetchAnswer] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, answer.set_result, FetchAnswer([], 0, 0))
        return answer

    def watch(self, overdue: Any) -> None:
        return None

    def add_closed_callback(self, callback: Any) -> None:
        return None


def in_world(
    monkeypatch: pytest.MonkeyPatch, tmp: Path, test: Callable[[World, ClusterRoutes], Coroutine[Any, Any, None]]
) -> None:
    world = World()
    monkeypatch.setattr(FakeReplicas, "world", world, raising=False)
    monkeypatch.setattr(router, "Replicas", FakeReplicas)
    monkeypatch.setattr(router, "_LEADERLESS_S", 0.05)

    async def run() -> None:
        settings = quick_settings(tmp).model_copy(update={"cluster": ClusterSettings(auto_create_topics=True)})
        routes = ClusterRoutes(RayDirectory("test"), settings)
        routes.coordinator = world  # type: ignore[assignment]
        try:
            await asyncio.wait_for(test(world, routes), 20)
        finally:
            await routes.close()

    asyncio.run(run())


async def error_of(work: Any) -> BaseException | None:
    try:
        await work
    except (RayQueueError, asyncio.CancelledError) as error:
        return error
    return None


def test_a_route_that_is_closed_tells_those_who_wait_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def test(world: World, routes: ClusterRoutes) -> None:
        world.make(1, led=False)
        route = await routes.partition(P0)
        waiting = [asyncio.ensure_future(error_of(route.leader())) for _ in range(2)]
        calling = asyncio.ensure_future(error_of(route.call(GetBounds())))
        await asyncio.sleep(0.01)
        given_up = asyncio.ensure_future(route.leader())
        await asyncio.sleep(0)
        given_up.cancel()
        route.close()
        assert [type(each) for each in await asyncio.gather(*waiting, calling)] == [ClosedError] * 3
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert isinstance(await error_of(route.leader()), ClosedError)

    in_world(monkeypatch, tmp_path, test)


def test_closing_the_connection_tells_those_who_look_a_topic_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def test(world: World, routes: ClusterRoutes) -> None:
        waiting = asyncio.ensure_future(error_of(routes.topic("orders")))
        await asyncio.sleep(0)
        await routes.close()
        assert isinstance(await waiting, ClosedError)

    in_world(monkeypatch, tmp_path, test)


def test_an_id_names_one_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def test(world: World, routes: ClusterRoutes) -> None:
        world.make(1)
        assert (await routes.partition(P0, 1)).group_id == "orders-0.1"
        world.make(2)
        assert (await routes.partition(P0, 1)).group_id == "orders-0.1", "nobody has looked since"
        assert (await routes.partition(P0, 2)).group_id == "orders-0.2", "who names a newer one knows better"
        asked = len(world.asked)
        assert isinstance(await error_of(routes.partition(P0, 1)), TopicRecreatedError)
        assert len(world.asked) == asked, "an older one cannot come back"
        assert (await routes.partition(P0)).group_id == "orders-0.2"

    in_world(monkeypatch, tmp_path, test)


@pytest.mark.parametrize("topic_id", [None, 1])
def test_whoever_waits_for_the_leader_of_a_deleted_topic_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, topic_id: int | None
) -> None:
    async def test(world: World, routes: ClusterRoutes) -> None:
        world.make(1, led=False)
        asking = asyncio.ensure_future(ask(routes, P0, GetBounds(), topic_id=topic_id))
        await asyncio.sleep(0.02)
        world.make(2)
        if topic_id is None:
            assert await asking == Bounds(0, 2), "who means the name is answered by the new one"
        else:
            assert isinstance(await error_of(asking), TopicRecreatedError)
        world.topics.clear()
        world.leaders.clear()
        assert isinstance(await error_of(routes.topic("orders", refresh=True)), UnknownTopicError)
        assert isinstance(await error_of(ask(routes, P0, GetBounds(), topic_id=2)), UnknownTopicError)
        assert not world.topics, "who is bound to a topic does not make another one of its name"
        assert await ask(routes, P0, GetBounds()) == Bounds(0, 9), "who only names it does, if that is wanted"

    in_world(monkeypatch, tmp_path, test)


def test_replicas_that_are_others_by_now_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def test(world: World, routes: ClusterRoutes) -> None:
        world.make(1, "r1", "r2", led=False)
        asking = asyncio.ensure_future(ask(routes, P0, GetBounds(), topic_id=1))
        await asyncio.sleep(0.02)
        world.make(1, "r3", "r4")
        assert await asking == Bounds(0, 1)

    in_world(monkeypatch, tmp_path, test)


def test_a_fetcher_goes_on_by_the_new_route(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def test(world: World, routes: ClusterRoutes) -> None:
        world.make(1, led=False)
        settings = quick_settings(tmp_path)
        subscription = Subscription(settings.consumer)
        fetcher = Fetcher(subscription, routes, settings, Random(1), grouped=True)
        assigned = AssignedPartition(P0, 1, 1)
        subscription.add(assigned)
        subscription.begin(assigned, {0: 0}, {})
        fetcher.start(assigned)
        await asyncio.sleep(0.02)
        (await routes.partition(P0)).close()
        world.make(1, "r3")
        await until(lambda: world.fetches)
        assert world.fetches[0] == "orders-0.1 r3"
        fetcher.close()

    in_world(monkeypatch, tmp_path, test)


def test_a_fetcher_that_is_cancelled_by_others_goes_on_and_one_that_breaks_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def test(world: World, routes: ClusterRoutes) -> None:
        world.make(1)
        settings = quick_settings(tmp_path)
        subscription = Subscription(settings.consumer)
        fetcher = Fetcher(subscription, routes, settings, Random(1))
        assigned = AssignedPartition(P0, 1)
        subscription.add(assigned)
        subscription.begin(assigned, {0: 0}, {})
        fetcher.start(assigned)
        await until(lambda: world.fetches)
        next(iter(fetcher._tasks[assigned])).cancel()
        before = len(world.fetches)
        await until(lambda: len(world.fetches) > before + 1)
        monkeypatch.setattr(FakeChannel, "fetch", lambda *_: 1 / 0)
        await until(subscription.error)
        fetcher.close()

    in_world(monkeypatch, tmp_path, test)


def test_who_finds_no_leader_is_told_what_the_replicas_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a partition with one copy nobody else will ever lead: that nobody leads now is not all that is to be said."""

    async def test(world: World, routes: ClusterRoutes) -> None:
        world.make(1, "r1", "r2", "r3", led=False)
        route = await routes.partition(P0)

        async def channel(node: str) -> Any:
            if node == "r1":
                raise StoreMissingError("there is no store. The records before offset 30 were acknowledged")
            if node == "r2":
                raise OutcomeUnknownError("died")
            found = FakeChannel(world, route.group_id, node)
            status = ReplicaStatus(node, "follower", None, 1, 0, 0, 0, "entry 7 does not match its checksum")
            monkeypatch.setattr(found, "call", lambda _: asyncio.sleep(0, status))
            return found

        monkeypatch.setattr(route._replicas, "channel", channel)
        error = await error_of(route.call(GetBounds(), timeout_ms=300))
        assert isinstance(error, NotLeaderError)
        assert "(r1: there is no store. The records before offset 30 were acknowledged; r3: entry 7 does" in str(error)
        assert "r2" not in str(error)

    in_world(monkeypatch, tmp_path, test)
