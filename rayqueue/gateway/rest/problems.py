"""Problems: our errors as HTTP statuses and ``application/problem+json`` (RFC 9457)."""

from __future__ import annotations

import logging

import msgspec
from msgspec import Struct

from rayqueue import errors as e
from rayqueue.gateway.texts import text_of

_log = logging.getLogger(__name__)

CONTENT_TYPE = "application/problem+json"

# The first that fits, from an error's own class upwards.
STATUSES: dict[type[e.RayQueueError], int] = {
    e.InvalidInputError: 400,
    e.OversizedBatchError: 413,
    e.OversizedRecordError: 413,
    e.UnauthenticatedError: 401,
    e.PermissionDeniedError: 403,
    e.UnknownTopicError: 404,
    e.UnknownPartitionError: 404,
    e.UnknownGroupError: 404,
    e.UnknownBrokerError: 404,
    e.UnknownJobError: 404,
    e.JobError: 409,
    e.TopicError: 409,
    e.TopicNotReadyError: 503,
    e.GroupError: 409,
    e.MembershipError: 409,
    e.CapacityError: 422,
    e.RequestConflictError: 422,
    e.RequestInProgressError: 409,
    e.RequestTooLargeError: 413,
    e.UnsupportedMediaError: 415,
    e.SessionGoneError: 410,
    e.SessionElsewhereError: 421,
    e.RateLimitedError: 429,
    e.QueueFullError: 429,
    e.TooManyProducersError: 429,
    e.GatewayClosingError: 503,
    e.DiskFullError: 503,
    e.NoBrokerError: 503,
    e.ClosedError: 503,
    e.OutcomeUnknownError: 504,
}
_RETRY_AFTER_S = 1


class Problem(Struct, omit_defaults=False):
    """What went wrong, and what to do about it."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retriable: bool


def status_of(error: e.RayQueueError) -> int:
    for cls in type(error).__mro__:
        if cls in STATUSES:
            return STATUSES[cls]
    return 503 if error.retriable else 500


def problem_of(error: e.RayQueueError) -> Problem:
    title = (type(error).__doc__ or type(error).__name__).split("\n\n")[0]
    return Problem(
        f"urn:rayqueue:error:{error.code}",
        " ".join(title.split()),
        status_of(error),
        text_of(error),
        error.code,
        error.retriable,
    )


def of_status(status: int, detail: str) -> Problem:
    """For what HTTP itself refuses: no such route, no such method."""
    code = {404: "unknown_route", 405: "unknown_method"}.get(status, f"http_{status}")
    title = {404: "There is no such route", 405: "This route has no such method"}.get(status, "Refused")
    return Problem(f"urn:rayqueue:error:{code}", title, status, detail, code, False)


INTERNAL = Problem(
    "urn:rayqueue:error:internal", "The gateway has failed", 500, "The gateway's log says why.", "internal", False
)


def retry_after_s(error: e.RayQueueError) -> int | None:
    """What the header ``Retry-After`` says, if the same request may succeed later."""
    if not error.retriable:
        return None
    told = error.details.get("retry_after_ms")
    return max(_RETRY_AFTER_S, -(-told // 1000)) if isinstance(told, int) else _RETRY_AFTER_S


def encoded(problem: Problem) -> bytes:
    return msgspec.json.encode(problem)
