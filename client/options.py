"""Options of producers, consumers and topics by name and type, so that an editor knows them.

Each is optional; what is left out is as the settings say. The same names, with
their defaults and what they mean, are in ``rayqueue.config.ProducerSettings`` and
``ConsumerSettings`` and in ``rayqueue.protocol.topics.TopicSettings``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from typing_extensions import TypedDict

from rayqueue.client.partitioners import CustomPartitioner
from rayqueue.client.polling import Listener
from rayqueue.protocol.topics import TopicPartition
from rayqueue.records import HeadersIn


class ProducerOptions(TypedDict, total=False):
    linger_ms: int
    batch_bytes: int
    in_flight_bytes: int
    in_flight_batches: int
    buffer_bytes: int
    delivery_timeout_ms: int
    on_full: Literal["block", "raise"]
    acks: Literal["all", "leader", "none"]
    compression: Literal["none", "lz4", "zstd"]
    partitioner: Literal["consistent", "murmur2", "roundrobin", "sticky"] | CustomPartitioner


class SendOptions(TypedDict, total=False):
    """Of one record."""

    headers: HeadersIn
    priority: int
    partition: int | None
    timestamp_ms: int | None


class ConsumerOptions(TypedDict, total=False):
    partitions: Iterable[TopicPartition | tuple[str, int]] | None
    pattern: str | re.Pattern[str] | None
    delivery: Literal["at_least_once", "at_most_once", "exactly_once"]
    auto_commit: bool
    ack: Literal["poll", "record"]
    listener: Listener | None
    instance: str | None
    client: str | None
    pin: bool
    fetch_bytes: int
    fetch_wait_ms: int
    prefetch_bytes: int
    max_poll_records: int
    auto_commit_ms: int
    session_timeout_ms: int
    heartbeat_ms: int
    max_poll_interval_ms: int
    assignor: Literal["balanced", "sticky", "range", "roundrobin"]
    start: Literal["earliest", "latest", "error"]
    on_corrupt: Literal["raise", "skip", "set_aside"]
    on_topic_deleted: Literal["raise", "drop"]
    refresh_ms: int


class TopicChanges(TypedDict, total=False):
    """What of a topic can be altered. ``None`` is: no limit."""

    partitions: int
    retention_ms: int | None
    retention_bytes: int | None
    retention_consumed: bool
    max_record_bytes: int
    max_backlog_bytes: int | None
    max_backlog_records: int | None


class TopicOptions(TopicChanges, total=False):
    replication: int
    lanes: int
