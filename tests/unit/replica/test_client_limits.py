"""Limits of a replica's clients, and who has to go: the idle first, never who has something under way."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayqueue.config import CallSettings
from rayqueue.errors import QueueFullError, RayQueueError, TransportError
from rayqueue.net.channel import Channel
from rayqueue.net.streams import Stream
from rayqueue.protocol.calls import GetBounds, JoinGroup
from rayqueue.protocol.data import encode_fetch
from rayqueue.protocol.failures import decode_failure
from rayqueue.protocol.frames import Frame, FrameReader, Kind, head
from rayqueue.replica.clients import Clients, ClientStats
from rayqueue.testing import wait_for
from tests.unit.cluster.cluster_state import Service
from tests.unit.net.client_net import RawClient, at
from tests.unit.replica.test_client_strangers import cluster_of, works


class Port:
    """A replica's clients over real sockets, at a time that the test tells. ``served`` are the requests."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 1000.0
        self.served: list[tuple[int, int]] = []
        self.members: set[int] = set()
        self.clients = Clients(CallSettings(**settings), 1 << 20, damaged=pytest.fail, clock=lambda: self.now_s)
        self.clients.service = self  # type: ignore[assignment]  # all that clients need of one
        self._sockets: list[socket.socket] = []

    def serve(self, client: int, frame: Frame) -> None:
        self.served.append((client, frame.request))

    def needs(self, client: int) -> bool:
        return client in self.members

    def client_gone(self, client: int) -> None:
        """Nothing is kept for it."""

    def connect(self, source: str = "10.0.0.1", unread: bytes = b"") -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.settimeout(5)
        self._sockets.append(ours)
        self.clients.admit(Stream(theirs, source), unread)
        return ours

    def close(self) -> None:
        self.clients.close()
        for each in self._sockets:
            each.close()


@contextmanager
def port(**settings: Any) -> Iterator[Port]:
    made = Port(**settings)
    try:
        yield made
    finally:
        made.close()


def fate(client: socket.socket) -> RayQueueError | None:
    """What the replica told a client about its connection; None if it still stands."""
    client.setblocking(False)
    reader = FrameReader(1 << 20)
    try:
        count = client.recv_into(reader.space())
    except BlockingIOError:
        return None
    (frame,) = reader.frames(count)
    assert (frame.kind, frame.request) == (Kind.FAILED, 0)
    client.setblocking(True)
    assert client.recv(1) == b"", "told, but not hung up on"
    return decode_failure(frame.body)


def request(number: int = 1) -> bytes:
    return head(Kind.CALL, number, 0)


def test_idle_connections_lock_nobody_out() -> None:
    """The longest idle one goes, and is told why."""
    with port(max_clients=4) as here:
        idle = []
        for second in range(4):
            here.now_s = 1000.0 + second
            idle.append(here.connect())
        here.now_s = 1010.0
        newcomer = here.connect()
        assert [type(fate(each)) for each in idle] == [TransportError, type(None), type(None), type(None)]
        assert fate(newcomer) is None
        assert here.clients.stats() == ClientStats(connected=4, refused=0, hung_up=1)


def test_who_has_something_under_way_stays() -> None:
    with port(max_clients=2) as here:
        busy, member = here.connect(unread=request()), here.connect()
        here.members.add(2)
        here.now_s += 3600.0
        newcomer = here.connect()
        assert type(fate(newcomer)) is QueueFullError
        assert fate(busy) is fate(member) is None
        assert here.clients.stats() == ClientStats(connected=2, refused=1, hung_up=0)
        here.clients.send(1, Kind.ANSWER, 1, (b"",))  # answered: now it is idle
        here.clients.flush()
        assert busy.recv(100) == head(Kind.ANSWER, 1, 0)
        assert fate(here.connect()) is None
        assert type(fate(busy)) is TransportError


