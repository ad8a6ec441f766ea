"""Work queues: what workers and the leader of a queue's partition say to each other.

A queue is a topic with the setting ``queue``; its records are jobs. They are put
by ordinary appends. What a job wants beside its key and value (a delay, a time to
live, ...) is a ``JobOptions`` in its header ``JOB_HEADER``, which the partition
reads and workers do not see.

A job's id is the offset at which it was put, and stays so though the job may be
moved inside the log. With its partition it names the job for ever.

A lease is told by its token, a number that its partition gives once. Whatever a
worker says of a job carries the token by which it got it. A worker is told by a
name that it has drawn for itself and that nobody has ever had or will have; the
connection on which it asked for jobs last is the worker's: if that breaks, its
leases end. A leader that it has not asked yet learns of it by what it says of its
jobs (``SettleJobs.attached``). The name says on which Ray node the worker runs (``worker_name``): if
Ray reports that node dead, its leases end too, though the connection may seem to
be there. Ray never gives a node's id again.

Numbers and lengths are bounded in the types, so that a call that decodes is one
that can be carried out, or refused for what the queue's state is.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from rayqueue.errors import InvalidInputError
from rayqueue.protocol.call import Call
from rayqueue.protocol.unpacking import unpack
from rayqueue.records.record import Headers

JOB_HEADER = "rayqueue-job"

MAX_JOBS = 10_000
"""In one lease, list or settlement."""
MAX_TEXT = 16 * 1024
"""Characters of a reason or a traceback. Clients cut longer ones."""
MAX_RESULT_BYTES = 64 * 1024
MAX_WAIT_MS = 24 * 3_600_000
MAX_TIME_MS = 2**48
"""No delay is longer, no time later: the year 10889."""

JobId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Worker = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
DurationMs = Annotated[int, Meta(ge=0, le=MAX_TIME_MS)]
WaitMs = Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)]
DedupeId = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=1, le=MAX_JOBS)]
Run = tuple[JobId, Count]
"""Jobs whose ids follow each other: the first id, and how many."""
Runs = Annotated[tuple[Run, ...], Meta(min_length=1, max_length=MAX_JOBS)]


_ON = "@"


def worker_name(own: str, ray_node: str = "") -> str:
    """``own`` is nobody else's."""
    return f"{own}{_ON}{ray_node}" if ray_node else own


def ray_node_of(worker: str) -> str:
    """Empty, if the worker did not say."""
    return worker.rpartition(_ON)[2] if _ON in worker else ""


class JobOptions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The options of a job. A job without options needs no header."""

    delay_ms: DurationMs = 0
    """Not before so long after it was put, by the queue's clock."""
    deliver_at_ms: Annotated[int, Meta(ge=0, le=MAX_TIME_MS)] = 0
    """Not before this time, in milliseconds since 1970. With a delay as well, the later of the two."""
    ttl_ms: DurationMs = 0
    """Not delivered any more so long after it was put; 0 is for ever."""
    dedupe_id: Annotated[str, Meta(max_length=256)] = ""
    """Within ``dedupe_window_ms`` one job of this id is put to this partition; others are dropped (``FindJobs``)."""
    want_result: bool = False
    """What it is acknowledged with is kept for ``result_ttl_ms``."""


_encoder = msgspec.msgpack.Encoder()
_options_decoder = msgspec.msgpack.Decoder(JobOptions)


def encode_options(options: JobOptions) -> bytes:
    """The value of ``JOB_HEADER``. ``InvalidInputError`` for options that no partition takes."""
    try:
        encoded = _encoder.encode(options)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"not the options of a job: {error}") from error
    decode_options(encoded)
    return encoded


def decode_options(encoded: bytes) -> JobOptions:
    """``InvalidInputError`` if it is none."""
    return unpack(_options_decoder, encoded, lambda why: InvalidInputError(f"not the options of a job: {why}"))


# -- answers -------------------------------------------------------------------------


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A job as its worker gets it."""

    id: int
    deliveries: int
    """How often it was delivered, this time included."""
    timestamp: int
    """Milliseconds since 1970, as its producer gave it."""
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    lane: int = 0
    want_result: bool = False
    forgiven: int = 0
    """Deliveries before it was redriven, which do not count any more. A replica of a release without it says 0."""


class Leased(msgspec.Struct, frozen=True, array_like=True):
    """Jobs of one lease. None, and no token, if there were too few in time."""

    token: int = 0
    lease_ms: int = 0
    """How long it lasts from now, unless it is extended."""
    jobs: tuple[Job, ...] = ()


class Settled(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one ``Settlement``."""

    lost: tuple[Run, ...] = ()
    """Jobs that it did not reach: they are somebody else's by now, or gone. The others are settled."""
    lease_ms: int = 0
    """How long the lease lasts from now, after ``extend``: less than asked for once ``max_lease_ms`` is near."""


