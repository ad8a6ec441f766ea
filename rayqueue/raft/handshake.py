"""The handshake of two replicas: a mutual proof of the cluster's secret, and the version of all that follows.

Owns the first four messages on every connection, before anything else is
parsed. Does no I/O and draws no random numbers: nonces are handed in, and must
be fresh for every connection.

    dialer                                                     acceptor
      Hello      versions, nonce, group, who, where, whom  ->
             <-  versions, nonce, group, who, where             Challenge
      Proof      HMAC("dialer", Hello, Challenge)         ->
             <-  HMAC("acceptor", Hello, Challenge, Proof)     Welcome

Why it holds:

- Both MACs cover every byte of Hello and Challenge, hence both nonces: an old
  recording does not fit a new nonce (replay), and nobody can change an id, a
  group, an address or the versions on the way: both sides use the highest that
  both speak, and nobody can make them use an older one.
- Each MAC is bound to its role by a label, and a replica refuses its own id: what
  one side says is useless when sent back to it (reflection).
- The key is derived from the secret and, under TLS, from the TLS session
  (channel binding): a man in the middle with two TLS sessions cannot pass the
  proof of one on to the other, even without a CA.
- The dialer proves first. A stranger who connects learns the replica's name
  and a nonce, and gets no MAC to try passwords on.

Without TLS the *connection* is authenticated, not every byte after it: whoever
can inject into the TCP stream can still harm. That is what TLS is for.

``Refuse`` may be sent by the acceptor instead of Challenge or Welcome. It is
not authenticated: it explains a closed connection to a human, nothing more.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from rayqueue.errors import ConfigError, HandshakeError, IncompatibleVersionError
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.protocol.versions import Versions, agree

SPEAKS = Versions(2, 3)
"""The versions of what replicas say to each other, of log entries and of checkpoints: a replica must be able to read
what another one sends, and to apply it (docs/upgrades.md).

2: a follower says that its disk is full (``AppendReply.full``), and the range is said. Version 1 was never released.
3: a replica whose store may be an older copy asks the others (``Inquiry``, ``Account``)."""
NONCE_BYTES = 32
INCARNATION_BYTES = 16
NEVER_SEEN = bytes(NONCE_BYTES)
MIN_SECRET_BYTES = 16

_MAGIC = b"RQH"
_HEAD = Struct("<3sBH")  # magic, kind, bytes of body
_HELLO, _CHALLENGE, _PROOF, _WELCOME, _REFUSE = 1, 2, 3, 4, 5

# The versions come first and stay there in all versions, so that two releases can at least tell why they part.
_HELLO_BODY = Struct("<HH32s16sQ32sH")  # versions, nonce, incarnation, attempt, last_seen, port; then four names
_CHALLENGE_BODY = Struct("<HH32s16sH")  # versions, nonce, incarnation, port; then three names
_VERSIONS = Struct("<HH")  # lowest, highest
_REFUSE_BODY = Struct("<HHB")  # versions, reason
_MAC_BYTES = 32
_MAX_NAME_BYTES = 255
_MAX_BODY_BYTES = {
    _HELLO: _HELLO_BODY.size + 4 * (1 + _MAX_NAME_BYTES),
    _CHALLENGE: _CHALLENGE_BODY.size + 3 * (1 + _MAX_NAME_BYTES),
    _PROOF: _MAC_BYTES,
    _WELCOME: _MAC_BYTES,
    _REFUSE: _REFUSE_BODY.size,
}
# What a side may have to keep at once; a caller never needs to read more than this before the handshake is done.
MAX_HANDSHAKE_BYTES = _HEAD.size + max(_MAX_BODY_BYTES.values())


class Reason(IntEnum):
    """Why an acceptor refused; ``details["reason"]`` of the dialer's ``HandshakeError``."""

    VERSION = 1
    GROUP = 2
    OWN_ID = 3
    WRONG_PEER = 4
    SECRET = 5
    DUPLICATE = 6
    """There is, or is about to be, another connection between the two. Not a fault."""
    BUSY = 7