def test_who_came_just_now_is_not_thrown_out_by_the_next() -> None:
    with port(max_clients=2) as here:
        first, second = here.connect(), here.connect()
        assert type(fate(here.connect())) is QueueFullError
        assert fate(first) is fate(second) is None


def test_one_source_has_its_share() -> None:
    with port(max_clients=10, max_clients_per_source=3) as here:
        crowd = [here.connect("10.0.0.1", request()) for _ in range(3)]
        refusal = fate(here.connect("10.0.0.1"))
        assert isinstance(refusal, QueueFullError)
        assert "of this address" in str(refusal)
        other = here.connect("10.0.0.2", request())
        here.now_s += 60.0
        idle = here.connect("10.0.0.3")
        here.now_s += 60.0
        # A source that is full makes room among its own: nobody else's idle ones go for it.
        assert isinstance(fate(here.connect("10.0.0.1")), QueueFullError)
        assert all(fate(each) is None for each in (*crowd, other, idle))


def test_idle_for_too_long() -> None:
    with port(client_idle_ms=60_000) as here:
        idle, busy, member = here.connect(), here.connect(unread=request()), here.connect()
        half = here.connect(unread=request()[:5])
        here.members.add(3)
        here.now_s += 59.0
        here.clients.sweep()
        assert fate(idle) is None
        here.now_s += 2.0
        here.clients.sweep()
        told = fate(idle)
        assert isinstance(told, TransportError)
        assert "idle for 61 s" in str(told)
        assert isinstance(fate(half), TransportError)
        assert fate(busy) is fate(member) is None


def test_silent_clients_hold_little_memory() -> None:
    """Neither for what they announced nor for what they once sent."""
    with port() as here:
        announced = head(Kind.APPEND, 1, (1 << 20) - 5)
        for _ in range(200):
            here.connect(unread=announced)
        held = sum(client.reader.size_bytes for client in here.clients._clients.values())
        assert held < 200 * 5000


# -- through a replica -------------------------------------------------------------------


def test_a_client_beside_a_crowd_of_idle_ones_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayqueue.replica.clients._EVICTED_AFTER_S", 0.0)
    with cluster_of(tmp_path, calls={"max_clients": 8}) as cluster:
        waiting = RawClient(cluster.endpoint())
        body = encode_fetch(at(0, wait_ms=30_000))
        waiting.socket.sendall(head(Kind.FETCH, 1, len(body)) + body)
        crowd = [RawClient(cluster.endpoint()) for _ in range(30)]
        works(cluster)
        assert [answer.kind for answer in waiting.frames()] == [Kind.FETCHED]
        for client in (waiting, *crowd):
            client.close()


def test_who_finds_no_room_is_told_so_in_its_own_words(tmp_path: Path) -> None:
    with cluster_of(tmp_path, calls={"max_clients": 1}) as cluster:
        first = RawClient(cluster.endpoint())
        wait_for(lambda: len(cluster.replica.clients) == 1, "the first to be there")

        async def scenario() -> None:
            channel = await Channel.open(cluster.endpoint(), cluster.settings)
            with pytest.raises(RayQueueError) as caught:
                await channel.call(GetBounds())
            assert "which is the limit" in str(caught.value)

        cluster.run(scenario())
        first.close()


@pytest.mark.slow
def test_a_replica_sweeps(tmp_path: Path) -> None:
    with cluster_of(tmp_path, calls={"client_idle_ms": 200}) as cluster:
        client = RawClient(cluster.endpoint())
        (told,) = client.frames()
        assert "idle" in str(decode_failure(told.body))
        assert client.is_closed()
        client.close()
        works(cluster)


def test_a_member_is_not_idle() -> None:
    service = Service()
    assert not service.coordinator.has_members(7)
    service.ask(JoinGroup(group="g", member="m", topics=()), client=7)
    service.pass_time(1)
    assert service.coordinator.has_members(7)
    assert not service.coordinator.has_members(8)
    service.coordinator.disconnected(service.now, 7)
    assert not service.coordinator.has_members(7)