class AckedAll(msgspec.Struct, frozen=True, array_like=True):
    """What became of an ``AckAll``."""

    done: bool
    """All of them are acknowledged by their leases. Otherwise none was, by this call."""
    forgotten: bool = False
    """Nobody knows any more whether an earlier attempt has acknowledged them: it was too long ago. They are not there
    now, and so many leases have ended since that these are forgotten."""


class QueueSizes(msgspec.Struct, frozen=True, array_like=True):
    """Exact numbers of one partition, as of now."""

    ready: int
    """Delivered to whoever asks next. With ``ordered_by_key`` also those that wait for an earlier one of their key."""
    leased: int
    delayed: int
    """Waiting for their time: put with a delay, or to be tried again later."""
    dead: int
    expired: int = 0
    """How many were not delivered within their time to live, ever."""
    dropped: int = 0
    """How many were given up without ``dead_letter``, ever."""
    deduplicated: int = 0
    """How many were not put because one with their ``dedupe_id`` was there, ever."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A delivery that did not end with an acknowledgement."""

    time_ms: int
    kind: str
    """``nack``, ``reject``, ``lease expired``, ``worker gone``, ``time to live`` or ``redriven``."""
    worker: str
    reason: str = ""
    traceback: str = ""


class DeadJob(msgspec.Struct, frozen=True, array_like=True):
    """A dead letter: the job, and what has happened to it, oldest first (the last ``MAX_NOTES``)."""

    job: Job
    died_ms: int
    history: tuple[Failure, ...]


class Changed(msgspec.Struct, frozen=True, array_like=True):
    """The number of jobs that one step has changed, and whether there may be more: then ask again."""

    jobs: int
    more: bool = False


class JobStatus(msgspec.Struct, frozen=True, array_like=True):
    """A job's state, and how often it was delivered."""

    state: str
    """``ready``, ``leased``, ``delayed``, ``dead`` or ``gone``: acknowledged, dropped, purged, or never there."""
    deliveries: int = 0


ENDED = "ended"


class JobResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of a job, where one was wanted."""

    state: str
    """``done``, ``dead``, ``cancelled``, ``pending``, or ``gone``: there is no result (any more)."""
    value: bytes | None = None
    reason: str = ""
    """Of ``gone``: ``ENDED`` if there was such a job, which has ended. A replica of a release before does not say."""
    traceback: str = ""


# -- calls ---------------------------------------------------------------------------


class LeaseJobs(Call, frozen=True, kw_only=True):
    """Jobs to do: up to ``max_jobs`` as soon as there are ``least_jobs``, in the order of the queue.

    Waits for them, at most ``wait_ms``, behind those who have waited longer. A repetition with the same ``attempt``,
    of a worker whose answer was lost, gets the lease that the first one made, if it has not ended since.
    """

    answer_type: ClassVar[Any] = Leased
    worker: Worker
    attempt: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """A number that the worker gives to each request, and to its repetitions."""
    max_jobs: Count = 1
    least_jobs: Count = 1
    """All or nothing: as many as ``max_jobs``."""
    max_bytes: Annotated[int, Meta(ge=1, le=2**40)] = 4 * 1024 * 1024
    """Values, keys and headers of the answer; at least one job is given, however large. Those that do not fit are
    given back as if they had not been delivered."""
    wait_ms: WaitMs = 0
    lease_ms: Annotated[int, Meta(ge=0, le=MAX_TIME_MS)] = 0
    """0: the queue's ``lease_ms``. At most its ``max_lease_ms``."""
    detached: bool = False
    """The lease outlives the connection on which it was asked for, until its time is up: whoever has it is somewhere
    behind the worker, as a caller of a gateway is. A replica of a release without it ends it with the connection."""


class Settlement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's word on jobs of one lease."""

    kind: Literal["ack", "nack", "reject", "extend", "release"]
    """``ack``: done. ``nack``: to be tried again. ``reject``: dead at once. ``extend``: not done yet; of the whole
    lease. ``release``: not begun; the delivery does not count."""
    token: Token
    jobs: Runs
    delay_ms: Annotated[int, Meta(ge=-1, le=MAX_TIME_MS)] = -1
    """``nack``: how long until the next try; -1: by the queue's back-off."""
    lease_ms: DurationMs = 0
    """``extend``: so long from now; 0: the queue's ``lease_ms``."""
    reason: Text = ""
    traceback: Text = ""
    result: Annotated[bytes, Meta(max_length=MAX_RESULT_BYTES)] | None = None
    """``ack`` of one job whose result is wanted."""


