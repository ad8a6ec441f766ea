"""The transport between replicas: TCP, authenticated, never blocking.

Owns the sockets of one replica: a listener, at most one connection per peer,
those still proving themselves, and the clock-driven work on them (dial again,
give up a slow handshake). Clients that have proven themselves are handed over
to a ``ClientPort``. Implements ``rayqueue.raft.transport.Transport``;
see there for what the engine may rely on.

Promises:

- ``send`` writes at once if nothing is queued, so bytes are on their way while
  the caller goes on to its fsync. It never blocks and never raises for a
  peer's fault.
- Everything that others can make grow is bounded by ``TransportSettings``: bytes
  queued per peer, bytes of a frame, bytes read per ``poll``, connections that
  have proven nothing, peers that nobody named.
- Per connection, messages arrive whole, unchanged, in order. Between two
  connections some may be lost: Raft repeats them.
- A peer is reported up once and down once, however many connections come and
  go between (``rayqueue.raft.peers`` has the rule). Down is followed by a
  second report only if it first was not known, and then is, that it is dead.

Does not resolve names (that blocks), and does not take silence for death: a
follower may have nothing to say. The kernel tells a dead link (keep-alive,
user timeout), Raft's own timers a stuck peer.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping

from rayqueue.config import TransportSettings
from rayqueue.errors import ConfigError, HandshakeError, TransportError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.net.streams import Stream, TlsContexts, TlsStream, Waker, dial, is_numeric, listen, tls_contexts, tune
from rayqueue.raft.clients import ClientPort, Guest
from rayqueue.raft.connection import Connection, Stage
from rayqueue.raft.handshake import (
    INCARNATION_BYTES,
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    Acceptor,
    Dialer,
    Identity,
    Reason,
    check_secret,
)
from rayqueue.raft.messages import Message
from rayqueue.raft.peers import Address, Peer, PeerStats, Standing, Verdict, verdict
from rayqueue.raft.transport import Event, PeerDown, PeerUp, Received, Transport
from rayqueue.raft.wire import FrameReader, encode, oldest_version

__all__ = ["PeerStats", "TcpTransport", "TlsContexts", "tls_contexts"]

_log = logging.getLogger(__name__)

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_NEVER = float("inf")
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104
_ACCEPTS_PER_POLL = 8  # under TLS each costs milliseconds, which heartbeats wait for
_ACCEPT_PAUSE_S = 0.1
_COMPLAINT_INTERVAL_S = 5.0


class TcpTransport(Transport):
    """``host`` is bound; ``advertised_host`` is what peers are told to dial, needed only if ``host`` is a wildcard."""

    def __init__(
        self,
        replica_id: ReplicaId,
        group_id: GroupId,
        secret: bytes,
        host: str,
        port: int = 0,
        *,
        advertised_host: str | None = None,
        settings: TransportSettings | None = None,
        tls: TlsContexts | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_secret(secret)
        self._secret = secret
        self._settings = settings or TransportSettings()
        self._tls = tls
        self._rng = rng or random.Random()  # noqa: S311  # jitter only
        self._clock = clock
        self._peers: dict[ReplicaId, Peer[Connection]] = {}
        self._unproven: dict[Connection, None] = {}  # accepted, nothing proven yet; oldest first
        self._events: list[Event] = []
        self._half_read: list[Connection] = []
        self._broken: list[Connection] = []
        self._clients: ClientPort | None = None
        self._dials = 0  # over all peers: still growing when one is forgotten and named again
        self._timer_at = _NEVER
        self._accept_again_at = _NEVER
        self._complain_again_at: dict[str, float] = {}
        self._scratch = memoryview(bytearray(MAX_HANDSHAKE_BYTES))
        self._closed = False
        self.versions: dict[ReplicaId, int] = {}
        """Of the protocol, as each peer spoke it when it was last connected."""
        self.handshake_failures = 0
        """Connections, ours and others', that ended before they stood, for whatever reason."""

        self._listener = listen(host, port)
        try:
            bound_host, bound_port = self._listener.getsockname()[:2]
            told = advertised_host or bound_host
            if told in _WILDCARDS or not is_numeric(told):
                raise ConfigError(
                    f"peers cannot dial {told}: give an address as advertised_host", key="advertised_host"
                )
            self._me = Identity(replica_id, group_id, told, bound_port, secrets.token_bytes(INCARNATION_BYTES))
        except ConfigError:
            self._listener.close()
            raise
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, _READ, None)
        self._waker = Waker()
        self._selector.register(self._waker, _READ, None)

    # -- the engine's side -------------------------------------------------------

    @property
    def address(self) -> Address:
        return self._me.host, self._me.port

    @property
    def connected(self) -> frozenset[ReplicaId]:
        return frozenset(peer.replica_id for peer in self._peers.values() if peer.connection is not None)

    def set_peers(self, addresses: Mapping[ReplicaId, Address]) -> None:
        for replica_id, (host, port) in addresses.items():
            if not is_numeric(host) or not 0 < port < 2**16:
                raise ConfigError(f"{replica_id} has no numeric address: {host}:{port}", key="peers")
        now = self._clock()
        for peer in list(self._peers.values()):
            if peer.named is not None and peer.replica_id not in addresses:
                self._forget(peer)
        for replica_id, (host, port) in addresses.items():
            if replica_id != self._me.replica_id:
                self._peers.setdefault(replica_id, Peer(replica_id)).name((host, port), now)
        self._timer_at = now

    def serve_clients(self, port: ClientPort) -> None:
        """Hand clients over to ``port``. Until then they are strangers."""
        port.attach(self._selector)
        self._clients = port

    def send(self, peer: ReplicaId, message: Message) -> bool:
        known = self._peers.get(peer)
        if known is None:
            return False
        connection = known.connection
        if connection is None or connection.broken is not None or connection.version < oldest_version(message):
            known.dropped_messages += 1
            return False
        buffers = encode(message)
        size = sum(map(len, buffers))
        stream = connection.stream
        queued = stream.queued_bytes
        if size > self._settings.max_frame_bytes or (queued and queued + size > self._settings.send_queue_bytes):
            known.dropped_messages += 1
            if size > self._settings.max_frame_bytes:
                self._complain("%s for %s has %d bytes and can never be sent", type(message).__name__, peer, size)
            return False
        try:
            stream.write(buffers, size)
        except OSError as error:
            # What the peer said before it went is still to be read: poll does that, then reports it down.
            connection.broken = error
            self._broken.append(connection)
            known.dropped_messages += 1
            return False
        known.sent_messages += 1
        known.sent_bytes += size
        if queued or stream.queued_bytes:
            self._watch(connection)
        return True

    def poll(self, timeout_s: float) -> list[Event]:
        if self._closed:
            raise TransportError("the transport is closed")
        remaining_s = timeout_s
        deadline = self._clock() + timeout_s
        while True:
            self._settle_broken()
            clients = self._clients
            busy = self._events or self._half_read or (clients is not None and clients.half_read)
            wait_s = 0.0 if busy else max(0.0, min(remaining_s, self._timer_at - self._clock()))
            half_read, self._half_read = self._half_read, []
            woken = False
            ready = self._selector.select(wait_s)
            for key, mask in ready:
                if isinstance(key.data, Connection):
                    self._on_ready(key.data, mask)
                elif key.data is not None and clients is not None:
                    clients.on_ready(key.data, mask)
                elif key.fileobj is self._waker:
                    woken = True
                    self._waker.drain()
                else:
                    self._accept()
            for connection in half_read:
                self._on_ready(connection, _READ)
            if clients is not None and clients.half_read:
                clients.read_rest()
            # Timers last: whatever arrived while this thread was held up elsewhere arrived in time.
            now = self._clock()
            if now >= self._timer_at:
                self._run_timers(now)
            # By the clock if it moved; by what was waited if it is a test's, which may stand still.
            remaining_s = min(remaining_s if ready else remaining_s - wait_s, deadline - now)
            if self._events or woken or remaining_s <= 0 or (clients is not None and clients.stirred):
                break
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in self._peers.values():
            for connection in (peer.connection, peer.dial):
                if connection is not None:
                    connection.close()
        for connection in self._unproven:
            connection.close()
        if self._clients is not None:
            self._clients.close()
        self._peers.clear()
        self._unproven.clear()
        self._events.clear()
        self._selector.close()
        self._listener.close()
        self._waker.close()

    def stats(self) -> dict[ReplicaId, PeerStats]:
        return {
            peer.replica_id: peer.stats(0 if peer.connection is None else peer.connection.stream.queued_bytes)
            for peer in self._peers.values()
        }

    # -- sockets -------------------------------------------------------------------

    def _on_ready(self, connection: Connection, mask: int) -> None:
        if connection.closed:
            return  # by what happened earlier in this round
        try:
            if connection.stage is Stage.STANDING:
                # Read first: writing to a peer that is gone fails, but what it said before still counts.
                if mask & _READ:
                    self._read(connection)
                if mask & _WRITE and not connection.closed:
                    connection.stream.flush()
            else:
                connection.greet(self._scratch)
                if connection.stage is Stage.GREETED:
                    self._greeted(connection)
            if not connection.closed:
                self._watch(connection)
        except (OSError, TransportError) as error:
            self._lost(connection, error)

    def _read(self, connection: Connection) -> None:
        reader, stream, peer = connection.reader, connection.stream, connection.peer
        if reader is None or peer is None:
            return
        budget = self._settings.read_budget_bytes
        while budget > 0:
            space = reader.space()
            count = stream.read_into(space)
            if count is None:
                return
            if count == 0:
                self._lost(connection, None)
                return
            peer.received_bytes += count
            budget -= count
            for message in reader.messages(count):
                peer.received_messages += 1
                self._events.append(Received(peer.replica_id, message))
            if count < len(space):
                return
        if stream.has_more:
            self._half_read.append(connection)

    def _watch(self, connection: Connection) -> None:
        """Have the selector watch for what the connection waits for."""
        if connection.stage is Stage.CONNECTING:
            interest = _WRITE
        else:
            interest = _READ | _WRITE if connection.stream.wants_write else _READ
        if interest != connection.interest:
            if connection.interest:
                self._selector.modify(connection.fd, interest, connection)
            else:
                self._selector.register(connection.fd, interest, connection)
            connection.interest = interest

    def _unwatch(self, connection: Connection) -> None:
        if connection.interest:
            self._selector.unregister(connection.fd)
            connection.interest = 0

    def _hang_up(self, connection: Connection) -> None:
        self._unwatch(connection)
        self._unproven.pop(connection, None)
        connection.close()

    def _accept(self) -> None:
        now = self._clock()
        for _ in range(_ACCEPTS_PER_POLL):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory. The listener stays readable, so look away for a moment.
                self._complain("cannot accept connections: %s", error)
                self._selector.unregister(self._listener)
                self._accept_again_at = now + _ACCEPT_PAUSE_S
                self._timer_at = min(self._timer_at, self._accept_again_at)
                return
            if len(self._unproven) >= self._settings.max_unauthenticated:
                self._lost(self._most_annoying(), HandshakeError("too many connections that have proven nothing"))
            try:
                stream = self._stream(sock, dialed=False, source=address[0])
            except OSError:
                sock.close()
                continue
            deadline = now + self._settings.handshake_timeout_ms / 1000
            begin_guest = None if self._clients is None else self._expect_client
            connection = Connection(stream, self._expect, deadline=deadline, begin_guest=begin_guest)
            self._unproven[connection] = None
            self._timer_at = min(self._timer_at, connection.deadline)
            self._watch(connection)

    def _most_annoying(self) -> Connection:
        """The oldest that has proven nothing, of the source that has most of them: a flood pushes itself out."""
        sources = Counter(connection.stream.source for connection in self._unproven)
        worst = max(sources.values())
        return next(each for each in self._unproven if sources[each.stream.source] == worst)

    def _stream(self, sock: socket.socket, *, dialed: bool, source: str = "") -> Stream:
        tune(sock, self._settings.peer_timeout_ms, self._settings.socket_buffer_bytes)
        if self._tls is None:
            return Stream(sock, source)
        return TlsStream(sock, self._tls.client if dialed else self._tls.server, dialed=dialed, source=source)

    def _expect(self, stream: Stream) -> Acceptor:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Acceptor(self._me, self._secret, nonce=nonce, binding=stream.binding())

    def _expect_client(self, stream: Stream) -> Guest:
        token = b"" if self._clients is None else self._clients.token
        return Guest(token, secrets.token_bytes(NONCE_BYTES), stream.binding())

    def _dial(self, peer: Peer[Connection], now: float) -> None:
        address = peer.next_address()
        if address is None:
            return
        self._dials += 1
        attempt = self._dials

        def begin(stream: Stream) -> Dialer:
            return Dialer(
                self._me,
                self._secret,
                peer.replica_id,
                nonce=secrets.token_bytes(NONCE_BYTES),
                attempt=attempt,
                last_seen=peer.last_seen,
                binding=stream.binding(),
            )

        try:
            stream = self._stream(dial(address), dialed=True)
        except OSError as error:
            self._dial_failed(peer, address, error)
            return
        deadline = now + self._settings.handshake_timeout_ms / 1000
        connection = Connection(stream, begin, deadline=deadline, peer=peer, address=address)
        peer.dial = connection
        self._watch(connection)

    # -- who is who ------------------------------------------------------------------

    def _greeted(self, connection: Connection) -> None:
        side = connection.side
        if isinstance(side, Dialer) and connection.peer is not None:
            peer = connection.peer
            peer.dial = None
            peer.reached = connection.address
            self._stand(
                connection, peer, Standing(side.connection_id, True, side.attempt, side.peer.incarnation), news=True
            )
        elif isinstance(side, Acceptor):
            self._judge(connection, side)
        elif isinstance(side, Guest) and self._clients is not None:
            self._unproven.pop(connection, None)
            self._unwatch(connection)
            self._clients.admit(connection.hand_over(), side.unread)

    def _judge(self, connection: Connection, side: Acceptor) -> None:
        """Someone called and has proven who it is. Welcome it or not."""
        claim = side.claim
        if claim is None:
            return
        replica_id = claim.peer.replica_id
        peer = self._peers.get(replica_id)
        if peer is None:
            unnamed = sum(known.named is None for known in self._peers.values())
            if unnamed >= self._settings.max_unnamed_peers:
                self._refuse(connection, side, Reason.BUSY)
                return
            peer = Peer(replica_id)
        ours = None if peer.dial is None else peer.dial.side
        crossing = ours.peer.incarnation if isinstance(ours, Dialer) and ours.proven else None
        decision = verdict(claim, self._me.replica_id, peer.standing, crossing)
        if decision is Verdict.REFUSE:
            self._refuse(connection, side, Reason.DUPLICATE)
            return
        connection.say(side.welcome())
        self._peers[replica_id] = peer
        for other in (peer.dial, peer.connection):
            if other is not None:
                self._hang_up(other)
        peer.dial = None
        if decision is Verdict.RESTARTED:
            self._events.append(PeerDown(replica_id, dead=True))
        if is_numeric(claim.peer.host):
            peer.learned = peer.reached = (claim.peer.host, claim.peer.port)
        standing = Standing(side.connection_id, False, claim.attempt, claim.peer.incarnation)
        self._stand(connection, peer, standing, news=decision is not Verdict.REPLACE)

    def _refuse(self, connection: Connection, side: Acceptor, reason: Reason) -> None:
        connection.say(side.refuse(reason))
        self._hang_up(connection)

    def _stand(self, connection: Connection, peer: Peer[Connection], standing: Standing, *, news: bool) -> None:
        self._unproven.pop(connection, None)
        connection.peer = peer
        peer.connection = connection
        peer.standing = standing
        peer.last_seen = standing.connection_id
        peer.up_since = self._clock()
        peer.maybe_alive = False
        peer.connections += 1
        if news:
            self._events.append(PeerUp(peer.replica_id))
        reader = FrameReader(self._settings.max_frame_bytes, self._settings.read_buffer_bytes)
        peer.received_bytes += 0 if connection.side is None else len(connection.side.unread)
        early = connection.stand(reader)
        self.versions[peer.replica_id] = connection.version
        for message in early:
            peer.received_messages += 1
            self._events.append(Received(peer.replica_id, message))
        self._read(connection)

    def _lost(self, connection: Connection, error: Exception | None) -> None:
        """A connection ended: in ``error``, or orderly by the other side."""
        if connection.closed:
            return
        error = connection.broken or error
        if isinstance(connection.side, Acceptor) and isinstance(error, HandshakeError):
            with contextlib.suppress(OSError):
                connection.say(connection.side.last_words)
        self._hang_up(connection)
        peer = connection.peer
        if peer is None:
            self._not_proven(None, error)
        elif connection is peer.dial:
            peer.dial = None
            self._dial_failed(peer, connection.address, error)
        elif connection is peer.connection:
            # Closed or reset by the peer's kernel: its process is gone, or hung up on us, which it never does for
            # long. Anything else (a timeout, no route, a bad frame) says nothing about the process.
            dead = error is None or isinstance(error, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)
            if error is not None and not dead:
                self._complain("lost the connection with %s: %s", peer.replica_id, error)
            self._down(peer, dead=dead)

    def _down(self, peer: Peer[Connection], *, dead: bool) -> None:
        peer.connection = None
        peer.standing = None
        peer.maybe_alive = not dead
        self._events.append(PeerDown(peer.replica_id, dead=dead))
        if peer.named is None:
            del self._peers[peer.replica_id]
            return
        now = self._clock()
        if now - peer.up_since >= self._settings.stable_ms / 1000:
            peer.failures = 0
            peer.next_dial_at = now
            self._timer_at = now
        else:
            self._retry_later(peer, now)

    def _forget(self, peer: Peer[Connection]) -> None:
        """``set_peers`` does not name it any more."""
        if peer.dial is not None:
            self._hang_up(peer.dial)
        if peer.connection is not None:
            self._hang_up(peer.connection)
            self._events.append(PeerDown(peer.replica_id, dead=False))
        del self._peers[peer.replica_id]

    def _dial_failed(self, peer: Peer[Connection], address: Address | None, error: Exception | None) -> None:
        if isinstance(error, ConnectionRefusedError) and address == peer.reached and peer.maybe_alive:
            peer.maybe_alive = False
            self._events.append(PeerDown(peer.replica_id, dead=True))
        if not isinstance(error, HandshakeError) or error.details.get("reason") is not Reason.DUPLICATE:
            self._not_proven(peer.replica_id, error)
        self._retry_later(peer, self._clock())

    def _not_proven(self, dialed: ReplicaId | None, error: Exception | None) -> None:
        self.handshake_failures += 1
        # One that merely hung up may have noticed that two dials crossed.
        if isinstance(error, HandshakeError | ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            self._complain("handshake with %s failed: %s", dialed or "a caller", error)

    def _retry_later(self, peer: Peer[Connection], now: float) -> None:
        peer.back_off(now, self._settings.reconnect_min_ms, self._settings.reconnect_max_ms, self._rng.random())
        self._timer_at = min(self._timer_at, peer.next_dial_at)

    # -- time --------------------------------------------------------------------------

    def _run_timers(self, now: float) -> None:
        if now >= self._accept_again_at:
            self._accept_again_at = _NEVER
            self._selector.register(self._listener, _READ, None)
        for connection in list(self._unproven):
            if now >= connection.deadline:
                self._lost(connection, HandshakeError("the handshake took too long"))
        for peer in list(self._peers.values()):
            if peer.dial is not None and now >= peer.dial.deadline:
                self._lost(peer.dial, TimeoutError("the handshake took too long"))
            if peer.wants_dial() and now >= peer.next_dial_at:
                self._dial(peer, now)
        self._timer_at = min(
            self._accept_again_at,
            min((connection.deadline for connection in self._unproven), default=_NEVER),
            min((peer.dial.deadline for peer in self._peers.values() if peer.dial is not None), default=_NEVER),
            min((peer.next_dial_at for peer in self._peers.values() if peer.wants_dial()), default=_NEVER),
        )

    def _settle_broken(self) -> None:
        """Writing to them failed: take what they had sent before, then let go."""
        broken, self._broken = self._broken, []
        for connection in broken:
            if connection.stage is Stage.STANDING:
                self._on_ready(connection, _READ)
                self._lost(connection, connection.broken)

    def _complain(self, text: str, *values: object) -> None:
        """Log, but let nobody fill the log: each text once in a while."""
        now = self._clock()
        if now >= self._complain_again_at.get(text, now):
            self._complain_again_at[text] = now + _COMPLAINT_INTERVAL_S
            _log.warning("%s: " + text, self._me.replica_id, *values)
