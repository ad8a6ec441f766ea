"""A worker's buffer: jobs that came before anybody asked for them, and callers who wait for jobs.

May be used by any thread; no I/O. Jobs go to those who wait, the first
first; others are kept until somebody asks. What the application will not come to
soon is given out by ``hand_back``, for the worker to return it to the queue: all of
it once nobody has asked for ``HAND_BACK_S``, and what is more than a worker does
in a while (``Ahead``). An application that waits for an answer about its last jobs
is not slow: it is given longer (``BLOCKED_S``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, repeat
from time import monotonic
from typing import Any

from rayqueue.client.queue.job import Job
from rayqueue.client.queue.takes import Ahead
from rayqueue.client.wakeup import Wakeup

HAND_BACK_S = 0.2
"""How long a job that came early waits for an application that does not ask for jobs, or slowly."""
BLOCKED_S = 2.0
"""The same while the application waits for an answer about its last jobs."""
LINGER_S = 0.02
"""The same once nobody waits for jobs, nor has for a while. Whoever polls comes back sooner."""

_Jobs = list[Job[Any, Any]]


class Waiter:
    """Somebody who waits for jobs."""

    __slots__ = ("count", "jobs", "wakeup")

    def __init__(self, count: int) -> None:
        self.count = count
        self.jobs: _Jobs = []
        self.wakeup = Wakeup()


class Buffer:
    """Of one worker, at most ``most_bytes`` of jobs ahead."""

    def __init__(self, most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[tuple[float, Job[Any, Any]]] = deque()  # each with the time at which it is handed back
        self._waiters: deque[Waiter] = deque()
        self._ahead = Ahead(most_bytes)
        self._blocked = 0
        self._looked_s = 0.0

    # -- for applications --------------------------------------------------------------------

    def ask(self, most: int, now_s: float) -> tuple[_Jobs | Waiter, bool]:
        """Up to so many jobs, or a place in the line; and whether more are to be taken."""
        with self._lock:
            jobs = self._jobs
            found = [jobs.popleft()[1] for _ in range(min(most, len(jobs)))]
            self._ahead.asked(now_s)
            if found:
                self._ahead.gave(len(found), now_s)
                return found, len(jobs) < self._ahead.count / 2
            waiter = Waiter(most)
            self._waiters.append(waiter)
            return waiter, True

    def leave(self, waiter: Waiter, now_s: float) -> _Jobs:
        """It waits no more. What it has got."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            gave, waiter.jobs = waiter.jobs, []
            self._ahead.gave(len(gave), now_s)
        return gave

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """The application waits for an answer: it asks for no jobs meanwhile, but not because it is slow."""
        with self._lock:
            self._blocked += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocked -= 1
                self._ahead.goes_on(monotonic())

    # -- for the worker ----------------------------------------------------------------------

    def wanted(self, now_s: float) -> tuple[int, int]:
        """How many jobs are waited for; and how many to take, with those that are wanted ahead."""
        with self._lock:
            waited_for = sum(each.count - len(each.jobs) for each in self._waiters)
            ahead = self._ahead.count if waited_for else self._ahead.wanted(now_s)
            return waited_for, waited_for + ahead - len(self._jobs)

    def at_once(self, size_bytes: int) -> int:
        """How many jobs, of the size of the last ones, fit into these bytes; at least one."""
        return self._ahead.at_once(size_bytes)

    def add(self, jobs: _Jobs, size_bytes: int, now_s: float) -> None:
        """These came, of so many bytes. Takes the list."""
        ringing: list[Waiter] = []
        with self._lock:
            self._ahead.received(len(jobs), size_bytes)
            for waiter in self._waiters:
                if not jobs:
                    break
                room = waiter.count - len(waiter.jobs)
                if room:
                    waiter.jobs += jobs[:room]
                    del jobs[:room]
                    ringing.append(waiter)
            comes_back = bool(ringing) or self._ahead.wanted(now_s) > 0
            until_s = now_s + (HAND_BACK_S if comes_back else LINGER_S)
            self._jobs.extend(zip(repeat(until_s), jobs))
            for waiter in ringing:
                self._waiters.remove(waiter)
        for waiter in ringing:
            waiter.wakeup.ring()

    def hand_back(self, now_s: float, *, everything: bool = False, of: int | None = None) -> _Jobs:
        """Take out what nobody will want soon; or all of it; or all ``of`` one partition."""
        with self._lock:
            soon = 0
            if not everything and of is None:
                self._looked_s = now_s
                soon = self._ahead.soon(now_s, BLOCKED_S if self._blocked else HAND_BACK_S)
            kept, returned = list(islice(self._jobs, soon)), []
            for each in islice(self._jobs, soon, None):
                until_s, job = each
                if everything or (until_s <= now_s if of is None else job.grant.partition == of):
                    returned.append(job)
                else:
                    kept.append(each)
            if returned:
                self._jobs = deque(kept)
                self._ahead.unused()
        return returned

    def spare(self, now_s: float) -> None:
        """This process was not given a processor: nor was the application, which may come back at once."""
        with self._lock:
            self._looked_s = now_s + HAND_BACK_S

    def due_s(self) -> float | None:
        """When to look for what is to be handed back."""
        with self._lock:
            if not self._jobs:
                return None
            return max(min(self._jobs[0][0], self._jobs[-1][0]), self._looked_s + LINGER_S)

    def wake(self) -> None:
        """All who wait look again at what they wait for."""
        with self._lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.wakeup.ring()
