"""One call to an actor, with its errors as RayQueue means them.

Ray wraps what an actor raises, has errors of its own for a process that is
gone, and others for time that is up. Callers of this module see errors of
``rayqueue.errors`` only. A replica that died or did not answer leaves the
outcome *unknown*: it may have written the batch and died after it.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rayqueue.errors import OutcomeUnknownError, RayQueueError

Ref = Any
"""An ``ObjectRef``. Ray's own annotations lose the type of what it refers to."""


def result_of(ref: Ref, who: str, timeout_s: float | None) -> Any:
    """What the call returned, or its error."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except (RayTaskError, RayActorError, GetTimeoutError) as error:
        raise typed(error, who) from None


def typed(error: Exception, who: str) -> Exception:
    """The error that the caller of a replica should see instead."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, RayQueueError) else error
    if isinstance(error, GetTimeoutError):
        return OutcomeUnknownError(f"{who} has not answered; outcome unknown", node=who)
    if isinstance(error, RayActorError):
        return OutcomeUnknownError(f"{who} died or cannot be reached; outcome unknown", node=who)
    return error
