"""The TCP transport over real loopback sockets. Nothing sleeps and hopes: every wait has a condition and a deadline."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import select
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from rayqueue.config import TransportSettings
from rayqueue.errors import ConfigError, TransportError
from rayqueue.ids import GroupId, Index, NodeId, Term
from rayqueue.log.store import Entry
from rayqueue.raft.handshake import NONCE_BYTES, Dialer, Identity
from rayqueue.raft.messages import AppendEntries, AppendReply, Message, TimeoutNow, VoteReply
from rayqueue.raft.tcp import TcpTransport, TlsContexts, tls_contexts
from rayqueue.raft.transport import Event, PeerDown, PeerUp, Received
from rayqueue.raft.wire import encode
from rayqueue.records.checksum import entry_crc

SECRET = b"a secret of the cluster"
GROUP = GroupId("orders-0")
HOST = "127.0.0.1"
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
DEADLINE_S = 20.0


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Node:
    """A transport and what it reported."""

    def __init__(self, node_id: NodeId, *, secret: bytes = SECRET, group: GroupId = GROUP, port: int = 0, **more: Any):
        self.id = node_id
        self.transport = TcpTransport(node_id, group, secret, HOST, port, **more)
        self.events: list[Event] = []

    def poll(self, timeout_s: float = 0.0) -> None:
        self.events += self.transport.poll(timeout_s)

    def received(self) -> list[Message]:
        return [event.message for event in self.events if isinstance(event, Received)]

    def news(self) -> list[Event]:
        """Everything but messages."""
        return [event for event in self.events if not isinstance(event, Received)]

    def connected(self, *peers: NodeId) -> bool:
        stats = self.transport.stats()
        return all(peer in stats and stats[peer].connected for peer in peers)


class Net:
    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def node(self, node_id: NodeId, **more: Any) -> Node:
        self.nodes.append(Node(node_id, **more))
        return self.nodes[-1]

    def introduce(self, *nodes: Node) -> None:
        for node in nodes:
            node.transport.set_peers({other.id: other.transport.address for other in nodes})

    def pair(self, **more: Any) -> tuple[Node, Node]:
        a, b = self.node(A, **more), self.node(B, **more)
        self.introduce(a, b)
        self.until(lambda: a.connected(B) and b.connected(A))
        return a, b

    def until(self, condition: Callable[[], bool], *, only: tuple[Node, ...] = ()) -> None:
        give_up_at = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < give_up_at, [(node.id, node.news()) for node in self.nodes]
            for node in only or self.nodes:
                node.poll(0.001)

    def stop(self, node: Node) -> None:
        self.nodes.remove(node)
        node.transport.close()


@pytest.fixture
def net() -> Iterator[Net]:
    net = Net()
    yield net
    for node in net.nodes:
        node.transport.close()


def reply(number: int) -> AppendReply:
    return AppendReply(Term(1), number % 2 == 0, Index(number), Index(number), number)


def append(first: int, *payloads: bytes) -> AppendEntries:
    entries = tuple(
        Entry(Index(index), Term(3), payload, entry_crc(index, 3, payload))
        for index, payload in enumerate(payloads, first)
    )
    return AppendEntries(Term(3), Index(first - 1), Term(2), Index(0), 9, entries)


# -- messages ---------------------------------------------------------------------


def test_ten_thousand_messages_each_way_in_order(net: Net) -> None:
    a, b = net.pair()
    count = 10_000
    rng = random.Random(7)
    to_b: list[Message] = [
        reply(i) if i % 4 else append(i + 1, rng.randbytes(rng.choice((0, 1, 100, 5000)))) for i in range(count)
    ]
    to_a: list[Message] = [reply(-i % 2**32) for i in range(count)]
    sent_by_a = sent_by_b = 0
    give_up_at = time.monotonic() + 60
    while len(b.received()) < count or len(a.received()) < count:
        assert time.monotonic() < give_up_at
        for _ in range(500):
            if sent_by_a < count and a.transport.send(B, to_b[sent_by_a]):
                sent_by_a += 1
            if sent_by_b < count and b.transport.send(A, to_a[sent_by_b]):
                sent_by_b += 1
        a.poll()
        b.poll()
    assert b.received() == to_b
    assert a.received() == to_a
    assert a.news() == [PeerUp(B)]
    assert b.news() == [PeerUp(A)]
    stats = a.transport.stats()[B]
    assert stats.sent_messages == stats.received_messages == count
    assert stats.sent_bytes == b.transport.stats()[A].received_bytes


def test_large_appends(net: Net) -> None:
    a, b = net.pair()
    rng = random.Random(1)
    large = append(10, *(rng.randbytes(100_000) for _ in range(40)))
    single = append(99, rng.randbytes(4_000_000))
    assert a.transport.send(B, large)
    assert a.transport.send(B, single)
    assert a.transport.send(B, reply(1))
    assert b.transport.send(A, single)
    net.until(lambda: len(b.received()) == 3 and len(a.received()) == 1)
    assert b.received() == [large, single, reply(1)]
    assert a.received() == [single]


def test_send_writes_at_once(net: Net) -> None:
    """The engine sends, then syncs its disk: the bytes must leave before it polls again."""
    a, b = net.pair()
    message = append(1, bytes(100_000))
    assert a.transport.send(B, message)
    net.until(lambda: b.received() == [message], only=(b,))


def test_a_reader_that_stops_costs_a_bounded_queue(net: Net) -> None:
    a, b = net.pair(settings=TransportSettings(send_queue_bytes=300_000))
    message = append(1, bytes(50_000))
    accepted = 0
    while a.transport.send(B, message):
        accepted += 1
        assert accepted < 10_000
        a.poll()
    for _ in range(100):
        assert not a.transport.send(B, message)
    stats = a.transport.stats()[B]
    assert 0 < stats.queued_bytes <= 300_000
    assert stats.dropped_messages == 101
    assert stats.sent_messages == accepted
    net.until(lambda: len(b.received()) == accepted)
    assert b.received() == [message] * accepted
    assert a.transport.stats()[B].queued_bytes == 0
    assert a.transport.send(B, message)
    assert a.news() == [PeerUp(B)]


def test_a_message_larger_than_the_queue_passes_alone(net: Net) -> None:
    a, b = net.pair(settings=TransportSettings(send_queue_bytes=1000))
    message = append(1, bytes(20_000_000))
    assert a.transport.send(B, message)
    assert a.transport.stats()[B].queued_bytes > 0  # else this shows nothing
    assert not a.transport.send(B, reply(1))
    net.until(lambda: b.received() == [message])


def test_a_message_larger_than_a_frame_may_be_is_dropped_not_sent(net: Net) -> None:
    a, b = net.pair(settings=TransportSettings(max_frame_bytes=10_000))
    assert not a.transport.send(B, append(1, bytes(10_000)))
    assert a.transport.send(B, reply(1))
    net.until(lambda: b.received() == [reply(1)])


def test_one_poll_reads_a_bounded_amount(net: Net) -> None:
    a, b = net.pair(settings=TransportSettings(read_budget_bytes=100_000, read_buffer_bytes=50_000))
    for _ in range(20):
        a.transport.send(B, append(1, bytes(40_000)))
    net.until(lambda: len(b.received()) > 0)
    most = 0
    while len(b.received()) < 20:
        before = len(b.received())
        a.poll()
        b.poll(0.1)
        most = max(most, len(b.received()) - before)
    assert most <= 5


def test_no_connection_no_send(net: Net) -> None:
    a = net.node(A)
    assert not a.transport.send(B, reply(1))
    a.transport.set_peers({B: (HOST, 9)})
    assert not a.transport.send(B, reply(1))
    assert a.transport.stats()[B].dropped_messages == 1


# -- waiting ------------------------------------------------------------------------


def test_poll_waits_as_long_as_told_and_no_longer(net: Net) -> None:
    a = net.node(A)
    begin = time.monotonic()
    a.poll(0.05)
    assert 0.045 <= time.monotonic() - begin < 5
    assert a.events == []


def test_poll_ends_although_a_tests_clock_stands_still(net: Net) -> None:
    a = net.node(A, clock=Clock())
    a.transport.set_peers({B: (HOST, 9)})
    for _ in range(3):
        a.poll(0.02)


def test_wake_from_another_thread(net: Net) -> None:
    a = net.node(A)
    for _ in range(20):
        waker = threading.Timer(0.005, a.transport.wake)
        waker.start()
        begin = time.monotonic()
        a.poll(DEADLINE_S)
        assert time.monotonic() - begin < DEADLINE_S / 2
        waker.join()


def test_a_wake_before_the_poll_counts_and_many_are_one(net: Net) -> None:
    a = net.node(A)
    for _ in range(100_000):
        a.transport.wake()
    begin = time.monotonic()
    a.poll(DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S / 2
    begin = time.monotonic()
    a.poll(0.05)
    assert time.monotonic() - begin >= 0.045


def test_no_wake_is_lost_in_a_race(net: Net) -> None:
    """Work is handed over by a list; after each wake, a poll must return and find it."""
    a = net.node(A)
    work: list[int] = []
    done = threading.Semaphore(0)

    def producer() -> None:
        for i in range(3000):
            work.append(i)
            a.transport.wake()
            if i % 3 == 0:
                done.acquire(timeout=DEADLINE_S)

    thread = threading.Thread(target=producer)
    thread.start()
    seen = 0
    begin = time.monotonic()
    while seen < 3000:
        a.poll(DEADLINE_S)
        new = len(work)
        for i in range(seen, new):
            if i % 3 == 0:
                done.release()
        seen = new
    thread.join()
    assert time.monotonic() - begin < DEADLINE_S  # one lost wake would cost a whole poll


def test_no_wake_is_lost_in_the_one_race_there_is(net: Net) -> None:
    """A wake while poll takes the last one back."""
    a = net.node(A)
    transport, waker = a.transport, a.transport._waker
    real = waker._reader

    class Raced:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def recv(self, size: int) -> bytes:
            transport.wake()
            return real.recv(size)

    raced: Any = Raced()
    waker._reader = raced
    for _ in range(3):
        transport.wake()
        begin = time.monotonic()
        a.poll(DEADLINE_S)
        assert time.monotonic() - begin < DEADLINE_S / 2


def test_closed(net: Net) -> None:
    a, _ = net.pair()
    a.transport.close()
    a.transport.close()
    a.transport.wake()
    assert not a.transport.send(B, reply(1))
    with pytest.raises(TransportError):
        a.transport.poll(0)


# -- who gets in ----------------------------------------------------------------------


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


def introduce_raw(net: Net, node: Node, me: NodeId, **more: Any) -> socket.socket:
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
    others = [net.node(NodeId(f"n{i}")) for i in range(4)]
    for other in others:
        other.transport.set_peers({A: a.transport.address})
    net.until(lambda: sum(other.transport.handshake_failures > 2 for other in others) == 2)
    assert len(a.transport.stats()) == 2
    a.transport.set_peers({other.id: other.transport.address for other in others})  # named ones are not bounded
    net.until(lambda: len([event for event in a.news() if isinstance(event, PeerUp)]) == 4)


# -- one connection per pair --------------------------------------------------------------


def assert_same_connection(a: Node, b: Node) -> None:
    ours, theirs = a.transport._peers[b.id].standing, b.transport._peers[a.id].standing
    assert ours is not None
    assert theirs is not None
    assert ours.connection_id == theirs.connection_id
    assert ours.dialed_by_us != theirs.dialed_by_us


def shuffle_arrivals(node: Node, rng: random.Random) -> None:
    """On one machine, what was sent first on any connection also arrives first. In a network it need not."""
    selector = node.transport._selector
    real = selector.select

    def select_some(timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = real(timeout)
        rng.shuffle(ready)
        return ready[: rng.randint(1, 3)]

    selector.select = select_some  # type: ignore[method-assign]


def test_simultaneous_dials_end_in_one_connection(net: Net) -> None:
    rng = random.Random(11)
    dialed_by = set()
    for round_ in range(400):
        a, b = net.node(A, rng=random.Random(round_)), net.node(B, rng=random.Random(-round_))
        shuffle_arrivals(a, rng)
        shuffle_arrivals(b, rng)
        net.introduce(a, b)
        while not (a.connected(B) and b.connected(A)):
            rng.choice((a, b)).poll(0.0)
        for _ in range(10):
            rng.choice((a, b)).poll(0.0)
        assert a.news() == [PeerUp(B)]
        assert b.news() == [PeerUp(A)]
        assert_same_connection(a, b)
        standing = a.transport._peers[B].standing
        dialed_by.add(standing is not None and standing.dialed_by_us)
        net.stop(a)
        net.stop(b)
    assert dialed_by == {True, False}  # both outcomes were seen


def lose_silently(node: Node, peer: NodeId) -> socket.socket:
    """The node gives its connection up while the peer's kernel hears nothing of it, as when a cable is cut."""
    connection = node.transport._peers[peer].connection
    assert connection is not None
    kept = socket.socket(fileno=os.dup(connection.fd))
    node.transport._lost(connection, TimeoutError("the cable is cut"))
    return kept


