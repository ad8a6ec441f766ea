"""Log entries that are not batches: what changes a partition's small state.

An entry's first byte says what it is: 0 to 3 are Raft's own, ``R`` is a batch,
the tags here are commands. Each command has a function that encodes it, for
whoever proposes it, and ``decode`` reads it back. Encoding checks the limits,
so that a command that is proposed is one that can be applied.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

from rayqueue.errors import InvalidInputError, InvalidOffsetError, UnknownFormatError
from rayqueue.partition.jobs.commands import JOB_DECODERS, JobCommand
from rayqueue.partition.settings import PartitionSettings
from rayqueue.partition.transactions.commands import TRANSACTION_DECODERS, TransactionCommand
from rayqueue.protocol.data import MAX_LANES

TRIM = 0x10
COMMIT_OFFSETS = 0x11
DELETE_GROUP = 0x12
FENCE_PRODUCER = 0x13
CONFIGURE = 0x14
PIN_GROUP = 0x15
TRIM_UNLESS_HELD = 0x16
FORGET_GROUP = 0x17
PASS_TIME = 0x18
EXPIRE_GROUPS = 0x19

MAX_GROUP_BYTES = 255
MAX_METADATA_BYTES = 4096
MAX_OFFSET = 2**63 - 1

_TRIM = Struct("<BQ")
_TRIM_UNLESS_HELD = Struct("<BQQ")
_COMMIT = Struct("<BB?xHHQ")  # tag, length of group, rewind, length of metadata, lanes, generation
_LANE = Struct("<BQ")
_FENCE = Struct("<BQI")
_FORGET = Struct("<BB?xHQQ")  # tag, length of group, whether something was seen, lanes seen, generation, that seen
_PASS_TIME = Struct("<BQQ")
_EXPIRE = Struct("<BQH")  # tag, generation, how many names follow, each with its length before it


@dataclass(frozen=True, slots=True)
class Trim:
    to_offset: int
    as_of: int | None = None


@dataclass(frozen=True, slots=True)
class CommitOffsets:
    group: str
    generation: int
    offsets: Mapping[int, int]
    metadata: bytes
    rewind: bool


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    """Of logs that an earlier release wrote. ``ForgetGroup`` says more."""

    group: str


@dataclass(frozen=True, slots=True)
class ForgetGroup:
    group: str
    generation: int
    seen: tuple[int, Mapping[int, int]] | None


@dataclass(frozen=True, slots=True)
class PinGroup:
    group: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class FenceProducer:
    producer_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Configure:
    settings: PartitionSettings


@dataclass(frozen=True, slots=True)
class PassTime:
    now_ms: int
    group_retention_ms: int
    """Positions without membership that nobody committed for longer are forgotten; 0: none are."""


@dataclass(frozen=True, slots=True)
class ExpireGroups:
    groups: tuple[str, ...]
    generation: int


Command = (
    Trim
    | CommitOffsets
    | DeleteGroup
    | ForgetGroup
    | PinGroup
    | FenceProducer
    | Configure
    | PassTime
    | ExpireGroups
    | JobCommand
    | TransactionCommand
)


# -- encoding -------------------------------------------------------------------


def trim_command(to_offset: int, *, as_of: int | None = None) -> bytes:
    """Let the log start at this offset. Never moves it back, nor past the end.

    ``as_of`` is the index of the last entry that whoever chose the offset had
    seen: if a group has asked to hold more since (it is new, was pinned or went
    back), nothing is trimmed. Without it the log is trimmed whatever groups hold.
    """
    if as_of is None:
        return _TRIM.pack(TRIM, check_offset(to_offset))
    return _TRIM_UNLESS_HELD.pack(TRIM_UNLESS_HELD, check_offset(to_offset), as_of)


def commit_command(
    group: str, generation: int, offsets: Mapping[int, int], *, metadata: bytes = b"", rewind: bool = False
) -> bytes:
    """Let the group continue at these offsets, lane by lane.

    Refused if a newer generation has been here. An offset lower than the
    committed one is ignored, unless ``rewind`` says that it is meant.
    """
    name = _encode_group(group)
    if len(offsets) > MAX_LANES:
        raise InvalidInputError(f"a commit names at most {MAX_LANES} lanes, not {len(offsets)}")
    if len(metadata) > MAX_METADATA_BYTES:
        raise InvalidInputError(f"metadata has {len(metadata)} bytes; the limit is {MAX_METADATA_BYTES}")
    try:
        head = _COMMIT.pack(COMMIT_OFFSETS, len(name), rewind, len(metadata), len(offsets), generation)
        lanes = b"".join(_LANE.pack(lane, check_offset(offsets[lane])) for lane in sorted(offsets))
    except struct.error as error:
        raise InvalidInputError(f"a number does not fit into a commit: {error}") from None
    return head + lanes + name + metadata


def delete_group_command(group: str) -> bytes:
    """Forget the group's offsets, as releases before ``forget_group_command`` did."""
    return bytes((DELETE_GROUP,)) + _encode_group(group)


