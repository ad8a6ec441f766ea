"""Repeating what was sent until it is answered, though nobody waits for it: a lease that nobody knows of, and an
acknowledgement of which nobody knows whether it counts, are in everybody's way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rayqueue.errors import RayQueueError
from rayqueue.net.backoff import Backoff

FOREVER_S = float("inf")


async def until_answered(
    ask: Callable[[], Coroutine[Any, Any, Any]],
    backoff: Backoff,
    within_s: float = FOREVER_S,
    *,
    asked: asyncio.Future[Any] | None = None,
) -> Any:
    """The answer. Raises an error that repeating cannot help, and any after so long. ``asked``: it is asked already."""
    clock_s = asyncio.get_running_loop().time
    until_s = clock_s() + within_s
    while True:
        try:
            return await (asked if asked is not None else ask())
        except RayQueueError as error:
            if not error.retriable or clock_s() > until_s:
                raise
        asked = None
        await asyncio.sleep(backoff.pause_s())
