"""One connection per pair of nodes, whoever dials, dies, restarts or moves."""

from __future__ import annotations

import itertools
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rayqueue.config import TransportSettings
from rayqueue.ids import ReplicaId, Term
from rayqueue.raft.messages import TimeoutNow
from rayqueue.raft.transport import Event, PeerDown, PeerUp, Received
from tests.unit.raft.tcp_net import (
    DEADLINE_S,
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


@pytest.mark.slow
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


def lose_silently(node: Node, peer: ReplicaId) -> socket.socket:
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


@pytest.mark.slow
def test_kill_minus_nine_is_known_at_once(net: Net) -> None:
    a = net.node(A)
    code = textwrap.dedent(CHILD.format(secret=SECRET, port=a.transport.address[1]))
    child = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3])
    try:
        net.until(lambda: a.connected(B))
        child.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        net.until(lambda: PeerDown(B, dead=True) in a.events)
        assert time.monotonic() - begin < 5.0
    finally:
        child.kill()
        child.wait()


def alternates(node: Node, peer: ReplicaId) -> bool:
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_three_nodes_under_cuts_and_restarts_find_together_again(net: Net, seed: int) -> None:
    rng = random.Random(seed)
    ids = [A, B, C]
    quick = TransportSettings(reconnect_min_ms=2, reconnect_max_ms=20, handshake_timeout_ms=300, stable_ms=0)
    nodes = {replica_id: net.node(replica_id, settings=quick) for replica_id in ids}
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
