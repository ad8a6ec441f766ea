"""Figures of a running replica for whoever draws them: once a second, on the engine's thread.

What grows for ever is counted from the start of the process, so that who looks
less often than once a second misses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayqueue.replica.clients import ClientStats
from rayqueue.replica.status import Status


@dataclass(frozen=True, slots=True)
class Measures:
    status: Status
    elected: int
    """How often this replica became the leader."""
    longest_sync_s: float
    """Of the second before."""
    clients: ClientStats = field(default=ClientStats(), kw_only=True)


@dataclass(frozen=True, slots=True)
class PartitionMeasures(Measures):
    appended_records: int
    """Applied since the process began, by whomever it was led."""
    appended_bytes: int
    fetched_records: int
    """Answered to clients by this replica."""
    fetched_bytes: int
    unacked_refused: int = 0
    """Batches sent with ``acks="none"`` that this replica refused."""
    backlog_records: int = 0
    """What the slowest group has not committed. Only the leader knows it; 0 elsewhere."""
    backlog_bytes: int = 0
    lags: Mapping[str, int] = field(default_factory=dict)
    """Group to the records that it has not committed. Only the leader's."""
