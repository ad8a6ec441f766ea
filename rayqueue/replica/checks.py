"""Batches whose check takes long: checked in a thread beside the engine's, each client's in the order it sent them.

A compressed batch of a few kilobytes may unpack to megabytes. The engine's
thread, which heartbeats and everybody's appends wait for, never unpacks one.
One batch of each client at a time, in turns, so that whoever sends many waits
for itself. What waits is bounded in bytes, over all clients and for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from rayqueue.errors import QueueFullError, ReplicaClosedError
from rayqueue.records import BatchHeader

_SHARE = 4
"""One client may fill this part of the queue."""

Result = BatchHeader | Exception
"""The header of a batch that was found good, or what is wrong with it."""


class _Batch(NamedTuple):
    payload: bytes
    done: Callable[[Result], None]


@dataclass(eq=False, slots=True)
class _Client:
    unchecked: deque[_Batch] = field(default_factory=deque)
    waiting: int = 0
    """Those whose results were not taken yet."""
    waiting_bytes: int = 0


class Checks:
    """``check`` runs in the thread; ``run`` brings what it found back to the engine's. The rest is called there."""

    def __init__(
        self,
        check: Callable[[bytes], BatchHeader],
        run: Callable[[Callable[[], None]], None],
        limit_bytes: int,
    ) -> None:
        self._check = check
        self._run = run
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._clients: dict[int, _Client] = {}  # the engine's
        self._lock = Lock()  # for the two below, and for ``unchecked`` of each client
        self._turns: deque[_Client] = deque()
        self._working = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batch checks")

    def __contains__(self, client: int) -> bool:
        """Some of this client's batches wait: what it sends now comes after them."""
        return client in self._clients

    def add(self, client: int, payload: bytes, done: Callable[[Result], None]) -> None:
        """``done`` gets the result, later, on the engine's thread; the client's in the order of these calls.

        ``QueueFullError`` if too much waits.
        """
        known = self._clients.get(client)
        waiting_bytes = 0 if known is None else known.waiting_bytes
        size_bytes = len(payload)
        full = self._bytes + size_bytes > self._limit_bytes
        # Its first is taken however large it is: it is less than a frame.
        if self._bytes and (full or (waiting_bytes and waiting_bytes + size_bytes > self._limit_bytes // _SHARE)):
            raise QueueFullError(f"batches of {self._bytes} bytes wait to be checked; retry")
        if known is None:
            known = self._clients[client] = _Client()
        known.waiting += 1
        known.waiting_bytes += size_bytes
        self._bytes += size_bytes

        def checked(result: Result) -> None:
            self._bytes -= size_bytes
            known.waiting -= 1
            known.waiting_bytes -= size_bytes
            if not known.waiting:
                del self._clients[client]
            done(result)

        with self._lock:
            if not known.unchecked:
                self._turns.append(known)
            known.unchecked.append(_Batch(payload, checked))
            idle, self._working = not self._working, True
        if idle:
            self._pool.submit(self._work)

    def close(self) -> None:
        with self._lock:
            self._turns.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- the thread beside -------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            result: Result
            try:
                result = self._check(batch.payload)
            except Exception as error:  # noqa: BLE001  # whoever sent it is told, or hung up on
                result = error
            try:
                self._run(lambda done=batch.done, result=result: done(result))  # type: ignore[misc]
            except ReplicaClosedError:
                return  # with the replica all connections end

    def _next(self) -> _Batch | None:
        with self._lock:
            if not self._turns:
                self._working = False
                return None
            client = self._turns.popleft()
            batch = client.unchecked.popleft()
            if client.unchecked:
                self._turns.append(client)
            return batch