def forget_group_command(group: str, generation: int = 0, seen: tuple[int, Mapping[int, int]] | None = None) -> bytes:
    """Forget the group's offsets, and refuse every generation up to this one from whoever is not known here.

    Only if the group is still as it was ``seen``, generation and offsets; without that, if it is at no later
    generation. So a command that is repeated does not delete what was committed since.
    """
    name = _encode_group(group)
    seen_generation, offsets = seen or (0, {})
    try:
        head = _FORGET.pack(FORGET_GROUP, len(name), seen is not None, len(offsets), generation, seen_generation)
        lanes = b"".join(_LANE.pack(lane, check_offset(offsets[lane])) for lane in sorted(offsets))
    except struct.error as error:
        raise InvalidInputError(f"a number does not fit: {error}") from None
    return head + lanes + name


def pin_command(group: str, pinned: bool = True) -> bytes:
    """Let no trim pass what this group has not committed; or let it again."""
    return bytes((PIN_GROUP, pinned)) + _encode_group(group)


def fence_command(producer_id: int, epoch: int) -> bytes:
    """Refuse every older epoch of this producer from now on."""
    try:
        return _FENCE.pack(FENCE_PRODUCER, producer_id, epoch)
    except struct.error as error:
        raise InvalidInputError(f"not a producer id and epoch: {error}") from None


def configure_command(settings: PartitionSettings) -> bytes:
    """Apply what follows with these settings."""
    return bytes((CONFIGURE,)) + settings.encode()


def pass_time_command(now_ms: int, group_retention_ms: int = 0) -> bytes:
    """Let the partition know what time it is at its leader, and forget what has expired by then."""
    return _PASS_TIME.pack(PASS_TIME, now_ms, group_retention_ms)


def expire_groups_command(groups: Sequence[str], generation: int) -> bytes:
    """Forget what members of these groups committed up to this generation, unless it is pinned, and refuse every
    generation up to it from whoever is not known here: the coordinator has given them up."""
    names = [_encode_group(group) for group in groups]
    return _EXPIRE.pack(EXPIRE_GROUPS, generation, len(names)) + b"".join(bytes((len(each),)) + each for each in names)


def check_offset(offset: Any) -> int:
    """``InvalidOffsetError`` unless it is a whole number that is not negative."""
    if not isinstance(offset, int) or not 0 <= offset <= MAX_OFFSET:
        raise InvalidOffsetError(f"an offset is a whole number from 0 to 2^63-1, not {offset!r}", offset=offset)
    return offset


def _encode_group(group: str) -> bytes:
    try:
        name = group.encode()
    except UnicodeEncodeError:
        raise InvalidInputError("a group's name must be valid Unicode") from None
    if not 1 <= len(name) <= MAX_GROUP_BYTES:
        raise InvalidInputError(f"a group's name has 1 to {MAX_GROUP_BYTES} bytes, not {len(name)}")
    return name


# -- decoding -------------------------------------------------------------------


def decode(payload: bytes) -> Command:
    """The command. ``UnknownFormatError`` if this release cannot read it.

    Nobody can skip such an entry: it may have come from a newer release, and a
    replica that skips what another applies has diverged.
    """
    tag = payload[0] if payload else -1
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise UnknownFormatError(f"log entry of kind {tag:#04x} is unknown to this release", tag=tag)
    try:
        return decoder(payload)
    except (struct.error, UnicodeDecodeError, InvalidInputError) as error:
        raise UnknownFormatError(f"command {tag:#04x} cannot be read: {error}", tag=tag) from None


