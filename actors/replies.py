"""From the engine's thread back to the event loops that wait for it.

A call into ``Replica`` is answered on the engine's thread. An async actor's
concurrency group has an event loop, and a thread, of its own; waking one costs
more than most answers. So all answers of one engine step reach a loop by one
``call_soon_threadsafe``: that is ``deliver``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rayqueue.errors import RayQueueError

Answered = tuple[Callable[[Any], None], Any]


class Reply:
    """A reply that one coroutine waits for. Make it on the loop that awaits ``future``."""

    __slots__ = ("future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def __call__(self, result: Any) -> None:
        if self.future.done():
            return  # the caller gave up
        if isinstance(result, RayQueueError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


def deliver(answers: Sequence[Answered]) -> None:
    """Hand over one step's answers. Called on the engine's thread, or on whichever one closes the replica."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Answered]] = {}
    for answered in answers:
        by_loop.setdefault(answered[0].loop, []).append(answered)  # type: ignore[attr-defined]
    for loop, group in by_loop.items():
        loop.call_soon_threadsafe(_settle, group)


def _settle(answers: Sequence[Answered]) -> None:
    for answer, result in answers:
        answer(result)
