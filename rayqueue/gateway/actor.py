"""The gateway's actor: a gateway in a process of the Ray cluster, kept alive by Ray.

It runs in a thread with an event loop of its own; Ray's calls only ask where it
listens, and end it. Restarted by Ray, it is another gateway at the same ports.

A start that fails is repeated until it succeeds, whatever has failed: Ray takes
this actor for alive, and would not do it. ``address`` says meanwhile what is
wrong, and so does ``rayqueue gateway list``.
"""

from __future__ import annotations

import logging
import os
import threading
from random import Random
from typing import Any

from rayqueue.client.handle import RayQueue
from rayqueue.config import GatewaySettings
from rayqueue.errors import GatewayClosingError, GatewayError, RayQueueError
from rayqueue.gateway.server import GatewayThread, stops_within_s
from rayqueue.gateway.tending import Tending, shifted
from rayqueue.net.backoff import Backoff

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class GatewayActor:
    """``rayqueue.gateway.tending`` makes actors of it."""

    def __init__(self, rq: RayQueue, settings: GatewaySettings, of_host: int = 0, tends_as: str | None = None) -> None:
        """``tends_as``: its name, if there is to be one on each node. Returns after the first attempt."""
        self._rq = rq
        self._settings = shifted(settings, of_host)
        self._gateway: Any = None
        self._problem: RayQueueError | None = None
        self._tried = threading.Event()
        self._stopping = threading.Event()
        self._running = threading.Thread(target=self._run, name="rayqueue gateway keeping", daemon=True)
        self._running.start()
        self._tending = None if tends_as is None else Tending(rq, type(self), tends_as, settings)
        if self._tending is not None:
            self._tending.start()
        self._tried.wait()

    def __repr__(self) -> str:
        return "gateway"

    def _run(self) -> None:
        backoff = Backoff(self._rq.settings.client, Random())  # noqa: S311  # jitter
        while not self._stopping.is_set():
            thread = GatewayThread(self._rq, self._settings)
            try:
                self._gateway = thread.start()
            except Exception as error:  # noqa: BLE001  # what nobody foresaw must not leave it dead, either
                self._failed(error)
            else:
                self._problem = None
                self._tried.set()
                backoff.reset()
                while thread.alive and not self._stopping.wait(_LOOK_EVERY_S):
                    pass
                self._gateway = None
                thread.stop()
                if not self._stopping.is_set():
                    self._failed(GatewayError("the gateway has ended by itself; its log says why"))
            self._tried.set()
            self._stopping.wait(backoff.pause_s())

    def _failed(self, error: Exception) -> None:
        before, self._problem = self._problem, error if isinstance(error, RayQueueError) else GatewayError(repr(error))
        if str(before) != str(self._problem):
            _log.critical("cannot start, and tries again: %s", error, exc_info=not isinstance(error, RayQueueError))

    def address(self) -> dict[str, Any]:
        """Where it listens. Raises what keeps it from that."""
        gateway, problem = self._gateway, self._problem
        if gateway is None:
            raise problem or GatewayClosingError("this gateway is being stopped")
        return {**gateway.address, "pid": os.getpid()}

    def closes_within_s(self) -> float:
        """How long ``close`` takes at most, by this gateway's own settings."""
        return stops_within_s(self._settings)

    def close(self) -> None:
        """No new requests; those under way are answered, sessions leave their groups. No other gateway is started."""
        self._stopping.set()
        if self._tending is not None:
            self._tending.stop()
        self._running.join(self.closes_within_s())
