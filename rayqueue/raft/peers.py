"""Peers of a transport: what it remembers of each, and which connection to it counts.

Owns the peer's addresses, its back-off, its counters and the rule below. Does
no I/O and reads no clock.

**One connection per pair.** Both replicas may dial, because either may be the
one that came back on another port. The acceptor decides, once the dialer has
proven itself and before it is welcome, so that a second connection never
stands, not even for a moment:

1. A connection stands already.

   - The dialer is another process than the one connected (its incarnation
     differs): it restarted. The new connection replaces the old one.
   - The dialer had dialed that one too: it has given it up, or it would not
     dial. The newer attempt replaces the older.
   - We had dialed it: if the dialer knew it (``last_seen``), it has lost it, and
     the new one replaces it. If not, the two dials crossed, and ours won: refuse.

2. None stands, but our own dial waits for its welcome. The dials crossed: the
   one of the lower replica id wins. Both sides know both ids, so they agree.

3. Otherwise: welcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from rayqueue.ids import ReplicaId
from rayqueue.net.backoff import longest_s
from rayqueue.raft.handshake import NEVER_SEEN, Claim

Address: TypeAlias = tuple[str, int]


class Verdict(Enum):
    WELCOME = "welcome"
    REPLACE = "replace"
    """The peer's process is the same; nobody needs to know."""
    RESTARTED = "restarted"
    """The peer's process is another one; the old one is dead."""
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Standing:
    """The connection that counts: its name, who dialed it, and which process is at its other end."""

    connection_id: bytes
    dialed_by_us: bool
    attempt: int
    incarnation: bytes


def verdict(claim: Claim, me: ReplicaId, standing: Standing | None, crossing_incarnation: bytes | None) -> Verdict:
    """The verdict on a dialer that has proven its claim. ``crossing_incarnation``: the peer process to which our own
    dial has sent its proof and waits for the welcome, if there is one."""
    peer = claim.peer
    if standing is not None:
        if standing.incarnation != peer.incarnation:
            return Verdict.RESTARTED
        if standing.dialed_by_us:
            return Verdict.REPLACE if claim.last_seen == standing.connection_id else Verdict.REFUSE
        return Verdict.REPLACE if claim.attempt > standing.attempt else Verdict.REFUSE
    if crossing_incarnation == peer.incarnation and me < peer.replica_id:
        return Verdict.REFUSE
    return Verdict.WELCOME


@dataclass(frozen=True, slots=True)
class PeerStats:
    """Counters since the peer became known. ``dropped``: messages for which ``send`` returned False."""

    connected: bool
    connections: int
    queued_bytes: int
    sent_bytes: int
    sent_messages: int
    received_bytes: int
    received_messages: int
    dropped_messages: int


ConnectionT = TypeVar("ConnectionT")


@dataclass(slots=True, eq=False)
class Peer(Generic[ConnectionT]):
    """One peer. ``connection`` stands; ``dial`` is under way."""

    replica_id: ReplicaId
    connection: ConnectionT | None = None
    standing: Standing | None = None
    dial: ConnectionT | None = None

    named: Address | None = None
    """Where ``set_peers`` says it is; None for a stranger, who is not dialed."""
    learned: Address | None = None
    """Where it said itself that it is, since ``set_peers`` last named another address."""
    reached: Address | None = None
    """Where its last known process listened."""

    last_seen: bytes = NEVER_SEEN
    up_since: float = 0.0
    maybe_alive: bool = False
    """It was up, is down, and nobody could tell whether its process is gone."""
    failures: int = 0
    next_dial_at: float = 0.0

    connections: int = 0
    sent_bytes: int = 0
    sent_messages: int = 0
    received_bytes: int = 0
    received_messages: int = 0
    dropped_messages: int = 0

    def name(self, address: Address, now: float) -> None:
        """``set_peers`` says where the peer is. Naming the same address again is no news: the peer may have
        restarted elsewhere since, and told us."""
        if address != self.named:
            self.named = address
            self.learned = None
            self.failures = 0
            self.next_dial_at = now

    def next_address(self) -> Address | None:
        """The address to dial now. With two candidates they take turns: either may be out of date."""
        if self.named is None:
            return None
        candidates = [self.named] if self.learned in (None, self.named) else [self.learned, self.named]
        return candidates[self.failures % len(candidates)]

    def wants_dial(self) -> bool:
        return self.named is not None and self.connection is None and self.dial is None

    def back_off(self, now: float, min_ms: int, max_ms: int, jitter: float) -> None:
        """Dial later: twice as late after each failure. ``jitter``, in [0, 1), keeps dials from crossing for ever."""
        self.next_dial_at = now + longest_s(min_ms, max_ms, self.failures) * (0.5 + 0.5 * jitter)
        self.failures += 1

    def stats(self, queued_bytes: int) -> PeerStats:
        return PeerStats(
            connected=self.connection is not None,
            connections=self.connections,
            queued_bytes=queued_bytes,
            sent_bytes=self.sent_bytes,
            sent_messages=self.sent_messages,
            received_bytes=self.received_bytes,
            received_messages=self.received_messages,
            dropped_messages=self.dropped_messages,
        )
