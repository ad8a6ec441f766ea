"""Clients that talk to replica actors directly: nothing is lost or doubled, whoever is killed or stopped meanwhile.

One Ray and one group for the whole module, on loopback: each test leaves the group whole.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rayqueue.actors.directory import RayDirectory
from rayqueue.client.embedded import embedded_ray
from rayqueue.client.io import IoThread
from rayqueue.config import Settings
from rayqueue.errors import OutcomeUnknownError, RayQueueError
from rayqueue.ids import ReplicaId
from rayqueue.net.channel import Channel
from rayqueue.net.route import GroupRoute
from rayqueue.protocol import calls
from rayqueue.protocol.data import ANY_LANE, READ_FOLLOWER, Appended, Cursor, FetchRequest
from rayqueue.records import RecordBatch
from rayqueue.testing import wait_for
from tests.integration.actor_groups import ActorGroup, actor_settings, new_producer
from tests.integration.history import RECORDS_PER_BATCH, numbered

pytestmark = pytest.mark.timeout(120)

IN_FLIGHT = 8
TIMEOUT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    with embedded_ray():
        yield


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActorGroup]:
    with ActorGroup("direct-0", actor_settings(data_dir=tmp_path_factory.mktemp("direct"))) as started:
        yield started


@pytest.fixture
def group(started: ActorGroup) -> ActorGroup:
    wait_for(lambda: len(started.statuses()) == 3, "all replicas", TIMEOUT_S)
    return started


@pytest.fixture
def route(group: ActorGroup) -> Iterator[GroupRoute]:
    io = IoThread.shared()

    async def made() -> GroupRoute:
        return group.route()

    route = io.call(made())
    yield route
    io.loop.call_soon_threadsafe(route.close)


def run(work: Any) -> Any:
    return IoThread.shared().call(work, TIMEOUT_S)


class Client:
    """A producer and a consumer of their own, until ``stop``: several batches in flight, and reading behind them."""

    def __init__(self, route: GroupRoute) -> None:
        self.producer = new_producer()
        self.acked: list[Appended] = []
        self.read: list[tuple[int, bytes]] = []
        self.longest_wait_s = 0.0
        self._route = route
        self._stop = False
        self._writing = IoThread.shared().run(self._write())
        self._reading = IoThread.shared().run(self._consume())

    def wait_for(self, more: int) -> None:
        goal = len(self.acked) + more

        def reached() -> bool:
            for work in (self._writing, self._reading):
                if work.done():
                    work.result()
            return len(self.acked) >= goal

        wait_for(reached, f"{goal} acknowledged batches", TIMEOUT_S)

    def stop(self) -> None:
        """All that was sent is acknowledged, and read."""
        self._stop = True
        self._writing.result(TIMEOUT_S)
        self._reading.result(TIMEOUT_S)

    async def _write(self) -> None:
        """What failed is sent again with all that was sent after it, in order: the replicas know duplicates."""
        window: deque[bytes] = deque()
        sent: deque[asyncio.Future[Appended]] = deque()
        made = 0
        last_s = time.monotonic()
        while window or not self._stop:
            while len(window) < IN_FLIGHT and not self._stop:
                window.append(numbered(self.producer, made * RECORDS_PER_BATCH))
                made += 1
            try:
                channel = await self._route.leader()
                for batch in list(window)[len(sent) :]:
                    sent.append(channel.append(batch))
                if not sent:
                    continue
                answer = await sent[0]
            except RayQueueError as error:
                if not error.retriable:
                    raise
                for other in sent:
                    other.cancel()
                sent.clear()
                self._route.failed(error)
                await asyncio.sleep(0.005)
                continue
            window.popleft()
            sent.popleft()
            self.acked.append(answer)
            self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - last_s)
            last_s = time.monotonic()

    async def _consume(self) -> None:
        offset = 0
        while not (self._writing.done() and self.acked and offset >= self._end()):
            try:
                channel = await self._route.leader()
                answer = await channel.fetch(FetchRequest((Cursor(ANY_LANE, offset),), 1 << 20, 200))
            except RayQueueError as error:
                if not error.retriable:
                    raise
                self._route.failed(error)
                await asyncio.sleep(0.005)
                continue
            for base, count, payload in answer.batches:
                self.read.append((base, bytes(payload)))
                offset = base + count

    def _end(self) -> int:
        last = self.acked[-1]
        assert last.base_offset is not None
        return last.base_offset + last.count


def check(group: ActorGroup, *clients: Client, replicas: int = 3) -> None:
    """Every replica has each acknowledged batch once, where its answer says, in order; readers have read the same."""
    end = max(client._end() for client in clients)
    logs = list(group.logs(end, replicas=replicas).values())
    assert all(log == logs[0] for log in logs)
    log = [(batch.base_offset, batch.payload) for batch in logs[0]]
    for client in clients:
        mine = [one for one in log if RecordBatch.decode(one[1]).header.producer_id == client.producer]
        assert mine == [
            (answer.base_offset, numbered(client.producer, number * RECORDS_PER_BATCH))
            for number, answer in enumerate(client.acked)
        ]
        assert client.read[: len(log)] == log[: len(client.read)]


def test_the_leader_is_killed_while_clients_write_and_read(group: ActorGroup, route: GroupRoute) -> None:
    clients = [Client(route), Client(route)]
    for _ in range(2):
        for client in clients:
            client.wait_for(30)
        node = run(route.leader()).endpoint.replica_id
        group.kill(node)
        for client in clients:
            client.wait_for(30)
        assert run(route.leader()).endpoint.replica_id != node
        wait_for(lambda: len(group.statuses()) == 3, "Ray to start it again", TIMEOUT_S)
    for client in clients:
        client.stop()
    check(group, *clients)


def test_all_are_killed_at_once(group: ActorGroup, route: GroupRoute) -> None:
    client = Client(route)
    client.wait_for(30)
    group.kill(*group.replica_ids)
    client.wait_for(30)
    client.stop()
    check(group, client)


def test_a_leader_that_is_stopped_is_left(group: ActorGroup, route: GroupRoute) -> None:
    """SIGSTOP closes no connection: only the others know that there is a new leader."""
    client = Client(route)
    client.wait_for(30)
    channel: Channel = run(route.leader())
    pid = group.process(channel.endpoint.replica_id).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        client.wait_for(30)
        assert run(route.leader()).endpoint.replica_id != channel.endpoint.replica_id
        assert channel.closed
    finally:
        os.kill(pid, signal.SIGCONT)
    client.stop()
    check(group, client)


def test_leadership_that_moves_is_followed(group: ActorGroup, route: GroupRoute) -> None:
    client = Client(route)
    for _ in range(3):
        client.wait_for(20)
        leader = run(route.leader()).endpoint.replica_id
        target = next(node for node in group.replica_ids if node != leader)
        group.transfer_leadership(target)
        client.wait_for(20)
        wait_for(lambda target=target: run(route.leader()).endpoint.replica_id == target, f"the way to {target}")  # type: ignore[misc]
    client.stop()
    check(group, client)


def test_calls_find_their_way(group: ActorGroup, route: GroupRoute) -> None:
    async def scenario() -> None:
        commit = calls.Commit(group="g", generation=0, offsets={})
        assert await route.call(commit) == calls.Position(0, {})
        channel = route.leader_channel
        assert channel is not None
        os.kill(pid_of[channel.endpoint.replica_id], signal.SIGKILL)
        assert await route.call(calls.GetPosition(group="g")) == calls.Position(0, {})
        reader = await route.any_replica(channel.endpoint.host)
        await reader.fetch(FetchRequest((Cursor(ANY_LANE, 0),), 100, 0, READ_FOLLOWER))

    pid_of = {node: group.process(node).pid for node in group.replica_ids}
    run(scenario())


def test_connections_are_few_and_end_with_the_route(group: ActorGroup) -> None:
    async def scenario() -> None:
        route = group.route()
        channel = await route.leader()
        assert await route.leader() is channel
        for _ in range(200):  # those that were asked who leads are let go
            if list(route._replicas._channels.values()) == [channel]:
                break
            await asyncio.sleep(0.05)
        assert list(route._replicas._channels.values()) == [channel]
        end = (await channel.call(calls.GetBounds())).end
        pending = channel.fetch(FetchRequest((Cursor(ANY_LANE, end),), 100, 10_000))
        route.close()
        with pytest.raises(OutcomeUnknownError):
            await pending
        with pytest.raises(RayQueueError):
            await route.leader()

    run(scenario())


class Elsewhere:
    """A client in a Ray worker, in an async actor: its own loop is not the one of the connections."""

    async def append(self, group_id: str, nodes: tuple[ReplicaId, ...], settings: Settings, batch: bytes) -> Appended:
        async def work() -> Appended:
            route = GroupRoute(group_id, nodes, RayDirectory(settings.namespace), settings)
            return await (await route.leader()).append(batch)

        return await asyncio.wrap_future(IoThread.shared().run(work()))


def test_from_a_task_and_from_an_async_actor(group: ActorGroup) -> None:
    @ray.remote
    def task(group_id: str, nodes: tuple[ReplicaId, ...], settings: Settings, batch: bytes) -> Appended:
        async def work() -> Appended:
            route = GroupRoute(group_id, nodes, RayDirectory(settings.namespace), settings)
            return await (await route.leader()).append(batch)

        return IoThread.shared().call(work(), TIMEOUT_S)

    arguments = (group.group_id, group.replica_ids, group.settings)
    first: Appended = ray.get(task.remote(*arguments, numbered(new_producer(), 0)))
    remote: Any = ray.remote(Elsewhere)
    actor = remote.remote()
    second: Appended = ray.get(actor.append.remote(*arguments, numbered(new_producer(), 0)))
    assert first.base_offset is not None
    assert second.base_offset == first.base_offset + first.count
