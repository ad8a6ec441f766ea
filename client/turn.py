"""One caller at a time, told apart by thread and asyncio task, and what may be waited for on the way.

A consumer's work is written once, as a generator that yields what it waits
for; a thread and a coroutine each drive it in their own way.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import threading
from collections.abc import Awaitable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from rayqueue.client.arguments import seconds_of
from rayqueue.client.bell import Bell
from rayqueue.client.forks import forked
from rayqueue.errors import InvalidInputError

_T = TypeVar("_T")

Step = float | concurrent.futures.Future[Any] | Awaitable[Any]
"""Seconds to wait for the bell, a future of the I/O thread, or what the application's own coroutine returns."""

Steps = Generator[Step, Any, _T]


class Turn:
    """Whose turn it is. The same caller may take it again, as a listener does that is called from a poll."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._free = threading.Condition()
        self._owner: tuple[int, Any] | None = None
        self._depth = 0

    @property
    def is_others(self) -> bool:
        return self._owner not in (None, (threading.get_ident(), _task()))

    @property
    def is_mine(self) -> bool:
        """The caller is in a call already: a listener of its poll, or a signal handler that interrupts it."""
        return self._owner == (threading.get_ident(), _task())

    def check_process(self) -> None:
        """``ForkedError`` in a forked child, before any lock: another thread of the parent may have held it."""
        if self._pid != os.getpid():
            raise forked(f"this {self._what}")

    @contextmanager
    def taken(self, *, wait_s: float = 0.0) -> Generator[None, None, None]:
        """``InvalidInputError`` if it is somebody else's for longer than ``wait_s``."""
        self.check_process()
        caller = threading.get_ident(), _task()
        with self._free:
            if self._owner not in (None, caller):
                self._free.wait_for(lambda: self._owner is None, wait_s)
            if self._owner not in (None, caller):
                raise InvalidInputError(
                    f"a {self._what} is used by one thread, or one task, at a time: another one is in a call of it"
                )
            self._owner = caller
            self._depth += 1
        try:
            yield
        finally:
            with self._free:
                self._depth -= 1
                if not self._depth:
                    self._owner = None
                    self._free.notify_all()


def _task() -> Any:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def drive(steps: Steps[_T], bell: Bell) -> _T:
    """Wait as a thread does."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, float):
                bell.wait(step)
                step = steps.send(None)
                continue
            if not isinstance(step, concurrent.futures.Future):
                if inspect.iscoroutine(step):
                    step.close()
                step = steps.throw(InvalidInputError("a listener whose methods are async needs poll_async"))
                continue
            try:
                outcome = step.result()
            except BaseException as error:  # noqa: BLE001 - it goes to whoever yielded the step
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        steps.close()


async def drive_async(steps: Steps[_T], bell: Bell) -> _T:
    """Wait as a coroutine does, in any event loop."""
    try:
        step = next(steps)
        while True:
            if isinstance(step, float):
                await bell.wait_async(step)
                step = steps.send(None)
                continue
            waiting = asyncio.wrap_future(step) if isinstance(step, concurrent.futures.Future) else step
            try:
                outcome = await waiting
            except BaseException as error:  # noqa: BLE001 - it goes to whoever yielded the step
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        steps.close()


class Pending:
    """Something under way in the I/O thread: ``await`` it, or ask for its ``result``."""

    __slots__ = ("_future", "_pid")

    def __init__(self, future: concurrent.futures.Future[None]) -> None:
        self._future = future
        self._pid = os.getpid()

    @property
    def _forked(self) -> bool:
        return self._pid != os.getpid()

    def done(self) -> bool:
        return self._forked or self._future.done()

    def result(self, timeout: float | None = None, *, timeout_ms: int | None = None) -> None:
        """Wait for it, for ``timeout`` seconds or ``timeout_ms``. ``TimeoutError``: it is still under way."""
        self._refuse_in_child()
        timeout_s = seconds_of(timeout, timeout_ms)
        try:
            self._future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"not done within {timeout_s} s") from None

    def __await__(self) -> Generator[Any, None, None]:
        self._refuse_in_child()
        return asyncio.wrap_future(self._future).__await__()

    def _refuse_in_child(self) -> None:
        """What was under way at a fork goes on in the parent, and only there is it known how it ends."""
        if self._forked:
            raise forked("this call")
