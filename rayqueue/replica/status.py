"""The status of a replica: what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass

from rayqueue.ids import GroupId, Index, NodeId, Offset, Term


@dataclass(frozen=True, slots=True)
class Status:
    group_id: GroupId
    node_id: NodeId
    role: str
    """``leader``, ``follower`` or ``learner``. One that asks for votes is a follower without a leader."""
    leader: NodeId | None
    term: Term
    start_offset: Offset
    high_watermark: Offset
    base_index: Index
    last_index: Index
    commit: Index
    applied: Index
    voters: tuple[NodeId, ...]
    learners: tuple[NodeId, ...]
    address: tuple[str, int]
    size_bytes: int
    read_only: bool
    """The disk is full; it takes records again once there is space."""
    damaged: str | None
    """Why this replica must be rebuilt from its peers."""
    syncs: int
    sync_ms: float
    """Time spent in syncs, in all."""
