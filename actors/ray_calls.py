"""The errors of calls to actors, as errors of ``rayqueue.errors``.

Ray wraps what an actor raises, has errors of its own for a process that is
gone, and others for time that is up. A replica that died or did not answer
leaves the outcome *unknown*: it may have done what it was asked, and died after.
"""

from __future__ import annotations

import asyncio

from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rayqueue.errors import OutcomeUnknownError, RayQueueError

FAILURES = (RayError, RayQueueError, OSError, ValueError, asyncio.TimeoutError)
"""What a call to an actor may end with that is no bug of ours. ``ValueError``: a name that is taken, or that nobody
has."""


def typed(error: Exception, who: str) -> Exception:
    """The error that the caller of a replica should see instead."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, RayQueueError) else error
    if isinstance(error, GetTimeoutError):
        return OutcomeUnknownError(f"{who} has not answered; outcome unknown", replica_id=who)
    if isinstance(error, RayActorError):
        return OutcomeUnknownError(f"{who} died or cannot be reached; outcome unknown", replica_id=who)
    return error
