"""How a connection of a client begins: both sides prove that they hold the replica's token.

A replica draws a token when it starts and gives it to whoever may call its
actor (Ray's own model of trust: the holder of a handle is trusted). Both sides
send a nonce, then a MAC over both nonces under a key made of the token. The
client proves first; a stranger learns nothing but a nonce.

    client                                  replica
      magic, version, nonce            ->
                                       <-   magic, version, nonce
      HMAC(key, "client" nonces)       ->
                                       <-   HMAC(key, "replica" nonces)

Under TLS the key is bound to the TLS session, as between replicas. Does no
I/O and draws no random numbers.
"""

from __future__ import annotations

import hmac
from struct import Struct

from rayqueue.errors import HandshakeError

MAGIC = b"RQC"
"""Other than the first bytes between replicas, so that one port serves both."""
VERSION = 1
NONCE_BYTES = 32
MAC_BYTES = 32
TOKEN_BYTES = 32

_HELLO = Struct("<3sB32s")
HELLO_BYTES = _HELLO.size


def key_of(token: bytes, binding: bytes = b"") -> bytes:
    return hmac.digest(token, b"rayqueue client handshake\0" + binding, "sha256")


def hello(nonce: bytes) -> bytes:
    """The first message of either side."""
    return _HELLO.pack(MAGIC, VERSION, nonce)


def nonce_of(message: bytes) -> bytes:
    """The nonce of the other side's first message. ``HandshakeError`` if it speaks something else."""
    magic, version, nonce = _HELLO.unpack(message)
    if magic != MAGIC or version != VERSION:
        raise HandshakeError(f"not a peer that speaks version {VERSION} of the client protocol", version=version)
    return nonce  # type: ignore[no-any-return]


def proof(key: bytes, role: bytes, client_nonce: bytes, replica_nonce: bytes) -> bytes:
    """``role`` is ``b"client"`` or ``b"replica"``."""
    return hmac.digest(key, role + b"\0" + client_nonce + replica_nonce, "sha256")


def check_proof(given: bytes, key: bytes, role: bytes, client_nonce: bytes, replica_nonce: bytes) -> None:
    if not hmac.compare_digest(given, proof(key, role, client_nonce, replica_nonce)):
        raise HandshakeError("the other side does not hold this replica's token")