@dataclass(frozen=True, slots=True)
class Identity:
    """A replica's name and address, as it says. ``incarnation`` is drawn once per process: new after a restart."""

    replica_id: ReplicaId
    group_id: GroupId
    host: str
    port: int
    incarnation: bytes

    def __post_init__(self) -> None:
        for key, name in (("replica_id", self.replica_id), ("group_id", self.group_id), ("host", self.host)):
            if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
                raise ConfigError(f"{key} must have 1 to {_MAX_NAME_BYTES} bytes", key=key)
        if not 0 < self.port < 2**16:
            raise ConfigError("port must be between 1 and 65535", key="port")


@dataclass(frozen=True, slots=True)
class Claim:
    """A dialer's claim, proven.

    ``attempt`` counts its dials, so that a newer one is known from an
    older. ``last_seen`` is the id of the last connection it had with us.
    """

    peer: Identity
    attempt: int
    last_seen: bytes


def check_secret(secret: bytes) -> None:
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"the cluster's secret must have at least {MIN_SECRET_BYTES} bytes", key="secret")


class _Side:
    """The part that both ends share: taking messages out of a stream, and the key."""

    def __init__(self, me: Identity, secret: bytes, nonce: bytes, binding: bytes, speaks: Versions) -> None:
        check_secret(secret)
        if len(nonce) != NONCE_BYTES:
            raise ConfigError(f"a nonce must have {NONCE_BYTES} bytes", key="nonce")
        self.me = me
        self.speaks = speaks
        self.version = 0
        """Of all that follows, once the other side's is known. Proven when the handshake is done."""
        self.unread = b""
        """Bytes that came after the handshake's last message."""
        self._nonce = nonce
        # A key of its own: the secret may serve other purposes, whose MACs must mean nothing here.
        self._key = hmac.digest(secret, b"rayqueue raft handshake\0" + binding, "sha256")

    def _mac(self, role: bytes, *transcript: bytes) -> bytes:
        # Every message carries its own length, so the concatenation is unambiguous.
        return hmac.digest(self._key, role + b"\0" + b"".join(transcript), "sha256")

    def _agree(self, body: bytes) -> None:
        """Settle the version; a message of the other side begins with those that it speaks."""
        if len(body) < _VERSIONS.size:
            raise HandshakeError("a message too short to hold its versions")
        self.version = agree(
            self.speaks, Versions(*_VERSIONS.unpack_from(body)), us="this replica", them="the other one"
        )

    def _next(self, expected: Sequence[int]) -> tuple[int, bytes, bytes] | None:
        """Kind, body and whole bytes of the next message, or None if it is not all here."""
        if len(self.unread) < _HEAD.size:
            # Strangers are turned away at their first wrong byte.
            if not _MAGIC.startswith(self.unread[: len(_MAGIC)]):
                raise HandshakeError("the other side does not speak this protocol")
            return None
        magic, kind, size = _HEAD.unpack_from(self.unread)
        if magic != _MAGIC:
            raise HandshakeError("the other side does not speak this protocol")
        if kind not in expected or size > _MAX_BODY_BYTES[kind]:
            raise HandshakeError(f"unexpected handshake message of kind {kind}, {size} bytes")
        end = _HEAD.size + size
        if len(self.unread) < end:
            return None
        message, self.unread = self.unread[:end], self.unread[end:]
        return kind, message[_HEAD.size :], message


