"""Transactions whose end nobody waits for (``wait=False``): those that are not decided yet, and the next one.

While one is being decided the next ones take what is sent; the accumulator holds
it back. What has ended by then is decided together, as one transaction of the
coordinator's: so a group becomes visible at once, and the more transactions there
are, the less each costs. If one is not committed, none after it is.

For any thread: no I/O, one lock. ``rayqueue.client.producer.transactions.tasks``
does the rest in the I/O thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from rayqueue.client.producer.accumulator import Accumulator
from rayqueue.errors import RayQueueError

MOST = 100
"""Transactions that may have ended and wait for the one that is being decided."""


class Deferred:
    """One of them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.serial = 0
        """Of its last batch."""
        self.decided: Future[None] = Future()
        self.decided.set_running_or_notify_cancel()  # whoever waits may go, and it is decided all the same

    def fail(self, error: RayQueueError) -> None:
        if not self.decided.done():
            self.decided.set_exception(error)


class Behind:
    """Of one producer. ``refusal``: what a send gets that is in no transaction."""

    def __init__(self, accumulator: Accumulator, refusal: Callable[[], RayQueueError]) -> None:
        self.number = 0
        """The transaction that has begun last, also of those whose end is waited for."""
        self.error: RayQueueError | None = None
        """Why some were not committed, as long as nobody was told."""
        self._accumulator = accumulator
        self._refusal = refusal
        self._lock = threading.Lock()
        self._open: Deferred | None = None
        self._ended: list[Deferred] = []
        self._running = False
        """Somebody decides, and looks here again before it stops."""
        self._closed = False
        self._waiters: list[Callable[[], None]] = []

    # -- any thread ------------------------------------------------------------------------

    def begin(self) -> Deferred | None:
        """The next one, if nobody has to be asked for it: because one is being decided."""
        with self._lock:
            if not self._running or self._open or self._closed or self.error or len(self._ended) >= MOST:
                return None
            return self._begin()

    def when_room(self, wake: Callable[[], None]) -> bool:
        """Whether too many wait; then wake the caller, once, when they do not any more."""
        with self._lock:
            full = len(self._ended) >= MOST
            if full:
                self._waiters.append(wake)
            return full

    def end(self, deferred: Deferred, start: Callable[[], object]) -> bool:
        """Let it be decided; ``start`` if nobody does that now. False if it is lost."""
        with self._lock:
            if self._open is not deferred:
                return False
            self._accumulator.refuse(self._refusal)
            deferred.serial = self._accumulator.cut_all()
            if not self._running:
                start()  # before anybody else can ask the I/O thread for something
                self._running = True
            self._open = None
            self._ended.append(deferred)
            return True

    @property
    def busy(self) -> bool:
        """Something is to be decided, or to be told."""
        return self._running or self.error is not None

    @property
    def deciding(self) -> bool:
        return self._running

    def tell(self) -> None:
        """Raise, once, why some were not committed."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    # -- the I/O thread ----------------------------------------------------------------------

    def opened(self, *, waits: bool) -> Deferred:
        """Another one begins, and nothing is being decided. ``waits``: its end is waited for, and is none of ours."""
        with self._lock:
            deferred = self._begin()
            self._accumulator.release(deferred.number)
            self._open = None if waits else deferred
            return deferred

    def dropped(self, deferred: Deferred) -> bool:
        """It is to be aborted; False if it is lost already."""
        with self._lock:
            mine = self._open is deferred
            self._open = None if mine else self._open
            return mine

    def take(self) -> tuple[list[Deferred], int]:
        """Those that are to be decided now, and up to which number to release: if none has ended, the one that is open.
        0 if there is nothing to do; then whoever ends the next one says so."""
        with self._lock:
            group, self._ended = self._ended, []
            waiters, self._waiters = self._waiters, []
            newest = group[-1].number if group else 0
            if not group and self._open is not None and self._open.number > self._accumulator.released:
                newest = self._open.number
            self._running = bool(newest)
        for wake in waiters:
            wake()
        return group, newest

    def fail(self, error: RayQueueError, *, first: int = 0, cause: RayQueueError | None = None) -> list[Deferred]:
        """All that have not been taken are lost; with ``first`` that one, if it is among them, and those after it.

        ``error`` is told if nothing else is, or ``cause``, also if none is lost. Who waits for one of them may begin
        the next one as soon as it fails: let them ``fail`` when nothing more is to be done.
        """
        with self._lock:
            waiting = [*self._ended, *([] if self._open is None else [self._open])]
            if first and all(each.number != first for each in waiting):
                return []
            lost = [each for each in waiting if each.number >= first]
            self._ended = [each for each in self._ended if each not in lost]
            if self._open in lost:
                self._open = None
            self.error = cause or self.error or (error if lost else None)
        return lost

    def give_up(self, error: RayQueueError) -> None:
        """The one that is open."""
        with self._lock:
            lost, self._open = self._open, None
        if lost is not None:
            lost.fail(error)

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _begin(self) -> Deferred:
        self.number += 1
        self._accumulator.accept(self.number)
        self._open = Deferred(self.number)
        return self._open
