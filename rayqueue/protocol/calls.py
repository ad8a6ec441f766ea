"""Everything but bulk data: small typed requests and answers, as msgpack.

``PartitionCall`` is answered by the replica that leads a partition (``GetStatus``
by any), ``CoordinatorCall`` by the coordinator. Each class says what it is
answered with; ``answer_type`` knows it too. An error is a FAILED frame.

A call may be repeated unless its text says otherwise.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import msgspec

from rayqueue.errors import InvalidInputError, TransportError
from rayqueue.protocol.call import Call as Call  # noqa: PLC0414  # all calls are imported from here
from rayqueue.protocol.jobs import JobCall
from rayqueue.protocol.topics import TopicInfo, TopicPartition, TopicSettings
from rayqueue.protocol.transactions import CoordinatorTransactionCall, PartitionTransactionCall
from rayqueue.protocol.unpacking import unpack

# -- answers -------------------------------------------------------------------------


class Position(msgspec.Struct, frozen=True, array_like=True):
    """A group's position in a partition."""

    generation: int
    offsets: dict[int, int]
    """Lane to the offset of the next record to read. A lane that is missing was never committed."""
    metadata: bytes = b""
    pinned: bool = False


class Bounds(msgspec.Struct, frozen=True, array_like=True):
    """``start <= offset < end`` can be read."""

    start: int
    end: int
    stable: int | None = None
    """The last stable offset: no transaction is open before it. None from a release without transactions."""


def end_of(bounds: Bounds, *, committed: bool) -> int:
    """The offset at which a reader finds nothing more; ``committed``: one of committed records."""
    return bounds.end if not committed or bounds.stable is None else bounds.stable


class Lag(msgspec.Struct, frozen=True, array_like=True):
    """The records that a group has not committed yet."""

    records: int
    records_by_lane: dict[int, int]
    unstable: int = 0
    """How many of these wait behind open transactions: whoever reads what is committed cannot see them yet."""


class Room(msgspec.Struct, frozen=True, array_like=True):
    """The room that a partition with bounds still has: in records, and in bytes of batches."""

    records: int
    size_bytes: int


class ReplicaStatus(msgspec.Struct, frozen=True, array_like=True):
    replica_id: str
    role: str
    leader: str | None
    term: int
    start_offset: int
    high_watermark: int
    size_bytes: int
    problem: str = ""
    """Why it may never lead: it is damaged, or an older copy of itself."""


class Broker(msgspec.Struct, frozen=True, array_like=True):
    broker: str
    host: str
    alive: bool
    replicas: int
    room: int | None = None
    """How many more replicas it takes; None if that has no bound, or it is away."""
    draining: bool = False
    """It is to be emptied: it gets no replica, and those that it has are moved elsewhere."""
    holds: int = 0
    """Replicas whose data is still there, with the coordinator's and those that are to be deleted."""
    ray_node: str = ""
    """The Ray node that it is on, or was on last."""
    rack: str = ""
    """Of its Ray node's labels: ``rayqueue.rack``, or the zone."""
    leaders: int | None = None
    """Partitions that it leads, as of the last look; None if that is not known yet."""
    memory_bytes: int = 0
    disk_bytes: int = 0
    """Of the file system of its data directory; 0 if that is not known."""
    disk_free_bytes: int = 0
    disk_spare_bytes: int | None = None
    """What may still be written there (``cluster.disk_reserve_percent`` stays free); None if that is not known."""
    leaving: bool = False
    """Ray drains its node, which may be taken away."""
    disk_promised_bytes: int = 0
    """What moves under way will still write there: as much less can be moved there besides."""

    @property
    def nearly_full(self) -> bool:
        """Nothing is placed on it for that reason."""
        return self.disk_spare_bytes == 0