class SettleJobs(Call, frozen=True, kw_only=True):
    """Acknowledge jobs, or say what else becomes of them. Answered when it is durable, one ``Settled`` for each.

    May be repeated: what an earlier attempt has settled counts as settled, for as long as it is remembered.
    """

    answer_type: ClassVar[Any] = tuple[Settled, ...]
    worker: Worker
    settlements: Annotated[tuple[Settlement, ...], Meta(min_length=1, max_length=MAX_JOBS)]
    attached: bool = False
    """The worker's leases end with this connection, unless it has asked for jobs on another one. A replica of a release
    without it ties them to none, if the worker has asked its predecessor: then they end by their time."""


class AckAll(Call, frozen=True, kw_only=True):
    """Acknowledge all of these jobs, of one lease or of several, or none of them: if a single one is somebody else's by
    now, or gone, nothing changes. For whoever can do nothing with a part. Answered when it is durable.

    May be repeated, and is told the same. The jobs may be more than ``MAX_JOBS``, as many as the queue lets be leased.
    """

    answer_type: ClassVar[Any] = AckedAll
    leases: Annotated[tuple[tuple[Token, Runs], ...], Meta(min_length=1, max_length=MAX_JOBS)]
    """Of each its token and its jobs, each once."""


class WithdrawRequest(Call, frozen=True, kw_only=True):
    """A worker does not want any more what it asked for by this ``attempt``. If the request waits for jobs, it is
    answered with none; if it is just being given some, they go back as if they had not been delivered. Answers how
    many requests that were: what has been answered is the worker's, who releases it."""

    answer_type: ClassVar[Any] = int
    worker: Worker
    attempt: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    give_back: bool = False
    """Also what it was answered with: the worker has not got the answer, and will not look at it. A replica of a
    release without it does not: then the lease ends by its time."""


class EndWorker(Call, frozen=True, kw_only=True):
    """A worker is dead, or stops: its leases end now, and its requests are withdrawn. Answers how many jobs it had."""

    answer_type: ClassVar[Any] = int
    worker: Worker


class GetQueueSizes(Call, frozen=True, kw_only=True):
    answer_type: ClassVar[Any] = QueueSizes


class PeekJobs(Call, frozen=True, kw_only=True):
    """The next jobs that are ready, without taking them; of a lane, the first first."""

    answer_type: ClassVar[Any] = tuple[Job, ...]
    max_jobs: Annotated[int, Meta(ge=1, le=1000)] = 1


class GetJobs(Call, frozen=True, kw_only=True):
    """The states of these jobs."""

    answer_type: ClassVar[Any] = tuple[JobStatus, ...]
    ids: Annotated[tuple[JobId, ...], Meta(min_length=1, max_length=1000)]


class CancelJobs(Call, frozen=True, kw_only=True):
    """Drop jobs that are ready or delayed. Answers how many were."""

    answer_type: ClassVar[Any] = int
    ids: Annotated[tuple[JobId, ...], Meta(min_length=1, max_length=1000)]


class FindJobs(Call, frozen=True, kw_only=True):
    """The ids of the jobs that have these ``dedupe_id``s within the window; None where there is none."""

    answer_type: ClassVar[Any] = tuple[int | None, ...]
    dedupe_ids: Annotated[tuple[DedupeId, ...], Meta(min_length=1, max_length=1000)]


class GetResult(Call, frozen=True, kw_only=True):
    """Of a job that was put with ``want_result``; waits for it at most ``wait_ms``."""

    answer_type: ClassVar[Any] = JobResult
    id: JobId
    wait_ms: WaitMs = 0


class ListDead(Call, frozen=True, kw_only=True):
    """Dead letters from this id on, in the order of their ids. Fewer than asked for, if they are large."""

    answer_type: ClassVar[Any] = tuple[DeadJob, ...]
    first: JobId = 0
    max_jobs: Annotated[int, Meta(ge=1, le=1000)] = 100


class RedriveDead(Call, frozen=True, kw_only=True):
    """Let dead letters be tried again, with all their deliveries before them and their history; all, without ids."""

    answer_type: ClassVar[Any] = Changed
    ids: Annotated[tuple[JobId, ...], Meta(max_length=1000)] | None = None


class PurgeDead(Call, frozen=True, kw_only=True):
    """Delete dead letters for good; all, without ids."""

    answer_type: ClassVar[Any] = Changed
    ids: Annotated[tuple[JobId, ...], Meta(max_length=1000)] | None = None


JobCall = (
    LeaseJobs
    | SettleJobs
    | AckAll
    | WithdrawRequest
    | EndWorker
    | GetQueueSizes
    | PeekJobs
    | GetJobs
    | CancelJobs
    | FindJobs
    | GetResult
    | ListDead
    | RedriveDead
    | PurgeDead
)
