"""Statuses: our errors as gRPC's, with ``google.rpc.ErrorInfo`` and ``RetryInfo`` as their details."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from rayqueue import errors as e
from rayqueue.gateway.rpc.v1 import common_pb2
from rayqueue.gateway.texts import text_of

DOMAIN = "rayqueue"

# The first that fits, from an error's own class upwards.
CODES: dict[type[e.RayQueueError], grpc.StatusCode] = {
    e.InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    e.OffsetOutOfRangeError: grpc.StatusCode.OUT_OF_RANGE,
    e.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    e.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    e.UnknownTopicError: grpc.StatusCode.NOT_FOUND,
    e.UnknownPartitionError: grpc.StatusCode.NOT_FOUND,
    e.UnknownGroupError: grpc.StatusCode.NOT_FOUND,
    e.UnknownBrokerError: grpc.StatusCode.NOT_FOUND,
    e.UnknownJobError: grpc.StatusCode.NOT_FOUND,
    e.JobError: grpc.StatusCode.FAILED_PRECONDITION,
    e.TopicExistsError: grpc.StatusCode.ALREADY_EXISTS,
    e.TopicNotReadyError: grpc.StatusCode.UNAVAILABLE,
    e.TopicError: grpc.StatusCode.FAILED_PRECONDITION,
    e.GroupError: grpc.StatusCode.FAILED_PRECONDITION,
    e.MembershipError: grpc.StatusCode.FAILED_PRECONDITION,
    e.CapacityError: grpc.StatusCode.FAILED_PRECONDITION,
    e.RequestConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    e.RequestInProgressError: grpc.StatusCode.ABORTED,
    e.RequestTooLargeError: grpc.StatusCode.INVALID_ARGUMENT,
    e.SessionGoneError: grpc.StatusCode.FAILED_PRECONDITION,
    e.SessionElsewhereError: grpc.StatusCode.FAILED_PRECONDITION,
    e.RateLimitedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    e.QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    e.TooManyProducersError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    e.OutcomeUnknownError: grpc.StatusCode.UNAVAILABLE,
    e.GatewayClosingError: grpc.StatusCode.UNAVAILABLE,
    e.ClosedError: grpc.StatusCode.UNAVAILABLE,
}
_NUMBERS = dict(code_pb2.Code.items())


def code_of(error: e.RayQueueError) -> grpc.StatusCode:
    for cls in type(error).__mro__:
        if cls in CODES:
            return CODES[cls]
    return grpc.StatusCode.UNAVAILABLE if error.retriable else grpc.StatusCode.INTERNAL


def status_of(error: e.RayQueueError) -> Any:
    """What a call is aborted with."""
    info = error_details_pb2.ErrorInfo(
        reason=error.code, domain=DOMAIN, metadata={"retriable": "true" if error.retriable else "false"}
    )
    details = [_packed(info)]
    if error.retriable:
        after_ms = error.details.get("retry_after_ms", 1000)
        delay = Duration(seconds=after_ms // 1000, nanos=after_ms % 1000 * 1_000_000)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    code = _NUMBERS[code_of(error).name]
    return rpc_status.to_status(status_pb2.Status(code=code, message=text_of(error), details=details))


def problem_of(error: e.RayQueueError) -> common_pb2.Problem:
    return common_pb2.Problem(code=error.code, detail=text_of(error), retriable=error.retriable)


def _packed(message: Any) -> any_pb2.Any:
    made = any_pb2.Any()
    made.Pack(message)
    return made
