"""Models of work queues: parameters, bodies and answers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from rayqueue.client.queue.settling import MAX_REASON, MAX_TRACEBACK
from rayqueue.gateway.operations import MAX_RECORDS
from rayqueue.gateway.queues import MAX_CHANGED
from rayqueue.gateway.rest.models import WaitMs, setting
from rayqueue.gateway.values import Contents, Form, Name, Value
from rayqueue.protocol.jobs import MAX_TIME_MS
from rayqueue.protocol.topics import TopicSettings, declared

Jobs = Annotated[int, Meta(ge=1, le=MAX_CHANGED)]
TimeMs = Annotated[int, Meta(ge=0, le=MAX_TIME_MS)]
LeaseMs = Annotated[int, Meta(ge=1, le=MAX_TIME_MS)]
JobText = Annotated[str, Meta(min_length=3, max_length=50, pattern="^[0-9]+-[0-9]+$")]
Lease = Annotated[str, Meta(min_length=5, max_length=80, pattern=r"^[0-9]+\.[0-9]+-[0-9]+\.[0-9]+$")]
Leases = Annotated[list[Lease], Meta(min_length=1, max_length=MAX_CHANGED)]

# -- parameters, of the path and the query ------------------------------------------------------


class QueueParams(Struct):
    queue: Name


class PeekJobsParams(QueueParams):
    max: Jobs = 10
    format: Form = "auto"


class LeaseJobsParams(QueueParams):
    max: Jobs = 1
    wait_ms: WaitMs = 1000
    lease_ms: LeaseMs | None = None
    format: Form = "auto"


class JobParams(QueueParams):
    job: JobText


class ResultParams(JobParams):
    wait_ms: WaitMs = 1000
    format: Form = "auto"


class DeadParams(QueueParams):
    max: Jobs = 100
    after: JobText | None = None
    format: Form = "auto"


class DeadJobParams(JobParams):
    format: Form = "auto"


# -- bodies ------------------------------------------------------------------------------------------

_NOT_QUEUES = ("queue", "retention_ms", "retention_bytes", "retention_consumed")

CreateQueue: Any = msgspec.defstruct(
    "CreateQueue",
    [
        ("name", Name),
        ("if_missing", bool, False),
        *(
            (name, setting(name) | msgspec.UnsetType, UNSET)
            for name in declared(TopicSettings)
            if name not in _NOT_QUEUES
        ),
    ],
    forbid_unknown_fields=True,
)
CreateQueue.__doc__ = "A work queue to be made. What is left out has its default."


class JobIn(Contents, forbid_unknown_fields=True, gc=False):
    """A job to be put. Of ``value``, ``text`` and ``base64`` one is given; none: a job without a value."""

    delay_ms: TimeMs = 0
    deliver_at_ms: TimeMs | None = None
    ttl_ms: LeaseMs | None = None
    dedupe_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    want_result: bool = False


class PutJobs(Struct, forbid_unknown_fields=True):
    jobs: Annotated[list[JobIn], Meta(min_length=1, max_length=MAX_RECORDS)]


class AckJobs(Struct, forbid_unknown_fields=True):
    """Jobs that are done, by their leases. One of them may have a result, for whoever has put it with
    ``want_result``."""

    leases: Leases
    result: Value | None = None


class ReleaseJobs(Struct, forbid_unknown_fields=True):
    """Jobs that were not begun, by their leases."""

    leases: Leases


class NackJobs(Struct, forbid_unknown_fields=True):
    """Jobs that are to be tried again: after ``delay_ms``, or after the queue's back-off."""

    leases: Leases
    delay_ms: TimeMs | None = None
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    traceback: Annotated[str, Meta(max_length=MAX_TRACEBACK)] = ""


class RejectJobs(Struct, forbid_unknown_fields=True):
    """Jobs that can never be done: to the dead letters at once."""

    leases: Leases
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    traceback: Annotated[str, Meta(max_length=MAX_TRACEBACK)] = ""


class ExtendJobs(Struct, forbid_unknown_fields=True):
    """Leases that are to last ``lease_ms`` from now, or another lease of the queue."""

    leases: Leases
    lease_ms: LeaseMs | None = None


class ChangeDead(Struct, forbid_unknown_fields=True):
    """Dead letters: these, or all of them."""

    jobs: Annotated[list[JobText], Meta(min_length=1, max_length=MAX_CHANGED)] | None = None
    all: bool = False


# -- answers -----------------------------------------------------------------------------------------


class QueueOut(Struct):
    """A queue's exact numbers; ``problem`` says why there are none."""

    queue: str
    queue_id: int
    partitions: int
    settings: dict[str, int | bool | str | None]
    ready: int | None = None
    leased: int | None = None
    delayed: int | None = None
    dead: int | None = None
    expired: int | None = None
    dropped: int | None = None
    deduplicated: int | None = None
    problem: str | None = None
    oldest_ready_ms: int | None = None


class QueueList(Struct):
    queues: list[QueueOut]


class PutOut(Struct, gc=False):
    job_id: str
    duplicate: bool
    """There was one with the same ``dedupe_id``: this one."""


class Put(Struct):
    """Every job is on the disks of a majority; in the order given."""

    queue: str
    jobs: list[PutOut]


class JobOut(Struct, omit_defaults=True, gc=False):
    """A job. Its value is in ``value`` (JSON), ``text`` or ``base64``; in none of them if it has none."""

    job_id: str
    priority: int
    deliveries: int
    put_at_ms: int
    lease: str | UnsetType = UNSET
    lease_ms: int | UnsetType = UNSET
    value: Raw | UnsetType = UNSET
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    headers_base64: dict[str, str] | UnsetType = UNSET


class JobsOut(Struct):
    jobs: list[JobOut]


class JobState(Struct):
    job_id: str
    state: str
    deliveries: int


class ResultOut(Struct, omit_defaults=True):
    """What became of a job: ``done``, with what it was acknowledged with; ``dead``, with its reason; ``cancelled``;
    ``pending``, if it was none of them in time."""

    job_id: str
    state: str
    reason: str = ""
    traceback: str = ""
    value: Raw | UnsetType = UNSET
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET


class SettledOut(Struct):
    """How many have ended so, on the disks of a majority; ``lost`` are leases that had ended before."""

    settled: int
    lost: list[str]


class ExtendedOut(Struct):
    extended: int
    lease_ms: int
    lost: list[str]


class FailureOut(Struct):
    time_ms: int
    kind: str
    worker: str
    reason: str
    traceback: str


class DeadOut(Struct, omit_defaults=True):
    """A dead letter; ``history`` is what happened to each delivery, the oldest first."""

    job_id: str
    partition: int
    reason: str
    priority: int
    deliveries: int
    put_at_ms: int
    died_at_ms: int
    history: list[FailureOut]
    value: Raw | UnsetType = UNSET
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    headers_base64: dict[str, str] | UnsetType = UNSET


class DeadList(Struct):
    """Go on behind the last one with ``after``."""

    jobs: list[DeadOut]


class Redriven(Struct):
    redriven: int


class Purged(Struct):
    purged: int