@pytest.mark.parametrize("loser_dialed", [True, False])
def test_a_connection_that_one_side_lost_is_replaced_unseen_by_the_other(net: Net, loser_dialed: bool) -> None:
    a, b = net.node(A), net.node(B)
    dialer, acceptor = (a, b) if loser_dialed else (b, a)
    dialer.transport.set_peers({acceptor.id: acceptor.transport.address})
    net.until(lambda: a.connected(B) and b.connected(A))
    net.introduce(a, b)
    kept = lose_silently(a, B)
    net.until(lambda: a.connected(B) and a.transport._peers[B].connections == b.transport._peers[A].connections)
    assert a.news() == [PeerUp(B), PeerDown(B, dead=False), PeerUp(B)]
    assert b.news() == [PeerUp(A)]
    assert_same_connection(a, b)
    assert b.transport.send(A, reply(1))
    net.until(lambda: a.received() == [reply(1)])
    kept.close()


def test_a_restarted_peer_on_another_port(net: Net) -> None:
    a, b = net.pair()
    net.stop(b)
    again = net.node(B)
    again.transport.set_peers({A: a.transport.address})
    net.until(lambda: a.news()[1:] == [PeerDown(B, dead=True), PeerUp(B)])
    again.transport.set_peers({})  # hangs up; and does not dial any more
    net.until(lambda: a.news()[3:] == [PeerDown(B, dead=True), PeerUp(B)])  # so a must have dialed the new port
    standing = a.transport._peers[B].standing
    assert standing is not None
    assert standing.dialed_by_us


