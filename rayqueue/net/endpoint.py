"""An endpoint: the address at which a replica serves clients, as its actor tells it."""

from __future__ import annotations

from typing import NamedTuple

from rayqueue.ids import ReplicaId, Term


class Endpoint(NamedTuple):
    """The replica's own socket, what opens it, and who leads as far as this replica knows.

    Good for one life of the replica's process: a restarted one listens elsewhere, with another token.
    """

    host: str
    port: int
    token: bytes
    """Proves that one was told by the actor (``rayqueue.protocol.hello``). A secret."""
    replica_id: ReplicaId
    leader: ReplicaId | None
    term: Term
    tls: bool | None = None
    """Whether it speaks TLS. None: it does not say."""

    def __repr__(self) -> str:
        return f"Endpoint({self.host}:{self.port}, replica={self.replica_id}, leader={self.leader}, term={self.term})"
