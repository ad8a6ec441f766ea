"""Lasting work: coroutines that run for as long as their owner. A failure is neither silent nor the end of them.

A task that nobody awaits keeps its exception to itself. What such a task does is
missed only much later: a transaction that nobody resolves, a position that nobody
commits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rayqueue.net.backoff import longest_s

_log = logging.getLogger(__name__)

MIN_PAUSE_MS = 1_000
_MAX_PAUSE_MS = 60_000


async def lasting(work: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
    """Until it returns, or is cancelled. If it fails, which is a bug, the log says so, and it is begun again after a
    while: after twice as long if it has failed sooner than that."""
    loop, failures = asyncio.get_running_loop(), 0
    while True:
        began_s = loop.time()
        try:
            return await work()
        except Exception:  # noqa: BLE001  # a bug
            _log.exception("%s has failed, and begins again", what)
        pause_s = longest_s(MIN_PAUSE_MS, _MAX_PAUSE_MS, failures)
        failures = failures + 1 if loop.time() - began_s < pause_s else 0
        await asyncio.sleep(pause_s)
