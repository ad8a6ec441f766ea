"""Options of producers and consumers by name and type, for overloads that would repeat them.

Each is optional; what is left out, or None, is as configured. ``ProducerSettings``
and ``ConsumerSettings`` declare them, with their defaults and what they mean; a
test compares these and all signatures with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from typing_extensions import TypedDict

from rayqueue.client.consumer.poll import Listener
from rayqueue.client.producer.partitioners import CustomPartitioner
from rayqueue.protocol.topics import TopicPartition


class ProducerOptions(TypedDict, total=False):
    linger_ms: int | None
    batch_bytes: int | None
    in_flight_bytes: int | None
    in_flight_batches: int | None
    buffer_bytes: int | None
    delivery_timeout_ms: int | None
    on_full: Literal["block", "raise"] | None
    acks: Literal["all", "leader", "none"] | None
    compression: Literal["none", "lz4", "zstd"] | None
    partitioner: Literal["consistent", "murmur2", "roundrobin", "sticky"] | CustomPartitioner | None
    transactional_id: str | None
    transaction_timeout_ms: int | None


class TopicConsumerOptions(TypedDict, total=False):
    """All but the group, which ``Topic.consumer`` takes in its place."""

    partitions: Iterable[TopicPartition | tuple[str, int]] | None
    pattern: str | re.Pattern[str] | None
    delivery: Literal["at_least_once", "at_most_once", "exactly_once"]
    auto_commit: bool
    ack: Literal["poll", "record"]
    listener: Listener | None
    instance: str | None
    client: str | None
    pin: bool
    isolation: Literal["read_committed", "read_uncommitted"]
    fetch_bytes: int | None
    fetch_wait_ms: int | None
    prefetch_bytes: int | None
    max_poll_records: int | None
    auto_commit_ms: int | None
    session_timeout_ms: int | None
    heartbeat_ms: int | None
    max_poll_interval_ms: int | None
    assignor: Literal["balanced", "sticky", "range", "roundrobin"] | None
    start: Literal["earliest", "latest", "error"] | None
    on_corrupt: Literal["raise", "skip", "set_aside"] | None
    on_topic_deleted: Literal["raise", "drop"] | None
    refresh_ms: int | None


class ConsumerOptions(TopicConsumerOptions, total=False):
    group: str | None
