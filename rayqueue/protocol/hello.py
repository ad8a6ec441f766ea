"""A client's hello: how its connection begins. Both sides prove that they hold the replica's token.

A replica draws a token when it starts and gives it to whoever may call its
actor (Ray's own model of trust: the holder of a handle is trusted). Both sides
send a nonce and the versions that they speak, then a MAC over both messages
under a key made of the token. The client proves first; a stranger learns
nothing but a nonce and the versions.

    client                                  replica
      magic, versions, nonce           ->
                                       <-   magic, versions, nonce
      HMAC(key, "client" both)         ->
                                       <-   HMAC(key, "replica" both)

Both then use the highest version that both speak. The first message has this
form in all versions, and the MACs cover both of them, so nobody on the way can
make the two sides use an older version than they would. A side that has none in
common with the other still says its hello: both can tell who is to be upgraded.

Under TLS the key is bound to the TLS session, as between replicas. Does no
I/O and draws no random numbers.
"""

from __future__ import annotations

import hmac
from struct import Struct
from typing import NamedTuple

from rayqueue.errors import HandshakeError
from rayqueue.protocol.versions import Versions

MAGIC = b"RQC"
"""Other than the first bytes between replicas, so that one port serves both."""
SPEAKS = Versions(2, 2)
"""Of frames and calls. 2: the range is said; before it was one number, and nothing was negotiated."""
NONCE_BYTES = 32
MAC_BYTES = 32
TOKEN_BYTES = 32

_HELLO = Struct("<3sBB32s")
HELLO_BYTES = _HELLO.size


class Hello(NamedTuple):
    versions: Versions
    nonce: bytes


def key_of(token: bytes, binding: bytes = b"") -> bytes:
    return hmac.digest(token, b"rayqueue client handshake\0" + binding, "sha256")


def hello(nonce: bytes, speaks: Versions = SPEAKS) -> bytes:
    """The first message of either side."""
    return _HELLO.pack(MAGIC, *speaks, nonce)


def read_hello(message: bytes) -> Hello:
    """The other side's first message. ``HandshakeError`` if it is none."""
    magic, lowest, highest, nonce = _HELLO.unpack(message)
    if magic != MAGIC or not 0 < lowest <= highest:
        raise HandshakeError("not a peer that speaks the client protocol")
    return Hello(Versions(lowest, highest), nonce)


def proof(key: bytes, role: bytes, client_hello: bytes, replica_hello: bytes) -> bytes:
    """``role`` is ``b"client"`` or ``b"replica"``. The hellos are whole messages."""
    return hmac.digest(key, role + b"\0" + client_hello + replica_hello, "sha256")


def check_proof(given: bytes, key: bytes, role: bytes, client_hello: bytes, replica_hello: bytes) -> None:
    if not hmac.compare_digest(given, proof(key, role, client_hello, replica_hello)):
        raise HandshakeError("the other side does not hold this replica's token")
