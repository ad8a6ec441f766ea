"""The coordinator's commands: every change of the cluster's state, as it is written to the coordinator's log.

An entry is one tag byte and the command as msgpack. ``encode_command`` is for
whoever proposes, ``decode_command`` for the machine. Each class says what
applying it answers; a refusal is an error that is answered, not raised.

Fields are only added at the end, with a default that means what commands
without it meant. A field or a command that this release does not know is not
skipped: who applies it and who does not would diverge (docs/upgrades.md).
"""

from __future__ import annotations

from typing import Any

import msgspec

from rayqueue.cluster.moves import Reason
from rayqueue.cluster.placement import Placement
from rayqueue.errors import UnknownFormatError, UpgradeUnfinishedError
from rayqueue.protocol.topics import TopicPartition, TopicSettings
from rayqueue.protocol.unpacking import unpack

COMMAND = 0x20


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Nothing(Command, frozen=True):
    """Changes nothing and answers None: who gets the answer has applied all that was written before."""


class CreateCluster(Command, frozen=True):
    """Give the cluster its id, once. Answers the id that it has."""

    cluster_id: str


class PutBroker(Command, frozen=True):
    """A node joined, or came back under another address. Answers its ``BrokerRow``."""

    broker: str
    host: str
    ray_node: str
    memory_bytes: int = 0
    directory: str = ""


class DrainBroker(Command, frozen=True):
    """A broker is to be emptied, or is not any more. Answers its ``BrokerRow``, or ``UnknownBrokerError``."""

    broker: str
    draining: bool


class ForgetBroker(Command, frozen=True):
    """A broker that was emptied and has gone. Void if it has replicas, or is not to be emptied. Answers None."""

    broker: str
    away: bool = False
    """It will hardly come back: what is doomed there does not hold it. Should it, that is deleted then."""


class CreateTopic(Command, frozen=True):
    """Answers the ``TopicInfo``, or ``TopicExistsError``."""

    name: str
    settings: TopicSettings
    placement: Placement
    if_missing: bool = False
    attempt: str = ""


class AlterTopic(Command, frozen=True):
    """Other settings, and a placement for the partitions that are new. Answers the ``TopicInfo``."""

    name: str
    changes: dict[str, int | bool | str | None]
    placement: Placement = ()
    topic_id: int = 0
    """``TopicRecreatedError`` if the topic has another. 0 in logs of earlier releases: whatever has the name."""


class ResizeTopic(Command, frozen=True):
    """``AlterTopic`` with another replication among the changes. Its replicas follow one by one (``BeginMove``).

    A command of its own: a release that refuses to change the replication must not skip this, but stop.
    """

    name: str
    changes: dict[str, int | bool | str | None]
    placement: Placement
    topic_id: int


class DeleteTopic(Command, frozen=True):
    """Its replicas are doomed: they count until ``ReplicasRemoved``. Answers whether it was there."""

    name: str
    topic_id: int = 0
    """0 in logs of earlier releases: whatever has the name."""


class PlaceCoordinator(Command, frozen=True):
    """The coordinator is to have one more replica, on this broker. It is unmade until ``ReplicasMade``. Answers None.

    Void if that replica, or another one on that broker, has a place already.
    """

    group_id: str
    replica_id: str
    broker: str


class RetireCoordinator(Command, frozen=True):
    """A replica of the coordinator has left the group, or never was in it: its place is free, and its data doomed.
    Answers None."""

    group_id: str
    replica_id: str
    broker: str


class ReplicasMade(Command, frozen=True):
    """Their data exists from now on: if it is missing later, it was lost. Answers None."""

    replicas: tuple[tuple[str, str], ...]
    """Raft group id, replica id."""


class ReplicasRemoved(Command, frozen=True):
    """The data of these doomed replicas is gone. Answers None."""

    replicas: tuple[tuple[str, str], ...]


class ReplicaLost(Command, frozen=True):
    """A replica says that its data is gone, damaged or too old: it is to be replaced.

    Answers whether it was in service. Void if its data was never made, or if it has been replaced already.
    """

    group_id: str
    replica_id: str
    why: str
    missing: bool = False
    """There was nothing where its data should be, so its process has promised nothing since. Should its disk be mounted
    late, it is what it was (``ReplicaFound``)."""


class ReplicaFound(Command, frozen=True):
    """A replica that was ``missing`` runs again, with all that it had acknowledged: it is lost no longer.

    Answers whether it was lost. Void if it was ever found damaged, or to have forgotten something; unless it is its
    partition's only one, which contradicts nobody.
    """

    group_id: str
    replica_id: str


class BeginMove(Command, frozen=True):
    """Replace a replica by a new one on this broker. Answers the ``Move``, or ``MembershipError``.

    Without ``remove`` the group gets one more, without ``broker`` one less.
    """

    group_id: str
    remove: str
    broker: str
    reason: Reason
    why: str = ""


