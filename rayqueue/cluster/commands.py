"""What is written to the coordinator's log: every change of the cluster's state.

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

from rayqueue.cluster.placement import Placement
from rayqueue.errors import UnknownFormatError
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
    changes: dict[str, int | bool | None]
    placement: Placement = ()
    topic_id: int = 0
    """``TopicRecreatedError`` if the topic has another. 0 in logs of earlier releases: whatever has the name."""


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
    node: str
    broker: str


class ReplicasMade(Command, frozen=True):
    """Their data exists from now on: if it is missing later, it was lost. Answers None."""

    replicas: tuple[tuple[str, str], ...]
    """Raft group id, replica id."""


class ReplicasRemoved(Command, frozen=True):
    """The data of these doomed replicas is gone. Answers None."""

    replicas: tuple[tuple[str, str], ...]


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


AnyCommand = (
    Nothing
    | CreateCluster
    | PutBroker
    | CreateTopic
    | AlterTopic
    | DeleteTopic
    | PlaceCoordinator
    | ReplicasMade
    | ReplicasRemoved
    | TakeProducerIds
    | ChangeGroup
    | DeleteGroup
    | FenceGroup
    | ExpireGroups
    | GroupsForgotten
)

_TAG = bytes([COMMAND])
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyCommand)


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
