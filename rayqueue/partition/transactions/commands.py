"""Log entries about transactions, as msgpack behind their tag.

Whoever proposes one makes it with a function here; decoding refuses fields that
this release does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from rayqueue.errors import InvalidInputError
from rayqueue.protocol.transactions import Epoch, ProducerId
from rayqueue.protocol.unpacking import unpack

STAGE_OFFSETS = 0x30
STAGE_ACKS = 0x31
END_TRANSACTION = 0x32

_Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Lane = Annotated[int, Meta(ge=0, le=254)]
_Time = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class StageOffsets(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Positions of a group that count once the transaction is committed. Answers ``Staged``, or an error."""

    producer_id: ProducerId
    epoch: Epoch
    group: Annotated[str, Meta(min_length=1, max_length=255)]
    generation: _Offset
    offsets: dict[_Lane, _Offset]
    metadata: Annotated[bytes, Meta(max_length=4096)] = b""


class StageAcks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Jobs of a lease that are done once the transaction is committed. Answers ``protocol.jobs.Settled``, or an
    error."""

    now_ms: _Time
    producer_id: ProducerId
    epoch: Epoch
    worker: str
    token: int
    jobs: tuple[tuple[int, int], ...]


class EndTransaction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The marker: a transaction has ended so. Answers ``Ended``."""

    producer_id: ProducerId
    epoch: Epoch
    commit: bool


TransactionCommand = StageOffsets | StageAcks | EndTransaction

_encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T", bound=TransactionCommand)


def stage_offsets_command(
    producer_id: int, epoch: int, group: str, generation: int, offsets: Mapping[int, int], metadata: bytes = b""
) -> bytes:
    staged = StageOffsets(producer_id, epoch, group, generation, dict(offsets), metadata)
    return bytes((STAGE_OFFSETS,)) + _encode(staged)


def stage_acks_command(
    now_ms: int, producer_id: int, epoch: int, worker: str, token: int, jobs: Sequence[tuple[int, int]]
) -> bytes:
    return bytes((STAGE_ACKS,)) + _encode(StageAcks(now_ms, producer_id, epoch, worker, token, tuple(jobs)))


def end_transaction_command(producer_id: int, epoch: int, *, commit: bool) -> bytes:
    return bytes((END_TRANSACTION,)) + _encode(EndTransaction(producer_id, epoch, commit))


def _decoder(kind: type[_T]) -> Callable[[bytes], _T]:
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    def decode(payload: bytes) -> _T:
        return unpack(decoder, memoryview(payload)[1:], InvalidInputError)  # type: ignore[no-any-return]

    return decode


TRANSACTION_DECODERS: dict[int, Callable[[bytes], TransactionCommand]] = {
    STAGE_OFFSETS: _decoder(StageOffsets),
    STAGE_ACKS: _decoder(StageAcks),
    END_TRANSACTION: _decoder(EndTransaction),
}
