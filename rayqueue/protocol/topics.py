"""Topics: the declaration of their settings, and what the cluster says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from rayqueue.errors import InvalidInputError, UnknownPartitionError

MAX_PARTITIONS = 10_000
MAX_REPLICATION = 7
MAX_NAME = 120

GATEWAY = "rayqueue-gateway."
"""How the names of topics begin that the gateway makes for itself: keys, requests, audit."""

INTERNAL = ("bridge-staging", "spark-staging.", "data-staging.", GATEWAY)
"""How the names of topics begin that the bridges and the gateway make for themselves."""

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
    return name.startswith(INTERNAL)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, but for the name, type and default that its field has. A number's unit is at the end of its name."""

    doc: str
    least: int = 1
    most: int = 2**62
    changes: Literal["freely", "up", "never"] = "freely"
    """Once there is the topic."""


_MAX_MS = 2**48


# What has its default is not written: an earlier release reads what it knows, as long as nobody uses what is new.
class SharedSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings that a topic has and its partitions act on. ``None`` is: no limit."""

    lanes: Annotated[
        int,
        Setting(
            "Priority levels: a record's priority is from 0 to this, exclusive. Fixed once the topic exists.",
            most=255,
            changes="never",
        ),
    ] = 1
    retention_ms: Annotated[int | None, Setting("Records that are older may be deleted.")] = None
    retention_bytes: Annotated[
        int | None, Setting("Per partition: of a larger one the oldest records may be deleted.")
    ] = None
    retention_consumed: Annotated[bool, Setting("Delete what every group has committed.")] = False
    max_record_bytes: Annotated[int | None, Setting("As a topic's; none in stores of the first format.")] = None
    max_backlog_bytes: Annotated[
        int | None,
        Setting("Per partition: the batches that the slowest group has not committed yet. More is QueueFullError."),
    ] = None
    max_backlog_records: Annotated[
        int | None, Setting("The same in records: the slowest group's lag; of a queue, the jobs that are not done.")
    ] = None
    queue: Annotated[
        bool,
        Setting(
            "A work queue: its records are jobs, which are leased to workers. What follows is for queues.",
            changes="never",
        ),
    ] = False
    lease_ms: Annotated[int, Setting("How long a job is leased, unless the lease is extended.", most=_MAX_MS)] = 30_000
    max_lease_ms: Annotated[
        int, Setting("How long a lease lasts at most, however often it is extended.", most=_MAX_MS)
    ] = 43_200_000
    max_deliveries: Annotated[
        int | None, Setting("A job that was delivered so often and not done is dead.", most=1_000_000)
    ] = 5
    retry_backoff_ms: Annotated[
        int, Setting("How long a failed job waits before its first retry; then twice as long each time.", 0, _MAX_MS)
    ] = 1_000
    retry_backoff_max_ms: Annotated[int, Setting("How long it waits at most.", 0, _MAX_MS)] = 300_000
    dead_letter: Annotated[bool, Setting("Keep dead jobs. Otherwise they are dropped, and counted.")] = True
    ordered_by_key: Annotated[
        bool, Setting("Jobs of one key are done one at a time, in the order in which they were put.", changes="never")
    ] = False
    fair_by_key: Annotated[
        bool, Setting("Keys that have jobs are served in turns, however many jobs each has.", changes="never")
    ] = False
    dedupe_window_ms: Annotated[int, Setting("How long a job's dedupe_id is remembered.", most=_MAX_MS)] = 300_000
    result_ttl_ms: Annotated[int, Setting("How long results of jobs are kept.", most=_MAX_MS)] = 3_600_000
    max_leased: Annotated[
        int, Setting("Per partition: jobs that are leased at the same time. Who asks for more waits.", most=1_000_000)
    ] = 50_000
    max_results_bytes: Annotated[
        int | None,
        Setting(
            "Per partition: results of jobs that are kept. Beyond it those go that would be kept for the shortest "
            "time; with none, beyond 16 MiB, those of the oldest jobs.",
            1_048_576,
            2**40,
        ),
    ] = None


class _Limited(SharedSettings, frozen=True, kw_only=True):
    max_record_bytes: Annotated[int, Setting("Key, value and headers of one record.", most=64 * 1024 * 1024)] = (
        1_000_000
    )


# Not kw_only, like its bases: so its own fields are the first.
class TopicSettings(_Limited, frozen=True):
    """The settings of a topic: the one place that declares them.

    The arguments of ``create_topic`` and ``alter_topic``, the flags of `rayqueue topics`, the checks, the wire, what a
    partition is told and docs/options.md follow from these fields and those of ``SharedSettings``. A new one goes to
    their end, with a default that means what there was before it (docs/upgrades.md).
    """

    partitions: Annotated[
        int,
        Setting(
            "Shards, each with an order of its own. More can be added later, never fewer.",
            most=MAX_PARTITIONS,
            changes="up",
        ),
    ] = 1
    replication: Annotated[
        int,
        Setting(
            "Copies of each partition. Where there are fewer nodes, several are on one: "
            "that survives processes, not nodes.",
            most=MAX_REPLICATION,
        ),
    ] = 3
    prefer_leader: Annotated[
        Literal["consumer"] | None,
        Setting("Lead each partition on the node where most of its readers are, if it has a replica there."),
    ] = None

    def check(self) -> TopicSettings:
        """Itself. ``InvalidInputError`` that names the setting, if one is impossible."""
        for key, problem in problems_of(self):
            raise InvalidInputError(problem, key=key)
        return self

    def changed(self, changes: Mapping[str, Any]) -> TopicSettings:
        """With these settings instead. ``InvalidInputError`` for one that does not exist, cannot be, or is fixed."""
        known = declared(TopicSettings)
        for key in changes:
            if key not in known:
                raise InvalidInputError(f"a topic has no setting {key!r}; there are {', '.join(known)}", key=key)
        different = {key: value for key, value in changes.items() if value != getattr(self, key)}
        fixed = sorted(key for key in different if known[key].changes == "never")
        if fixed:
            raise InvalidInputError(f"{', '.join(fixed)} cannot change once a topic exists", key=fixed[0])
        for key, value in different.items():
            before = getattr(self, key)
            if known[key].changes == "up" and isinstance(value, int) and value < before:
                raise InvalidInputError(
                    f"a topic cannot go from {before} {key} to {value}: the records of those removed would be lost",
                    key=key,
                )
        if self.ordered_by_key and "partitions" in different:
            raise InvalidInputError(
                "a queue that is ordered_by_key keeps its partitions: with more of them, jobs of a key would be put to "
                "another one while earlier ones wait in the first. Make a new queue, put there, and let this one empty",
                key="partitions",
            )
        return msgspec.structs.replace(self, **changes).check()


@dataclass(frozen=True, slots=True)
class Declared:
    """A setting as it is declared."""

    name: str
    kind: Any
    """``int``, ``bool`` or a ``Literal``."""
    optional: bool
    """It may be ``None``."""
    default: int | bool | str | None
    doc: str
    least: int
    most: int
    changes: Literal["freely", "up", "never"]
    choices: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """The values that it can have, in words."""
        if self.choices:
            return " or ".join((*map(repr, self.choices), "none") if self.optional else map(repr, self.choices))
        values = "true or false" if self.kind is bool else f"from {self.least} to {self.most}"
        return f"{values}, or none" if self.optional else values

    def problem(self, value: Any) -> str | None:
        """Why it cannot be this."""
        if value is None and self.optional:
            return None
        if self.choices:
            return None if value in self.choices else f"{self.name} is {self.range}, not {value!r}"
        if self.kind is bool:
            return None if isinstance(value, bool) else f"{self.name} is {self.range}, not {value!r}"
        if isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most:
            return None
        return f"{self.name} must be {self.range}, not {value!r}"


@cache
def declared(settings: type[msgspec.Struct]) -> Mapping[str, Declared]:
    """The settings that a class of them declares, by name, in the order of its fields."""
    hints = get_type_hints(settings, include_extras=True)
    found: dict[str, Declared] = {}
    for field in msgspec.structs.fields(settings):
        kind, meta = get_args(hints[field.name])
        kinds = get_args(kind) or (kind,)
        optional = type(None) in kinds
        choices = get_args(kinds[0])  # of a Literal
        rest = (meta.doc, meta.least, meta.most, meta.changes, choices)
        found[field.name] = Declared(field.name, kinds[0], optional, field.default, *rest)
    return MappingProxyType(found)


def problems_of(settings: msgspec.Struct) -> Iterator[tuple[str, str]]:
    """The names of settings that cannot be as they are, and why."""
    for name, setting in declared(type(settings)).items():
        problem = setting.problem(getattr(settings, name))
        if problem is not None:
            yield name, problem


class ReplicaInfo(msgspec.Struct, frozen=True, array_like=True):
    replica_id: str
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
    first_partitions: int = 0
    """Of a queue: how many it had before it was given more; 0 if it never was."""

    @property
    def dedupe_partitions(self) -> int:
        """Jobs with a ``dedupe_id`` go to the first so many, also once there are more: an id has one place for ever."""
        return self.first_partitions or len(self.partitions)

    def partition(self, number: int) -> PartitionInfo:
        """``UnknownPartitionError`` if there is none of this number."""
        if not 0 <= number < len(self.partitions):
            raise UnknownPartitionError(
                f"{self.name} has {len(self.partitions)} partitions; there is no {number}",
                topic=self.name,
                partition=number,
            )
        return self.partitions[number]


class TopicPartition(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A partition by its topic's name and its number. Its text is ``orders-3``."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"
