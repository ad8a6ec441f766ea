"""The transport to a replica's peers: the small interface under the engine.

Owns nothing; ``rayqueue.raft.tcp`` is the real one. A transport never blocks,
never grows without bound (a peer that does not keep up loses messages, which
Raft repeats) and hands over whole, authenticated messages only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

from msgspec import Struct

from rayqueue.ids import ReplicaId
from rayqueue.raft.messages import Message


class Received(Struct, frozen=True, gc=False):
    sender: ReplicaId
    message: Message


class PeerUp(Struct, frozen=True, gc=False):
    """A connection to this peer stands; messages sent now have a chance."""

    peer: ReplicaId


class PeerDown(Struct, frozen=True, gc=False):
    """The connection is gone. ``dead``: the peer's process is known to be gone, not only the connection
    (its socket was closed or its port refuses)."""

    peer: ReplicaId
    dead: bool


Event: TypeAlias = Received | PeerUp | PeerDown


class Transport(Protocol):
    """Used from the engine's thread only, except ``wake``."""

    @property
    def address(self) -> tuple[str, int]:
        """The address at which this replica listens."""

    def set_peers(self, addresses: Mapping[ReplicaId, tuple[str, int]]) -> None:
        """Keep connections with these replicas, at these addresses. Peers not named any more are dropped."""

    def send(self, peer: ReplicaId, message: Message) -> bool:
        """Queue a message. False if it was dropped: no connection, or its queue is full."""

    def poll(self, timeout_s: float) -> list[Event]:
        """Write what is queued, read what has come, keep connections up. Waits at most this long,
        less if there is something to report or ``wake`` is called."""

    def wake(self) -> None:
        """Make a waiting ``poll`` return. From any thread."""

    def close(self) -> None: ...