def test_a_peer_that_restarts_while_its_old_connection_seems_alive(net: Net) -> None:
    a, b = net.pair()
    net.nodes.remove(b)  # stopped, as by SIGSTOP: its sockets stay open
    again = net.node(B)
    again.transport.set_peers({A: a.transport.address})
    net.until(lambda: again.connected(A))
    assert a.news() == [PeerUp(B), PeerDown(B, dead=True), PeerUp(B)]
    assert a.transport.send(B, reply(1))
    net.until(lambda: again.received() == [reply(1)])
    b.transport.close()


def test_a_restarted_peer_on_the_same_port(net: Net) -> None:
    a, b = net.pair()
    _, port = b.transport.address
    net.stop(b)
    net.until(lambda: PeerDown(B, dead=True) in a.events)
    again = net.node(B, port=port)
    net.until(lambda: again.connected(A) and a.connected(B))  # dialed by a alone
    assert a.news() == [PeerUp(B), PeerDown(B, dead=True), PeerUp(B)]


def test_a_peer_that_set_peers_names_elsewhere(net: Net) -> None:
    a = net.node(A)
    with socket.create_server((HOST, 0)) as nobody:
        unused = nobody.getsockname()
    a.transport.set_peers({B: unused})
    net.until(lambda: a.transport._peers[B].failures > 2)
    b = net.node(B)
    a.transport.set_peers({B: b.transport.address})
    net.until(lambda: a.connected(B))
    a.transport.set_peers({B: unused})
    for _ in range(20):
        a.poll(0.001)
    assert a.news() == [PeerUp(B)]  # the connection proves who is there, whatever the address


