"""From the engine's thread back to the event loops that wait for it.

A call into ``Replica`` is answered on the engine's thread. Each of an async
actor's concurrency groups has an event loop, and a thread, of its own; waking
one costs more than most answers. So all answers of one engine step reach a
loop by one ``call_soon_threadsafe``: that is ``deliver``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rayqueue.errors import RayQueueError
from rayqueue.replica import Answer

Answered = tuple[Answer, Any]


class Reply:
    """What one coroutine waits for. Make it on the loop that awaits ``future``."""

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


class Replies:
    """The same for several answers at once: ``future`` has all of them, errors among them, in their order."""

    __slots__ = ("_missing", "_results", "future", "loop")

    def __init__(self, count: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[list[Any]] = self.loop.create_future()
        self._results: list[Any] = [None] * count
        self._missing = count

    def take(self, position: int, result: Any) -> None:
        self._results[position] = result
        self._missing -= 1
        if not self._missing and not self.future.done():
            self.future.set_result(self._results)


class ReplyTo:
    """One place in ``Replies``."""

    __slots__ = ("_position", "_replies", "loop")

    def __init__(self, replies: Replies, position: int) -> None:
        self.loop = replies.loop
        self._replies = replies
        self._position = position

    def __call__(self, result: Any) -> None:
        self._replies.take(self._position, result)


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