class FinishMove(Command, frozen=True):
    """The group has the new replica and not the old one, whose data is doomed. Answers None; void if it is over."""

    group_id: str
    add: str


class CancelMove(Command, frozen=True):
    """The group has not the new replica, whose data is doomed. Answers None; void if it is over."""

    group_id: str
    add: str


class RecoverGroup(Command, frozen=True):
    """A group goes on with one replica, in a new epoch; the others are given up, and their data is doomed.

    Answers the ``Recovery``, or ``MembershipError`` if these are not its replicas any more. Of the coordinator's own
    group it is written to the survivor's log itself, when nothing runs (``rayqueue.actors.keeper.rescue``).
    """

    group_id: str
    survivor: str
    abandoned: tuple[tuple[str, str], ...]
    """Replica ids and brokers: with the survivor, all that the group had when the operator looked."""
    at_ms: int
    said: str
    epoch: int = 0
    """Of the coordinator's group, which knows it itself. 0: the one after the last."""
    begins_at: int | None = None
    """Without a ``survivor``: a new replica begins empty, at this offset, on this broker."""
    broker: str = ""


class RecoverySettled(Command, frozen=True):
    """The survivor leads. Answers None."""

    group_id: str
    epoch: int


class BeginRebalance(Command, frozen=True):
    """Write a plan down; what is out of date in it is left out. Answers the ``Rebalance``, or
    ``ChangeInProgressError``."""

    moves: tuple[tuple[str, str, str, int], ...]
    """Raft group id, replica id, the broker that is to have its successor, bytes."""
    now_ms: int


class EndRebalance(Command, frozen=True):
    """Forget what of the plan was not begun yet. Answers None; void if that rebalance is over. 0: whichever."""

    number: int


class DropPlanned(Command, frozen=True):
    """These moves of a plan cannot be made any more. Answers None."""

    replicas: tuple[tuple[str, str], ...]


class NoteEvents(Command, frozen=True):
    """Remember what happened (``rayqueue.cluster.events``). Answers None."""

    events: tuple[tuple[int, str, str, str], ...]
    """Time, kind, subject and text of each."""


class TakeProducerIds(Command, frozen=True):
    """Answers the first of ``count`` numbers that nobody had before."""

    count: int


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A new member, or other wishes of one."""

    member: str
    topics: tuple[str, ...]
    instance: str | None
    client: str
    assignor: str
    session_timeout_ms: int
    again: bool = False
    """Only a member may wish for something else: ``UnknownMemberError`` if it is none any more."""


class Release(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A member no longer reads these. Void if it was told something else after ``generation``."""

    member: str
    generation: int
    partitions: tuple[TopicPartition, ...]


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A member left, or was silent for too long."""

    member: str


GroupChange = Join | Release | Leave


class ChangeGroup(Command, frozen=True):
    """Several changes that are one step of the group. Answers one None or error for each."""

    group: str
    changes: tuple[GroupChange, ...]
    above: bool = False
    """Its new generation is above those of all groups that were deleted, and a new group knows when it was born. Not in
    logs of earlier releases, which must mean what they meant."""
    now_ms: int = 0
    """The leader's time: when it was, if nobody is left in the group."""


class DeleteGroup(Command, frozen=True):
    """Answers ``DeletedGroup``, or ``GroupNotEmptyError``."""

    group: str
    born: int = -1
    """Of the group that is meant. -1 in logs of earlier releases: whatever has the name."""


class FenceGroup(Command, frozen=True):
    """Take a generation of a group without members: whoever was a member before is fenced off by it, and whoever joins
    later has a higher one. Answers it, or ``GroupNotEmptyError``, or ``UnknownGroupError``."""

    group: str
    born: int
    """Of the group that is meant."""
    now_ms: int = 0
    """The leader's time: the group counts as used."""


class ExpireGroups(Command, frozen=True):
    """Delete groups that were without members for longer, some at a time. Answers their names.

    Their positions are still the partitions': each is among ``expired`` until ``GroupsForgotten``.
    """

    now_ms: int
    retention_ms: int


class GroupsForgotten(Command, frozen=True):
    """All partitions have forgotten these groups, up to this generation. Answers None."""

    groups: tuple[str, ...]
    generation: int


class InitTransactions(Command, frozen=True):
    """Take a transactional id, or with ``resume`` go on with it. Answers ``Transaction``: the producer's next one; or
    ``ProducerFencedError``, ``UnknownTransactionError``."""

    transactional_id: str
    attempt: str
    timeout_ms: int
    owner: str
    resume: bool
    now_ms: int
    max_ids: int = 0
    """With so many a new id takes the place of one that could be lent. 0 in logs of before: no such limit."""
    evict: str = ""
    """An id that makes room, unless something is still to be done of it."""