class MoveInfo(msgspec.Struct, frozen=True, array_like=True):
    """A replica that is being replaced."""

    topic: str
    partition: int
    remove: str
    """The old replica's id."""
    add: str
    broker: str
    """Where the new one is."""
    reason: str
    """``lost``, ``away``, ``drain``, ``asked``, ``grow``, ``shrink`` or ``balance``."""
    why: str
    source: str = ""
    """The old replica's broker."""
    size_bytes: int | None = None
    """What is copied, about; None if that is not known yet."""
    copied_bytes: int = 0
    bytes_per_s: int = 0
    """As of the last seconds."""
    left_ms: int | None = None
    """How much longer the copying takes, at that pace; None if nothing can be said."""


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """A partition of which a replica should be made, moved or removed, and nothing is done about it yet."""

    topic: str
    partition: int
    why: str
    """What is the matter, and what it waits for."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """Moves of a rebalance to one broker that were not begun yet."""

    broker: str
    moves: int
    size_bytes: int


class RebalanceInfo(msgspec.Struct, frozen=True, array_like=True):
    """The rebalance that is under way."""

    number: int
    moves: int
    """As many were planned."""
    size_bytes: int
    begun_ms: int
    waiting: tuple[Share, ...]
    """What was not begun yet."""


class LostReplica(msgspec.Struct, frozen=True, array_like=True):
    """A replica that has lost its data, and waits for a new one to be made instead."""

    group_id: str
    replica_id: str
    why: str


class EventInfo(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a broker or a replica."""

    at_ms: int
    kind: str
    """Such as ``broker_away``, ``replica_lost``, ``move_begun``: ``rayqueue.cluster.events.KINDS``."""
    subject: str
    """The broker, or the Raft group of the partition."""
    text: str
    number: int
    """They are counted from 1, over the whole life of the cluster."""


class RecoveryInfo(msgspec.Struct, frozen=True, array_like=True):
    """The audit record of a group that went on without a majority (``rayqueue recover --unsafe``)."""

    group_id: str
    epoch: int
    survivor: str
    abandoned: tuple[tuple[str, str], ...]
    """The replicas that were given up, and the broker that each was on."""
    at_ms: int
    said: str
    """What may be lost, as it was told to whoever confirmed it."""
    settled: bool
    """The survivor leads again."""
    begins_at: int | None = None
    """If nobody was left who could go on: the survivor is a new replica, which began empty, at this offset."""


class ClusterInfo(msgspec.Struct, frozen=True, array_like=True):
    cluster_id: str
    coordinator: str
    """The replica of the coordinator's group that leads."""
    term: int
    brokers: tuple[Broker, ...]
    topics: int
    partitions: int
    groups: int
    moves: tuple[MoveInfo, ...] = ()
    lost: tuple[LostReplica, ...] = ()
    recoveries: tuple[RecoveryInfo, ...] = ()
    rebalance: RebalanceInfo | None = None
    waiting: tuple[Waiting, ...] = ()


class Topics(msgspec.Struct, frozen=True, array_like=True):
    version: int
    """Grows with every change of any topic."""
    topics: tuple[TopicInfo, ...]


