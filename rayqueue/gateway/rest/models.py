"""Models: parameters, bodies and answers of the routes. Their JSON schemas are the OpenAPI document's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from rayqueue.gateway.operations import MAX_RECORDS, Isolation
from rayqueue.gateway.values import Base64, Form, Int32, Int64, Name, RecordOut
from rayqueue.protocol.topics import MAX_PARTITIONS, TopicSettings, declared

Count = Annotated[int, Meta(ge=1, le=MAX_RECORDS)]
WaitMs = Annotated[int, Meta(ge=0, le=30_000)]
Signed64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# -- parameters, of the path and the query ------------------------------------------------------


class NoParams(Struct):
    """None."""


class TopicParams(Struct):
    topic: Name


class PublishRawParams(Struct):
    topic: Name
    key: str | None = None
    key_base64: Base64 | None = None
    priority: Annotated[int, Meta(ge=0, le=254)] = 0
    partition: Int32 | None = None


class PeekParams(Struct):
    topic: Name
    partition: Int32 = 0
    offset: Int64 | None = None
    timestamp_ms: Int64 | None = None
    max: Count = 10
    format: Form = "auto"
    isolation: Isolation | None = None


class TailParams(Struct):
    topic: Name
    partition: Int32 | None = None
    offset: Int64 | None = None
    start: Literal["earliest", "latest"] = "latest"
    format: Form = "auto"
    isolation: Isolation | None = None


class TrackedParams(Struct):
    topic: Name
    consumer: Name
    max: Count = 100
    wait_ms: WaitMs = 1000
    format: Form = "auto"


class GroupParams(Struct):
    group: Name


class SessionParams(Struct):
    session: Annotated[str, Meta(min_length=1, max_length=200)]


class SessionReadParams(SessionParams):
    cursor: Int64 | None = None
    max: Count = 500
    wait_ms: WaitMs = 1000
    format: Form = "auto"


class FalconConsumeParams(Struct):
    topic: Name
    consumerID: Name  # noqa: N815  # as FalconQ spells it
    batch: Count = 1


class FalconPeekParams(Struct):
    topic: Name
    offset: Int64 = 0
    batch: Count = 1


# -- bodies ------------------------------------------------------------------------------------------


def setting(name: str) -> Any:
    """The type of a topic's setting, as bodies have it."""
    told = declared(TopicSettings)[name]
    kind: Any = told.kind
    if kind is int:
        kind = Annotated[int, Meta(ge=told.least, le=told.most, description=told.doc)]
    return kind | None if told.optional else kind


CreateTopic: Any = msgspec.defstruct(
    "CreateTopic",
    [
        ("name", Name),
        ("if_missing", bool, False),
        *((name, setting(name) | msgspec.UnsetType, UNSET) for name in declared(TopicSettings)),
    ],
    forbid_unknown_fields=True,
)
CreateTopic.__doc__ = "A topic to be made. What is left out has its default."

AlterTopic: Any = msgspec.defstruct(
    "AlterTopic",
    [
        (name, setting(name) | msgspec.UnsetType, UNSET)
        for name, told in declared(TopicSettings).items()
        if told.changes != "never"
    ],
    forbid_unknown_fields=True,
)
AlterTopic.__doc__ = "Settings to be changed; null takes a limit away, what is left out stays."


def given(body: Any) -> dict[str, Any]:
    """The settings that a body names."""
    known = declared(TopicSettings)
    fields = ((name, getattr(body, name)) for name in body.__struct_fields__ if name in known)
    return {name: value for name, value in fields if value is not UNSET}


class OpenSession(Struct, forbid_unknown_fields=True):
    """A consuming session to be opened, as a member of the group."""

    topics: Annotated[list[Name], Meta(min_length=1, max_length=100)]
    start: Literal["earliest", "latest"] = "earliest"
    timeout_ms: Annotated[int, Meta(ge=1000, le=600_000)] | None = None
    isolation: Isolation | None = None


class AckPlace(Struct, forbid_unknown_fields=True, gc=False):
    topic: Name
    partition: Int32
    offset: Int64
    lane: Annotated[int, Meta(ge=0, le=254)] = 0


class Ack(Struct, forbid_unknown_fields=True):
    """Records that are done: these, or all through the cursor of an answer."""

    records: Annotated[list[AckPlace], Meta(max_length=MAX_RECORDS)] | None = None
    through: Int64 | None = None


class ResetGroup(Struct, forbid_unknown_fields=True):
    """Where a group's positions go: one of ``to``, ``to_time_ms`` and ``by``."""

    to: Literal["earliest", "latest"] | Int64 | None = None
    to_time_ms: Int64 | None = None
    by: Signed64 | None = None
    topic: Name | None = None
    partitions: Annotated[list[Int32], Meta(max_length=MAX_PARTITIONS)] | None = None
    dry_run: bool = False


class FalconPublish(Struct, forbid_unknown_fields=True):
    message: str
    priority: Literal["high", "low"] = "low"


# -- answers -----------------------------------------------------------------------------------------


