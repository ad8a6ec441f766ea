"""A leader that hangs with its connections open: calls go on with the new one. Real sockets and channels, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rayqueue.config import ClientSettings, Settings
from rayqueue.errors import OutcomeUnknownError
from rayqueue.ids import GroupId, ReplicaId, Term
from rayqueue.net.directory import Directory
from rayqueue.net.endpoint import Endpoint
from rayqueue.net.route import GroupRoute
from rayqueue.protocol import hello
from rayqueue.protocol.calls import Bounds, GetBounds, GetStatus, ReplicaStatus, decode_partition_call, encode_answer
from rayqueue.protocol.data import ANY_LANE, Cursor, FetchRequest
from rayqueue.protocol.frames import HEAD, FrameReader, Kind

TOKEN = bytes(32)
PATIENCE_S = 10.0
"""Far less than a call may take; more than a busy machine needs."""


class Replica:
    """One that says who it takes for the leader, and that may fall silent."""

    def __init__(self, node: str, number: int) -> None:
        self.node = node
        self.number = number
        self.leads_in_term = 0
        self.silent = False
        self.asked = 0

    async def start(self) -> Endpoint:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        return Endpoint("127.0.0.1", port, TOKEN, ReplicaId(self.node), None, Term(0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key, ours = hello.key_of(TOKEN), hello.hello(bytes(range(32)))
        try:
            theirs = await reader.readexactly(hello.HELLO_BYTES)
            writer.write(ours)
            hello.check_proof(await reader.readexactly(hello.MAC_BYTES), key, b"client", theirs, ours)
            writer.write(hello.proof(key, b"replica", theirs, ours))
            frames = FrameReader(1 << 20)
            while data := await reader.read(1 << 16):
                space = frames.space()
                space[: len(data)] = data
                for kind, request, body in frames.frames(len(data)):
                    if not self.silent and kind == Kind.CALL:
                        answer = encode_answer(self._answer(decode_partition_call(bytes(body))))
                        writer.write(HEAD.pack(HEAD.size - 4 + len(answer), Kind.ANSWER, request) + answer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    def _answer(self, call: Any) -> Any:
        if isinstance(call, GetStatus):
            role = "leader" if self.leads_in_term else "follower"
            return ReplicaStatus(self.node, role, None, self.leads_in_term, 0, 0, 0)
        self.asked += 1
        return Bounds(0, self.number)


class Addresses(Directory):
    """The directory of this test."""

    def __init__(self, endpoints: dict[str, Endpoint]) -> None:
        self._endpoints = endpoints

    async def endpoint(self, group_id: GroupId, replica_id: ReplicaId) -> Endpoint:
        return self._endpoints[replica_id]

    async def coordinators(self) -> tuple[str, ...]:
        return ()


class World:
    def __init__(self, route: GroupRoute, old: Replica, new: Replica) -> None:
        self.route, self.old, self.new = route, old, new

    def fail_over(self) -> None:
        self.old.silent = True
        self.new.leads_in_term = 2


def in_world(tmp: Path, test: Callable[[World], Coroutine[Any, Any, None]], **client: Any) -> None:
    async def run() -> None:
        old, new = Replica("r1", 1), Replica("r2", 2)
        endpoints = {each.node: await each.start() for each in (old, new)}

        old.leads_in_term = 1
        settings = Settings(data_dir=tmp).model_copy(update={"client": ClientSettings(doubt_ms=50, **client)})
        route = GroupRoute("orders-0.1", ("r1", "r2"), Addresses(endpoints), settings)
        try:
            assert await route.call(GetBounds()) == Bounds(0, 1)
            await asyncio.wait_for(test(World(route, old, new)), 2 * PATIENCE_S)
        finally:
            route.close()
            for each in (old, new):
                each.server.close()

    asyncio.run(run())


def test_a_call_to_a_leader_that_hangs_goes_on_with_the_new_one(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.old.silent = True
        calling = asyncio.ensure_future(world.route.call(GetBounds()))
        await asyncio.sleep(0.2)
        assert not calling.done(), "nobody else leads yet"
        world.fail_over()
        assert await asyncio.wait_for(calling, PATIENCE_S) == Bounds(0, 2)

    in_world(tmp_path, test)


def test_so_does_one_that_waits_while_others_have_found_the_new_leader(tmp_path: Path) -> None:
    """A fetch that gives up lets the route look for the leader. What was asked of the old one must not stay there."""

    async def test(world: World) -> None:
        world.old.silent = True
        calling = asyncio.ensure_future(world.route.call(GetBounds()))
        reading = (await world.route.leader()).fetch(FetchRequest((Cursor(ANY_LANE, 0),), 1000))
        await asyncio.sleep(0.01)
        world.route.failed(OutcomeUnknownError("no answer to a fetch within 1500 ms"))
        world.fail_over()
        assert await asyncio.wait_for(calling, PATIENCE_S) == Bounds(0, 2)
        with pytest.raises(OutcomeUnknownError):
            await asyncio.wait_for(reading, PATIENCE_S)

    in_world(tmp_path, test)


def test_a_former_leader_that_answers_is_not_cut_off(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        former = await world.route.leader()
        world.new.leads_in_term = 2
        world.old.leads_in_term = 0
        world.route.failed(OutcomeUnknownError("deposed"))
        assert await world.route.call(GetBounds()) == Bounds(0, 2)
        assert former.unanswered == 0

    in_world(tmp_path, test)


def test_every_call_has_a_deadline(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.old.silent = world.new.silent = True
        with pytest.raises(OutcomeUnknownError):
            await asyncio.wait_for(world.route.call(GetBounds(), timeout_ms=300), PATIENCE_S)

    in_world(tmp_path, test)


def test_reading_from_followers_for_long_keeps_nothing_per_fetch(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        channel = await world.route.any_replica()
        before = len(channel._on_closed)
        for _ in range(100):
            await world.route.any_replica()
        assert len(channel._on_closed) <= before + 1

    in_world(tmp_path, test)