class Grant(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A partition that a member may read, and the generation it must commit with."""

    topic: str
    partition: int
    generation: int
    topic_id: int = 0
    """Of the topic that has this name now. One that is made again has another, and its partitions are others."""

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """The partitions that a member may read now.

    A partition it read and that is not among ``grants`` any more must be let go: it
    stops, commits, and names what it still reads in the next heartbeat. Only
    then may another member read it.
    """

    member: str
    generation: int
    """Of the group. Grows with every change in it."""
    grants: tuple[Grant, ...]
    rebalancing: bool
    """Somebody has still to let go of something."""
    missing: tuple[str, ...] = ()
    """Topics that the member wants and that do not exist. What it reads of them is lost, not revoked."""
    seals: tuple[bytes, ...] = ()
    """What proves each of ``grants``, in their order, to its partition (``rayqueue.protocol.seals``)."""


class MemberInfo(msgspec.Struct, frozen=True, array_like=True):
    member: str
    instance: str | None
    client: str
    topics: tuple[str, ...]
    grants: tuple[Grant, ...]
    target: tuple[TopicPartition, ...]


class GroupInfo(msgspec.Struct, frozen=True, array_like=True):
    group: str
    generation: int
    assignor: str
    state: str
    """``empty``, ``stable`` or ``rebalancing``."""
    members: tuple[MemberInfo, ...]
    born: int = 0
    """The generation that it began with. A group that is deleted and made again begins above all that it ever had."""
    empty_since_ms: int | None = None
    """When its last member left."""
    expires_at_ms: int | None = None
    """When it is forgotten unless somebody joins; None if it has members, or groups do not expire."""


class DeletedGroup(msgspec.Struct, frozen=True, array_like=True):
    existed: bool
    generation: int
    """The highest of all groups that were deleted: no group that is made from now on has it, or a lower one."""
    seal: bytes = b""
    """What proves it to partitions (``ForgetGroup``)."""


class FencedGroup(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    """Of nobody else: all members of before are below it, all that come above."""
    seal: bytes = b""
    """What proves it to partitions (``Commit``)."""


# -- calls ---------------------------------------------------------------------------


class GetStatus(Call, frozen=True, kw_only=True):
    """Any replica, also of the coordinator's group, answers for itself."""

    answer_type: ClassVar[Any] = ReplicaStatus


class GetPosition(Call, frozen=True, kw_only=True):
    """As of now: a majority has confirmed the leader after the call."""

    answer_type: ClassVar[Any] = Position | None
    group: str


class Commit(Call, frozen=True, kw_only=True):
    """Let a group continue at these offsets.

    ``StaleGenerationError`` if a newer generation has been here. Without offsets it
    only claims the partition for this generation, and answers where to begin.
    An offset does not go back unless ``rewind``.
    """

    answer_type: ClassVar[Any] = Position
    group: str
    generation: int
    offsets: dict[int, int]
    metadata: bytes = b""
    rewind: bool = False
    seal: bytes = b""
    """Of the grant (``Assignment.seals``), or of whoever fenced the group (``FencedGroup``). ``UnknownGenerationError``
    without it, unless the generation is 0."""


class Pin(Call, frozen=True, kw_only=True):
    """Retention never passes what this group has not committed, until it is unpinned."""

    answer_type: ClassVar[Any] = None
    group: str
    pinned: bool = True


class ForgetGroup(Call, frozen=True, kw_only=True):
    """Delete the group's position. Answers whether there was one that was deleted.

    If the position is still the one that was ``seen``; without that, if its generation is at most this one. Members
    of a group that is not known here are refused from now on if their generation is at most this one
    (``DeletedGroup``).
    """

    answer_type: ClassVar[Any] = bool
    group: str
    generation: int = 0
    seen: Position | None = None
    seal: bytes = b""
    """Of the generation (``DeletedGroup.seal``). ``UnknownGenerationError`` without it, unless the generation is 0."""


class GetGroups(Call, frozen=True, kw_only=True):
    """Every group that has a position here."""

    answer_type: ClassVar[Any] = dict[str, Position]


class GetBounds(Call, frozen=True, kw_only=True):
    answer_type: ClassVar[Any] = Bounds


class GetLag(Call, frozen=True, kw_only=True):
    answer_type: ClassVar[Any] = Lag
    group: str


class FindOffset(Call, frozen=True, kw_only=True):
    """The first record that is not older than this; the end if all are."""

    answer_type: ClassVar[Any] = int
    timestamp_ms: int


class Trim(Call, frozen=True, kw_only=True):
    """Delete what is before this offset, but nothing that a pinned group has not committed. Answers where the log
    begins now: where it did, if a group came, was pinned or went back at the same moment."""

    answer_type: ClassVar[Any] = int
    before: int


class AwaitRoom(Call, frozen=True, kw_only=True):
    """Wait until the partition takes more, behind those who wait already.

    Answered with what is kept for this producer for a while; with nothing after ``wait_ms``.
    ``OversizedRecordError`` if ``least_bytes``, ``OversizedBatchError`` if ``least_records`` is more than the
    partition ever holds.
    """

    answer_type: ClassVar[Any] = Room
    producer_id: int
    records: int
    size_bytes: int
    """What is wanted. Less may be granted, but not less than the least."""
    least_bytes: int
    """Of a batch with the first record alone; of the whole batch, if it cannot be cut."""
    least_records: int = 1
    wait_ms: int = 0


class TransferLeader(Call, frozen=True, kw_only=True):
    """Let this replica of the partition lead. True if it does; False if the one that was asked has just made way: ask
    again, for an election may have another outcome.

    ``MembershipError`` if it is no voter of this partition, ``NotInSyncError`` if it lacks entries or is away,
    ``TransferFailedError`` if it did not take over in time: the old leader goes on.
    """

    answer_type: ClassVar[Any] = bool
    to: str
    """Its replica id. Ids of a partition are never used again."""


PartitionCall = (
    GetStatus
    | GetPosition
    | Commit
    | Pin
    | ForgetGroup
    | GetGroups
    | GetBounds
    | GetLag
    | FindOffset
    | Trim
    | AwaitRoom
    | TransferLeader
    | JobCall
    | PartitionTransactionCall
)


class DescribeCluster(Call, frozen=True, kw_only=True):
    answer_type: ClassVar[Any] = ClusterInfo


class GetTopics(Call, frozen=True, kw_only=True):
    """All topics, or those of these names that exist. None of them, if the version is still the one that is given."""

    answer_type: ClassVar[Any] = Topics
    names: tuple[str, ...] | None = None
    unless: int | None = None


class CreateTopic(Call, frozen=True, kw_only=True):
    """``TopicExistsError`` if there is one, unless ``if_missing`` or the same ``attempt`` made it."""

    answer_type: ClassVar[Any] = TopicInfo
    name: str
    settings: TopicSettings
    if_missing: bool = False
    attempt: str = ""
    """Drawn by the caller, the same for each repetition of one call."""


class AlterTopic(Call, frozen=True, kw_only=True):
    """``TopicRecreatedError`` if the name is another topic's by now: one that the caller has not seen."""

    answer_type: ClassVar[Any] = TopicInfo
    name: str
    topic_id: int
    changes: dict[str, int | bool | str | None]


class DeleteTopic(Call, frozen=True, kw_only=True):
    """Answers whether it was there. A topic of this name that was made later stays."""

    answer_type: ClassVar[Any] = bool
    name: str
    topic_id: int


class NewProducerIds(Call, frozen=True, kw_only=True):
    """The first of ``count`` numbers that no producer ever had. Repeating it wastes some, no more."""

    answer_type: ClassVar[Any] = int
    count: int = 1


class JoinGroup(Call, frozen=True, kw_only=True):
    """Become a member, or as a member say what is wanted now. The answer may be without grants: heartbeat.

    With ``instance`` the member takes the place, and the partitions, of the one that had this name before.
    """

    answer_type: ClassVar[Any] = Assignment
    group: str
    member: str
    """Drawn by the member, unique for ever."""
    topics: tuple[str, ...]
    instance: str | None = None
    client: str = ""
    """For humans: where it runs."""
    assignor: str = "balanced"
    """``balanced``, ``range``, ``roundrobin`` or the older ``sticky``. The group's first member decides;
    ``InvalidInputError`` for another."""
    session_timeout_ms: int = 2500
    generation: int = 0
    """As a member: of the newest ``Assignment`` that it has taken. ``UnknownMemberError`` if it is none any more;
    with 0 it would be taken in again, and not learn at once that it has lost its grants."""


class Heartbeat(Call, frozen=True, kw_only=True):
    """I live, and read by these grants and no others. ``UnknownMemberError``: join again, all grants are lost.

    Answered when there is news for this member since ``generation``, or after ``wait_ms``.
    """

    answer_type: ClassVar[Any] = Assignment
    group: str
    member: str
    generation: int
    """Of the newest ``Assignment`` that the member has taken."""
    reading: tuple[Grant, ...]
    wait_ms: int = 0
    ray_node: str = ""
    """Where it runs (``prefer_leader="consumer"``)."""


class LeaveGroup(Call, frozen=True, kw_only=True):
    """Its partitions are free for others at once. No error if it is no member."""

    answer_type: ClassVar[Any] = None
    group: str
    member: str


class ListGroups(Call, frozen=True, kw_only=True):
    answer_type: ClassVar[Any] = tuple[GroupInfo, ...]


class DescribeGroup(Call, frozen=True, kw_only=True):
    """``UnknownGroupError`` if it has no member and never had one."""

    answer_type: ClassVar[Any] = GroupInfo
    group: str


class DeleteGroup(Call, frozen=True, kw_only=True):
    """Only without members (``GroupNotEmptyError``). Its positions are the partitions': ``ForgetGroup``.

    A group of this name that was made after the one with this ``born`` stays. None: there is no such group, as far as
    the caller knows, but there may be positions of one.
    """

    answer_type: ClassVar[Any] = DeletedGroup
    group: str
    born: int | None


class FenceGroup(Call, frozen=True, kw_only=True):
    """A generation to move the positions of a group without members with (``GroupNotEmptyError``). Whoever joins
    afterwards fences it off. ``UnknownGroupError`` if the group that had this ``born`` is gone."""

    answer_type: ClassVar[Any] = FencedGroup
    group: str
    born: int


class ReportReplica(Call, frozen=True, kw_only=True):
    """A replica's process to the coordinator: my data is gone or damaged, I can never be trusted again under this id.

    Answers whether the replica was in service, and is to be replaced now.
    """

    answer_type: ClassVar[Any] = bool
    group_id: str
    replica_id: str = msgspec.field(name="node")  # as every release has called it on the wire
    why: str
    missing: bool = False
    """There was nothing where its data should be: if that comes back (a disk that was mounted late) it is trusted."""


class DrainBroker(Call, frozen=True, kw_only=True):
    """Empty a broker, or let it be used again. ``UnknownBrokerError`` if there is none of this name."""

    answer_type: ClassVar[Any] = ClusterInfo
    broker: str
    draining: bool


class MoveReplica(Call, frozen=True, kw_only=True):
    """Let another broker have the replica that this one has of a partition."""

    answer_type: ClassVar[Any] = MoveInfo
    topic: str
    topic_id: int
    partition: int
    source: str
    target: str
    size_bytes: int = 0
    """Of the partition, as far as the caller knows it: the target's disk must have room for it."""


class GetEvents(Call, frozen=True, kw_only=True):
    """The last events after this number, the oldest first. Only so many are kept."""

    answer_type: ClassVar[Any] = tuple[EventInfo, ...]
    after: int = 0


class RecoverPartition(Call, frozen=True, kw_only=True):
    """Let a partition that has lost its majority go on with this replica alone; the others are given up. If none is
    left: with a new one, which begins empty, at this offset.

    ``MembershipError`` if ``replicas`` are not those that it has now. It is not checked here that the majority is lost:
    who asks has looked, and has been told what may be lost (``said``).
    """

    answer_type: ClassVar[Any] = RecoveryInfo
    topic: str
    topic_id: int
    partition: int
    survivor: str
    """"" to begin anew."""
    replicas: tuple[str, ...]
    said: str
    begins_at: int | None = None
    """Only to begin anew."""
    broker: str = ""
    """That is to have the new replica; "": the one that had the old one, or else another."""


class RebalanceMove(msgspec.Struct, frozen=True, array_like=True):
    """One replica's way, from the broker that has it to another one."""

    group_id: str
    """The Raft group of the partition, of this very topic."""
    remove: str
    """The replica that is there now. Ids are never used again."""
    broker: str
    size_bytes: int


class BeginRebalance(Call, frozen=True, kw_only=True):
    """Write this plan down, and carry it out. What is out of date in it is left out.

    ``ChangeInProgressError`` if another rebalance is under way.
    """

    answer_type: ClassVar[Any] = ClusterInfo
    moves: tuple[RebalanceMove, ...]


class StopRebalance(Call, frozen=True, kw_only=True):
    """Forget what was not begun yet. What was is carried through. No error if there is none."""

    answer_type: ClassVar[Any] = ClusterInfo


CoordinatorCall = (
    GetStatus
    | DescribeCluster
    | GetTopics
    | CreateTopic
    | AlterTopic
    | DeleteTopic
    | NewProducerIds
    | JoinGroup
    | Heartbeat
    | LeaveGroup
    | ListGroups
    | DescribeGroup
    | DeleteGroup
    | FenceGroup
    | ReportReplica
    | DrainBroker
    | MoveReplica
    | RecoverPartition
    | BeginRebalance
    | StopRebalance
    | GetEvents
    | CoordinatorTransactionCall
)

_encoder = msgspec.msgpack.Encoder()
_partition_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(PartitionCall)
_coordinator_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(CoordinatorCall)


def encode_call(call: Call) -> bytes:
    """``InvalidInputError`` if it cannot be written: a text that is no Unicode, a number beyond 64 bits."""
    try:
        return _encoder.encode(call)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"a {type(call).__name__} cannot be written: {error}") from error


def decode_partition_call(body: memoryview | bytes) -> PartitionCall:
    """``InvalidInputError`` if it is none."""
    return _decode(_partition_decoder, body)  # type: ignore[no-any-return]


def decode_coordinator_call(body: memoryview | bytes) -> CoordinatorCall:
    """``InvalidInputError`` if it is none."""
    return _decode(_coordinator_decoder, body)  # type: ignore[no-any-return]


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: memoryview | bytes) -> Any:
    return unpack(decoder, body, lambda why: InvalidInputError(f"not a call that this replica knows: {why}"))


def encode_answer(answer: Any) -> bytes:
    return _encoder.encode(answer)


def decode_answer(call: Call, body: memoryview | bytes) -> Any:
    """The answer to ``call``."""
    return unpack(
        _answer_decoder(type(call)), body, lambda why: TransportError(f"not an answer to {type(call).__name__}: {why}")
    )


@lru_cache(maxsize=64)
def _answer_decoder(kind: type[Call]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind.answer_type)