class WrittenOut(Struct, gc=False):
    """Where a record is."""

    partition: int
    offset: int
    timestamp_ms: int


class Published(Struct):
    """Every record is on the disks of a majority; in the order given."""

    topic: str
    records: list[WrittenOut]


class Records(Struct):
    records: list[RecordOut]


class SessionRecords(Struct):
    """Give ``cursor`` with the next read: what was handed out after the last answer that you saw comes again."""

    records: list[RecordOut]
    cursor: int


class TopicOut(Struct):
    name: str
    topic_id: int
    partitions: int
    settings: dict[str, int | bool | str | None]


class TopicList(Struct):
    topics: list[TopicOut]


class RaftOut(Struct):
    """Where a replica stands in its group's log. Indices are of entries, not of records."""

    term: int
    leader: str | None
    """Whom it follows, by its id."""
    first_index: int
    last_index: int
    last_term: int
    commit: int
    applied: int
    epoch: int
    """How often its group went on without a majority (``rayqueue recover``)."""
    voters: list[str]
    learners: list[str]


class ReplicaOut(Struct):
    """A replica and its state in the partition's Raft group."""

    replica_id: str
    broker: str
    role: str
    high_watermark: int | None
    size_bytes: int | None
    problem: str | None
    in_sync: bool
    lag: int | None
    """Entries of the log that the leader does not know it to have."""
    raft: RaftOut | None
    """None if it does not answer."""


class PartitionOut(Struct):
    number: int
    leader: str | None
    term: int
    start_offset: int
    end_offset: int
    size_bytes: int
    replicas: list[ReplicaOut]
    shared_brokers: list[str]


class TopicDetail(Struct):
    name: str
    topic_id: int
    settings: dict[str, int | bool | str | None]
    records: int
    size_bytes: int
    partitions: list[PartitionOut]


class Assigned(Struct):
    topic: str
    partition: int


class SessionOut(Struct):
    session: str
    group: str
    topics: list[str]
    timeout_ms: int
    gateway: str
    assignment: list[Assigned]


class Acked(Struct):
    acknowledged: int


class MemberOut(Struct):
    member: str
    instance: str | None
    client: str
    topics: list[str]


class GroupOut(Struct):
    group: str
    generation: int
    assignor: str
    state: str
    members: list[MemberOut]
    empty_since_ms: int | None
    expires_at_ms: int | None


class GroupList(Struct):
    groups: list[GroupOut]


class PartitionLagOut(Struct):
    topic: str
    partition: int
    member: str | None
    committed: dict[int, int]
    lag: int
    pinned: bool
    oldest_unread_ms: int | None = None
    """When the first record was written that is not read. None: all is, or it is not known now."""


class GroupDetail(GroupOut):
    lag: int
    partitions: list[PartitionLagOut]
    lag_trend_per_s: float | None = None
    """How fast the lag grows, over the last minute in which somebody looked."""


class MovedOut(Struct):
    """One partition's part: lane to the next offset to read."""

    topic: str
    partition: int
    before: dict[int, int]
    after: dict[int, int]
    start: int
    end: int
    note: str


class ResetOut(Struct):
    group: str
    executed: bool
    positions: list[MovedOut]


class BrokerOut(Struct):
    broker: str
    host: str
    alive: bool
    replicas: int
    room: int | None
    draining: bool
    holds: int


class MoveOut(Struct):
    topic: str
    partition: int
    remove: str
    add: str
    broker: str
    reason: str
    why: str


class LostOut(Struct):
    group_id: str
    replica_id: str
    why: str


class ClusterOut(Struct):
    cluster_id: str
    coordinator: str
    term: int
    topics: int
    partitions: int
    groups: int
    brokers: list[BrokerOut]
    moves: list[MoveOut]
    lost: list[LostOut]


class TopicLook(Struct):
    name: str
    kind: Literal["log", "queue"]
    partitions: list[PartitionOut]


class GroupLookOut(Struct):
    group: str
    state: str
    members: int
    lag: int | None
    """None: not known now."""
    lag_trend_per_s: float | None
    topics: list[str]


class OverviewOut(Struct):
    """Everything that the caller may see, as of ``now_ms``."""

    now_ms: int
    gateway: str
    version: str
    cluster: ClusterOut
    topics: list[TopicLook]
    groups: list[GroupLookOut]


class SettingOut(Struct):
    key: str
    value: str
    source: str
    """default, argument, a variable's name or a file's path."""
    description: str


class SettingList(Struct):
    settings: list[SettingOut]


class Health(Struct):
    status: Literal["ok", "starting", "draining"]
    gateway: str
    version: str


class FalconPublished(Struct):
    status: Literal["published"]
    topic: str
    partition: int
    offset: int


class FalconMessage(Struct):
    message: str
    offset: int
    partition: int
    priority: Literal["high", "low"]


class FalconMessages(Struct):
    messages: list[FalconMessage]


class FalconTopics(Struct):
    topics: list[str]


class FalconPartition(Struct):
    id: int


class FalconPartitions(Struct):
    partitions: list[FalconPartition]
    topic: str
