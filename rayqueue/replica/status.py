"""The status of a replica: what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayqueue.ids import GroupId, Index, Offset, ReplicaId, Term


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """The scrub's progress (``rayqueue.replica.scrub``) since the process began."""

    bytes: int = 0
    """In all passes."""
    passes: int = 0
    passed_ms: int | None = None
    """When the last pass ended, by the machine's clock. Everything was intact then, or was found."""
    pass_bytes: int = 0
    """Of the pass that is under way."""


@dataclass(frozen=True, slots=True)
class Status:
    group_id: GroupId
    replica_id: ReplicaId
    role: str
    """``leader``, ``follower`` or ``learner``. One that asks for votes is a follower without a leader."""
    leader: ReplicaId | None
    term: Term
    start_offset: Offset
    high_watermark: Offset
    base_index: Index
    last_index: Index
    commit: Index
    applied: Index
    voters: tuple[ReplicaId, ...]
    learners: tuple[ReplicaId, ...]
    address: tuple[str, int]
    size_bytes: int
    read_only: bool
    """The disk is full; it takes records again once there is space."""
    damaged: str | None
    """Why this replica must be rebuilt from its peers."""
    forgetful: tuple[ReplicaId, ...]
    """On the leader: replicas that have lost what they had acknowledged to it."""
    syncs: int
    sync_ms: float
    """Time spent in syncs, in all."""
    doubted: str | None = None
    """Why this replica may have forgotten what it promised (a restored store), and whose answer it waits for."""
    last_term: int = 0
    """Of the last entry of its log."""
    epoch: int = 0
    """How often its group went on without a majority (``rayqueue.raft.recovery``)."""
    in_sync: tuple[ReplicaId, ...] = ()
    """On the leader: the replicas that are near the end of its log (``raft.in_sync_ms``), itself included."""
    lags: tuple[tuple[ReplicaId, int], ...] = ()
    """On the leader: how many entries of the log each other replica is not known to have."""
    scrubbed: Scrubbed = field(default=Scrubbed())
    """How far the slow read of everything has come, which finds damage without a reader."""
    acknowledged: int = 0
    """The offset before which it had acknowledged all, as is remembered beside its store. Of an only voter."""
    settled: bool = True
    """The membership that it knows is committed. Else its group may return to the one before it."""
    peers: tuple[ReplicaId, ...] = ()
    """The others of its group, and whoever else it asks while it is in doubt of itself."""
    connected: tuple[ReplicaId, ...] = ()
    """Those with which it has a connection now."""
