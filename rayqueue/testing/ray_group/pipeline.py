"""Appends of one idempotent producer: in order, and as many by one call as wait for it.

Ray runs the calls to an async actor in any order, even those of one caller. So
one call at a time is under way, with everything that was sent before it
started; what is sent meanwhile goes with the next one. That also costs half as
much per batch as a call for each of several in flight.

When a call fails and may be repeated, its batches are sent again, in their
order, to whoever leads then. What had been written already is answered as a
duplicate: nothing is lost, doubled or reordered, whatever happened between.

Not thread-safe. It does not make batches, and does not number them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import NamedTuple

import ray

from rayqueue.client.calls import Ref
from rayqueue.client.retry import Retry
from rayqueue.config import MIB, ClientSettings
from rayqueue.errors import InvalidInputError, RayQueueError
from rayqueue.ids import NodeId
from rayqueue.partition import Appended
from rayqueue.records import BatchHeader
from rayqueue.testing.ray_group.route import Route

Done = Callable[[Appended], None]

MAX_IN_FLIGHT = 16
"""Batches on their way; at most what a partition remembers of a producer."""

_CALL_BYTES = MIB  # batches that go by one call; a larger one goes alone


class _Sent(NamedTuple):
    batch: bytes
    done: Done


class _Call(NamedTuple):
    ref: Ref
    node: NodeId


class Pipeline:
    """``send`` batches, ``poll`` now and then, ``flush`` at the end.

    An error that retrying does not cure is raised by whichever of them meets
    it, and by each one after: what was not acknowledged then is unknown.
    """

    def __init__(self, route: Route, settings: ClientSettings) -> None:
        self._route = route
        self._window: deque[_Sent] = deque()
        self._call: _Call | None = None
        self._failed: RayQueueError | None = None
        self._retry = Retry(settings, Random(), time.monotonic(), idempotent=True)  # noqa: S311  # jitter

    @property
    def waiting(self) -> int:
        """Batches that are not acknowledged."""
        return len(self._window)

    def send(self, batch: bytes, done: Done) -> None:
        """Append the batch; ``done`` gets its answer, from inside a later call. Waits while too many are unanswered."""
        if not BatchHeader.parse(batch).producer_id:
            raise InvalidInputError("a batch without a producer id cannot be repeated: give it one, or append it alone")
        self._raise_failed()
        while len(self._window) >= MAX_IN_FLIGHT:
            self._settle()
        if not self._window:
            self._retry.progress(time.monotonic())
        self._window.append(_Sent(batch, done))
        self._start_call_if_possible()

    def poll(self) -> None:
        """Take the answers that have come, without waiting for more."""
        self._raise_failed()
        self._start_call_if_possible()
        while self._call is not None and ray.wait([self._call.ref], timeout=0)[0]:
            self._settle()

    def flush(self) -> None:
        """Wait until every batch is acknowledged."""
        self._raise_failed()
        while self._window:
            self._settle()

    def _settle(self) -> None:
        """Wait for the call that is under way, or make one attempt at a new one."""
        try:
            call = self._call or self._start_call()
            answers: list[Appended | RayQueueError] = self._route.result(call.ref, call.node, self._retry.deadline_s)
        except RayQueueError as error:
            self._call = None
            self._recover(error)
            return
        self._call = None
        for answer in answers:
            if isinstance(answer, RayQueueError):
                self._recover(answer)
                return
            self._retry.progress(time.monotonic())
            self._window.popleft().done(answer)
        self._start_call_if_possible()

    def _start_call_if_possible(self) -> None:
        if self._call is None and self._window and self._route.leader is not None:
            with suppress(RayQueueError):  # the next wait for an answer meets it again, and deals with it
                self._start_call()

    def _start_call(self) -> _Call:
        node, handle = self._route.to_leader()
        batches: list[bytes] = []
        size_bytes = 0
        for sent in self._window:
            size_bytes += len(sent.batch)
            if batches and size_bytes > _CALL_BYTES:
                break
            batches.append(sent.batch)
        self._call = _Call(handle.append_many.remote(batches), node)
        return self._call

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
