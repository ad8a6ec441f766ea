"""A replica's figures in Ray's metrics: exported by each node for Prometheus, drawn by the dashboard and Grafana.

Fed about once a second from what the replica measured of itself; nothing here
happens per record, batch or call. Every figure is tagged with topic, partition
and node, the lag with its group too. ``docs/operations.md`` says what each means.

What only the leader knows is 0 at the others, so that the sum over the replicas
of a partition is the leader's figure. Ray puts ``ray_`` in front of each name,
and ``_total`` behind a counter's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ray.util.metrics import Counter, Gauge

from rayqueue.actors.names import topic_partition
from rayqueue.ids import GroupId, ReplicaId
from rayqueue.replica.measures import Measures, PartitionMeasures
from rayqueue.replica.replica import Replica

EVERY_S = 1.0

_M = TypeVar("_M", Counter, Gauge)

_TAGS = ("topic", "partition", "replica")

_GAUGES: dict[str, tuple[str, Callable[[Measures], float]]] = {
    "rayqueue_leader": ("1 if this replica leads its partition", lambda now: now.status.role == "leader"),
    "rayqueue_term": ("Raft term", lambda now: now.status.term),
    "rayqueue_start_offset": ("first offset that can be read", lambda now: now.status.start_offset),
    "rayqueue_high_watermark": ("first offset that is not committed yet", lambda now: now.status.high_watermark),
    "rayqueue_disk_bytes": ("size of the replica on its disk", lambda now: now.status.size_bytes),
    "rayqueue_read_only": ("1 while the disk is full", lambda now: now.status.read_only),
    "rayqueue_damaged": ("1 if the replica must be rebuilt", lambda now: now.status.damaged is not None),
    "rayqueue_doubted": ("1 while the replica may have forgotten promises", lambda now: now.status.doubted is not None),
    "rayqueue_in_sync": ("replicas near the end of the log, by the leader", lambda now: len(now.status.in_sync)),
    "rayqueue_follower_lag_entries": (
        "entries that the slowest follower lacks, by the leader",
        lambda now: max((lag for _, lag in now.status.lags), default=0),
    ),
    "rayqueue_clients": ("clients that are connected", lambda now: now.clients.connected),
    "rayqueue_fsync_longest_seconds": ("longest sync of the second before", lambda now: now.longest_sync_s),
}

_PARTITION_GAUGES: dict[str, tuple[str, Callable[[PartitionMeasures], float]]] = {
    "rayqueue_backlog_records": ("records that the slowest group has not committed", lambda now: now.backlog_records),
    "rayqueue_backlog_bytes": ("the same in bytes of batches", lambda now: now.backlog_bytes),
    "rayqueue_jobs_ready": ("jobs of a work queue that wait for a worker", lambda now: now.jobs_ready),
    "rayqueue_jobs_leased": ("jobs that workers have", lambda now: now.jobs_leased),
    "rayqueue_jobs_delayed": ("jobs that wait for their time", lambda now: now.jobs_delayed),
    "rayqueue_jobs_dead": ("dead letters", lambda now: now.jobs_dead),
    "rayqueue_results_bytes": ("results of jobs that are kept", lambda now: now.results_bytes),
    "rayqueue_transactions_open": ("transactions that have not ended here", lambda now: now.transactions_open),
    "rayqueue_transaction_oldest_seconds": (
        "for how long the oldest of them has been open",
        lambda now: now.oldest_transaction_ms / 1000,
    ),
}

_COUNTERS: dict[str, tuple[str, Callable[[Measures], float]]] = {
    "rayqueue_elections": ("times this replica became the leader", lambda now: now.elected),
    "rayqueue_leaders_handed_over": ("times this replica became the leader by hand-over", lambda now: now.handed_over),
    "rayqueue_clients_refused": ("clients turned away because of too many", lambda now: now.clients.refused),
    "rayqueue_clients_hung_up": ("clients that this replica hung up on", lambda now: now.clients.hung_up),
    "rayqueue_scrubbed_bytes": ("read by the slow search for damage", lambda now: now.status.scrubbed.bytes),
    "rayqueue_scrub_passes": ("times that it has read everything", lambda now: now.status.scrubbed.passes),
    "rayqueue_fsyncs": ("syncs of the disk", lambda now: now.status.syncs),
    "rayqueue_fsync_seconds": ("time spent in them", lambda now: now.status.sync_ms / 1000),
}

_PARTITION_COUNTERS: dict[str, tuple[str, Callable[[PartitionMeasures], float]]] = {
    "rayqueue_fetched_records": ("records sent to consumers by this replica", lambda now: now.fetched_records),
    "rayqueue_fetched_bytes": ("the same in bytes of batches", lambda now: now.fetched_bytes),
    "rayqueue_unacked_refused": ("batches with acks='none' that were refused", lambda now: now.unacked_refused),
}

_PRODUCED: dict[str, tuple[str, Callable[[PartitionMeasures], float]]] = {
    "rayqueue_results_evicted": ("results forgotten before their time, for room", lambda now: now.results_evicted),
    "rayqueue_produced_records": ("records committed, counted by the leader", lambda now: now.appended_records),
    "rayqueue_produced_bytes": ("the same in bytes of batches", lambda now: now.appended_bytes),
}


class _Growth:
    """A counter that is told totals since the process began."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._counted = 0.0

    def reach(self, total: float, *, counts: bool = True) -> None:
        """``counts`` is false for what others count."""
        if counts and total > self._counted:
            self._counter.inc(total - self._counted)
        self._counted = total


