"""The one thread of a process in which all client connections live.

An event loop (uvloop where there is one) in a daemon thread, shared by every
producer, consumer and connection of the process. Application threads hand it
coroutines and wait for the outcome; nothing in it may block.

A forked child has none of its parent's threads: it gets a loop of its own, and
its parent's connections are dead to it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from rayqueue.errors import InvalidInputError

_T = TypeVar("_T")


class IoThread:
    """An event loop and its thread. Use ``shared()``; a second one is for tests."""

    _shared: IoThread | None = None
    _shared_lock = threading.Lock()

    def __init__(self, name: str = "rayqueue io") -> None:
        self.loop: asyncio.AbstractEventLoop = _new_loop()
        self._pid = os.getpid()
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
        return self._pid == os.getpid() and self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is in this very thread."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start it in the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float | None = None) -> _T:
        """Start it and wait for what it returns or raises. ``TimeoutError``: it was cancelled."""
        if self.is_current:
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
        self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.is_current:
            self._thread.join()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a thread stays in its process")

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._started.set)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# A lock that another thread holds at the fork would stay locked in the child for ever.
def _after_fork() -> None:
    IoThread._shared_lock = threading.Lock()
    IoThread._shared = None


os.register_at_fork(after_in_child=_after_fork)