def test_a_peer_not_named_any_more_is_dropped(net: Net) -> None:
    a, b = net.pair()
    a.transport.set_peers({})
    b.transport.set_peers({})
    assert not a.transport.send(B, reply(1))
    net.until(lambda: len(a.news()) == 2 and len(b.news()) == 2)
    assert a.news() == [PeerUp(B), PeerDown(B, dead=False)]
    assert a.transport.stats() == {}


def test_not_known_dead_then_known_dead(net: Net) -> None:
    a, b = net.pair()
    net.nodes.remove(b)
    kept = lose_silently(a, B)
    b.transport.close()
    net.until(lambda: len(a.news()) == 3)
    assert a.news() == [PeerUp(B), PeerDown(B, dead=False), PeerDown(B, dead=True)]
    for _ in range(50):
        a.poll(0.002)
    assert len(a.news()) == 3  # its port refuses again and again; that is no news
    kept.close()


def test_a_peer_never_seen_whose_port_refuses_is_no_news(net: Net) -> None:
    a = net.node(A)
    with socket.create_server((HOST, 0)) as nobody:
        unused = nobody.getsockname()
    a.transport.set_peers({B: unused})
    net.until(lambda: a.transport._peers[B].failures > 3)
    assert a.events == []


def test_redials_back_off(net: Net) -> None:
    clock = Clock()
    a = net.node(
        A, clock=clock, rng=random.Random(5), settings=TransportSettings(reconnect_min_ms=50, reconnect_max_ms=2000)
    )
    with socket.create_server((HOST, 0)) as nobody:
        unused = nobody.getsockname()
    a.transport.set_peers({B: unused})
    dials = []
    while clock.now < 1020:
        before = a.transport._peers[B].failures
        a.poll()
        if a.transport._peers[B].failures > before:
            dials.append(clock.now)
        clock.now += 0.01
    gaps = [later - earlier for earlier, later in itertools.pairwise(dials)]
    assert 12 <= len(dials) <= 30
    assert max(gaps) < 2.1
    assert min(gaps[8:]) > 0.9


