"""Callbacks of the application: they run in a thread of their own, one after the other.

So a slow one holds up other callbacks and nothing else. What a callback raises is
logged. A forked child has none of its parent's, and a thread of its own.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)

Callback = Callable[[], object]


class CallbackThread:
    """Runs the application's callbacks, in the order in which outcomes became known. One per process."""

    MAX_BACKLOG = 100_000
    """Callbacks that wait; with more, a ``send`` with a callback waits too."""

    _shared: CallbackThread | None = None
    _shared_lock = threading.Lock()

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Sequence[Callback]] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._posted = 0
        self._done = 0
        self._thread = threading.Thread(target=self._main, name="rayqueue callbacks", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> CallbackThread:
        shared = cls._shared
        if shared is None or not shared._thread.is_alive():  # it is not after a fork
            with cls._shared_lock:
                shared = cls._shared
                if shared is None or not shared._thread.is_alive():
                    shared = cls._shared = cls()
        return shared

    @property
    def is_current(self) -> bool:
        return self._thread is threading.current_thread()

    @property
    def backlog(self) -> int:
        return self._posted - self._done

    def post(self, callbacks: Sequence[Callback]) -> None:
        with self._counting:
            self._posted += len(callbacks)
        self._jobs.put(callbacks)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until all that was posted before has run. In the callback thread itself: at once."""
        if self.is_current or not self.backlog:
            return True
        passed = threading.Event()
        self.post((passed.set,))
        return passed.wait(timeout_s)

    def _main(self) -> None:
        while True:
            for callback in self._jobs.get():
                try:
                    callback()
                except Exception:  # noqa: BLE001  # the application's, and nobody is there to catch it
                    _log.exception("a delivery callback failed")
                self._done += 1


def _after_fork() -> None:
    CallbackThread._shared_lock = threading.Lock()
    CallbackThread._shared = None


os.register_at_fork(after_in_child=_after_fork)
