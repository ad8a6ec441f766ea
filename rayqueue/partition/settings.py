"""Settings of a partition: its topic's, and those that decide how it applies its log.

Every replica must apply with the same ones, or they diverge. So they are part
of the replicated state: what the constructor is given counts for a new
partition only, and is changed by ``configure_command``.

They are written as a map, so that a release may add one: with a default that
means what there was before, and that never changes.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import Annotated

import msgspec

from rayqueue.errors import ConfigError, UnknownFormatError
from rayqueue.protocol.topics import Setting, SharedSettings, TopicSettings, declared, problems_of
from rayqueue.protocol.unpacking import unpack

_HEAD = bytes((2,))
"""The format: a map of names to values follows."""
_FIXED_FORMAT = 1
_FIXED = Struct("<BHIIIQQQ?QQQ")  # the format, then these

_FIRST = ("lanes", "max_producers", "dedupe_window", "max_groups", "version")
"""Written first, in this order."""
_FIXED_NAMES = (
    *_FIRST,
    "retention_ms",
    "retention_bytes",
    "retention_consumed",
    "max_record_bytes",
    "max_backlog_bytes",
    "max_backlog_records",
)


class PartitionSettings(SharedSettings, frozen=True, kw_only=True):
    """Its topic's, and its own."""

    max_producers: Annotated[
        int,
        Setting(
            "Idempotent producers that are remembered however long they are idle (producers.IDLE_MS).", most=1_000_000
        ),
    ] = 1024
    dedupe_window: Annotated[
        int,
        Setting("Batches per producer whose answers are remembered: more than it ever has in flight.", most=1024),
    ] = 32
    max_groups: Annotated[int, Setting("Consumer groups that may have offsets here.", most=1_000_000)] = 1000
    max_transactions: Annotated[int, Setting("Transactions that may be open here.", most=1_000_000)] = 1000
    max_transaction_runs: Annotated[
        int,
        Setting("Runs of neighbouring batches that one transaction may have here, and jobs whose end it may stage."),
    ] = 10_000
    version: Annotated[
        int,
        Setting("The coordinator's number of its topic's settings: says whether the partition has the newest.", 0),
    ] = 0

    def __post_init__(self) -> None:
        for key, problem in problems_of(self):
            raise ConfigError(problem, key=key)

    @staticmethod
    def of(topic: TopicSettings, version: int) -> PartitionSettings:
        """The part of a topic's settings that each of its partitions is told."""
        return PartitionSettings(
            version=version, **{name: getattr(topic, name) for name in SharedSettings.__struct_fields__}
        )

    def encode(self) -> bytes:
        order = dict.fromkeys((*_FIRST, *self.__struct_fields__))
        values = {name: getattr(self, name) for name in order}
        # Of what came later only what is used: replicas of the release before must be able to apply the rest.
        used = {name: values[name] for name in order if name in _FIXED_NAMES or values[name] != _DEFAULTS[name]}
        return _HEAD + _encode(used)

    @staticmethod
    def decode(encoded: bytes) -> PartitionSettings:
        """A setting that is not there has its default. ``UnknownFormatError`` if this release cannot read them, or does
        not know one of them: whoever applies the log without it diverges."""
        if encoded[:1] == bytes((_FIXED_FORMAT,)):
            return _decode_fixed(encoded)
        if encoded[:1] != _HEAD:
            raise UnknownFormatError(f"partition settings of format {encoded[:1].hex()} are unknown to this release")
        found = unpack(_decoder, memoryview(encoded)[1:], _unreadable)
        unknown = found.keys() - set(PartitionSettings.__struct_fields__)
        if unknown:
            raise UnknownFormatError(
                f"a newer release has written the partition settings {', '.join(sorted(unknown))}: upgrade this one",
                unknown=sorted(unknown),
            )
        try:
            return PartitionSettings(**found)  # type: ignore[arg-type]  # the ranges are checked
        except (ConfigError, TypeError) as error:
            raise _unreadable(str(error)) from None


_DEFAULTS = {name: setting.default for name, setting in declared(PartitionSettings).items()}
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(dict[str, int | bool | None])


def _unreadable(why: str) -> UnknownFormatError:
    return UnknownFormatError(f"partition settings cannot be read: {why}")


def _decode_fixed(encoded: bytes) -> PartitionSettings:
    """As they were written before there were names. 0 is no limit."""
    try:
        _, *values = _FIXED.unpack(encoded)
        found = dict(zip(_FIXED_NAMES, values, strict=True))
        limits = {name: value or None for name, value in found.items() if name not in (*_FIRST, "retention_consumed")}
        return PartitionSettings(**(found | limits))
    except (struct.error, ConfigError) as error:
        raise _unreadable(str(error)) from None
