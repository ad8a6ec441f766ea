"""What a topic is told to be, and what the cluster says it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from rayqueue.errors import InvalidInputError

MAX_PARTITIONS = 10_000
MAX_REPLICATION = 7
MAX_NAME = 120

STAGING = ("bridge-staging", "spark-staging.", "data-staging.")
"""How the names of topics begin that the bridges make for themselves."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(kind: str, name: Any) -> str:
    """``InvalidInputError`` unless it may name a topic or a consumer group."""
    if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{name!r} cannot name a {kind}: 1 to {MAX_NAME} letters, digits, dots, underscores and hyphens, "
            "and a letter or digit first",
            name=str(name),
        )
    return name


def is_internal(name: str) -> bool:
    """Whether RayQueue has made this topic for itself. Such topics are not listed, and no pattern means them."""
    return name.startswith(STAGING)


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a topic is made. ``None`` is: no limit."""

    partitions: int = 1
    """Shards, each with an order of its own. More can be added later, never fewer."""
    replication: int = 3
    """Copies of each partition. Where there are fewer nodes, several are on one: that survives processes, not nodes."""
    lanes: int = 1
    """Priority levels: a record's priority is from 0 to this, exclusive. Fixed once the topic exists."""
    retention_ms: int | None = None
    """Records that are older may be deleted."""
    retention_bytes: int | None = None
    """Per partition: of a larger one the oldest records may be deleted."""
    retention_consumed: bool = False
    """Trim what every group has committed."""
    max_record_bytes: int = 1_000_000
    """Key, value and headers of one record."""
    max_backlog_bytes: int | None = None
    """Per partition: the batches that the slowest group has not committed yet. More is ``QueueFullError``."""
    max_backlog_records: int | None = None
    """The same in records: the slowest group's lag."""

    def check(self) -> TopicSettings:
        """Itself. ``InvalidInputError`` that names the setting, if one is impossible."""
        ranges = {
            "partitions": (1, MAX_PARTITIONS),
            "replication": (1, MAX_REPLICATION),
            "lanes": (1, 255),
            "retention_ms": (1, 2**62),
            "retention_bytes": (1, 2**62),
            "max_record_bytes": (1, 64 * 1024 * 1024),
            "max_backlog_bytes": (1, 2**62),
            "max_backlog_records": (1, 2**62),
        }
        for key, (least, most) in ranges.items():
            value = getattr(self, key)
            if value is None and key not in ("partitions", "replication", "lanes", "max_record_bytes"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise InvalidInputError(f"{key} must be from {least} to {most}, not {value!r}", key=key)
        if not isinstance(self.retention_consumed, bool):
            raise InvalidInputError(f"retention_consumed is true or false, not {self.retention_consumed!r}")
        return self

    def changed(self, changes: Mapping[str, Any]) -> TopicSettings:
        """With these settings instead. ``InvalidInputError`` for one that does not exist, cannot be, or is fixed."""
        for key in changes:
            if key not in self.__struct_fields__:
                raise InvalidInputError(
                    f"a topic has no setting {key!r}; there are {', '.join(self.__struct_fields__)}", key=key
                )
        fixed = {key for key in ("lanes", "replication") if changes.get(key, getattr(self, key)) != getattr(self, key)}
        if fixed:
            raise InvalidInputError(f"{', '.join(sorted(fixed))} cannot change once a topic exists", key=min(fixed))
        partitions = changes.get("partitions", self.partitions)
        if isinstance(partitions, int) and partitions < self.partitions:
            raise InvalidInputError(
                f"a topic cannot go from {self.partitions} partitions to {partitions}: "
                "the records of those removed would be lost",
                key="partitions",
            )
        return msgspec.structs.replace(self, **changes).check()


class ReplicaInfo(msgspec.Struct, frozen=True, array_like=True):
    node: str
    """The replica's id in its Raft group."""
    broker: str


class PartitionInfo(msgspec.Struct, frozen=True, array_like=True):
    number: int
    group_id: str
    """Of the Raft group; with a replica's id it names its actor (``rayqueue.actors.names``)."""
    replicas: tuple[ReplicaInfo, ...]


class TopicInfo(msgspec.Struct, frozen=True, array_like=True):
    name: str
    topic_id: int
    """Another one for each topic that ever had this name."""
    settings: TopicSettings
    partitions: tuple[PartitionInfo, ...]
    version: int = 0
    """Of the settings: how often they were altered."""


class TopicPartition(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A partition by its topic's name and its number. Its text is ``orders-3``."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"
