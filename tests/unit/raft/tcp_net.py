"""Nodes with real TCP transports on loopback, for the tests of the transport. The fixture is in ``conftest``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rayqueue.ids import GroupId, Index, ReplicaId, Term
from rayqueue.log.store import Entry
from rayqueue.raft.messages import AppendEntries, AppendReply, Message
from rayqueue.raft.tcp import TcpTransport
from rayqueue.raft.transport import Event, Received
from rayqueue.records.checksum import entry_crc

SECRET = b"a secret of the cluster"
GROUP = GroupId("orders-0")
HOST = "127.0.0.1"
A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
DEADLINE_S = 20.0


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Node:
    """A transport and what it reported."""

    def __init__(
        self, replica_id: ReplicaId, *, secret: bytes = SECRET, group: GroupId = GROUP, port: int = 0, **more: Any
    ):
        self.id = replica_id
        self.transport = TcpTransport(replica_id, group, secret, HOST, port, **more)
        self.events: list[Event] = []

    def poll(self, timeout_s: float = 0.0) -> None:
        self.events += self.transport.poll(timeout_s)

    def received(self) -> list[Message]:
        return [event.message for event in self.events if isinstance(event, Received)]

    def news(self) -> list[Event]:
        """Everything but messages."""
        return [event for event in self.events if not isinstance(event, Received)]

    def connected(self, *peers: ReplicaId) -> bool:
        stats = self.transport.stats()
        return all(peer in stats and stats[peer].connected for peer in peers)


class Net:
    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def node(self, replica_id: ReplicaId, **more: Any) -> Node:
        self.nodes.append(Node(replica_id, **more))
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


def reply(number: int) -> AppendReply:
    return AppendReply(Term(1), number % 2 == 0, Index(number), Index(number), number)


def append(first: int, *payloads: bytes) -> AppendEntries:
    entries = tuple(
        Entry(Index(index), Term(3), payload, entry_crc(index, 3, payload))
        for index, payload in enumerate(payloads, first)
    )
    return AppendEntries(Term(3), Index(first - 1), Term(2), Index(0), 9, entries)