class EndTransaction(Command, frozen=True):
    """Decide. Answers the next ``Transaction``, or ``TransactionAbortedError``, ``ProducerFencedError``,
    ``UnknownTransactionError``. A repetition is answered as the first time."""

    transactional_id: str
    producer_id: int
    epoch: int
    commit: bool
    participants: tuple[str, ...]
    finished: tuple[tuple[int, int], ...]
    """Producer ids and epochs: as ``FinishTransactions``."""
    now_ms: int


class AbortTransactions(Command, frozen=True):
    """Abort these, each if it is still the current one of its producer. Answers whether each is."""

    transactions: tuple[tuple[int, int], ...]
    why: str
    now_ms: int


class FinishTransactions(Command, frozen=True):
    """Participants have the markers of these: that one, or without one all. Answers None."""

    finished: tuple[tuple[int, int], ...]
    group_id: str = ""


class ExpireTransactionalIds(Command, frozen=True):
    """Forget ids that nobody has used for longer and of which nothing is to be done, some at a time. Answers them."""

    now_ms: int
    retention_ms: int


class ForgetTransactionalId(Command, frozen=True):
    """Forget an id that this attempt has, unless a commit of it is still to be told. Answers whether it is gone."""

    transactional_id: str
    attempt: str
    now_ms: int


class JoinWrite(Command, frozen=True):
    """A task's transaction. Answers ``Transaction``, or ``TransactionAbortedError`` if its write is over."""

    write: str
    writer: str
    batch_id: int
    timeout_ms: int
    owner: str
    now_ms: int
    evict: str = ""
    """As for ``InitTransactions``."""


class EndWrite(Command, frozen=True):
    """Commit these parts, and abort what else the write has. Answers whether they are committed by this, and what is
    aborted; or ``TransactionAbortedError``, ``TooManyTransactionsError``, and what a ledger refuses with."""

    write: str
    writer: str
    batch_id: int
    identity: bytes
    once: bool
    commit: bool
    parts: tuple[tuple[int, int, tuple[str, ...]], ...]
    """Producer id, epoch, participants."""
    max_writers: int
    retention_ms: int
    now_ms: int


AnyCommand = (
    Nothing
    | CreateCluster
    | PutBroker
    | DrainBroker
    | ForgetBroker
    | CreateTopic
    | AlterTopic
    | ResizeTopic
    | DeleteTopic
    | PlaceCoordinator
    | RetireCoordinator
    | ReplicasMade
    | ReplicasRemoved
    | ReplicaLost
    | ReplicaFound
    | BeginMove
    | FinishMove
    | CancelMove
    | RecoverGroup
    | RecoverySettled
    | BeginRebalance
    | EndRebalance
    | DropPlanned
    | NoteEvents
    | TakeProducerIds
    | ChangeGroup
    | DeleteGroup
    | FenceGroup
    | ExpireGroups
    | GroupsForgotten
    | InitTransactions
    | EndTransaction
    | AbortTransactions
    | FinishTransactions
    | ExpireTransactionalIds
    | ForgetTransactionalId
    | JoinWrite
    | EndWrite
)

_VERSION_2 = frozenset(
    (
        Nothing,
        CreateCluster,
        PutBroker,
        CreateTopic,
        AlterTopic,
        DeleteTopic,
        PlaceCoordinator,
        ReplicasMade,
        ReplicasRemoved,
        TakeProducerIds,
        ChangeGroup,
        DeleteGroup,
        FenceGroup,
        ExpireGroups,
        GroupsForgotten,
    )
)
"""What coordinators can apply that speak version 2 of the replicas' protocol. All others need version 3."""

_TAG = bytes([COMMAND])
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyCommand)


def check_readable(command: AnyCommand, version: int) -> None:
    """``UpgradeUnfinishedError`` if a coordinator that speaks this version of the replicas' protocol cannot apply it:
    it would stop, and with a second one the group."""
    if version < 3 and type(command) not in _VERSION_2:
        raise UpgradeUnfinishedError(
            f"a coordinator of the release before runs, and cannot read {type(command).__name__}; upgrade it first"
        )


def encode_command(command: AnyCommand) -> bytes:
    return _TAG + _encoder.encode(command)


def decode_command(payload: bytes) -> AnyCommand:
    """The command. ``UnknownFormatError`` if this release cannot read it: nobody may skip what others apply."""
    if payload[:1] != _TAG:
        raise UnknownFormatError(f"log entry of kind {payload[:1].hex()} is unknown to this release")
    return unpack(  # type: ignore[no-any-return]
        _decoder,
        memoryview(payload)[1:],
        lambda why: UnknownFormatError(f"a command of the coordinator cannot be read: {why}"),
    )