def test_what_a_dead_peer_said_last_is_still_delivered(net: Net) -> None:
    a, b = net.pair()
    for number in range(5):
        assert b.transport.send(A, reply(number))
    net.stop(b)
    give_up_at = time.monotonic() + DEADLINE_S
    while a.transport.send(B, reply(0)):  # until the reset arrives
        assert time.monotonic() < give_up_at
    net.until(lambda: len(a.news()) == 2)
    assert a.events == [PeerUp(B), *(Received(B, reply(i)) for i in range(5)), PeerDown(B, dead=True)]


CHILD = """
    import sys
    from rayqueue.raft.tcp import TcpTransport
    transport = TcpTransport("b", "orders-0", {secret!r}, "127.0.0.1")
    transport.set_peers({{"a": ("127.0.0.1", {port})}})
    while True:
        transport.poll(1.0)
"""


def test_kill_minus_nine_is_known_at_once(net: Net) -> None:
    a = net.node(A)
    code = textwrap.dedent(CHILD.format(secret=SECRET, port=a.transport.address[1]))
    child = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        net.until(lambda: a.connected(B))
        child.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        net.until(lambda: PeerDown(B, dead=True) in a.events)
        assert time.monotonic() - begin < 5.0
    finally:
        child.kill()
        child.wait()


def alternates(node: Node, peer: NodeId) -> bool:
    """Up, down, up ...; a second down only to say what the first did not know."""
    up = False
    last: Event | None = None
    for event in node.events:
        if event == PeerUp(peer):
            if up:
                return False
            up = True
        elif isinstance(event, PeerDown) and event.peer == peer:
            if not up and not (event.dead and last == PeerDown(peer, dead=False)):
                return False
            up = False
        elif isinstance(event, Received) and event.sender == peer and not up:
            return False
        else:
            continue
        last = event
    return up


@pytest.mark.parametrize("seed", range(6))
def test_three_nodes_under_cuts_and_restarts_find_together_again(net: Net, seed: int) -> None:
    rng = random.Random(seed)
    ids = [A, B, C]
    quick = TransportSettings(reconnect_min_ms=2, reconnect_max_ms=20, handshake_timeout_ms=300, stable_ms=0)
    nodes = {node_id: net.node(node_id, settings=quick) for node_id in ids}
    net.introduce(*nodes.values())
    kept: list[socket.socket] = []
    for step in range(600):
        node = nodes[rng.choice(ids)]
        roll = rng.random()
        if roll < 0.02:
            peer = rng.choice(ids)
            if peer != node.id and node.connected(peer):
                kept.append(lose_silently(node, peer))
        elif roll < 0.03:
            net.stop(node)
            others = {other.id: other.transport.address for other in net.nodes}
            nodes[node.id] = net.node(node.id, settings=quick)
            nodes[node.id].transport.set_peers(others)
        elif roll < 0.3:
            node.transport.send(rng.choice(ids), reply(step))
        nodes[rng.choice(ids)].poll(0.0005)
    net.introduce(*nodes.values())
    pairs = list(itertools.permutations(ids, 2))
    net.until(lambda: all(nodes[one].connected(other) for one, other in pairs))
    for _ in range(30):
        for node in net.nodes:
            node.poll(0.001)
    for one, other in pairs:
        assert_same_connection(nodes[one], nodes[other])
        assert alternates(nodes[one], other), nodes[one].news()
        assert nodes[one].transport.send(other, TimeoutNow(Term(99)))
    net.until(lambda: all(node.received().count(TimeoutNow(Term(99))) == 2 for node in net.nodes))
    for sock in kept:
        sock.close()


# -- TLS --------------------------------------------------------------------------------


