"""Appends of one idempotent producer: in order, several on their way at a time.

Owns the window of batches that are not acknowledged. When the first of them
fails and may be repeated, it and all after it are sent again, in their order,
to whoever leads then. What had been written already is answered as a
duplicate, so nothing is lost, doubled or reordered, whatever happened between.

Not thread-safe. It does not make batches, and does not number them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import ray

from rayqueue.client.calls import Ref
from rayqueue.client.retry import Retry
from rayqueue.client.route import Route
from rayqueue.config import ClientSettings
from rayqueue.errors import InvalidInputError, RayQueueError
from rayqueue.ids import NodeId
from rayqueue.partition import Appended
from rayqueue.records import BatchHeader

Done = Callable[[Appended], None]


@dataclass(slots=True)
class _Sent:
    batch: bytes
    done: Done
    ref: Ref = None
    node: NodeId | None = None


class Pipeline:
    """``send`` batches, ``poll`` now and then, ``flush`` at the end.

    An error that retrying does not cure is raised by whichever of them meets
    it, and by each one after: what was not acknowledged then is unknown.
    """

    def __init__(self, route: Route, settings: ClientSettings, *, in_flight: int | None = None) -> None:
        self._route = route
        self._in_flight = min(in_flight or settings.max_in_flight, settings.max_in_flight)
        self._window: deque[_Sent] = deque()
        self._in_doubt = False
        self._failed: RayQueueError | None = None
        self._retry = Retry(settings, Random(), time.monotonic(), idempotent=True)  # noqa: S311  # jitter

    @property
    def waiting(self) -> int:
        """Batches that are not acknowledged."""
        return len(self._window)

    def send(self, batch: bytes, done: Done) -> None:
        """Append the batch; ``done`` gets its answer, from inside a later call. Waits while the window is full."""
        if not BatchHeader.parse(batch).producer_id:
            raise InvalidInputError("a batch without a producer id cannot be repeated: give it one, or append it alone")
        self._raise_failed()
        while len(self._window) >= self._in_flight:
            self._settle()
        if not self._window:
            self._retry.progress(time.monotonic())
        self._window.append(_Sent(batch, done))
        if not self._in_doubt:
            try:
                self._send_from(len(self._window) - 1)
            except RayQueueError:
                self._in_doubt = True

    def poll(self) -> None:
        """Take the answers that have come. Waits only while something has to be sent again."""
        self._raise_failed()
        while self._window and (self._in_doubt or ray.wait([self._window[0].ref], timeout=0)[0]):
            self._settle()

    def flush(self) -> None:
        """Wait until every batch is acknowledged."""
        self._raise_failed()
        while self._window:
            self._settle()

    def _settle(self) -> None:
        """One attempt to get the first batch's answer, or to send the window again."""
        try:
            if self._in_doubt:
                self._send_from(0)
                self._in_doubt = False
            first = self._window[0]
            answer = self._route.result(first.ref, first.node or NodeId("?"), self._retry.deadline_s)
        except RayQueueError as error:
            self._in_doubt = True
            self._recover(error)
            return
        self._window.popleft()
        self._retry.progress(time.monotonic())
        first.done(answer)

    def _send_from(self, position: int) -> None:
        node, handle = self._route.to_leader()
        for number in range(position, len(self._window)):
            sent = self._window[number]
            sent.ref, sent.node = handle.append.remote(sent.batch), node

    def _recover(self, error: RayQueueError) -> None:
        try:
            wait = self._retry.after(error, time.monotonic())
        except RayQueueError as hopeless:
            self._failed = hopeless
            raise
        time.sleep(wait.seconds)
        if wait.refresh:
            self._route.failed(error)

    def _raise_failed(self) -> None:
        if self._failed is not None:
            raise self._failed