class ReplicaMetrics:
    """Of one replica. It may be a coordinator's, which has no records and no groups."""

    def __init__(self, group_id: GroupId, replica_id: ReplicaId) -> None:
        topic, partition = topic_partition(group_id)
        self._tags = {"topic": topic, "partition": partition, "replica": replica_id}
        gauges, counters = {**_GAUGES, **_PARTITION_GAUGES}, {**_COUNTERS, **_PARTITION_COUNTERS, **_PRODUCED}
        self._gauges = {name: self._tagged(Gauge(name, text, _TAGS)) for name, (text, _) in gauges.items()}
        self._grown = {name: _Growth(self._tagged(Counter(name, text, _TAGS))) for name, (text, _) in counters.items()}
        lag = Gauge("rayqueue_lag_records", "records that a group has not committed", (*_TAGS, "group"))
        self._lag = self._tagged(lag)
        self._lagging: set[str] = set()

    def report(self, now: Measures) -> None:
        for name, (_, read) in _GAUGES.items():
            self._gauges[name].set(float(read(now)))
        for name, (_, read) in _COUNTERS.items():
            self._grown[name].reach(read(now))
        if now.partition is not None:
            self._report_partition(now.partition, leads=now.status.role == "leader")

    def _report_partition(self, now: PartitionMeasures, *, leads: bool) -> None:
        for name, (_, read) in _PARTITION_GAUGES.items():
            self._gauges[name].set(float(read(now)))
        for name, (_, read) in _PARTITION_COUNTERS.items():
            self._grown[name].reach(read(now))
        for name, (_, read) in _PRODUCED.items():
            self._grown[name].reach(read(now), counts=leads)
        # Ray forgets no group by itself: one that is gone, or that another replica counts now, is at 0.
        for group in self._lagging - now.lags.keys():
            self._lag.set(0.0, {"group": group})
        for group, records in now.lags.items():
            self._lag.set(float(records), {"group": group})
        self._lagging = set(now.lags)

    def _tagged(self, metric: _M) -> _M:
        metric.set_default_tags(self._tags)
        return metric


_CLUSTER_GAUGES = {
    "rayqueue_under_replicated_partitions": "partitions with fewer copies in service than they should have",
    "rayqueue_moves_under_way": "replicas that are being made, replaced or removed",
    "rayqueue_replicas_lost": "replicas whose data is lost and that were not replaced yet",
    "rayqueue_brokers_away": "brokers that are known and not here",
    "rayqueue_transactions_committing": "transactions that are committed, and of which some partitions may not know",
}


class ClusterMetrics:
    """Of the cluster, told by the coordinator that leads; the others say 0."""

    def __init__(self, replica_id: ReplicaId) -> None:
        tags = {"replica": str(replica_id)}
        self._gauges = {name: Gauge(name, text, ("replica",)) for name, text in _CLUSTER_GAUGES.items()}
        self._events = Counter("rayqueue_events", "what happened to brokers and replicas", ("replica", "kind"))
        for each in (*self._gauges.values(), self._events):
            each.set_default_tags(tags)

    def report(self, *figures: float) -> None:
        """In the order of ``_CLUSTER_GAUGES``."""
        for gauge, figure in zip(self._gauges.values(), figures, strict=True):
            gauge.set(float(figure))

    def count(self, kind: str) -> None:
        self._events.inc(1.0, {"kind": kind})


async def report_metrics(replica: Replica[Any], group_id: GroupId, replica_id: ReplicaId) -> NoReturn:
    """Until it is cancelled."""
    metrics = ReplicaMetrics(group_id, replica_id)
    while True:
        if replica.measures is not None:
            metrics.report(replica.measures)
        await asyncio.sleep(EVERY_S)
