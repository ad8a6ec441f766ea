"""Log entries about jobs, as msgpack behind their tag.

Each carries the leader's stamp. Whoever proposes one makes it with a function
here; ``decode`` refuses fields and kinds that this release does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from rayqueue.errors import InvalidInputError
from rayqueue.protocol.jobs import Settlement
from rayqueue.protocol.unpacking import unpack

LEASE_JOBS = 0x20
SETTLE_JOBS = 0x21
END_WORKERS = 0x22
CHANGE_JOBS = 0x23
ACK_ALL = 0x24


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One worker that wants jobs."""

    worker: str
    attempt: int
    max_jobs: int
    least_jobs: int
    lease_ms: int


class LeaseJobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Lease jobs to each of these, one after the other. Answered with a ``Grant``, or None, for each."""

    now_ms: int
    requests: tuple[Request, ...]


class Settle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One settlement, by whom. As ``protocol.jobs.Settlement``; that one may get fields, this one gets a new tag."""

    worker: str
    kind: str
    token: int
    jobs: tuple[tuple[int, int], ...]
    delay_ms: int
    lease_ms: int
    reason: str
    traceback: str
    result: bytes | None


class SettleJobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answered with ``protocol.jobs.Settled`` for each."""

    now_ms: int
    settles: tuple[Settle, ...]


class EndWorkers(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Their leases end. Answered with how many jobs each had."""

    now_ms: int
    workers: tuple[str, ...]


class ChangeJobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``redrive`` or ``purge`` dead letters, or ``cancel`` jobs that wait. Answered with how many it was."""

    now_ms: int
    kind: str
    ids: tuple[int, ...]


Held = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
"""Tokens of leases, and runs of their jobs."""


class AckAll(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of each of these all jobs are done, or none is. Answered with ``protocol.jobs.AckedAll`` for each."""

    now_ms: int
    acks: tuple[Held, ...]


JobCommand = LeaseJobs | SettleJobs | EndWorkers | ChangeJobs | AckAll

_encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T", bound=JobCommand)


def lease_command(now_ms: int, requests: Sequence[Request]) -> bytes:
    return bytes((LEASE_JOBS,)) + _encode(LeaseJobs(now_ms, tuple(requests)))


def settle(worker: str, settlement: Settlement) -> Settle:
    each = settlement
    return Settle(
        worker,
        each.kind,
        each.token,
        each.jobs,
        each.delay_ms,
        each.lease_ms,
        each.reason,
        each.traceback,
        each.result,
    )


def settle_command(now_ms: int, settles: Sequence[Settle]) -> bytes:
    return bytes((SETTLE_JOBS,)) + _encode(SettleJobs(now_ms, tuple(settles)))


def end_workers_command(now_ms: int, workers: Sequence[str]) -> bytes:
    return bytes((END_WORKERS,)) + _encode(EndWorkers(now_ms, tuple(workers)))


def change_command(now_ms: int, kind: str, ids: Sequence[int]) -> bytes:
    return bytes((CHANGE_JOBS,)) + _encode(ChangeJobs(now_ms, kind, tuple(ids)))


def ack_all_command(now_ms: int, acks: Sequence[Held]) -> bytes:
    return bytes((ACK_ALL,)) + _encode(AckAll(now_ms, tuple(acks)))


def _decoder(kind: type[_T]) -> Callable[[bytes], _T]:
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    def decode(payload: bytes) -> _T:
        return unpack(decoder, memoryview(payload)[1:], InvalidInputError)  # type: ignore[no-any-return]

    return decode


JOB_DECODERS: dict[int, Callable[[bytes], JobCommand]] = {
    LEASE_JOBS: _decoder(LeaseJobs),
    SETTLE_JOBS: _decoder(SettleJobs),
    END_WORKERS: _decoder(EndWorkers),
    CHANGE_JOBS: _decoder(ChangeJobs),
    ACK_ALL: _decoder(AckAll),
}
