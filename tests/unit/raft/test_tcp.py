"""The TCP transport over real loopback sockets: messages, their limits, its settings.

Nothing here or in its sister files sleeps and hopes: every wait has a condition and a deadline.
"""

from __future__ import annotations

import logging
import random
import time

import pytest

from rayqueue.config import TransportSettings
from rayqueue.errors import ConfigError
from rayqueue.ids import Term
from rayqueue.raft.messages import Message, VoteReply
from rayqueue.raft.tcp import TcpTransport
from rayqueue.raft.transport import PeerUp
from tests.unit.raft.tcp_net import (
    GROUP,
    HOST,
    SECRET,
    A,
    B,
    Net,
    append,
    reply,
)

# -- messages ---------------------------------------------------------------------


@pytest.mark.slow
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