class Dialer(_Side):
    """The side that opened the connection. Send ``hello``, then what ``receive`` returns, until ``done``."""

    def __init__(
        self,
        me: Identity,
        secret: bytes,
        wanted: ReplicaId,
        *,
        nonce: bytes,
        attempt: int,
        last_seen: bytes = NEVER_SEEN,
        binding: bytes = b"",
        speaks: Versions = SPEAKS,
    ) -> None:
        super().__init__(me, secret, nonce, binding, speaks)
        self.wanted = wanted
        self.attempt = attempt
        self.done = False
        self.proven = False
        """True once the Proof has left: the acceptor may count this connection as standing from now on."""
        fields = _HELLO_BODY.pack(*speaks, nonce, me.incarnation, attempt, last_seen, me.port)
        self.hello = _message(_HELLO, fields + _names(me.group_id, me.replica_id, me.host, wanted))
        self._challenge = b""
        self._proof = b""
        self._peer: Identity | None = None
        self._connection_id = b""

    @property
    def peer(self) -> Identity:
        """The replica that answered. Proven only when ``done``."""
        if self._peer is None:
            raise HandshakeError("nobody has answered yet")
        return self._peer

    @property
    def connection_id(self) -> bytes:
        """The connection's name, the same at both ends."""
        return self._connection_id

    def receive(self, data: bytes) -> bytes:
        """Take received bytes, return bytes to send."""
        self.unread += data
        reply = b""
        while not self.done:
            message = self._next((_WELCOME, _REFUSE) if self.proven else (_CHALLENGE, _REFUSE))
            if message is None:
                break
            kind, body, whole = message
            if kind == _REFUSE:
                raise self._refused(body)
            if kind == _CHALLENGE:
                reply += self._prove(body, whole)
            elif not hmac.compare_digest(body, self._mac(b"acceptor", self.hello, self._challenge, self._proof)):
                raise HandshakeError("the acceptor does not hold this cluster's secret", peer=self.wanted)
            else:
                self.done = True
        return reply

    def _refused(self, body: bytes) -> HandshakeError:
        if len(body) != _REFUSE_BODY.size:
            return HandshakeError("refused without a readable reason")
        *_, code = _REFUSE_BODY.unpack(body)
        try:
            reason = Reason(code)
        except ValueError:
            return HandshakeError(f"refused for reason {code}, unknown to this version")
        if reason is Reason.VERSION:
            try:
                self._agree(body)
            except IncompatibleVersionError as error:
                return error
        return HandshakeError(f"refused: {reason.name.lower().replace('_', ' ')}", reason=reason)

    def _prove(self, body: bytes, whole: bytes) -> bytes:
        self._agree(body)
        if len(body) < _CHALLENGE_BODY.size:
            raise HandshakeError("malformed Challenge")
        _, _, nonce, incarnation, port = _CHALLENGE_BODY.unpack_from(body)
        group_id, replica_id, host = _parse_names(body[_CHALLENGE_BODY.size :], 3)
        if group_id != self.me.group_id:
            raise HandshakeError("the acceptor belongs to another group", group=group_id)
        if replica_id != self.wanted or replica_id == self.me.replica_id:
            raise HandshakeError(f"dialed {self.wanted}, reached {replica_id!r}", peer=replica_id)
        if hmac.compare_digest(nonce, self._nonce):
            raise HandshakeError("the acceptor returned our own nonce")
        self._peer = _identity(replica_id, group_id, host, port, incarnation)
        self._connection_id = nonce
        self._challenge = whole
        self._proof = _message(_PROOF, self._mac(b"dialer", self.hello, whole))
        self.proven = True
        return self._proof


