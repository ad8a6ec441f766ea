"""Whom the TCP transport lets in, and what those cost whom it does not."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import socket
import time
from typing import Any

import pytest

from rayqueue.config import TransportSettings
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.raft.handshake import NONCE_BYTES, Dialer, Identity
from rayqueue.raft.transport import PeerDown, PeerUp, Received
from rayqueue.raft.wire import encode
from tests.unit.raft.tcp_net import (
    DEADLINE_S,
    GROUP,
    HOST,
    SECRET,
    A,
    B,
    C,
    Clock,
    Net,
    Node,
    reply,
)


def raw(node: Node) -> socket.socket:
    sock = socket.create_connection(node.transport.address)
    sock.settimeout(DEADLINE_S)
    return sock


def hung_up(sock: socket.socket) -> bool:
    """True once the other side has closed this connection."""
    sock.setblocking(False)
    try:
        return sock.recv(4096) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def introduce_raw(net: Net, node: Node, me: ReplicaId, **more: Any) -> socket.socket:
    """A connection that has done the handshake, by hand."""
    sock = raw(node)
    identity = Identity(me, GROUP, HOST, 9, os.urandom(16))
    dialer = Dialer(identity, SECRET, node.id, nonce=os.urandom(NONCE_BYTES), attempt=1, **more)
    sock.sendall(dialer.hello)
    sock.setblocking(False)

    def advance() -> bool:
        with contextlib.suppress(BlockingIOError):
            sock.sendall(dialer.receive(sock.recv(4096)))
        return dialer.done

    net.until(advance)
    return sock


@pytest.mark.parametrize(
    "stranger",
    [{"secret": b"another cluster's one"}, {"group": GroupId("orders-1")}],
    ids=["secret", "group"],
)
def test_a_stranger_is_kept_out(net: Net, stranger: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    a, b = net.node(A), net.node(B, **stranger)
    net.introduce(a, b)
    net.until(lambda: a.transport.handshake_failures > 3 and b.transport.handshake_failures > 3)
    assert a.events == b.events == []
    assert 1 <= len([record for record in caplog.records if record.name == "rayqueue.raft.tcp"]) <= 4
    assert "secret'" not in caplog.text


def test_the_nodes_own_id_is_refused(net: Net) -> None:
    a, impostor = net.node(A), net.node(A)
    impostor.transport.set_peers({B: a.transport.address})  # reaches a, not b
    net.until(lambda: a.transport.handshake_failures > 1)
    assert a.events == impostor.events == []
    sock = raw(a)
    me = Identity(A, GROUP, HOST, 9, os.urandom(16))
    sock.sendall(Dialer(me, SECRET, A, nonce=os.urandom(NONCE_BYTES), attempt=1).hello)
    net.until(lambda: hung_up(sock))


def test_a_node_named_itself_is_not_dialed(net: Net) -> None:
    a = net.node(A)
    a.transport.set_peers({A: a.transport.address})
    a.poll(0.01)
    assert a.transport.stats() == {}


@pytest.mark.slow
def test_garbage_is_hung_up_on(net: Net) -> None:
    a, b = net.pair()
    rng = random.Random(3)
    for round_ in range(60):
        sock = raw(a)
        begin = [b"", b"RQ", b"RQH\x01", b"RQH\x01\xff\xff", b"RQH\x01\x80\x00", b"GET / HTTP/1.1\r\n"][round_ % 6]
        with contextlib.suppress(ConnectionError):
            sock.sendall(begin + rng.randbytes(rng.randrange(300, 3000)))
        net.until(lambda sock=sock: hung_up(sock))  # type: ignore[misc]
        sock.close()
    assert a.transport.send(B, reply(5))
    net.until(lambda: b.received() == [reply(5)])
    assert a.news() == [PeerUp(B)]


@pytest.mark.slow
def test_garbage_after_a_good_handshake_ends_the_connection_only(net: Net) -> None:
    a, _ = net.pair()
    rng = random.Random(4)
    for round_ in range(20):
        sock = introduce_raw(net, a, C)
        good = b"".join(encode(reply(round_)))
        with contextlib.suppress(ConnectionError):
            sock.setblocking(True)
            sock.sendall(good + (200).to_bytes(4, "little") + rng.randbytes(400))
        net.until(lambda sock=sock: hung_up(sock))  # type: ignore[misc]
        sock.close()
        assert a.events[-3:] == [PeerUp(C), Received(C, reply(round_)), PeerDown(C, dead=False)]
    assert PeerDown(B, dead=False) not in a.events
    assert PeerDown(B, dead=True) not in a.events


def test_a_slow_handshake_is_given_up(net: Net) -> None:
    clock = Clock()
    a = net.node(A, clock=clock, settings=TransportSettings(handshake_timeout_ms=3000))
    sock = raw(a)
    hello = Dialer(Identity(B, GROUP, HOST, 9, bytes(16)), SECRET, A, nonce=os.urandom(NONCE_BYTES), attempt=1).hello
    for byte in hello[:29]:
        sock.sendall(bytes([byte]))
        a.poll(0.001)
        clock.now += 0.1
        assert not hung_up(sock)
        sock.setblocking(True)
    clock.now += 0.2
    net.until(lambda: hung_up(sock))
    assert a.transport.handshake_failures == 1


def test_a_dial_that_nobody_answers_is_given_up_and_tried_again(net: Net) -> None:
    clock = Clock()
    a = net.node(A, clock=clock)
    with socket.create_server((HOST, 0)) as silent:
        a.transport.set_peers({B: silent.getsockname()})
        for _ in range(3):
            net.until(lambda: a.transport._peers[B].dial is not None)
            conn, _ = silent.accept()
            clock.now += 3.1
            a.poll(0.01)
            net.until(lambda conn=conn: conn.recv(4096) == b"" if select_readable(conn) else False)  # type: ignore[misc]
            conn.close()
            clock.now += 2.1
    assert a.events == []


def select_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def test_hundreds_of_silent_connections(net: Net) -> None:
    a = net.node(A, settings=TransportSettings(max_unauthenticated=20, handshake_timeout_ms=600_000))
    crowd = []
    for _ in range(300):
        crowd.append(raw(a))
        a.poll()
    net.until(lambda: sum(map(hung_up, crowd)) >= 280)
    assert len(a.transport._unproven) <= 20
    b = net.node(B)
    net.introduce(a, b)
    for _ in range(30):  # the crowd goes on while b proves itself
        crowd.append(raw(a))
        a.poll()
        b.poll()
    net.until(lambda: a.connected(B) and b.connected(A))
    assert a.transport.send(B, reply(1))
    net.until(lambda: b.received() == [reply(1)])
    for sock in crowd:
        sock.close()
    net.until(lambda: not a.transport._unproven)


def test_accepting_goes_on_after_running_out_of_descriptors(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    a, b = net.node(A, clock=clock), net.node(B)
    real = a.transport._listener

    class Exhausted:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(a.transport, "_listener", Exhausted())
    monkeypatch.setattr(
        a.transport._selector,
        "unregister",
        lambda _: type(a.transport._selector).unregister(a.transport._selector, real),
    )
    b.transport.set_peers({A: a.transport.address})
    net.until(lambda: a.transport._accept_again_at < float("inf"))
    monkeypatch.undo()
    begin = time.monotonic()
    a.poll(0.02)
    assert time.monotonic() - begin >= 0.015  # it does not spin on the listener
    clock.now += 0.2
    net.until(lambda: a.connected(B))


def test_an_unnamed_peer_with_the_secret_is_accepted_and_answered(net: Net) -> None:
    a, b = net.node(A), net.node(B)
    b.transport.set_peers({A: a.transport.address})
    net.until(lambda: a.news() == [PeerUp(B)] and b.news() == [PeerUp(A)])
    assert a.transport.send(B, reply(2))
    net.until(lambda: b.received() == [reply(2)])
    net.stop(b)
    net.until(lambda: a.news() == [PeerUp(B), PeerDown(B, dead=True)])
    assert a.transport.stats() == {}


def test_unnamed_peers_are_bounded(net: Net) -> None:
    a = net.node(A, settings=TransportSettings(max_unnamed_peers=2))
    others = [net.node(ReplicaId(f"n{i}")) for i in range(4)]
    for other in others:
        other.transport.set_peers({A: a.transport.address})
    net.until(lambda: sum(other.transport.handshake_failures > 2 for other in others) == 2)
    assert len(a.transport.stats()) == 2
    a.transport.set_peers({other.id: other.transport.address for other in others})  # named ones are not bounded
    net.until(lambda: len([event for event in a.news() if isinstance(event, PeerUp)]) == 4)
