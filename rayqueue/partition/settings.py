"""Settings of a partition: its topic's, and those that decide how it applies its log.

Every replica must apply with the same ones, or they diverge. So they are part
of the replicated state: what the constructor is given counts for a new
partition only, and is changed by ``configure_command``.

They are written as a map, so that a release may add one: with a default that
means what there was before, and that never changes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from struct import Struct

import msgspec

from rayqueue.errors import ConfigError, UnknownFormatError
from rayqueue.protocol.topics import TopicSettings
from rayqueue.protocol.unpacking import unpack

_HEAD = bytes((2,))
"""The format: a map of names to values follows."""
_FIXED_FORMAT = 1
_FIXED = Struct("<BHIIIQQQ?QQQ")  # the format, then the fields in the order that they had

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
        return _HEAD + _encode(self)

    @staticmethod
    def decode(encoded: bytes) -> PartitionSettings:
        """A setting that is not there has its default. ``UnknownFormatError`` if this release cannot read them, or does
        not know one of them: whoever applies the log without it diverges."""
        if encoded[:1] == bytes((_FIXED_FORMAT,)):
            return _decode_fixed(encoded)
        if encoded[:1] != _HEAD:
            raise UnknownFormatError(f"partition settings of format {encoded[:1].hex()} are unknown to this release")
        found = unpack(_decoder, memoryview(encoded)[1:], _unreadable)
        unknown = found.keys() - PartitionSettings.__slots__
        if unknown:
            raise UnknownFormatError(
                f"a newer release has written the partition settings {', '.join(sorted(unknown))}: upgrade this one",
                unknown=sorted(unknown),
            )
        try:
            return PartitionSettings(**found)  # type: ignore[arg-type]  # the ranges are checked
        except (ConfigError, TypeError) as error:
            raise _unreadable(str(error)) from None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(dict[str, int | bool | None])


def _unreadable(why: str) -> UnknownFormatError:
    return UnknownFormatError(f"partition settings cannot be read: {why}")


def _decode_fixed(encoded: bytes) -> PartitionSettings:
    """As they were written before there were names. 0 is no limit."""
    try:
        _, lanes, producers, window, groups, version, *limits = _FIXED.unpack(encoded)
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
    except (struct.error, ConfigError) as error:
        raise _unreadable(str(error)) from None
