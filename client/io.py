"""The one thread of a process in which all client connections live.

An event loop (uvloop where there is one) in a daemon thread, shared by every
producer, consumer and connection of the process. Application threads hand it
coroutines and wait for the outcome; nothing in it may block.

A forked child has none of its parent's threads: it gets a loop of its own, and
its parent's is closed to it (``ForkedError``).
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from rayqueue.client.forks import forked
from rayqueue.errors import ClosedError, InvalidInputError

_T = TypeVar("_T")

_LAST_TASKS_S = 0.5
"""How long tasks that were cancelled because their thread ends may take for it."""

END_S = 5.0
"""How long the end of a process waits for its threads."""

_here = threading.local()


def in_io_thread() -> bool:
    """Whether the caller is in the thread of some ``IoThread``: it must not wait for what only that thread can do."""
    return getattr(_here, "is_io", False)


class IoThread:
    """An event loop and its thread. Use ``shared()``; a second one is for tests."""

    _shared: IoThread | None = None
    _shared_lock = threading.Lock()
    _all: WeakSet[IoThread] = WeakSet()  # noqa: RUF012  # the process's own

    def __init__(self, name: str = "rayqueue io") -> None:
        self.loop: asyncio.AbstractEventLoop = _new_loop()
        self._pid = os.getpid()
        self._all.add(self)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self._started.wait()

    @classmethod
    def shared(cls) -> IoThread:
        """This process's."""
        shared = cls._shared
        if shared is None or not shared.usable:
            with cls._shared_lock:
                shared = cls._shared
                if shared is None or not shared.usable:
                    shared = cls._shared = cls()
        return shared

    @property
    def usable(self) -> bool:
        """False in a process that was forked from the one it was made in, and after ``close``."""
        return not self.forked and self._thread.is_alive()

    @property
    def forked(self) -> bool:
        """True in a process that was forked from the one it was made in."""
        return self._pid != os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether the caller is in this very thread."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start it in the loop, from any thread. ``ForkedError`` in a forked child, where nobody would run it;
        ``ClosedError`` when the process has ended the thread.
        """
        if self.forked:
            coroutine.close()
            raise forked("this connection")
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise ClosedError("this process has ended its connections, because it exits") from None

    def call(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Start it and wait for what it returns or raises. ``TimeoutError``: it was cancelled."""
        if self.is_current and not self.forked:
            coroutine.close()
            raise InvalidInputError("this would wait for itself: in the I/O thread, await instead")
        future = self.run(coroutine)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise  # its own
            future.cancel()
            raise TimeoutError(f"not done within {timeout_s} s") from None

    def close(self) -> None:
        """End the thread. Not for the shared one."""
        if self.forked:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.is_current:
            self._thread.join()

    @classmethod
    def end_all(cls, timeout_s: float = END_S) -> None:
        """At the end of the process: end every such thread, and wait for each that long. What still asks them gets an
        error. A thread in foreign code (uvloop, Arrow) while the interpreter is taken down may end it by a signal.
        """
        ending = [each for each in list(cls._all) if each.usable and not each.is_current]
        for each in ending:
            with contextlib.suppress(RuntimeError):  # it has ended by itself meanwhile
                each.loop.call_soon_threadsafe(each.loop.stop)
        for each in ending:
            each._thread.join(timeout_s)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a thread stays in its process")

    def _main(self) -> None:
        _here.is_io = True
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._started.set)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)  # of those who were not closed: a consumer that was just let go
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=_LAST_TASKS_S))
        finally:
            self.loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_of_parents: list[IoThread] = []
"""Kept: a loop that is let go while it is open complains."""


def _after_fork() -> None:
    # A lock that another thread holds at the fork would stay locked in the child for ever.
    IoThread._shared_lock = threading.Lock()
    IoThread._shared = None
    for each in list(IoThread._all):
        if each not in _of_parents:
            _of_parents.append(each)
            _cut_off(each.loop)


def _cut_off(loop: asyncio.AbstractEventLoop) -> None:
    """The kernel's list of what the loop waits for (epoll) is shared with the parent, who would hear no more of a
    socket that the child's copy of the loop closes, if only because it is collected. Give the child another one.
    """
    if loop.is_closed():
        return
    shared: Any = loop
    shared_fd = shared._get_backend_id() if hasattr(shared, "_get_backend_id") else shared._selector.fileno()
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nothing, shared_fd, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(IoThread.end_all)  # in processes without Ray; with it, client/shared.py ends them before Ray ends
