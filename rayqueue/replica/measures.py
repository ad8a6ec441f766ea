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
class PartitionMeasures:
    """Measures that only a partition has."""

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
    jobs_ready: int = 0
    """Of a work queue, as those that follow; only the leader's."""
    jobs_leased: int = 0
    jobs_delayed: int = 0
    jobs_dead: int = 0
    results_bytes: int = 0
    results_evicted: int = 0
    """Results of jobs that were forgotten before their time, as applied since the process began."""
    transactions_open: int = 0
    """As the one that follows only the leader's."""
    oldest_transaction_ms: int = 0
    """How long the oldest of them has been open, by the partition's clock."""


@dataclass(frozen=True, slots=True)
class Measures:
    status: Status
    elected: int
    """How often this replica became the leader."""
    longest_sync_s: float
    """Of the second before."""
    clients: ClientStats = field(default=ClientStats())
    partition: PartitionMeasures | None = None
    """None for a replica of the coordinator."""
    handed_over: int = 0
    """How often it became the leader because the one before made way."""


class SyncTimes:
    """The number of syncs of the disk, and how long they took."""

    __slots__ = ("count", "longest_s", "total_s")

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self.longest_s = 0.0
        """Since somebody set it to 0."""

    def add(self, took_s: float) -> None:
        self.count += 1
        self.total_s += took_s
        if took_s > self.longest_s:
            self.longest_s = took_s