class Acceptor(_Side):
    """The side that was called. After ``receive`` has set ``claim``, the caller decides: ``welcome`` or ``refuse``."""

    def __init__(
        self, me: Identity, secret: bytes, *, nonce: bytes, binding: bytes = b"", speaks: Versions = SPEAKS
    ) -> None:
        super().__init__(me, secret, nonce, binding, speaks)
        self.claim: Claim | None = None
        """Who is there. Set once it is proven."""
        self.last_words = b""
        """What to send, at best effort, after ``receive`` raised."""
        self._hello = b""
        self._said: Claim | None = None
        self._challenge = b""
        self._proof = b""

    @property
    def connection_id(self) -> bytes:
        """The connection's name, the same at both ends."""
        return self._nonce

    def receive(self, data: bytes) -> bytes:
        """Take received bytes, return bytes to send."""
        self.unread += data
        reply = b""
        while self.claim is None:
            message = self._next((_PROOF,) if self._hello else (_HELLO,))
            if message is None:
                return reply
            kind, body, whole = message
            if kind == _HELLO:
                reply += self._answer(body, whole)
            elif not hmac.compare_digest(body, self._mac(b"dialer", self._hello, self._challenge)):
                raise self._refusal(Reason.SECRET, "the dialer does not hold this cluster's secret")
            else:
                self._proof = whole
                self.claim = self._said
        if self.unread:
            raise HandshakeError("the dialer spoke before it was welcome")
        return reply

    def welcome(self) -> bytes:
        if self.claim is None:
            raise HandshakeError("nobody has proven anything yet")
        return _message(_WELCOME, self._mac(b"acceptor", self._hello, self._challenge, self._proof))

    def refuse(self, reason: Reason) -> bytes:
        return _message(_REFUSE, _REFUSE_BODY.pack(*self.speaks, reason))

    def _answer(self, body: bytes, whole: bytes) -> bytes:
        try:
            self._agree(body)
        except HandshakeError:
            self.last_words = self.refuse(Reason.VERSION)
            raise
        if len(body) < _HELLO_BODY.size:
            raise HandshakeError("malformed Hello")
        _, _, nonce, incarnation, attempt, last_seen, port = _HELLO_BODY.unpack_from(body)
        group_id, replica_id, host, wanted = _parse_names(body[_HELLO_BODY.size :], 4)
        if group_id != self.me.group_id:
            raise self._refusal(Reason.GROUP, "the dialer belongs to another group", group=group_id)
        if replica_id == self.me.replica_id:
            raise self._refusal(Reason.OWN_ID, "the dialer claims this replica's own id")
        if wanted != self.me.replica_id:
            raise self._refusal(Reason.WRONG_PEER, f"the dialer wants {wanted!r}", wanted=wanted)
        if hmac.compare_digest(nonce, self._nonce):
            raise HandshakeError("the dialer returned our own nonce")
        self._said = Claim(_identity(replica_id, group_id, host, port, incarnation), attempt, last_seen)
        self._hello = whole
        me = self.me
        fields = _CHALLENGE_BODY.pack(*self.speaks, self._nonce, me.incarnation, me.port)
        self._challenge = _message(_CHALLENGE, fields + _names(me.group_id, me.replica_id, me.host))
        return self._challenge

    def _refusal(self, reason: Reason, why: str, **details: object) -> HandshakeError:
        self.last_words = self.refuse(reason)
        return HandshakeError(why, **details)


def _message(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, kind, len(body)) + body


def _names(*names: str) -> bytes:
    encoded = [name.encode() for name in names]
    return b"".join(bytes((len(name),)) + name for name in encoded)


def _parse_names(data: bytes, count: int) -> list[str]:
    names: list[str] = []
    at = 0
    for _ in range(count):
        if at >= len(data) or at + 1 + data[at] > len(data):
            raise HandshakeError("a name does not fit its message")
        end = at + 1 + data[at]
        try:
            names.append(data[at + 1 : end].decode())
        except UnicodeDecodeError as error:
            raise HandshakeError("a name is not UTF-8") from error
        at = end
    if at != len(data):
        raise HandshakeError("bytes after the last name")
    return names


def _identity(replica_id: str, group_id: str, host: str, port: int, incarnation: bytes) -> Identity:
    try:
        return Identity(ReplicaId(replica_id), GroupId(group_id), host, port, incarnation)
    except ConfigError as error:
        raise HandshakeError(f"the other side's identity is not valid: {error}") from error