def _decode_trim(payload: bytes) -> Trim:
    return Trim(check_offset(_TRIM.unpack(payload)[1]))


def _decode_trim_unless_held(payload: bytes) -> Trim:
    _, to_offset, as_of = _TRIM_UNLESS_HELD.unpack(payload)
    return Trim(check_offset(to_offset), as_of)


def _decode_commit(payload: bytes) -> CommitOffsets:
    _, name_bytes, rewind, metadata_bytes, lanes, generation = _COMMIT.unpack_from(payload)
    names_at = _COMMIT.size + lanes * _LANE.size
    metadata_at = names_at + name_bytes
    if metadata_at + metadata_bytes != len(payload) or not name_bytes:
        raise InvalidInputError("lengths do not add up")
    offsets = {lane: check_offset(offset) for lane, offset in _LANE.iter_unpack(payload[_COMMIT.size : names_at])}
    return CommitOffsets(
        payload[names_at:metadata_at].decode(), generation, offsets, bytes(payload[metadata_at:]), rewind
    )


def _decode_delete_group(payload: bytes) -> DeleteGroup:
    if not 1 < len(payload) <= 1 + MAX_GROUP_BYTES:
        raise InvalidInputError("a group's name is empty or too long")
    return DeleteGroup(payload[1:].decode())


def _decode_forget_group(payload: bytes) -> ForgetGroup:
    _, name_bytes, was_seen, lanes, generation, seen_generation = _FORGET.unpack_from(payload)
    name_at = _FORGET.size + lanes * _LANE.size
    if name_at + name_bytes != len(payload) or not name_bytes or (lanes and not was_seen):
        raise InvalidInputError("lengths do not add up")
    offsets = {lane: check_offset(offset) for lane, offset in _LANE.iter_unpack(payload[_FORGET.size : name_at])}
    return ForgetGroup(payload[name_at:].decode(), generation, (seen_generation, offsets) if was_seen else None)


def _decode_pin(payload: bytes) -> PinGroup:
    if not 2 < len(payload) <= 2 + MAX_GROUP_BYTES or payload[1] > 1:
        raise InvalidInputError("a group's name is empty or too long, or it is neither pinned nor not")
    return PinGroup(payload[2:].decode(), bool(payload[1]))


def _decode_fence(payload: bytes) -> FenceProducer:
    return FenceProducer(*_FENCE.unpack(payload)[1:])


def _decode_pass_time(payload: bytes) -> PassTime:
    return PassTime(*_PASS_TIME.unpack(payload)[1:])


def _decode_expire_groups(payload: bytes) -> ExpireGroups:
    _, generation, count = _EXPIRE.unpack_from(payload)
    at, names = _EXPIRE.size, []
    for _ in range(count):
        end = at + 1 + payload[at] if at < len(payload) else at
        if not at + 1 < end <= len(payload):
            raise InvalidInputError("lengths do not add up")
        names.append(payload[at + 1 : end].decode())
        at = end
    if at != len(payload):
        raise InvalidInputError("lengths do not add up")
    return ExpireGroups(tuple(names), generation)


def _decode_configure(payload: bytes) -> Configure:
    return Configure(PartitionSettings.decode(payload[1:]))


_DECODERS: dict[int, Callable[[bytes], Command]] = {
    TRIM: _decode_trim,
    COMMIT_OFFSETS: _decode_commit,
    DELETE_GROUP: _decode_delete_group,
    FENCE_PRODUCER: _decode_fence,
    CONFIGURE: _decode_configure,
    PASS_TIME: _decode_pass_time,
    EXPIRE_GROUPS: _decode_expire_groups,
    PIN_GROUP: _decode_pin,
    TRIM_UNLESS_HELD: _decode_trim_unless_held,
    FORGET_GROUP: _decode_forget_group,
    **JOB_DECODERS,
    **TRANSACTION_DECODERS,
}
