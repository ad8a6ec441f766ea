"""Draining: a gateway's stop, as everything that waits hears of it.

From ``begin`` on nothing waits for news any more: long polls answer with what
there is, streams are handed nothing new. What is at work has until the time to
drain is over; then it is cut off, and told so (``cut_off``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rayqueue.errors import GatewayClosingError, OutcomeUnknownError, RayQueueError

_T = TypeVar("_T")


class Draining:
    """Of one gateway. Belongs to its event loop."""

    def __init__(self) -> None:
        self._begun = asyncio.Event()
        self.over = False
        """What is under way is cut off."""
        self.under_way: set[asyncio.Task[Any]] = set()
        """Calls of gRPC, which its server would cut off without a word."""

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        self._begun.set()

    def check(self) -> None:
        """``GatewayClosingError`` once it has begun: for what would go on."""
        if self.begun:
            raise closing()

    async def unless_begun(self, waiting: Coroutine[Any, Any, _T], otherwise: _T) -> _T:
        """What it answers; once draining begins it is cancelled, and this is ``otherwise``."""
        work = asyncio.ensure_future(waiting)
        begun = asyncio.ensure_future(self._begun.wait())
        try:
            await asyncio.wait((work, begun), return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else otherwise
        finally:
            for task in (work, begun):
                task.cancel()
            await asyncio.gather(work, begun, return_exceptions=True)

    async def finish(self, within_s: float) -> None:
        """Let calls under way end, and cut off those that have not in time."""
        if self.under_way:
            await asyncio.wait(self.under_way, timeout=within_s)
        self.over = True
        for task in self.under_way:
            task.cancel()


def closing() -> GatewayClosingError:
    return GatewayClosingError("this gateway is being stopped: ask another, or this one again in a moment")


def cut_off(*, changes: bool) -> RayQueueError:
    """For what was not through when the time to drain was over. ``changes``: it may have changed something."""
    if changes:
        return OutcomeUnknownError("this gateway was stopped before this was done; it may still be")
    return closing()