def certificates(folder: Path, name: str, authority: trustme.CA, *, check: bool = True) -> TlsContexts:
    issued = authority.issue_cert(f"{name}.rayqueue.test")
    cert, key, ca = folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.ca"
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    return tls_contexts(cert, key, ca if check else None)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("check", [True, False], ids=["mutual", "encrypted only"])
def test_tls(net: Net, tmp_path: Path, authority: trustme.CA, check: bool) -> None:
    a = net.node(A, tls=certificates(tmp_path, "a", authority, check=check))
    b = net.node(B, tls=certificates(tmp_path, "b", authority, check=check))
    net.introduce(a, b)
    net.until(lambda: a.connected(B) and b.connected(A))
    large = append(5, random.Random(2).randbytes(4_000_000), b"small")
    sent: list[Message] = [*map(reply, range(2000)), large, *map(reply, range(100))]
    for message in sent:
        assert a.transport.send(B, message)
        assert b.transport.send(A, message)
    net.until(lambda: len(a.received()) == len(b.received()) == len(sent))
    assert a.received() == sent
    assert b.received() == sent
    net.stop(b)
    net.until(lambda: len(a.news()) == 2)
    assert a.news() == [PeerUp(B), PeerDown(B, dead=True)]


def test_tls_bytes_left_in_the_session_are_read_though_the_socket_is_silent(
    net: Net, tmp_path: Path, authority: trustme.CA
) -> None:
    small = TransportSettings(read_budget_bytes=100, read_buffer_bytes=4096)
    a = net.node(A, tls=certificates(tmp_path, "a", authority))
    b = net.node(B, tls=certificates(tmp_path, "b", authority), settings=small)
    net.introduce(a, b)
    net.until(lambda: a.connected(B) and b.connected(A))
    message = append(1, *(b"x" * 1000 for _ in range(14)))
    assert a.transport.send(B, message)
    begin = time.monotonic()
    while not b.received():
        b.poll(DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S / 2


def test_tls_of_another_authority_is_refused(net: Net, tmp_path: Path, authority: trustme.CA) -> None:
    a = net.node(A, tls=certificates(tmp_path, "a", authority))
    b = net.node(B, tls=certificates(tmp_path, "b", trustme.CA()))
    net.introduce(a, b)
    net.until(lambda: a.transport.handshake_failures > 3 and b.transport.handshake_failures > 3)
    assert a.events == b.events == []


def test_tls_and_plain_do_not_mix(net: Net, tmp_path: Path, authority: trustme.CA) -> None:
    a, b = net.node(A, tls=certificates(tmp_path, "a", authority)), net.node(B)
    net.introduce(a, b)
    net.until(lambda: a.transport.handshake_failures > 3 and b.transport.handshake_failures > 3)
    assert a.events == b.events == []


def test_a_man_in_the_middle_cannot_pass_the_handshake_on(net: Net, tmp_path: Path, authority: trustme.CA) -> None:
    """Without a CA the dialer takes any certificate. The proof is bound to the TLS session, so relaying fails."""
    a = net.node(A, tls=certificates(tmp_path, "a", authority, check=False))
    b = net.node(B, tls=certificates(tmp_path, "b", authority, check=False))
    middle = certificates(tmp_path, "m", trustme.CA(), check=False)
    relayed = threading.Event()

    def pump(source: ssl.SSLSocket, sink: ssl.SSLSocket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                relayed.set()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = server.accept()
                inner = middle.server.wrap_socket(caller, server_side=True)
                outer = middle.client.wrap_socket(socket.create_connection(b.transport.address))
                for pair in ((inner, outer), (outer, inner)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    with socket.create_server((HOST, 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        a.transport.set_peers({B: server.getsockname()})
        net.until(lambda: relayed.is_set() and b.transport.handshake_failures > 1)
        server.shutdown(socket.SHUT_RDWR)
    assert a.events == b.events == []


# -- settings ---------------------------------------------------------------------------


def test_impossible_addresses(net: Net) -> None:
    with pytest.raises(ConfigError, match="advertised_host"):
        TcpTransport(A, GROUP, SECRET, "0.0.0.0")
    with pytest.raises(ConfigError, match="secret"):
        TcpTransport(A, GROUP, b"short", HOST)
    a = net.node(A)
    with pytest.raises(ConfigError, match="numeric"):
        a.transport.set_peers({B: ("some.host.example", 1)})
    assert TcpTransport(A, GROUP, SECRET, "localhost").address[0] in (HOST, "::1")


def test_secrets_and_payloads_are_not_logged(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    a, b = net.pair()
    a.transport.send(B, VoteReply(Term(1), True))
    net.until(lambda: len(b.received()) == 1)
    net.stop(b)
    net.until(lambda: len(a.news()) == 2)
    assert caplog.text == ""
