"""A wakeup of whoever waits for records, space or an answer: a thread, or a coroutine of any event loop.

One waiter at a time. A ring while nobody waits is kept for the next one, so
that nothing is slept through between looking and waiting.
"""

from __future__ import annotations

import asyncio
import threading


class Wakeup:
    def __init__(self) -> None:
        self._rung = threading.Event()
        self._lock = threading.Lock()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def ring(self) -> None:
        """From any thread."""
        if self._rung.is_set():
            return
        with self._lock:
            self._rung.set()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # the waiter's loop was closed under it
                return

    def wait(self, timeout_s: float) -> bool:
        """Until somebody rings, or so long. Whether somebody has."""
        rung = self._rung.wait(timeout_s)
        self._rung.clear()
        return rung

    async def wait_async(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._rung.is_set():
                self._rung.clear()
                return True
            self._waiter = loop, future
        timer = loop.call_later(timeout_s, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            with self._lock:
                self._waiter = None  # there is one at a time, so it is ours or nobody's
        rung = self._rung.is_set()
        self._rung.clear()
        return rung


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
