"""Settings of a partition: its topic's, and those that decide how it applies its log.

Every replica must apply with the same ones, or they diverge. So they are part
of the replicated state: what the constructor is given counts for a new
partition only, and is changed by ``configure_command``.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from struct import Struct

from rayqueue.errors import ConfigError, UnknownFormatError
from rayqueue.protocol.topics import TopicSettings

_FORMAT = 1
_LAYOUT = Struct("<BHIIIQQQ?QQQ")  # the format, then the fields in their order; 0 is no limit

_MUCH = 2**62
_RANGES = {
    "lanes": (1, 255),
    "max_producers": (1, 1_000_000),
    "dedupe_window": (1, 1024),
    "max_groups": (1, 1_000_000),
    "version": (0, _MUCH),
}
_LIMITS = ("retention_ms", "retention_bytes", "max_record_bytes", "max_backlog_bytes", "max_backlog_records")


@dataclass(frozen=True, slots=True)
class PartitionSettings:
    """``None`` is: no limit. See ``TopicSettings`` for what the topic's mean."""

    lanes: int = 1
    """Priority levels. A batch belongs to one of them."""
    max_producers: int = 1024
    """Idempotent producers that are remembered however long they are idle (``producers.IDLE_MS``)."""
    dedupe_window: int = 32
    """Batches per producer whose answers are remembered: more than it ever has in flight."""
    max_groups: int = 1000
    """Consumer groups that may have offsets here."""
    version: int = 0
    """The coordinator's number of its topic's settings: says whether the partition has the newest."""
    retention_ms: int | None = None
    retention_bytes: int | None = None
    retention_consumed: bool = False
    max_record_bytes: int | None = None
    max_backlog_bytes: int | None = None
    max_backlog_records: int | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            number = getattr(self, name)
            if not least <= number <= most:
                raise ConfigError(f"{name} must be from {least} to {most}, not {number}", key=name)
        for name in _LIMITS:
            number = getattr(self, name)
            if number is not None and not 1 <= number <= _MUCH:
                raise ConfigError(f"{name} must be from 1 to {_MUCH}, or none, not {number}", key=name)

    @staticmethod
    def of(topic: TopicSettings, version: int) -> PartitionSettings:
        """What a topic's settings say for each of its partitions."""
        return PartitionSettings(
            lanes=topic.lanes,
            version=version,
            retention_ms=topic.retention_ms,
            retention_bytes=topic.retention_bytes,
            retention_consumed=topic.retention_consumed,
            max_record_bytes=topic.max_record_bytes,
            max_backlog_bytes=topic.max_backlog_bytes,
            max_backlog_records=topic.max_backlog_records,
        )

    def encode(self) -> bytes:
        return _LAYOUT.pack(_FORMAT, *(field or 0 for field in astuple(self)))

    @staticmethod
    def decode(encoded: bytes) -> PartitionSettings:
        """``UnknownFormatError`` if this release cannot read them."""
        if encoded[:1] != bytes((_FORMAT,)):
            raise UnknownFormatError(f"partition settings of format {encoded[:1].hex()} are unknown to this release")
        try:
            _, lanes, producers, window, groups, version, *limits = _LAYOUT.unpack(encoded)
        except struct.error as error:
            raise UnknownFormatError(f"partition settings cannot be read: {error}") from None
        age_ms, size_bytes, consumed, record_bytes, backlog_bytes, backlog_records = limits
        return PartitionSettings(
            lanes,
            producers,
            window,
            groups,
            version,
            age_ms or None,
            size_bytes or None,
            consumed,
            record_bytes or None,
            backlog_bytes or None,
            backlog_records or None,
        )
