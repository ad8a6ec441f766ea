"""Processes that are killed, or stopped for a while, one kind after the other; and counted.

A kind whose process is not found at the moment, because nobody leads, say, has its
turn again. So whoever demands one of each knows that each has happened.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path

import ray

from rayqueue.errors import RayQueueError

_GONE_S = 10.0
_NOT_NOW = (RayQueueError, ray.exceptions.RayError, ProcessLookupError, ValueError, TimeoutError)
"""Nobody leads at the moment, or the one that did has just died."""

Find = Callable[[], int]
"""The process of one of a kind, now."""


class Killing:
    """``kinds``: how to find a process of each. ``paused``: those of which one is stopped and goes on, too."""

    def __init__(self, kinds: Mapping[str, Find], paused: Mapping[str, float], rng: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self.failed: list[str] = []
        self._kinds = kinds
        self._paused = paused
        self._rng = rng
        self._stopped: set[int] = set()
        self._waiting: deque[str] = deque()

    @property
    def names(self) -> list[str]:
        return [f"kill {kind}" for kind in self._kinds] + [f"pause {kind}" for kind in self._paused]

    @property
    def missing(self) -> list[str]:
        return [name for name in self.names if not self.done[name]]

    def next(self) -> None:
        """Let one happen."""
        if not self._waiting:
            self._waiting.extend(self._rng.sample(self.names, len(self.names)))
        name = self._waiting.popleft()
        how, kind = name.split(" ", 1)
        try:
            pid = self._kinds[kind]()
            if how == "kill":
                _kill(pid)
            else:
                self._pause(pid, self._paused[kind])
        except _NOT_NOW as error:
            self.failed.append(f"{name}: {error!r}")
            self._waiting.append(name)
        else:
            self.done[name] += 1

    def _pause(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._stopped.add(pid)
        timer = threading.Timer(seconds, self._go_on, (pid,))
        timer.daemon = True
        timer.start()

    def _go_on(self, pid: int) -> None:
        if pid in self._stopped:
            self._stopped.discard(pid)
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return  # it was killed meanwhile

    def heal(self) -> None:
        """Nobody is stopped any more."""
        for pid in list(self._stopped):
            self._go_on(pid)


def _kill(pid: int) -> None:
    """``TimeoutError`` if it lives on."""
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + _GONE_S
    while _lives(pid):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"process {pid} was killed, and lives")
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
